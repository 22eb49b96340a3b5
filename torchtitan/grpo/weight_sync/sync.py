"""Weights reach the servers while the trainer trains: snapshot, common pushes, copies for those that fall behind.

`publish` copies this rank's shards and returns. One sync thread a rank does the rest, on process groups and a CUDA
stream of its own: rank 0's leads, the others follow its word. The main threads never agree on anything, and never wait
for a server, a transfer or another rank.
"""

import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
import torch.nn as nn

from torchtitan.grpo import job_config
from torchtitan.grpo.engines.fleet import Fleet, Server
from torchtitan.grpo.errors import UserError
from torchtitan.grpo.weight_sync.buckets import Bucket, bucket_bytes, plan_to_json
from torchtitan.grpo.weight_sync.disk import DiskCopy
from torchtitan.grpo.weight_sync.link import Pause, WeightSyncError, in_thread
from torchtitan.grpo.weight_sync.push import HostCopy, Push
from torchtitan.grpo.weight_sync.ranks import Ranks
from torchtitan.grpo.weight_sync.receiver import PROTOCOL
from torchtitan.grpo.weight_sync.report import SyncReport
from torchtitan.grpo.weight_sync.sender import Sender
from torchtitan.grpo.weight_sync.snapshot import SnapshotBuffer
from torchtitan.grpo.weight_sync.worker import Board, Closing, Mode, ServerWorker

logger = logging.getLogger(__name__)

_PHASES = 8
"""Phases of rank 0, each bounded by `timeout_seconds`, that another rank may sit through in one wait: connecting anew,
pause, start, a bucket on the wire, acknowledgement, finish, version, resume."""

_BEAT_S = 2.0
_SWITCH_S = 0.0005
_CLOSE_S = 10.0
_LAST_WORD_S = 3.0
_STANDSTILL_SHARE = 0.05

