"""Weights reach the servers while the trainer trains: snapshots, common pushes, copies for servers that fall behind.

docs/weight_sync.md has the picture and the invariants I1 to I7.
"""

import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator

import torch

from torchtitan.grpo.config import job_config
from torchtitan.grpo.engines.fleet import Fleet
from torchtitan.grpo.engines.push_report import SyncReport
from torchtitan.grpo.engines.server import Server
from torchtitan.grpo.errors import UserError
from torchtitan.grpo.weight_sync.board import Board, Mode
from torchtitan.grpo.weight_sync.copies import MemoryCopy, VersionCopy
from torchtitan.grpo.weight_sync.disk import DiskCopy
from torchtitan.grpo.weight_sync.link import Pause, WeightSyncError
from torchtitan.grpo.weight_sync.packer import Packer, zeros
from torchtitan.grpo.weight_sync.published import PublishedWeights
from torchtitan.grpo.weight_sync.ranks import Ranks
from torchtitan.grpo.weight_sync.sync_thread import PHASES, Follower, Leader
from torchtitan.grpo.weight_sync.worker import ServerWorker
from torchtitan.grpo.weight_wire.adapters import AdapterInfo
from torchtitan.grpo.weight_wire.buckets import NUM_BUFFERS, bucket_bytes, plan_to_json
from torchtitan.grpo.weight_wire.refusals import PROTOCOL
from torchtitan.grpo.weight_wire.shared_buffers import allocate
from torchtitan.grpo.weight_wire.transport import in_thread
from torchtitan.grpo.weight_wire.transports import TRANSPORTS
from torchtitan.grpo.weight_wire.version_names import own_run

logger = logging.getLogger(__name__)

_SWITCH_S = 0.0005
_CLOSE_S = 10.0
_LAST_WORD_S = 3.0


