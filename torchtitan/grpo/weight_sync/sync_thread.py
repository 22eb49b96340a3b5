"""The sync threads, one on each trainer rank: rank 0's is the leader and sends versions to the servers when they are
due; the others follow its commands."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from torchtitan.grpo.config import job_config
from torchtitan.grpo.engines.push_report import SyncReport
from torchtitan.grpo.engines.server import Server
from torchtitan.grpo.weight_sync.board import Board, Closing
from torchtitan.grpo.weight_sync.packer import Packer
from torchtitan.grpo.weight_sync.push import Push
from torchtitan.grpo.weight_sync.ranks import Ranks
from torchtitan.grpo.weight_sync.snapshot import SnapshotBuffer
from torchtitan.grpo.weight_sync.worker import ServerWorker
from torchtitan.grpo.weight_wire.buckets import Bucket

PHASES = 8
"""Phases of rank 0, each bounded by `timeout_seconds`, that another rank may sit through in one wait (I6): connecting
again, pause, start, a bucket on the wire, acknowledgement, finish, version, resume."""

_BEAT_S = 2.0
_LOOK_S = 0.25

# Commands of rank 0 to the other ranks' sync threads.
_CLOSE, _BEAT, _SEND = 0, 1, 2


class SyncThread(threading.Thread):
    """One on each trainer rank, on process groups and a stream of its own. Ranks agree here and nowhere else (I5).

    Attributes:
        error: What ended the thread, unless it was closed.
        closing: Set it to end the thread. The leader must be woken too.
        busy: Weights are on their way from this rank.
    """

    def __init__(self, ranks: Ranks, packer: Packer, timeout_s: float):
        super().__init__(name="weight-sync", daemon=True)
        self.error: BaseException | None = None
        self.closing = False
        self.busy = False
        self._ranks, self._packer, self._timeout_s = ranks, packer, timeout_s
        ranks.check = self._raise_if_closed  # another rank may have closed first

    def run(self) -> None:
        try:
            with self._packer.on_stream():
                self._work()
        except Closing:
            pass
        except BaseException as error:
            self.error = error

    def _work(self) -> None:
        raise NotImplementedError

    @contextmanager
    def _hold(self) -> Iterator[SnapshotBuffer]:
        """Hold the newest version that any rank has, on all ranks, to send it."""
        what = "agreeing on a version to publish"
        held = self._packer.snapshots.hold(
            lambda newest: max(self._ranks.all_values(newest, what)), PHASES * self._timeout_s, self._raise_if_closed
        )
        with held as snapshot:
            self.busy = True
            try:
                yield snapshot
            finally:
                self.busy = False

    def _raise_if_closed(self) -> None:
        if self.closing:
            raise Closing


class Follower(SyncThread):
    """Ranks 1..: does what rank 0 says. A command comes every few seconds; without one, rank 0 is gone.

    Attributes:
        followed: The newest version whose shards this rank has given to rank 0.
        changed: Notified when `followed` changes.
    """

    followed = -1

    def __init__(self, ranks: Ranks, packer: Packer, timeout_s: float):
        super().__init__(ranks, packer, timeout_s)
        self.changed = threading.Condition()

    def _work(self) -> None:
        while (command := self._ranks.command(_BEAT)) != _CLOSE:
            if command == _SEND:
                with self._hold() as snapshot:
                    for bucket in self._packer.buckets:
                        self._packer.gather(bucket, snapshot)
                    with self.changed:
                        self.followed = snapshot.version
                        self.changed.notify_all()


class Leader(SyncThread):
    """Rank 0: pushes the newest version when it is due, and makes a copy of it when a worker asks for one.

    Args:
        config: `[weight_sync]`.
        board: Where the leader meets the workers.
        make_worker: Makes the worker of a server that joins later.

    Attributes:
        waited_for: The newest version that the main thread has waited for.
    """

    def __init__(
        self,
        ranks: Ranks,
        packer: Packer,
        config: job_config.WeightSync,
        board: Board,
        make_worker: Callable[[Server], ServerWorker],
    ):
        super().__init__(ranks, packer, config.timeout_seconds)
        self.waited_for = -1
        self._board = board
        self._make_worker = make_worker
        self._push: Push | None = None
        self._next_beat = 0.0

    def run(self) -> None:
        super().run()
        if self.error is not None:
            self._board.fleet.fail(self.error)

    def settled(self, version: int) -> bool:
        """Whether all pushes up to this version have ended. Under the board's lock."""
        board = self._board
        if self._push is not None or board.sent < version:
            return False
        if board.copies_only:
            return all(
                worker.server.version >= version or worker.server.lost or worker.server.silent or worker.reader.dropped
                for worker in board.workers
            )
        return True

    def _work(self) -> None:
        board, looked = self._board, time.monotonic()
        while True:
            with board.changed:
                job = self._next_job()
            if self.closing:
                self._ranks.command(_CLOSE, lambda: None)
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
        """Hold the newest version on all ranks. They gather it bucket by bucket."""
        self._ranks.command(_SEND)
        with self._hold() as snapshot:
            yield snapshot

    def _next_job(self) -> Callable[[], None] | None:
        """What to do now. None if there was nothing to do for a while, or at the end. Under the board's lock."""
        board, deadline = self._board, time.monotonic() + _BEAT_S
        while time.monotonic() < deadline and not self.closing:
            newest = -1 if board.fleet.resting else self._packer.snapshots.newest
            due = newest not in (-1, board.sent)
            if newest >= 0 and (board.push_wanted or due) and board.in_common():
                return self._push_in_common
            wanted = board.copy_wanted or (board.copies_only and due)
            waited = wanted or (board.copies_only and newest == self.waited_for and not self.settled(newest))
            if newest >= 0 and waited and board.copy is not None:
                board.drop_late_readers()
                if wanted and not board.copy_in_use():
                    board.copy.invalidate()
                    return self._make_copy
            pause_s = _LOOK_S if waited else _BEAT_S
            board.changed.wait(min(pause_s, max(0.01, deadline - time.monotonic())))
        return None

    def _push_in_common(self) -> None:
        if self._board.pause.in_flight:  # ranks agree first, which may take a training step; servers pause then
            with self._send() as snapshot, self._new_push(snapshot.version) as push:
                self._push_buckets(push, snapshot)
            return
        with self._new_push(self._packer.snapshots.newest) as push:
            push.wait_until_still(self._while_servers_drain)
            with self._send() as snapshot:
                self._push_buckets(push, snapshot)

    def _while_servers_drain(self) -> None:
        """That may take long. A server that has waited for weights for longer than a push takes gets a copy meanwhile:
        nothing is packed for the push yet."""
        self._beat()
        board = self._board
        with board.changed:
            if not board.copy_is_late(0.0) or board.copy_in_use():
                return
            board.copy.invalidate()
        self._make_copy()

    def _beat(self) -> None:
        if time.monotonic() > self._next_beat:
            self._ranks.command(_BEAT)
            self._reread_servers()
            self._next_beat = time.monotonic() + _BEAT_S

    @contextmanager
    def _new_push(self, version: int) -> Iterator[Push]:
        """Invite the servers that take part. An error in the block fails the push for all of them."""
        board = self._board

        def make(servers: list[str], on_drop: Callable[[str, str], None]) -> Push:
            drain_s = None if board.pause.in_flight else board.pause.drain_timeout_s
            shape = version, len(board.buckets), board.num_buffers
            return Push(*shape, servers, board.config.straggler_seconds, on_drop, drain_s, board.copy_is_late)

        with board.changed:
            self._push = push = board.begin_push(make)
        try:
            yield push
        except BaseException:
            push.fail()
            raise

    def _push_buckets(self, push: Push, snapshot: SnapshotBuffer) -> None:
        board, packer = self._board, self._packer
        board.sending(snapshot.version)
        push.begin(snapshot.version)
        gather_s = 0.0
        for bucket in board.buckets:
            push.wait_for_buffer(bucket.index)
            gather_s += self._gather(bucket, snapshot)
            push.offer(packer.pack(bucket, snapshot), self._mark())
        expected = packer.expected_acknowledgement(snapshot.version)
        seconds = {"gather": gather_s, "pack": 0.0, "snapshot": snapshot.seconds()}
        push.complete(expected, seconds | packer.stopwatch.take())
        push.on_settled(lambda: self._report(push))

    def _report(self, push: Push) -> None:
        board, total_s = self._board, time.perf_counter() - push.started
        with board.changed:
            if self._push is push:
                self._push = None
            board.push_settled(
                SyncReport(
                    push.version,
                    self._packer.bytes,
                    len(board.buckets),
                    push.seconds | {"total": total_s},
                    push.servers,
                    missed=push.invited - len(push.servers),
                    waited=push.version <= self.waited_for,
                    stops=push.stops,
                )
            )

    def _make_copy(self) -> None:
        """Copy the newest version for servers that are fed alone."""
        board, packer, copy = self._board, self._packer, self._board.copy
        with self._send() as snapshot:
            started, gather_s = time.perf_counter(), 0.0
            copy.begin()
            for bucket in board.buckets:
                gather_s += self._gather(bucket, snapshot)
                copy.store(bucket.index, packer.pack(bucket, snapshot))
            expected = packer.expected_acknowledgement(snapshot.version)  # waits for the device: the copies are done
            copy.complete(snapshot.version, expected)
            seconds = {"gather": gather_s, "snapshot": snapshot.seconds()} | packer.stopwatch.take()
            seconds["total"] = time.perf_counter() - started
            with board.changed:
                if board.copies_only:
                    board.sending(snapshot.version)
                    waited = snapshot.version <= self.waited_for
                    sizes = packer.bytes, len(board.buckets)
                    board.add_report(SyncReport(snapshot.version, *sizes, seconds, {}, waited=waited))
                board.copy_made()

    def _gather(self, bucket: Bucket, snapshot: SnapshotBuffer) -> float:
        started = time.perf_counter()
        self._packer.gather(bucket, snapshot)
        return time.perf_counter() - started

    def _mark(self) -> torch.cuda.Event | None:
        if self._packer.device.type != "cuda":
            return None
        event = torch.cuda.Event()
        event.record()
        return event

    def _reread_servers(self) -> None:
        board = self._board
        added, removed = board.fleet.reread()
        with board.changed:
            gone = [worker for worker in board.workers if worker.server in removed]
            new = [self._make_worker(server) for server in added]
            board.replace_workers(gone, new)
        for worker in gone:
            worker.remove()
        for worker in new:
            worker.start()