# Rank 0's words to the other ranks' sync threads.
_CLOSE, _BEAT, _SEND = 0, 1, 2


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
        self._thread: threading.Thread | None = None
        self._board: Board | None = None
        self._closing = False
        self._drain = False
        self._error: BaseException | None = None
        self._newest = self._waited_for = -1
        self._followed = -1
        self._push: Push | None = None
        self._push_started = 0.0
        self._next_beat = 0.0

    # -------------------------------------------------------------------------------------------- the trainer's

    def connect(self) -> None:
        """Plan the buckets, form one group per server and start the threads. Collective over the trainer's ranks;
        bounded. All servers must join.

        Raises:
            UserError, WeightSyncError: One did not; on every rank.
        """
        config = self._config
        self._ranks = Ranks(self._device, config.timeout_seconds, _PHASES * config.timeout_seconds)
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
        run = self._lead if self._ranks.rank == 0 else self._follow
        self._thread = threading.Thread(target=self._run, args=(run,), name="weight-sync", daemon=True)
        self._thread.start()

    def publish(self, version: int, wait: bool = False) -> None:
        """Give the servers the weights as they are now; `version` is greater than any before.

        Returns at once. With `wait`, and without `[weight_sync] async_weight_update`, rank 0 returns when every server
        in the push has acknowledged this version and is resumed, or has been withdrawn.

        Raises:
            FleetError: Fewer servers are left than `[rollout] min_servers`; on rank 0.
            Anything that a sync thread raised since the last call.
        """
        self.check()
        # One buffer is enough for a trainer that waits; what may still read it is another rank, or a host copy.
        self._sender.snapshots.take(version, self._config.timeout_seconds)
        self._newest = version
        if self._board is not None:
            wait = wait or not self._config.async_weight_update
            self._waited_for = version if wait else self._waited_for
            self._board.notify()
            if wait:
                self._wait_until(lambda: self._settled(version), f"the push of version {version}")

    def order_writes_after(self) -> None:
        """Call before the weights change: orders the calling thread's CUDA stream after the snapshot. Never waits."""
        self._sender.snapshots.order_writes_after()

    def drain(self) -> None:
        """Wait until the newest version has reached all servers in common pushes. Bounded; call it on every rank."""
        if self._board is None:
            self._wait_until(lambda: self._followed >= self._newest or not self._thread.is_alive(), "the last push")
            return
        self._drain = True
        self._board.notify()
        self._wait_until(lambda: self._settled(self._newest), f"the push of version {self._newest}")
        self._drain = False

    def finished(self) -> list[SyncReport]:
        """Pushes that ended since the last call; none on ranks other than 0."""
        if self._board is None:
            return []
        with self._board.changed:
            reports, self._board.reports = self._board.reports, []
        return reports

    def check(self) -> None:
        """Raise what a sync thread raised, or that too few servers are left."""
        if self._error is not None:
            raise self._error
        if self._fleet is not None:
            self._fleet.check()

    def close(self) -> None:
        """End the threads and leave all groups; what is under way is given up. Bounded by a few seconds."""
        deadline = time.monotonic() + _CLOSE_S
        threads = [self._thread] if self._thread else []
        if self._board is None and self._thread is not None:
            self._thread.join(_LAST_WORD_S)  # rank 0 may be in a push that needs this rank
        self._closing = True
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

    def _settled(self, version: int) -> bool:
        board = self._board
        if self._push is not None or board.sent < version:
            return False
        if board.copies_only:
            return all(worker.server.version >= version or worker.server.lost for worker in board.workers)
        return True

    def _wait_until(self, ready: Callable[[], bool], what: str) -> None:
        changed = self._board.changed if self._board is not None else threading.Condition()
        drain_s = 0.0 if self._pause.in_flight else self._pause.drain_timeout_s
        deadline = time.monotonic() + _PHASES * self._config.timeout_seconds + 2 * drain_s  # after a push under way
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
        board.workers = [self._worker(server, board) for server in self._fleet.servers]
        if self._backend == "disk":
            board.copy, board.copies_only = DiskCopy(config.disk_folder, buckets), True
        elif len(board.workers) > 1 or self._fleet.may_grow:
            board.copy = HostCopy([bucket.wire_bytes for bucket in buckets], self._device)
        self._board = board
        joining = [in_thread(worker.connect, "weight-sync-connect") for worker in board.workers]
        for future in joining:
            future.result()
        for worker in board.workers:
            worker.mode = Mode.ALONE if board.copies_only else Mode.COMMON
            worker.start()

    def _worker(self, server: Server, board: Board) -> ServerWorker:
        return ServerWorker(server, board, self._backend, self._device)

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

    # -------------------------------------------------------------------------------------------- sync threads

    def _run(self, loop: Callable[[], None]) -> None:
        try:
            with self._sender.on_stream():
                loop()
        except Closing:
            pass
        except BaseException as error:
            self._error = error
            if self._fleet is not None:
                self._fleet.fail(error)

    def _follow(self) -> None:
        """Ranks 1..: do what rank 0 says. A word comes every few seconds; without one rank 0 is gone."""
        while (word := self._ranks.command(_BEAT, self._raise_if_closed)) != _CLOSE:
            if word == _SEND:
                with self._hold() as snapshot:
                    for bucket in self._sender.buckets:
                        self._sender.gather(bucket, snapshot)
                    self._followed = snapshot.version

    def _lead(self) -> None:
        """Rank 0: push the newest version when it is due; make a host copy when a worker wants one."""
        board, looked = self._board, time.monotonic()
        while True:
            with board.changed:
                job = self._next_job()
            if self._closing:
                self._ranks.command(_CLOSE)
                return
            if time.monotonic() > looked + _BEAT_S:
                self._reread_servers()
                looked = time.monotonic()
            if job is None:
                self._ranks.command(_BEAT)
                continue
            job()
            board.notify()

    @contextmanager
    def _send(self) -> Iterator[SnapshotBuffer]:
        """Rank 0: hold the newest version on all ranks, which gather bucket after bucket of it."""
        self._ranks.command(_SEND)
        with self._hold() as snapshot:
            yield snapshot

    def _hold(self) -> AbstractContextManager[SnapshotBuffer]:
        timeout_s = _PHASES * self._config.timeout_seconds
        what = "agreeing on a version to publish"
        return self._sender.snapshots.hold(
            lambda newest: self._ranks.greatest(newest, what), timeout_s, self._raise_if_closed
        )

    def _raise_if_closed(self) -> None:
        if self._closing:
            raise Closing

    def _next_job(self) -> Callable[[], None] | None:
        """What to do now, under the board's lock; None if there was nothing for a while, or at the end."""
        board, deadline = self._board, time.monotonic() + _BEAT_S
        while time.monotonic() < deadline and not self._closing:
            newest = self._sender.snapshots.newest
            due = newest >= 0 and self._due(newest)
            if newest >= 0 and board.in_common() and (board.push_wanted or due):
                return self._push_in_common
            wanted = board.copy_wanted or (board.copies_only and due)
            if newest >= 0 and wanted and board.copy is not None and board.copy.readers == 0:
                return self._make_copy
            board.changed.wait(min(_BEAT_S, max(0.01, deadline - time.monotonic())))
        return None

    def _due(self, newest: int) -> bool:
        behind = newest - self._board.sent
        if behind == 0:
            return False
        if self._config.cadence == "every" or behind >= self._max_lag or self._drain:
            return True
        # The servers stood still for `push_s`: let them work twenty times as long before they do so again.
        return time.monotonic() - self._push_started > self._board.push_s / _STANDSTILL_SHARE

    def _push_in_common(self) -> None:
        if self._pause.in_flight:  # servers are stopped when the ranks have agreed: that may take a step
            with self._send() as snapshot:
                self._push_buckets(self._new_push(snapshot.version), snapshot)
            return
        push = self._new_push(self._sender.snapshots.newest)
        try:
            push.wait_until_still(self._beat)
            with self._send() as snapshot:
                self._push_buckets(push, snapshot)
        except BaseException as error:
            push.fail(error)
            raise

    def _beat(self) -> None:
        if time.monotonic() > self._next_beat:
            self._ranks.command(_BEAT)
            self._next_beat = time.monotonic() + _BEAT_S

    def _new_push(self, version: int) -> Push:
        """Call everyone who takes part."""
        board = self._board
        with board.changed:
            workers = {worker.url: worker for worker in board.in_common()}
            push = Push(
                version,
                len(board.buckets),
                board.num_buffers,
                list(workers),
                board.straggler_s,
                lambda url, why: workers[url].drop(why),
                None if self._pause.in_flight else self._pause.drain_timeout_s,
            )
            self._push, self._push_started = push, time.monotonic()
            board.push_wanted = False
            for worker in workers.values():
                worker.push = push
                worker.wake.notify()
        return push

    def _push_buckets(self, push: Push, snapshot: SnapshotBuffer) -> None:
        board, sender = self._board, self._sender
        try:
            with board.changed:
                board.sent = snapshot.version
            push.begin(snapshot.version)
            gather_s = 0.0
            for bucket in board.buckets:
                push.wait_for_buffer(bucket.index)
                gather_s += self._gather(bucket, snapshot)
                push.offer(sender.pack(bucket, snapshot), self._mark())
            expected = sender.expected_acknowledgement(snapshot.version)
            seconds = {"gather": gather_s, "pack": 0.0, "snapshot": snapshot.seconds()}
            push.complete(expected, seconds | sender.stopwatch.take())
        except BaseException as error:
            push.fail(error)
            raise
        push.on_settled(lambda: self._report(push))

    def _report(self, push: Push) -> None:
        board, total_s = self._board, time.perf_counter() - push.started
        with board.changed:
            board.push_s = total_s
            board.report(
                SyncReport(
                    push.version,
                    self._sender.bytes,
                    len(board.buckets),
                    push.seconds | {"total": total_s},
                    push.servers,
                    missed=push.invited - len(push.servers),
                    waited=push.version <= self._waited_for,
                )
            )
            if self._push is push:
                self._push = None
            board.changed.notify_all()

    def _make_copy(self) -> None:
        """Write the newest version down for servers that are fed alone."""
        with self._send() as snapshot:
            self._copy(snapshot)

    def _copy(self, snapshot: SnapshotBuffer) -> None:
        board, sender, copy = self._board, self._sender, self._board.copy
        started, gather_s = time.perf_counter(), 0.0
        self._push_started = time.monotonic()
        copy.begin()
        for bucket in board.buckets:
            gather_s += self._gather(bucket, snapshot)
            copy.store(bucket.index, sender.pack(bucket, snapshot))
        expected = sender.expected_acknowledgement(snapshot.version)  # waits for the device: the copies are done
        copy.complete(snapshot.version, expected)
        seconds = {"gather": gather_s, "snapshot": snapshot.seconds()} | sender.stopwatch.take()
        seconds["total"] = time.perf_counter() - started
        with board.changed:
            board.copy_wanted = False
            if board.copies_only:
                board.sent = snapshot.version
                waited = snapshot.version <= self._waited_for
                board.report(SyncReport(snapshot.version, sender.bytes, len(board.buckets), seconds, {}, waited=waited))
            board.changed.notify_all()
            board.wake_workers(Mode.ALONE)

    def _gather(self, bucket: Bucket, snapshot: SnapshotBuffer) -> float:
        started = time.perf_counter()
        self._sender.gather(bucket, snapshot)
        return time.perf_counter() - started

    def _mark(self) -> torch.cuda.Event | None:
        if self._device.type != "cuda":
            return None
        event = torch.cuda.Event()
        event.record()
        return event

    def _reread_servers(self) -> None:
        added, removed = self._fleet.reread()
        board = self._board
        with board.changed:
            gone = [worker for worker in board.workers if worker.server in removed]
            new = [self._worker(server, board) for server in added]
            board.workers = [worker for worker in board.workers if worker not in gone] + new
        for worker in gone:
            worker.remove()
        for worker in new:
            worker.start()
