"""Weights reach the servers while the trainer trains: snapshot, common pushes, copies for those that fall behind.

`publish` copies this rank's shards and returns. One sync thread a rank does the rest (`sync_thread.py`). The main
threads never agree on anything, and with `[weight_sync] async_weight_update` never wait for a server, a transfer or
another rank.
"""

import logging
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn as nn

from torchtitan.grpo.config import job_config
from torchtitan.grpo.engines.fleet import Fleet, Server
from torchtitan.grpo.errors import UserError
from torchtitan.grpo.weight_sync.disk import DiskCopy
from torchtitan.grpo.weight_sync.link import Pause, WeightSyncError, in_thread
from torchtitan.grpo.weight_sync.packer import Sender
from torchtitan.grpo.weight_sync.push import HostCopy
from torchtitan.grpo.weight_sync.ranks import Ranks
from torchtitan.grpo.weight_sync.report import SyncReport
from torchtitan.grpo.weight_sync.sync_thread import PHASES, Follower, Leader
from torchtitan.grpo.weight_sync.worker import Board, Mode, ServerWorker
from torchtitan.grpo.weight_wire.buckets import bucket_bytes, plan_to_json
from torchtitan.grpo.weight_wire.receiver import PROTOCOL

logger = logging.getLogger(__name__)

_SWITCH_S = 0.0005
_CLOSE_S = 10.0
_LAST_WORD_S = 3.0


