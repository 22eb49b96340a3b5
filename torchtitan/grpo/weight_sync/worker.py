"""One thread per server, and the board on which the lead and the workers meet. Rank 0 only."""

import logging
import threading
import time
from collections.abc import Callable
from enum import Enum

import torch

from torchtitan.grpo.engines.fleet import Fleet, Server
from torchtitan.grpo.engines.protocol import EngineError
from torchtitan.grpo.engines.sglang_control import SglangControl
from torchtitan.grpo.errors import UserError
from torchtitan.grpo.weight_sync.disk import DiskLink
from torchtitan.grpo.weight_sync.link import Pause, ServerLink, WeightSyncError
from torchtitan.grpo.weight_sync.push import Copy, Dropped, Push
from torchtitan.grpo.weight_sync.report import SyncReport
from torchtitan.grpo.weight_sync.sglang_link import SglangDiskLink, SglangLink
from torchtitan.grpo.weight_wire.buckets import Bucket

logger = logging.getLogger(__name__)

HEALTH_S = 5.0
"""How often an idle server is asked whether it is well. Shorter than an engine takes to start, so that a server that
was restarted between two pushes is not taken for the one with our weights."""

_HEALTH_FAILURES_MAX = 3
_SUSPECT_LOOK_S = 0.5
_REPORTS_MAX = 1000
_BACKOFF_S = 0.5
_BACKOFF_MAX_S = 10.0


class Closing(Exception):
    """Weight sync is being shut down."""


class Mode(Enum):
    """How a server gets its weights."""

    LOST = "lost"
    """Not at all: it is being connected anew."""
    ALONE = "alone"
    """From a host copy, at its own pace."""
    COMMON = "common"
    """In pushes together with the others."""


class Board:
    """What the lead (the sync thread of rank 0) and the workers share, under one lock.

    The lead and the main thread wait for `changed`, each worker for a condition of its own on the same lock: with many
    servers, what one does must not wake all the others.

    Args:
        pause: How servers are stopped.

    Attributes:
        sent: The version of the newest common push; a server must have it, or a newer one, to be admitted.
        copy: A version for servers in mode ALONE. None where there can be none.
        copies_only: There are no common pushes: every server is fed from the copy (transport "disk").
        copy_wanted: A worker waits for a newer copy than there is.
        push_wanted: A server has joined that has no newest version yet, and no other server has either.
        push_s: Seconds of the last common push, over all its servers; with `copies_only`, of the last server.
        reports: Pushes that ended and were not asked for yet.
    """

    def __init__(
        self,
        fleet: Fleet,
        buckets: list[Bucket],
        num_buffers: int,
        timeout_s: float,
        straggler_s: float,
        pause: Pause,
    ):
        self.fleet = fleet
        self.buckets = buckets
        self.num_buffers = num_buffers
        self.timeout_s = timeout_s
        self.straggler_s = straggler_s
        self.pause = pause
        self.plan_info: dict = {}
        self.lock = threading.RLock()
        self.changed = threading.Condition(self.lock)
        self.workers: list[ServerWorker] = []
        self.closing = False
        self.sent = -1
        self.push_s = 0.0
        self.push_wanted = False
        self.copy: Copy | None = None
        self.copies_only = False
        self.copy_wanted = False
        self.reports: list[SyncReport] = []
        fleet.add_listener(self._on_fleet_change)

    def notify(self) -> None:
        with self.changed:
            self.changed.notify_all()

    def wake_workers(self, mode: Mode | None = None) -> None:
        """Those in a mode, or all."""
        with self.changed:
            for worker in self.workers:
                if mode is None or worker.mode is mode:
                    worker.wake.notify_all()

    def _on_fleet_change(self) -> None:
        with self.changed:
            self.changed.notify_all()
            for worker in self.workers:
                if worker.server.suspected:
                    worker.wake.notify_all()

    def check(self) -> None:
        """Raises Closing at the end."""
        if self.closing:
            raise Closing

    def report(self, report: SyncReport) -> None:
        """Under the lock."""
        self.reports = [*self.reports[-_REPORTS_MAX:], report]

    def copy_in_use(self) -> bool:
        """Whether a worker reads the copy, or has been woken to: a newer one must not take its turn away each time."""
        return self.copy.readers > 0 or any(worker.may_take(self.copy) for worker in self.workers)

    def in_common(self) -> list["ServerWorker"]:
        return [worker for worker in self.workers if worker.mode is Mode.COMMON and not worker.dropped]


