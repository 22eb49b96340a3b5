"""The board on which the leader and the workers meet. Rank 0 only."""

import math
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

from torchtitan.grpo.config.job_config import WeightSync
from torchtitan.grpo.engines.fleet import Fleet
from torchtitan.grpo.engines.push_report import SyncReport
from torchtitan.grpo.weight_sync.copies import VersionCopy
from torchtitan.grpo.weight_sync.link import Pause
from torchtitan.grpo.weight_sync.push import Push
from torchtitan.grpo.weight_wire.buckets import Bucket

if TYPE_CHECKING:  # workers import the board
    from torchtitan.grpo.weight_sync.worker import ServerWorker

_REPORTS_MAX = 1000


class Closing(Exception):
    """Weight sync is being shut down."""


class Mode(Enum):
    """How a server gets its weights."""

    LOST = "lost"
    """Not at all: it is being connected again."""
    ALONE = "alone"
    """From a copy, at its own pace."""
    COMMON = "common"
    """In pushes together with the others."""


@dataclass(eq=False)
class Board:
    """What the leader (the sync thread of rank 0) and the workers share, under one lock.

    The leader and the main thread wait for `changed`. Each worker waits for a condition of its own on the same lock:
    with many servers, what one does must not wake all the others.

    Args:
        pause: How servers are paused.
        plan_info: What every link needs to connect; see `ServerLink.connect`.
        copy: Where a version is kept for servers in mode ALONE. None if there is none.
        copies_only: There are no common pushes: every server is fed from the copy (transport "disk").

    Attributes:
        sent: The version of the newest common push. A server needs it, or a newer one, to be admitted (I3).
        push_wanted: Push now although no push is due. Under the lock.
        copy_wanted: Make a copy, if none is in use. Under the lock.
        push_s: Seconds of the last common push that a server completed, over all its servers; with `copies_only`, of
            the last server. 0 before the first.
    """

    fleet: Fleet
    buckets: list[Bucket]
    num_buffers: int
    config: WeightSync
    pause: Pause
    plan_info: dict
    copy: VersionCopy | None
    copies_only: bool

    def __post_init__(self) -> None:
        self.lock = threading.RLock()
        self.changed = threading.Condition(self.lock)
        self.workers: list[ServerWorker] = []
        self._leaving: list[ServerWorker] = []
        self.sent = -1
        self.push_s = 0.0
        self._closing = False
        self._waited_since = math.inf
        self.push_wanted = False
        self.copy_wanted = False
        self._reports: list[SyncReport] = []
        self.fleet.add_listener(self.notify)

    def notify(self) -> None:
        with self.changed:
            self.changed.notify_all()

    def wake_workers(self, mode: Mode | None = None) -> None:
        """Wake the workers in a mode, or all."""
        with self.changed:
            for worker in self.workers:
                if mode is None or worker.mode is mode:
                    worker.wake.notify_all()

    def close(self) -> None:
        """Every wait of the leader and the workers ends with Closing."""
        with self.changed:
            self._closing = True
            self.changed.notify_all()
            self.wake_workers()

    def check(self) -> None:
        """Raise Closing once `close` was called."""
        if self._closing:
            raise Closing

    # Workers ask, the leader answers.

    def ask_for_push(self) -> None:
        """A server joins common pushes, and no other server would have to wait: push even if no push is due."""
        with self.changed:
            self.push_wanted = True
            self.changed.notify_all()

    def ask_for_copy(self) -> None:
        """A worker needs a newer copy than there is."""
        with self.changed:
            self.copy_wanted = True
            self.changed.notify_all()

    def begin_push(self, make: Callable[[list[str], Callable[[str, str], None]], Push]) -> Push:
        """Invite all workers in mode COMMON to a push. `make` gets their addresses, and what to call on a drop.

        Raises:
            Closing: `close` was called. Workers that have ended would not leave the push.
        """
        with self.changed:
            self.check()
            workers = {worker.url: worker for worker in self.in_common()}
            push = make(list(workers), lambda url, why: workers[url].drop(push, why))
            self.push_wanted = False
            for worker in workers.values():
                worker.invite(push)
        return push

    def sending(self, version: int) -> None:
        """This version is on its way to everyone: servers with older ones are no longer admitted."""
        with self.lock:
            self.sent = version

    def push_settled(self, report: SyncReport) -> None:
        """Every server has acknowledged a common push, or has left it."""
        with self.changed:
            if report.servers:
                self.push_s = report.seconds["total"]
            self.add_report(report)
            self.changed.notify_all()

    def server_updated_alone(self, report: SyncReport) -> None:
        """One server has got a version from the copy."""
        with self.lock:
            if self.copies_only:
                self.push_s = report.seconds["total"]
            self.add_report(report)

    def copy_made(self) -> None:
        """The copy holds a new version."""
        with self.changed:
            self.copy_wanted, self._waited_since = False, math.inf
            self.changed.notify_all()
            self.wake_workers(Mode.ALONE)

    def add_report(self, report: SyncReport) -> None:
        with self.lock:
            self._reports = [*self._reports[-_REPORTS_MAX:], report]

    def take_reports(self) -> list[SyncReport]:
        """Pushes that ended since the last call."""
        with self.lock:
            reports, self._reports = self._reports, []
        return reports

    def replace_workers(self, gone: list["ServerWorker"], new: list["ServerWorker"]) -> None:
        """The list of servers has changed."""
        with self.lock:
            self.workers = [worker for worker in self.workers if worker not in gone] + new
            self._leaving = [worker for worker in [*self._leaving, *gone] if worker.is_leaving()]

    def leaving(self, url: str) -> bool:
        """Whether a worker that the server at this address had before it left the list still acts on it."""
        return any(worker.url == url and worker.is_leaving() for worker in self._leaving)

    def copy_in_use(self) -> bool:
        """Whether a worker reads the copy, or is about to. A newer copy must not deprive it of its turn each time."""
        copy = self.copy
        return copy is not None and (bool(copy.readers) or any(worker.reader.may_take(copy) for worker in self.workers))

    def drop_late_readers(self) -> None:
        """Others wait for the readers' end: drop those that take longer than the last server took, by `straggler_s`.
        Each drop doubles a server's time: a slow one would else never have a whole version. Under the lock."""
        copy = self.copy
        assert copy is not None  # it has readers
        others_wait_since = self._others_wait_since()
        for reader in list(copy.readers):
            limit_s = (self.push_s + self.config.straggler_seconds) * 2.0**reader.too_late
            if time.monotonic() > max(reader.began, others_wait_since) + limit_s:
                reader.drop(f"kept the other servers waiting for over {limit_s:.3g} s with version {copy.version}")

    def copy_is_late(self, since: float) -> bool:
        """Whether a server has waited for a copy since then (`time.monotonic()`) for longer than a push takes. False as
        long as none has ended."""
        if not (self.copy_wanted and self.push_s):
            return False
        return time.monotonic() > max(since, self._others_wait_since()) + self.push_s

    def _others_wait_since(self) -> float:
        """When the leader found that servers wait, who need a newer copy. inf if none does."""
        copy = self.copy
        waits = copy is not None and any(worker.is_idle(copy) for worker in self.workers)
        self._waited_since = min(self._waited_since, time.monotonic()) if waits else math.inf
        return self._waited_since

    def in_common(self) -> list["ServerWorker"]:
        """The workers that take part in common pushes."""
        return [worker for worker in self.workers if worker.takes_part()]