def device_memory_bytes(device: torch.device) -> int:
    """All memory of the device; of the machine for CPU."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


class WeightSync:
    """How weights leave the trainer. Construct, `connect`, `publish` and `close` on every trainer rank.

    Every rank publishes every version, in the same order. If a push is under way when the next version is published,
    the newest wins: versions in between are never sent.

    Args:
        model: Parallelised model, with its optimizer made.
        adapter: State-dict adapter to Hugging Face names.
        config: `[weight_sync]`.
        fleet: The servers, on rank 0; None elsewhere.
        device: The trainer's device.
        tied: The model's output is its embedding.
        max_lag: With `cadence = "auto"`, by how many versions the servers may be behind.
        in_flight: `[async_grpo] in_flight_weight_updates`, see `link.Pause`.
        recompute_kv: `[async_grpo] recompute_kv_cache_after_weight_updates`.
        drain_timeout_s: `[rollout] request_timeout_seconds`: without `in_flight`, how long a server may take to finish
            its running answers.
    """

    def __init__(
        self,
        model: nn.Module,
        adapter: Any,
        config: job_config.WeightSync,
        fleet: Fleet | None,
        device: torch.device,
        tied: bool,
        max_lag: int = 1,
        in_flight: bool = True,
        recompute_kv: bool = True,
        drain_timeout_s: float = 600.0,
    ):
        on_cuda = device.type == "cuda"
        self._model, self._adapter, self._config, self._tied = model, adapter, config, tied
        self._fleet = fleet
        self._device = device
        self._max_lag = max(1, max_lag)
        self._pause = Pause(in_flight, recompute_kv, drain_timeout_s)
        self._backend = config.transport if config.transport != "auto" else "nccl" if on_cuda else "gloo"
        if self._backend == "nccl" and not on_cuda:
            raise UserError('[weight_sync] transport = "nccl" needs a trainer on CUDA: use "auto" or "gloo"')
        dtype = config.dtype if config.dtype != "auto" else "bfloat16" if on_cuda else "float32"
        self._dtype = getattr(torch, dtype)
        self._thread: Leader | Follower | None = None
        self._board: Board | None = None
        self._newest = -1

    # -------------------------------------------------------------------------------------------- the trainer's

    def connect(self) -> None:
        """Plan the buckets, form one group per server and start the threads. Collective over the trainer's ranks;
        bounded. All servers must join.

        Raises:
            UserError, WeightSyncError: One did not; on every rank.
        """
        config = self._config
        self._ranks = Ranks(self._device, config.timeout_seconds, PHASES * config.timeout_seconds)
        limit = bucket_bytes(
            device_memory_bytes(self._device), config.buffer_memory_ratio, config.num_buffers, config.bucket_mib_max
        )
        self._sender = Sender(
            self._model,
            self._adapter,
            self._ranks,
            self._dtype,
            limit,
            config.num_buffers,
            config.verify,
            snapshots=2 if config.async_weight_update else 1,
        )
        self._check_model()
        self._on_rank0_then_share("connect", self._connect_servers)
        # Threads that compute in Python keep the interpreter for this long. With Python's 5 ms the main thread would
        # wait for ours that long, and more than once, in a publish.
        sys.setswitchinterval(min(_SWITCH_S, sys.getswitchinterval()))
        if self._board is not None:
            self._thread = Leader(self._ranks, self._sender, config, self._board, self._worker, self._max_lag)
        else:
            self._thread = Follower(self._ranks, self._sender, config.timeout_seconds, lambda error: None)
        self._thread.start()

    def publish(self, version: int, wait: bool = False) -> None:
        """Give the servers the weights as they are now; `version` is greater than any before.

        Returns at once. With `wait`, and without `[weight_sync] async_weight_update`, rank 0 returns when every server
        in the push has acknowledged this version and is resumed, or has been withdrawn; the others when rank 0 has
        their shards. Did they go on before, their next collective would wait on the device for rank 0, who waits for
        these shards, and NCCL promises nothing for collectives of several communicators at a time: two GPUs hung.

        Raises:
            FleetError: Fewer servers are left than `[rollout] min_servers`; on rank 0.
            Anything that a sync thread raised since the last call.
        """
        self.check()
        # One buffer is enough for a trainer that waits; what may still read it is another rank, or a host copy.
        self._sender.snapshots.take(version, self._config.timeout_seconds)
        self._newest = version
        wait = wait or not self._config.async_weight_update
        if self._board is not None:
            if wait:
                self._thread.waited_for = version
            self._board.notify()
        if wait:
            self._wait_for_push(version)

    def order_writes_after(self) -> None:
        """Call before the weights change: orders the calling thread's CUDA stream after the snapshot. Never waits."""
        self._sender.snapshots.order_writes_after()

    def drain(self) -> None:
        """Wait until the newest version has reached all servers in common pushes. Bounded; call it on every rank."""
        if self._board is None:
            self._wait_for_push(self._newest)
            return
        with self.hurry():
            self._wait_for_push(self._newest)

    @contextmanager
    def hurry(self) -> Iterator[None]:
        """On rank 0: somebody waits for the newest version, so versions are pushed whatever the cadence."""
        self._thread.hurry = True
        self._board.notify()
        try:
            yield
        finally:
            self._thread.hurry = False

    def idle(self) -> bool:
        """Whether no weights are on their way from this rank."""
        return self._thread is None or not self._thread.busy

    def finished(self) -> list[SyncReport]:
        """Pushes that ended since the last call; none on ranks other than 0."""
        if self._board is None:
            return []
        with self._board.changed:
            reports, self._board.reports = self._board.reports, []
        return reports

    def check(self) -> None:
        """Raise what a sync thread raised, or that too few servers are left."""
        if self._thread is not None and self._thread.error is not None:
            raise self._thread.error
        if self._fleet is not None:
            self._fleet.check()

    def close(self) -> None:
        """End the threads and leave all groups; what is under way is given up. Bounded by a few seconds."""
        deadline = time.monotonic() + _CLOSE_S
        threads = [self._thread] if self._thread else []
        if self._board is None and self._thread is not None:
            self._thread.join(_LAST_WORD_S)  # rank 0 may be in a push that needs this rank
        if self._thread is not None:
            self._thread.closing = True
        if self._board is not None:
            self._board.closing = True
            self._board.notify()
            self._board.wake_workers()
            threads += [worker for worker in self._board.workers if worker.ident]
        for thread in threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        if self._board is not None:
            for worker in self._board.workers:
                worker.link.close()
            if self._board.copy is not None:
                self._board.copy.close()

    def _wait_for_push(self, version: int) -> None:
        thread = self._thread
        if self._board is not None:
            self._wait_until(lambda: thread.settled(version), f"the push of version {version}")
        else:
            self._wait_until(
                lambda: thread.followed >= version or not thread.is_alive(),
                f"trainer rank 0 to fetch this rank's shards of version {version}",
            )

    def _wait_until(self, ready: Callable[[], bool], what: str) -> None:
        changed = self._board.changed if self._board is not None else self._thread.changed
        drain_s = 0.0 if self._pause.in_flight else self._pause.drain_timeout_s
        deadline = time.monotonic() + PHASES * self._config.timeout_seconds + 2 * drain_s  # after a push under way
        with changed:
            while not ready():
                self.check()
                if time.monotonic() > deadline:
                    servers = f"; {self._fleet.describe()}" if self._fleet else ""
                    raise TimeoutError(f"timed out waiting for {what}{servers}")
                changed.wait(0.05)
        self.check()

    # -------------------------------------------------------------------------------------------------- set-up

    def _check_model(self) -> None:
        sender = self._sender
        if sender.device.type != self._device.type:
            raise UserError(
                f"[training] enable_cpu_offload: the weights lie on {sender.device}, the trainer computes on "
                f"{self._device}; weight sync needs them on the trainer's device"
            )
        sends_output = any(spec.name == "lm_head.weight" for b in sender.buckets for spec in b.tensors)
        if sends_output == self._tied:
            raise UserError(
                f"[model] tied is {self._tied}, but the adapter {'gives' if sends_output else 'drops'} lm_head.weight"
            )
        limit = self._config.bucket_mib_max << 20
        for bucket in sender.buckets:
            if bucket.payload_bytes > limit and self._ranks.rank == 0:
                logger.warning(
                    "%s is larger than [weight_sync] bucket_mib_max = %d: its bucket takes %d MiB",
                    bucket.tensors[0].name,
                    self._config.bucket_mib_max,
                    bucket.payload_bytes >> 20,
                )

    def _connect_servers(self) -> None:
        config, buckets = self._config, self._sender.buckets
        board = Board(
            self._fleet, buckets, config.num_buffers, config.timeout_seconds, config.straggler_seconds, self._pause
        )
        board.plan_info = {
            "protocol": PROTOCOL,
            "num_buffers": config.num_buffers,
            "verify": config.verify,
            "plan": plan_to_json(buckets),
        }
        self._board = board
        board.workers = [self._worker(server) for server in self._fleet.servers]
        if self._backend == "disk":
            board.copy, board.copies_only = DiskCopy(config.disk_folder, buckets), True
        elif len(board.workers) > 1 or self._fleet.may_grow:
            board.copy = HostCopy([bucket.wire_bytes for bucket in buckets], self._device)
        joining = [in_thread(worker.connect, "weight-sync-connect") for worker in board.workers]
        for future in joining:
            future.result()
        for worker in board.workers:
            worker.mode = Mode.ALONE if board.copies_only else Mode.COMMON
            worker.start()

    def _worker(self, server: Server) -> ServerWorker:
        return ServerWorker(server, self._board, self._backend, self._device)

    def _on_rank0_then_share(self, what: str, call: Callable[[], None]) -> None:
        """Call it on rank 0; its error is raised on every rank."""
        if self._ranks.rank != 0:
            shared = self._ranks.share(None, what)
            if shared is not None:
                raise WeightSyncError(*shared)
            return
        try:
            call()
        except Exception as error:
            named = isinstance(error, WeightSyncError)
            known = error if named else WeightSyncError("the servers", what, -1, 0, error)
            self._ranks.share([known.server, known.phase, known.version, known.bytes, known.cause], what)
            raise
        self._ranks.share(None, what)
