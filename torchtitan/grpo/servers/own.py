"""The servers that a run starts itself."""

import dataclasses
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import torch

from torchtitan.config import JobConfig
from torchtitan.grpo.engines.embedded.spawn import EmbeddedServer, choose_device
from torchtitan.grpo.engines.fleet import Fleet
from torchtitan.grpo.engines.protocol import EngineError
from torchtitan.grpo.servers.plan import LOG_FOLDER, MODEL_FOLDER, on_cuda, run_launches
from torchtitan.grpo.servers.supervisor import Supervisor


class OwnServers:
    """What `[rollout]` asks a run to start, on rank 0's machine: `replicas` servers that are kept alive; or, without
    any address, one embedded server, whose end is the end of the run; or nothing.

        own = OwnServers(config, device, trainers_here)      # every rank
        own.start(write_model)                               # rank 0; servers load while the trainer loads
        fleet = Fleet(own.urls, make, min_servers, own.urls_file)
        own.watch(fleet)                                     # until all are healthy; then tells it of ends at once
        own.close()

    Attributes:
        urls, urls_file: `[rollout]`'s, or those of the started servers.
        weight_sync: `[weight_sync]`, with a transport that reaches them. The same on every rank.
    """

    def __init__(self, config: JobConfig, device: torch.device, trainers_here: int) -> None:
        rollout = config.rollout
        self._config, self._device, self._trainers_here = config, device, trainers_here
        self._resources = ExitStack()
        self._supervisor: Supervisor | None = None
        self.urls, self.urls_file, self.weight_sync = rollout.urls, rollout.urls_file, config.weight_sync
        self._starts_one = rollout.engine == "embedded" and not (rollout.replicas or rollout.urls or rollout.urls_file)
        reached_by_nccl = not rollout.replicas or on_cuda(config, device.type == "cuda")
        if self._starts_one:
            self._one_on, reached_by_nccl = choose_device(rollout.embedded_device, device, trainers_here)
        if config.weight_sync.transport == "auto" and not reached_by_nccl:
            self.weight_sync = dataclasses.replace(config.weight_sync, transport="gloo")

    def start(self, write_model: Callable[[Path], None]) -> None:
        """Start the servers. `write_model` writes config.json and tokenizer into a folder. For rank 0.

        Raises:
            UserError: A server cannot be started.
        """
        rollout, dump = self._config.rollout, Path(self._config.job.dump_folder)
        if not (self._starts_one or rollout.replicas):
            return
        write_model(dump / MODEL_FOLDER)
        if self._starts_one:
            server = self._resources.enter_context(EmbeddedServer())
            self.urls = [server.start(dump / MODEL_FOLDER, rollout, self._one_on, dump / "embedded_server.log")]
            return
        starts = run_launches(self._config, self._device.type == "cuda", self._trainers_here)
        folder = dump / LOG_FOLDER
        self._supervisor = Supervisor(starts, folder, folder / "urls.txt", rollout.start_timeout_seconds)
        self._resources.enter_context(self._supervisor).start()
        self.urls, self.urls_file = self._supervisor.urls, str(self._supervisor.urls_file)

    def watch(self, fleet: Fleet) -> None:
        """Wait until the supervised servers serve. Then the fleet hears of each end at once, and who may return.

        Raises:
            UserError: One does not come up. The message ends with the end of its log.
        """
        if self._supervisor is None:
            return

        def ended(url: str, why: str) -> None:
            for server in fleet.servers:
                if server.url == url:
                    fleet.suspect(server, EngineError(why), "it has ended")

        self._supervisor.wait_healthy()
        fleet.keeper, self._supervisor.on_end = self._supervisor, ended

    def close(self) -> None:
        self._resources.close()
