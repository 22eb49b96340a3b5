"""One thread per server, on rank 0."""

import gc
import logging
import pkgutil
import threading
import time
from collections.abc import Callable
from typing import Any

import torch

from torchtitan.grpo.engines.http_control import NoReply
from torchtitan.grpo.engines.protocol import EngineError, LocalError
from torchtitan.grpo.engines.push_report import SyncReport, stop_until_now
from torchtitan.grpo.engines.server import Server
from torchtitan.grpo.errors import UserError
from torchtitan.grpo.weight_sync.board import Board, Closing, Mode
from torchtitan.grpo.weight_sync.copies import CopyReader, VersionCopy
from torchtitan.grpo.weight_sync.link import ServerLink, WeightSyncError
from torchtitan.grpo.weight_sync.push import Dropped, Push
from torchtitan.grpo.weight_wire.transports import TRANSPORTS
from torchtitan.grpo.weight_wire.version_names import origin, version_of

logger = logging.getLogger(__name__)

HEALTH_S = 5.0
"""How often an idle server's health is asked. Shorter than the time that an engine takes to start, so that a server
that was restarted between two pushes is not mistaken for the one that has our weights."""

_HEALTH_FAILURES_MAX = 3
_SUSPECT_LOOK_S = 0.5
_BACKOFF_S = 0.5
_BACKOFF_DOUBLINGS_MAX = 7
_DEAD_S = 5.0
"""Longest pause before the health of a lost server is asked again: it must be back soon after it is healthy."""
_REFUSES_S = 60.0
"""Longest pause before a healthy server that failed is connected again, which costs a process group at both ends."""
_COLLECT_EVERY = 100
"""Losses between two full collections of garbage. The trainer collects young garbage only, and what a connection left
may be old by the time it is garbage."""
_DISTRUST_S = 30.0
"""How long a server stays away whose answers are not the policy's for the second time; twice as long each time. The
first time it is fed at once."""
_DISTRUST_MAX_S = 3600.0


def _notify(wake: threading.Condition) -> None:
    with wake:
        wake.notify_all()


