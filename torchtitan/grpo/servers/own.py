"""The servers that a run starts itself."""

import dataclasses
import os
import time
from collections.abc import Callable
from pathlib import Path

import torch

from torchtitan.components.optimizer import OptimizersContainer
from torchtitan.config import JobConfig
from torchtitan.grpo.config.machine import shares_gpu
from torchtitan.grpo.config.target import trainer_bytes
from torchtitan.grpo.engines.fleet import Fleet
from torchtitan.grpo.engines.protocol import EngineError
from torchtitan.grpo.engines.server import Server
from torchtitan.grpo.process.stopping import StopRequested
from torchtitan.grpo.servers.launched import TOKEN, LaunchedServers
from torchtitan.grpo.servers.plan import LOG_FOLDER, MODEL_FOLDER, URLS_FILE, reads_files, run_launches
from torchtitan.grpo.servers.supervisor import Supervisor
from torchtitan.grpo.weight_wire.transport import in_thread

_LOOK_S = 0.1


class OwnServers:
    """What `[rollout]` asks a run to start: `replicas` servers that are kept alive, on rank 0's machine, or where a
    launcher has them (`launched.py`), or on the trainers' own GPUs (`shares_gpu`); or nothing. On every rank:

        own = OwnServers(config, device, trainers_here, meet)
        own.start(write_model)                               # servers load while the trainer loads
        fleet = own.fleet(make)                              # rank 0 alone, once all are healthy
        own.sleep()                                          # rank 0 alone, before each step of training
        own.take_memory()                                    # once rank 0 has returned
        own.make_room(optimizers)                            # after the step
        own.close()

    Args:
        meet: Returns when every rank has called it.

    Attributes:
        weight_sync: `[weight_sync]`, with a transport that reaches them. The same on every rank.
    """

    def __init__(
        self, config: JobConfig, device: torch.device, trainers_here: int, meet: Callable[[], None] = lambda: None
    ) -> None:
        rollout = config.rollout
        self._config, self._device, self._trainers_here, self._meet = config, device, trainers_here, meet
        self._kept: Supervisor | LaunchedServers | None = None
        self._sleeps, self._stopping = rollout.sleep_while_training, False
        self._fleet: Fleet | None = None
        self.weight_sync = config.weight_sync
        self._gpus = torch.cuda.device_count() if device.type == "cuda" else 0
        self._shares_gpu = shares_gpu(config, self._gpus, trainers_here)
        if config.weight_sync.transport == "auto" and rollout.colocate:
            self.weight_sync = dataclasses.replace(config.weight_sync, transport="ipc")
        elif config.weight_sync.transport == "auto" and reads_files(config):
            self.weight_sync = dataclasses.replace(config.weight_sync, transport="disk")
        elif config.weight_sync.transport == "auto" and self._shares_gpu:  # NCCL joins no two processes on one GPU
            self.weight_sync = dataclasses.replace(config.weight_sync, transport="gloo")

    def start(self, write_model: Callable[[Path], None] | None) -> None:
        """Start the servers. With `colocate`, each rank's part of its GPU is fixed then.

        Args:
            write_model: On rank 0, which starts them: writes config.json and tokenizer into a folder. Else None.

        Raises:
            UserError: A server cannot be started.
        """
        rollout = self._config.rollout
        if write_model is not None and rollout.replicas:
            self._start(write_model)
        if rollout.colocate:
            self._meet()  # no rank loads before the servers have seen what is free
            self._hold_trainer(rollout.memory_share)

    def _start(self, write_model: Callable[[Path], None]) -> None:
        rollout, dump = self._config.rollout, Path(self._config.job.dump_folder)
        write_model(dump / MODEL_FOLDER)
        folder, limit_s = dump / LOG_FOLDER, rollout.start_timeout_seconds
        kept: Supervisor | LaunchedServers
        if token := os.environ.get(TOKEN):
            kept = LaunchedServers(folder, token, limit_s)
        else:
            starts = run_launches(self._config, self._gpus, self._trainers_here)
            kept = Supervisor(starts, folder, folder / URLS_FILE, limit_s)
        self._kept = kept
        kept.start()
        if self._shares_gpu:
            # A server measures what it needs by what is free, so the trainer must not load meanwhile. If one with a
            # share dies and returns, it must find its share free.
            kept.wait_healthy()

    def fleet(self, make: Callable[[str], Server]) -> Fleet:
        """The servers of the run. Waits until those that are kept alive serve. Of these the fleet hears each end and
        each start at once, and which may return.

        Args:
            make: As in `Fleet`.

        Raises:
            UserError: One does not come up. The message ends with the end of its log.
        """
        rollout, kept = self._config.rollout, self._kept
        if kept is None:
            return Fleet(rollout.urls, make, rollout.min_servers, rollout.urls_file)
        kept.wait_healthy()
        fleet = Fleet([], make, rollout.min_servers, str(kept.urls_file))
        fleet.alone = rollout.colocate and rollout.replicas == 1

        def ended(url: str, why: str) -> None:
            for server in fleet.servers:
                if server.url == url:
                    fleet.suspect(server, EngineError(why), "it has ended")

        fleet.keeper, kept.on_end, kept.on_healthy = kept, ended, fleet.started
        self._fleet = fleet
        return fleet

    def sleep(self) -> None:
        """With `[rollout] sleep_while_training`: the trainers need the servers' memory. For rank 0.

        Returns when every server is asleep, or down. Until `make_room`, weight sync leaves them alone and none is
        started. First it waits for those that are loading or being fed. One that does not come to an end with that in
        time, or does not sleep, is ended. It starts again after the step.

        Raises:
            FleetError: Too few servers are left.
            StopRequested: `stop` was called.
            UserError: A server cannot be ended.
        """
        if self._fleet is None or not self._sleeps or not isinstance(self._kept, Supervisor):
            return
        kept, deadline = self._kept, time.monotonic() + self._config.rollout.start_timeout_seconds
        self._fleet.rest()
        kept.may_restart.clear()
        while busy := self._busy(kept):
            self._fleet.check()
            if self._stopping:
                raise StopRequested
            if time.monotonic() > deadline:
                for url in busy:
                    kept.end(url, "did not come to rest before the next step in time")
                break
            kept.may_restart.set()  # one that is down comes back now, rather than after the step
            time.sleep(_LOOK_S)
            kept.may_restart.clear()
        downs = {state.url for state in kept.states if state.down}
        awake = [server for server in self._fleet.servers if server.url not in downs]
        asleep = [(server.url, in_thread(server.control.sleep, "server-sleep")) for server in awake]
        for url, slept in asleep:
            try:
                slept.result()
            except EngineError as error:
                kept.end(url, f"does not sleep: {error}")

    def _busy(self, kept: Supervisor) -> list[str]:
        """Servers that are loading, or that weight sync is at work with."""
        assert self._fleet is not None
        rest = {server.url for server in self._fleet.servers if server.at_rest}
        return [state.url for state in kept.states if not (state.down or (state.healthy and state.url in rest))]

    def take_memory(self) -> None:
        """With `[rollout] sleep_while_training`: the servers are asleep, and the trainer may have the whole GPU."""
        if self._sleeps:
            self._hold_trainer(0.0)

    def on_another_gpu(self, url: str) -> bool:
        """Whether CUDA IPC does not reach this server, since it is on another rank's GPU. On rank 0."""
        kept = self._kept
        return self._config.rollout.colocate and self._gpus > 0 and isinstance(kept, Supervisor) and url != kept.urls[0]

    def make_room(self, optimizers: OptimizersContainer) -> None:
        """With `[rollout] sleep_while_training`: free what only the update needed. Returns when every rank has, and the
        servers may wake up."""
        if not self._sleeps:
            return
        try:
            optimizers.zero_grad()
            if self._device.type == "cuda":
                torch.cuda.empty_cache()
            self._hold_trainer(self._config.rollout.memory_share)
        finally:
            self._meet()  # the others wait, whatever fails here
        if self._fleet is not None:
            self._fleet.rise()
        if isinstance(self._kept, Supervisor):
            self._kept.may_restart.set()

    def _hold_trainer(self, server_share: float) -> None:
        """Hold torch's allocator to what the server's share of the GPU leaves."""
        if self._device.type == "cuda":
            total = torch.cuda.get_device_properties(self._device).total_memory
            own = trainer_bytes(server_share, total, self._config.rollout.replicas)
            torch.cuda.set_per_process_memory_fraction(max(0.0, own / total), self._device)

    def stop(self) -> None:
        """From any thread: no step is trained from now on."""
        self._stopping = True

    def close(self) -> None:
        if self._kept is not None:
            self._kept.close()