def device_memory_bytes(device: torch.device) -> int:
    """All memory of the device; of the machine for CPU."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def wire_dtype(config: job_config.WeightSync, device: torch.device) -> torch.dtype:
    """`[weight_sync] dtype`; "auto" is bfloat16 on CUDA, float32 on CPU."""
    if config.dtype == "auto":
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    return getattr(torch, config.dtype)


class WeightSync:
    """Brings each version of the weights to every server.

    Every trainer rank makes the same calls, in the same order:

        sync = WeightSync(published, config, fleet, device)
        sync.connect()                    # plan the buckets, form one group per server, start the threads
        for version in range(1, steps + 1):
            sync.order_writes_after()     # the device finishes the last copy before the weights change
            optimizer.step()
            sync.publish(version)         # copy this rank's shards and return; a thread sends them
        sync.drain()                      # until all servers have the newest version
        sync.close()

    A thread on each rank gathers, packs and sends a version while the next step trains. If more versions are published
    meanwhile, the newest wins and those in between are never sent (I5). A server serves a version only after all of its
    bytes have arrived and were acknowledged (I3). With `[weight_sync] async_weight_update`, main threads never wait for
    a server, a transfer or another rank (I1).

    Args:
        published: What the servers get.
        config: `[weight_sync]`.
        fleet: The servers, on rank 0; None elsewhere.
        device: The trainer's device.
        in_flight: `[async_grpo] in_flight_weight_updates`, see `link.Pause`.
        recompute_kv: False for `AsyncGrpo.keeps_kv`, see `link.Pause`.
        drain_timeout_s: `[rollout] request_timeout_seconds`: without `in_flight`, how long a server may take to finish
            its running answers.
        on_another_gpu: Of a server's address, with transport "ipc": whether that does not reach it. It gets its weights
            over NCCL, from the same buffers.
    """

    def __init__(
        self,
        published: PublishedWeights,
        config: job_config.WeightSync,
        fleet: Fleet | None,
        device: torch.device,
        in_flight: bool = True,
        recompute_kv: bool = True,
        drain_timeout_s: float = 600.0,
        on_another_gpu: Callable[[str], bool] = lambda url: False,
    ):
        self._published, self._config = published, config
        self._fleet = fleet
        self._device = device
        self._pause = Pause(in_flight, recompute_kv, drain_timeout_s)
        self._backend = config.transport if config.transport != "auto" else "nccl" if device.type == "cuda" else "gloo"
        self._transport, self._on_another_gpu = TRANSPORTS[self._backend], on_another_gpu
        self._thread: Leader | Follower | None = None
        self._board: Board | None = None
        self._newest = -1
        self._waits = True

    # -------------------------------------------------------------------------------------------- the trainer's

    def connect(self) -> None:
        """Plan the buckets, form one group per server and start the threads. Collective over the trainer's ranks,
        bounded. All servers must join.

        Raises:
            UserError, WeightSyncError: A server did not join; raised on every rank.
        """
        config = self._config
        self._ranks = Ranks(self._device, config.timeout_seconds, PHASES * config.timeout_seconds)
        self._limit = bucket_bytes(device_memory_bytes(self._device), config.buffer_memory_ratio)
        self._packer = Packer(
            self._published,
            self._ranks,
            self._limit,
            NUM_BUFFERS,
            snapshots=2 if config.async_weight_update else 1,
            allocate=allocate if self._transport.shares_memory else zeros,
        )
        self._warn_of_large_tensors()
        self._connect_on_rank0()
        # A thread that computes in Python keeps the interpreter for this long. Python's default of 5 ms would delay the
        # main thread by that much, more than once, in a publish.
        sys.setswitchinterval(min(_SWITCH_S, sys.getswitchinterval()))
        if self._board is not None:
            self._thread = Leader(self._ranks, self._packer, config, self._board, self._worker)
        else:
            self._thread = Follower(self._ranks, self._packer, config.timeout_seconds)
        self._thread.start()

    def publish(self, version: int, wait: bool = False) -> None:
        """Give the servers the weights as they are now. `version` is greater than any before.

        Returns at once (I1).

        With `wait`, or without `[weight_sync] async_weight_update`, rank 0 returns when every server in the push has
        acknowledged this version and is resumed, or has been withdrawn. The other ranks return when rank 0 has their
        shards: if they went on earlier, their next collective would wait on the device for rank 0, which waits for
        these shards. NCCL gives no guarantee for concurrent collectives of several communicators.

        Raises:
            FleetError: Fewer servers are left than `[rollout] min_servers`; on rank 0.
            TimeoutError: No snapshot buffer became free, or a wait for the push ran out of time.
            Whatever a sync thread raised since the last call.
        """
        self.check()
        # Where there is one buffer, a push, another rank's gather or a copy may still be reading it.
        self._packer.snapshots.take(version, self._push_bound_s, self.check)
        self._newest = version
        wait = wait or not self._config.async_weight_update
        if self._board is not None:
            if wait:
                self._thread.waited_for = version
            self._board.notify()
        if wait:
            self._wait_for_push(version)

    def stop_waiting(self) -> None:
        """From any thread, in a run that stops: nothing waits for a push any more, on no rank."""
        self._waits = False

    def order_writes_after(self) -> None:
        """Call before the weights change: orders the calling thread's CUDA stream after the snapshot (I2). The host
        never waits."""
        self._packer.snapshots.order_writes_after()

    def drain(self) -> None:
        """Wait, bounded, until all servers have the newest version, those that are fed alone too. Call on every rank.

        So no server is left paused, or with a torn version. A server that is lost is not waited for.
        """
        if self._board is None:
            self._wait_for_push(self._newest)
            return
        board, version = self._board, self._newest
        self._wait_for_push(version)
        if version >= 0:
            what = f"all servers to have version {version}"

            def ready() -> bool:
                return not self._waits or all(worker.is_settled(version) for worker in board.workers)

            self._wait_until(ready, what)

    def idle(self) -> bool:
        """Whether no weights are on their way from this rank."""
        return self._thread is None or not self._thread.busy

    @property
    def moved(self) -> int:
        """Buckets that this rank has gathered. It grows as long as weights move."""
        return self._packer.gathered

    def describe(self) -> str:
        """Where the newest version is, in one line. Takes no lock: for a report of a run that hangs."""
        text = f"weight sync: version {self._newest} published, {'none' if self.idle() else 'one'} on its way"
        if self._board is None:
            return text
        modes = "".join(f"; {worker.url}: {worker.mode.value}" for worker in self._board.workers)
        return f"{text}, version {self._board.sent} sent in common{modes}"

    def finished(self) -> list[SyncReport]:
        """Pushes that ended since the last call. Rank 0 has them all, other ranks none."""
        return self._board.take_reports() if self._board is not None else []

    @property
    def newest(self) -> int:
        """The newest version that was published, which is the model's as long as no optimizer step follows."""
        return self._newest

    @property
    def base(self) -> dict[str, str]:
        """With `[lora]`: fingerprints of the frozen weights that servers must have."""
        return self._published.announced.get("adapter", {}).get("base", {})

    def whole_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """What servers get of the model as it is now: name and tensor, one by one. Collective, and slow: for a server
        under suspicion. Every rank has to take all of them."""
        yield from self._published.whole_tensors()

    def check(self) -> None:
        """Raise what a sync thread raised, or FleetError if too few servers are left."""
        if self._thread is not None and self._thread.error is not None:
            raise self._thread.error
        if self._fleet is not None:
            self._fleet.check()

    def close(self) -> None:
        """End the threads and leave all groups. Running pushes are given up. Takes a few seconds at most."""
        deadline = time.monotonic() + _CLOSE_S
        threads: list[threading.Thread] = [self._thread] if self._thread else []
        if self._board is None and self._thread is not None:
            self._thread.join(_LAST_WORD_S)  # rank 0 may be in a push that needs this rank
        if self._thread is not None:
            self._thread.closing = True
        if self._board is not None:
            self._board.close()
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
            self._wait_until(lambda: thread.settled(version) or not self._waits, f"the push of version {version}")
        else:
            self._wait_until(
                lambda: thread.followed >= version or not thread.is_alive() or not self._waits,
                f"trainer rank 0 to fetch this rank's shards of version {version}",
            )

    @property
    def _push_bound_s(self) -> float:
        """Longest time for a push, and for one that runs before it."""
        drain_s = 0.0 if self._pause.in_flight else self._pause.drain_timeout_s
        return PHASES * self._config.timeout_seconds + 2 * drain_s

    def _wait_until(self, ready: Callable[[], bool], what: str) -> None:
        changed = self._board.changed if self._board is not None else self._thread.changed
        deadline = time.monotonic() + self._push_bound_s
        with changed:
            while not ready():
                self.check()
                if time.monotonic() > deadline:
                    servers = f"; {self._fleet.describe()}" if self._fleet else ""
                    raise TimeoutError(f"timed out waiting for {what}{servers}")
                changed.wait(0.05)
        self.check()

    # -------------------------------------------------------------------------------------------------- set-up

    def _warn_of_large_tensors(self) -> None:
        for bucket in self._packer.buckets:
            if bucket.payload_bytes > self._limit and self._ranks.rank == 0:
                logger.warning(
                    "%s is larger than a bucket, %d MiB ([weight_sync] buffer_memory_ratio): its own takes %d MiB",
                    bucket.tensors[0].name,
                    self._limit >> 20,
                    bucket.payload_bytes >> 20,
                )

    def _connect_servers(self) -> None:
        config, fleet, buckets = self._config, self._fleet, self._packer.buckets
        assert fleet is not None  # on rank 0
        copies_only = not self._transport.join
        plan_info = {
            "protocol": PROTOCOL,
            "run": own_run(),
            "num_buffers": NUM_BUFFERS,
            "timeout_seconds": config.straggler_seconds + config.timeout_seconds,  # it may wait for another server
            "plan": plan_to_json(buckets),
        } | self._published.announced
        copy = self._copy()
        board = self._board = Board(fleet, buckets, NUM_BUFFERS, config, self._pause, plan_info, copy, copies_only)
        board.workers = [self._worker(server) for server in fleet.servers]
        joining = [in_thread(worker.connect, "weight-sync-connect") for worker in board.workers]
        for future in joining:
            future.result()
        for worker in board.workers:
            worker.mode = Mode.ALONE if copies_only else Mode.COMMON
            worker.start()

    def _copy(self) -> VersionCopy | None:
        """Where servers that are fed alone read a version from; None for one server that is never alone."""
        if not self._transport.join:
            adapter = self._published.announced.get("adapter")
            info = AdapterInfo(**adapter) if adapter else None
            return DiskCopy(self._config.disk_folder, self._packer.buckets, info)
        if len(self._fleet.servers) > 1 or self._fleet.may_grow:
            wire_bytes = [bucket.wire_bytes for bucket in self._packer.buckets]
            return MemoryCopy(wire_bytes, pinned=self._device.type == "cuda")
        return None

    def _worker(self, server: Server) -> ServerWorker:
        assert self._board is not None  # on rank 0
        backend = "nccl" if self._transport.shares_memory and self._on_another_gpu(server.url) else self._backend
        return ServerWorker(server, self._board, backend, self._device)

    def _connect_on_rank0(self) -> None:
        """`_connect_servers` on rank 0. If it raises an error, every rank raises one."""
        what = "connect"
        if self._ranks.rank != 0:
            shared = self._ranks.share(None, what)
            if isinstance(shared, str):
                raise UserError(shared)
            if shared is not None:
                raise WeightSyncError(*shared)
            return
        try:
            self._connect_servers()
        except UserError as error:
            self._ranks.share(str(error), what)
            raise
        except Exception as error:
            known = error
            if not isinstance(known, WeightSyncError):
                known = WeightSyncError("the servers", what, -1, 0, error)
            self._ranks.share([known.server, known.phase, known.version, known.bytes, known.cause], what)
            raise
        self._ranks.share(None, what)