class ServerWorker(threading.Thread):
    """Keeps one server at the newest version: in common pushes, alone, or by connecting again (I4).

    Attributes:
        mode: How the server gets its weights now.
        dropped: Why the leader goes on without this server in the push that it is invited to; "" if it does not.
        reader: Its seat at the copies.
        wake: Notified when there is something to do.
    """

    def __init__(self, server: Server, board: Board, backend: str, device: torch.device):
        super().__init__(name=f"weight-sync {server.url}", daemon=True)
        self.server = server
        self.url = server.url
        self.link = self._make_link(server, backend, device, board)
        self.mode = Mode.LOST
        self.dropped = ""
        self.reader = CopyReader(server, board)
        self.wake = wake = threading.Condition(board.lock)
        server.call = lambda: _notify(wake)  # a worker that has ended is not kept by its server
        self._push: Push | None = None
        self._board = board
        self._given = -1  # on this connection
        self._removed = self._ended = False
        self._retry_at = 0.0
        self._dead = False
        self._failures = 0  # in a row, all deaths or all refusals
        self._losses = 0
        self._starts = server.starts  # of which it was told
        self._health_failures = 0
        self._next_look = 0.0

    @staticmethod
    def _make_link(server: Server, backend: str, device: torch.device, board: Board) -> ServerLink:
        path = server.engine.link if TRANSPORTS[backend].join else server.engine.disk_link
        return pkgutil.resolve_name(path)(
            server.control,
            backend,
            device,
            board.config.timeout_seconds,
            board.pause,
            board.check,
            hold=lambda: board.fleet.hold(server),
            requests_in_flight=lambda: board.fleet.requests_in_flight(server),
            versions_in_use=lambda: board.fleet.versions_in_use(server),
        )

    def connect(self) -> None:
        """Form the process group. The main thread calls it before the worker starts, the worker afterwards."""
        self._given = -1
        self.link.connect(self._board.plan_info)
        self._health_failures = 0

    def invite(self, push: Push) -> None:
        """Take part in this push. Under the board's lock."""
        self._push = push
        self.wake.notify()

    def drop(self, push: Push, why: str) -> None:
        """The leader goes on with `push` without this server, which may still be busy with the previous one."""
        with self._board.lock:
            if push is self._push:  # else it has left by itself, and may have connected again
                self.dropped = why
                self._board.fleet.withdraw(self.server, why, lost=False)

    def remove(self) -> None:
        """The server is no longer listed: leave it."""
        with self._board.lock:
            self._removed = True
            self.wake.notify_all()

    def is_leaving(self) -> bool:
        """Whether it was removed and may still act on its server."""
        return not self._ended and self.is_alive()

    def is_settled(self, version: int) -> bool:
        """Whether the server serves this version or a newer one, or is lost and not being fed."""
        server = self.server
        return self.mode is Mode.LOST if server.lost else server.in_traffic and server.version >= version

    def is_idle(self, copy: VersionCopy) -> bool:
        """Whether it is fed from the copy, and not now."""
        reader = self.reader
        return self.mode is Mode.ALONE and not (reader in copy.readers or reader.dropped or self.server.silent)

    def takes_part(self) -> bool:
        """Whether it is invited to common pushes. A silent server would only delay them."""
        return self.mode is Mode.COMMON and not self.dropped and not self.server.silent

    def run(self) -> None:
        board = self._board
        steps = {Mode.LOST: self._reconnect, Mode.ALONE: self._catch_up, Mode.COMMON: self._take_part}
        try:
            while not self._removed:
                board.check()
                if board.fleet.resting:
                    self._rest()
                    continue
                if self.server.distrusted:
                    self._lose(self.server.reason)
                    self._retry_at += min(_DISTRUST_S * (2 ** (self.server.distrusts - 1) - 1), _DISTRUST_MAX_S)
                steps[self.mode]()
        except Closing:
            pass
        except BaseException as error:
            board.fleet.fail(error)
        finally:
            self._leave_push()
            self.link.close()
            self._ended = True
            board.wake_workers(Mode.LOST)  # the server may be listed again

    # ---------------------------------------------------------------------------------------- one step of each mode

    def _take_part(self) -> None:
        board = self._board
        if not self._wait(lambda: self._push is not None):
            if -1 < self._given < board.sent:
                self.mode = Mode.ALONE  # it missed a version, and the next push is not due yet
            self._look_after_health()
            return
        push = self._push
        seat = push.seat(self.url, board.config.timeout_seconds, board.check)

        def check() -> None:
            seat.raise_if_dropped()
            if self.dropped or self.server.silent:
                raise Dropped(self.dropped or "it does not reply")

        self.link.check = check
        try:
            check()
            seat.stopping()
            self.link.stop(push.version)
            seat.stopped()
            seconds = self._update(seat, board.num_buffers)
        except Dropped as why:
            self._start_over(why, push)
        except (WeightSyncError, UserError) as error:
            self._lose(error, push=push)
        else:
            self._has_given(push.version)
            with board.changed:
                late = bool(self.dropped) and push.version < board.sent
                if self._push is push:  # else the next one is here already
                    self._push, self.dropped = None, ""
                if late:
                    self.mode, self._push, self.dropped = Mode.ALONE, None, ""  # what dropped it has ended for it
                elif not self.dropped:
                    board.fleet.admit(self.server, push.version)
            push.ended(self.url, seconds)
        finally:
            self.link.check = board.check

    def _catch_up(self) -> None:
        board, reader = self._board, self.reader
        with board.changed:
            if not (board.copies_only or board.in_common()):
                self._join_pushes()
                return
        with reader.waiting():
            taken = self._wait(reader.takes)
        if not taken:
            self._look_after_health()
            return
        try:
            version, seconds = self._read()
        except Dropped as why:
            self._start_over(why)
            return
        except (WeightSyncError, UserError) as error:
            if reader.dropped:  # files of a version that was given up may have been removed
                self._start_over(Dropped(reader.dropped))
            else:
                self._lose(error)
            return
        self._has_given(version)
        with board.changed:
            reader.dropped = ""  # it has all of it
            newest = version >= board.sent
            own_s = seconds["total"] - seconds.get("drain", 0.0)
            if not board.copies_only and own_s <= board.push_s + board.config.straggler_seconds:
                # Fast enough for common pushes. If the others were sent a newer version meanwhile, the server gets the
                # next one with them and is admitted then.
                self.mode = Mode.COMMON
            size = sum(bucket.payload_bytes for bucket in board.buckets)
            total = {"total": seconds["total"]}
            stops = {self.url: stop_until_now(seconds)}
            report = SyncReport(version, size, len(board.buckets), total, {self.url: seconds}, alone=True, stops=stops)
            board.server_updated_alone(report)
        if not board.copies_only:
            logger.info("%s has caught up with version %d in %.2f s", self.url, version, seconds["total"])
        if newest:
            board.fleet.admit(self.server, version)
        board.notify()

    def _read(self) -> tuple[int, dict[str, float]]:
        """Feed the server from the copy that it takes: the version and the seconds by phase. Whatever the end, it is no
        reader then, and is not dropped any more."""
        copy, reader = self._board.copy, self.reader
        assert copy is not None  # it has this reader
        version, feed = copy.version, copy.feed()
        self.link.check = reader.raise_if_dropped
        try:
            self.link.stop(version)
            reader.stopped()
            return version, self._update(feed, 1)
        finally:
            self.link.check = self._board.check
            reader.leave()

    def _update(self, feed: Any, num_buffers: int) -> dict[str, float]:
        self.server.updating = True
        try:
            return self.link.update(feed, self._board.buckets, num_buffers)
        finally:
            self.server.updating = False

    def _reconnect(self) -> None:
        board = self._board
        if board.leaving(self.url) and not self._wait(
            lambda: not board.leaving(self.url), board.config.timeout_seconds
        ):
            if not (self._removed or board.fleet.resting):
                what = "the end of what it was told before it left the list of servers"
                self._lose(f"timed out after {board.config.timeout_seconds:g} s waiting for {what}", dead=True)
            return
        pause_s = min(self._retry_at - time.monotonic(), _DEAD_S)
        if self._wait(lambda: self.server.starts != self._starts, pause_s):
            self._starts, self._retry_at, self._failures = self.server.starts, 0.0, 0
        if self._removed or board.fleet.resting:
            return
        try:
            if not self.server.control.is_healthy():
                raise EngineError("it is not healthy")
            board.fleet.heard(self.server)
        except (UserError, EngineError) as error:
            self._lose(error, dead=True)
            return
        if time.monotonic() < self._retry_at:
            return  # it is there, and refused a moment ago
        try:
            self.server.check()
            self.connect()
        except (WeightSyncError, UserError, EngineError) as error:
            self._lose(error)
            return
        with board.changed:
            if board.copies_only or board.in_common():
                self.mode = Mode.ALONE
                board.changed.notify_all()
            else:
                self._join_pushes()
        logger.info("%s is connected again; it gets the newest weights first", self.url)

    def _look_after_health(self) -> None:
        """Check that the server is there, and that it is the one that we gave weights to."""
        server = self.server
        if self._board.fleet.resting:
            return
        self._next_look = time.monotonic() + _SUSPECT_LOOK_S
        try:
            if not server.control.is_healthy():
                self._lose("it is not healthy", dead=True)
                return
            reported = server.control.weight_version()
        except (EngineError, UserError) as error:
            self._health_failures += 1
            if not isinstance(error, NoReply) or self._health_failures >= _HEALTH_FAILURES_MAX:
                self._lose(error, dead=True)
            return
        self._health_failures = 0
        self._board.fleet.heard(server)
        if self._given >= 0 and reported is not None and version_of(reported) != self._given:
            self._lose(f"reports weights {reported!r} in place of version {self._given}: {origin(reported)}")
        elif server.suspected and self._given >= self._board.sent:
            self._board.fleet.admit(server, self._given)

    # ---------------------------------------------------------------------------------------------- parts of steps

    def _rest(self) -> None:
        """Nothing reaches the server: trainers have the memory of its GPU."""
        fleet, self.server.at_rest = self._board.fleet, True
        try:
            while fleet.resting and not self._removed:
                self._wait(lambda: not fleet.resting)
        finally:
            self.server.at_rest = False

    def _join_pushes(self) -> None:
        """No other server would have to wait: take part in common pushes, from one right now. Under the lock."""
        self.mode = Mode.COMMON
        self._board.ask_for_push()

    def _wait(self, ready: Callable[[], bool], timeout_s: float | None = None) -> bool:
        """Wait under the board's lock. False after `timeout_s`, or as soon as there is something else to do."""
        board, deadline = self._board, time.monotonic() + (HEALTH_S if timeout_s is None else timeout_s)
        with board.changed:
            while not ready():
                board.check()
                now = time.monotonic()
                look = self.server.suspected and self.mode is not Mode.LOST and not self.server.at_rest
                rests = board.fleet.resting and not self.server.at_rest
                if now >= deadline or self._removed or rests or (look and now >= self._next_look):
                    return False
                self.wake.wait(min(deadline, self._next_look if look else deadline) - now)
            return True

    def _start_over(self, why: Dropped, push: Push | None = None) -> None:
        """The server has a mix of two versions: connect again, at once."""
        self._leave_push(push)
        self._board.fleet.withdraw(self.server, str(why), lost=False)
        self.link.close()
        self.mode, self._retry_at, self.reader.dropped = Mode.LOST, 0.0, ""

    def _has_given(self, version: int) -> None:
        self._given, self._failures = version, 0
        self._board.fleet.heard(self.server)

    def _lose(self, reason: object, dead: bool = False, push: Push | None = None) -> None:
        """Connect again, after a pause that grows with each failure in a row. Death and refusal are counted apart."""
        if isinstance(reason, LocalError):
            raise reason  # no fault of the server
        self.link.close()
        self.mode, self.reader.too_late = Mode.LOST, 0
        if dead is not self._dead:
            self._dead, self._failures = dead, 0
        pause_s = min(_BACKOFF_S * 2**self._failures, _DEAD_S if dead else _REFUSES_S)
        self._failures = min(self._failures + 1, _BACKOFF_DOUBLINGS_MAX)
        self._retry_at = time.monotonic() + pause_s
        self._losses += 1
        if self._losses % _COLLECT_EVERY == 0:
            gc.collect()
        self._board.fleet.withdraw(self.server, str(reason))
        self._leave_push(push)  # now: who waits for its end must not find the server in traffic
        self._board.wake_workers(Mode.ALONE)  # perhaps no other server is left that would have to wait for them

    def _leave_push(self, push: Push | None = None) -> None:
        """Leave this push, and the one that may have come since."""
        with self._board.changed:
            invited, self._push, self.dropped = self._push, None, ""
        for each in {push, invited} - {None}:
            each.ended(self.url, None)