class ServerWorker(threading.Thread):
    """Keeps one server at the newest version: in common pushes, alone, or by connecting anew."""

    def __init__(self, server: Server, board: Board, backend: str, device: torch.device):
        super().__init__(name=f"weight-sync {server.url}", daemon=True)
        self.server = server
        self.url = server.url
        self.link = self._make_link(server, backend, device, board)
        self.mode = Mode.LOST
        self.push: Push | None = None
        """The push to take part in, set by the lead."""
        self.dropped = ""
        """Why the lead goes on without this server, until it has connected anew."""
        self.wake = threading.Condition(board.lock)
        self._board = board
        self.has = -1
        self.awaits_copy = False
        """It waits for a copy of a version after `has`."""
        self._given = -1  # on this connection
        self._removed = False
        self._retry_at = 0.0
        self._backoff_s = _BACKOFF_S
        self._health_failures = 0
        self._next_look = 0.0

    @staticmethod
    def _make_link(server: Server, backend: str, device: torch.device, board: Board) -> ServerLink:
        args = (server.control, backend, device, board.timeout_s, board.pause, board.check)
        if not isinstance(server.control, SglangControl):
            return (DiskLink if backend == "disk" else ServerLink)(*args)
        link = SglangDiskLink if backend == "disk" else SglangLink
        return link(*args, hold=lambda: board.fleet.hold(server), in_flight=lambda: server.in_flight)

    def connect(self) -> None:
        """Form the process group. By the main thread before the worker starts, by the worker afterwards."""
        self._given = -1
        self.link.connect(self._board.plan_info)
        self._backoff_s = _BACKOFF_S
        self._health_failures = 0

    def drop(self, why: str) -> None:
        """The lead goes on without this server, which may still be busy with the push before."""
        self.dropped = why
        self._board.fleet.withdraw(self.server, why, lost=False)

    def remove(self) -> None:
        """The server is no longer listed: leave it."""
        with self._board.lock:
            self._removed = True
            self.wake.notify_all()

    def run(self) -> None:
        board = self._board
        steps = {Mode.LOST: self._reconnect, Mode.ALONE: self._catch_up, Mode.COMMON: self._take_part}
        try:
            while not self._removed:
                board.check()
                steps[self.mode]()
        except Closing:
            pass
        except BaseException as error:
            board.fleet.fail(error)
        finally:
            self._leave_push()
            self.link.close()

    # ------------------------------------------------------------------------------------------------ its modes

    def _take_part(self) -> None:
        board = self._board
        if not self._wait(lambda: self.push is not None):
            if -1 < self._given < board.sent:
                self.mode = Mode.ALONE  # it missed a version, and the next one is long in coming
            self._look_after_health()
            return
        push = self.push
        seat = push.seat(self.url, board.timeout_s, board.check)

        def check() -> None:
            seat.raise_if_dropped()
            if self.dropped:
                raise Dropped(self.dropped)

        self.link.check = check
        try:
            check()
            seat.stopping()
            self.link.stop(push.version)
            seat.stopped()
            seconds = self.link.update(seat, board.buckets, board.num_buffers)
        except Dropped as why:
            # Its weights are a mix: connect anew, at once.
            self.dropped = ""
            self._leave_push(push)
            board.fleet.withdraw(self.server, str(why), lost=False)
            self.link.close()
            self.mode, self._retry_at = Mode.LOST, 0.0
        except (WeightSyncError, UserError) as error:
            self._leave_push(push)
            self._lose(error)
        else:
            self._given = push.version
            if not self.dropped:
                board.fleet.admit(self.server, push.version)
            with board.changed:
                if self.push is push:  # else the next one has come already
                    self.push = None
            push.ended(self.url, seconds)
        finally:
            self.link.check = board.check

    def _catch_up(self) -> None:
        board = self._board
        with board.changed:
            if not (board.copies_only or board.in_common()):
                self.mode, board.push_wanted = Mode.COMMON, True
                board.changed.notify_all()
                return
        self.has, self.awaits_copy = self.server.version if self.server.in_traffic else -1, True
        try:
            taken = self._wait(self._takes_copy)
        finally:
            self.awaits_copy = False
        if not taken:
            self._look_after_health()
            return
        copy = board.copy
        version = copy.version
        try:
            self.link.stop(version)
            seconds = self.link.update(copy.feed(), board.buckets, 1)
        except (WeightSyncError, UserError) as error:
            self._lose(error)
            return
        finally:
            with board.changed:
                copy.readers -= 1
                board.changed.notify_all()
        self._given = version
        with board.changed:
            newest = version >= board.sent
            if board.copies_only:
                board.push_s = seconds["total"]
            elif seconds["total"] - seconds.get("drain", 0.0) <= board.push_s + board.straggler_s:
                # As quick as the others by itself: it keeps them waiting no more. If they were sent a newer version
                # meanwhile, it gets the next one with them, and is admitted then.
                self.mode = Mode.COMMON
            size = sum(bucket.payload_bytes for bucket in board.buckets)
            total = {"total": seconds["total"]}
            board.report(SyncReport(version, size, len(board.buckets), total, {self.url: seconds}, alone=True))
        if not board.copies_only:
            logger.info("%s has caught up with version %d in %.2f s", self.url, version, seconds["total"])
        if newest:
            board.fleet.admit(self.server, version)
        board.notify()

    def may_take(self, copy: Copy) -> bool:
        """It waits, and the copy is newer than what it has and not older than what the others were sent."""
        return self.awaits_copy and copy.version > self.has and copy.version >= self._board.sent

    def _takes_copy(self) -> bool:
        board, copy = self._board, self._board.copy
        if copy is not None and self.may_take(copy):
            copy.readers += 1
            return True
        if board.sent > self.has:
            board.copy_wanted = True
            board.changed.notify_all()
        return False

    def _reconnect(self) -> None:
        board = self._board
        self._wait(lambda: time.monotonic() >= self._retry_at, self._retry_at - time.monotonic())
        if time.monotonic() < self._retry_at or self._removed:
            return
        try:
            if not self.server.control.is_healthy():
                self._lose("it is not healthy")
                return
            self.server.check()
            self.connect()
        except (WeightSyncError, UserError, EngineError) as error:
            self._lose(error)
            return
        with board.changed:
            self.mode = Mode.ALONE if board.copies_only or board.in_common() else Mode.COMMON
            if self.mode is Mode.COMMON:
                board.push_wanted = True
            board.changed.notify_all()
        logger.info("%s is connected again; it gets the newest weights first", self.url)

    def _look_after_health(self) -> None:
        """Is it there, and is it the one that we gave weights to?"""
        server = self.server
        self._next_look = time.monotonic() + _SUSPECT_LOOK_S
        try:
            if not server.control.is_healthy():
                self._lose("it is not healthy")
                return
            reported = server.control.weight_version()
        except (EngineError, UserError) as error:
            self._health_failures += 1
            if "no reply" not in str(error) or self._health_failures >= _HEALTH_FAILURES_MAX:
                self._lose(error)
            return
        self._health_failures = 0
        if reported not in (None, str(self._given)) and self._given >= 0:
            self._lose(f"reports weight version {reported!r} in place of {self._given}: it was restarted")
        elif server.suspected and self._given >= self._board.sent:
            self._board.fleet.admit(server, self._given)

    # ------------------------------------------------------------------------------------------------ its parts

    def _wait(self, ready: Callable[[], bool], timeout_s: float = HEALTH_S) -> bool:
        """Wait under the board's lock; False after `timeout_s`, or as soon as there is something else to do."""
        board, deadline = self._board, time.monotonic() + timeout_s
        with board.changed:
            while not ready():
                board.check()
                now = time.monotonic()
                look = self.server.suspected and self.mode is not Mode.LOST
                if now >= deadline or self._removed or (look and now >= self._next_look):
                    return False
                self.wake.wait(min(deadline, self._next_look if look else deadline) - now)
            return True

    def _lose(self, reason: object) -> None:
        self.link.close()
        self.dropped = ""
        self.mode = Mode.LOST
        self._retry_at = time.monotonic() + self._backoff_s
        self._backoff_s = min(2 * self._backoff_s, _BACKOFF_MAX_S)
        self._board.fleet.withdraw(self.server, str(reason))
        self._board.wake_workers(Mode.ALONE)  # there may be nobody left whom they would keep waiting

    def _leave_push(self, push: Push | None = None) -> None:
        """Leave this push, and the one that may have come since."""
        with self._board.changed:
            given, self.push = self.push, None
        for each in {push, given} - {None}:
            each.ended(self.url, None)
