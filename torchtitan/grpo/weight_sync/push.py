"""One version on its way to several servers: who has which bucket, who is late, who has acknowledged.

The leader fills wire buffers and offers them in order. Each server's worker sends them to its own server and lets go of
them. A buffer is filled again when all workers have let go of it, so a push is as fast as its slowest server. A server
that keeps the others waiting is dropped. I4 (docs/weight_sync.md) rests on this file. It knows nothing of devices or
networks.
"""

import threading
import time
from collections.abc import Callable
from typing import Protocol

import torch

from torchtitan.grpo.engines.push_report import stop_until_now

_CHECK_S = 0.05
_LOOK_S = 0.25
_MOVING = -1
"""Sentinel in place of a server's bucket count: the server is not paused yet."""


class Dropped(Exception):
    """The push goes on without this server."""


class Feed(Protocol):
    """Where a worker gets the buckets of one version from: a common push, or a copy."""

    @property
    def version(self) -> int: ...

    def bucket(self, index: int) -> tuple[torch.Tensor, torch.cuda.Event | None]:
        """Bucket `index` as uint8 [wire_bytes], and the event after which it is filled. Waits for it, bounded. It may
        be in host memory."""
        ...

    def release(self, count: int) -> None:
        """The first `count` buckets have left the wire."""
        ...

    def expected(self) -> list[int]:
        """The acknowledgement of a server that has all of it (`receiver.ACK_FIELDS`). Waits for it, bounded."""
        ...


class Push:
    """The common push of one version.

    With `drain_s`, servers finish their running answers first, and some take much longer than others. Nothing is packed
    and no server listens until all are paused: the push then sends the newest version, and no transfer waits for an
    answer. A draining server is not late. Its own bound is `drain_s`.

    Args:
        version: Weight version. With `drain_s` it may become a newer one, see `begin`.
        buckets: How many buckets a version has.
        num_buffers: Wire buffers: bucket k is offered in the buffer of bucket k - num_buffers.
        servers: Who takes part.
        straggler_s: How long one server may be behind while another is ready to go on, or has everything already.
        on_drop: Called on the leader's thread with a server that is dropped and the reason.
        drain_s: How long a server may take to finish its running answers; None if it does not finish them.
        outside: Whether a server that takes no part has waited for too long, too, since the leader began to wait for
            this bucket (`time.monotonic()`). Called under the push's lock.

    Attributes:
        version: See above.
        started: time.perf_counter() of the start.
        invited: How many servers were to take part.
        seconds: The leader's, by phase, once all buckets have left.
        servers: Seconds by phase of each server that has acknowledged.
        stops: See `SyncReport.stops`.
    """

    def __init__(
        self,
        version: int,
        buckets: int,
        num_buffers: int,
        servers: list[str],
        straggler_s: float,
        on_drop: Callable[[str, str], None],
        drain_s: float | None = None,
        outside: Callable[[float], bool] = lambda since: False,
    ):
        self.version = version
        self.seconds: dict[str, float] = {}
        self.servers: dict[str, dict[str, float]] = {}
        self.stops: dict[str, tuple[float, float]] = {}
        self.started = time.perf_counter()
        self.invited = len(servers)
        self._buckets = buckets
        self._num_buffers = num_buffers
        self._straggler_s = straggler_s
        self._on_drop = on_drop
        self._outside = outside
        # Two conditions on one lock: with many servers, what one does must not wake all the others.
        self._lock = threading.Lock()
        self._for_leader = threading.Condition(self._lock)
        self._for_servers = threading.Condition(self._lock)
        self._offered: list[tuple[torch.Tensor, torch.cuda.Event | None]] = []
        self._drain_s = drain_s
        self._released = dict.fromkeys(servers, 0 if drain_s is None else _MOVING)
        self._draining: set[str] = set()
        self._begun = drain_s is None
        self._awaited = 0
        self._late: set[str] = set()
        self._dropped: dict[str, str] = {}
        self._unfinished = set(servers)
        self._expected: list[int] | None = None
        self._call: Callable[[], None] | None = None

    # -------------------------------------------------------------------------------------------- for the leader

    def wait_until_still(self, check: Callable[[], None]) -> None:
        """Wait until every server that takes part is paused. Calls `check` while waiting."""
        self._wait_until_released(0, check)

    def begin(self, version: int) -> None:
        """The version is settled: servers may listen."""
        with self._lock:
            self.version, self._begun = version, True
            self._for_servers.notify_all()

    def wait_for_buffer(self, index: int) -> None:
        """Wait until the buffer of bucket `index` is free."""
        self._wait_until_released(index - self._num_buffers + 1)

    def offer(self, wire: torch.Tensor, filled: torch.cuda.Event | None) -> None:
        """Give the next bucket to all servers that take part."""
        with self._lock:
            self._offered.append((wire, filled))
            self._for_servers.notify_all()

    def complete(self, expected: list[int], seconds: dict[str, float]) -> None:
        """All buckets were offered. A server must acknowledge `expected`. Wait until all have let go of all buckets."""
        with self._lock:
            self._expected = expected
            self._for_servers.notify_all()
        self._wait_until_released(self._buckets)
        self.seconds = seconds

    def fail(self) -> None:
        """No more buckets will come."""
        with self._lock:
            self._released.clear()
            self._for_servers.notify_all()

    def on_settled(self, call: Callable[[], None]) -> None:
        """Have `call` called once, by the last thread, when every server has acknowledged or has left the push."""
        with self._lock:
            self._call = call
        self._settle()

    def _wait_until_released(self, count: int, check: Callable[[], None] = lambda: None) -> None:
        with self._lock:
            self._awaited = count
            self._late = {server for server, done in self._released.items() if done < count}
        others_wait_since, began = None, time.monotonic()
        while True:
            check()
            with self._lock:
                if not self._late:
                    return
                nobody_waits = len(self._late) == len(self._released) and not self.servers and not self._outside(began)
                if nobody_waits or self._late <= self._draining:
                    others_wait_since = None
                    self._for_leader.wait(_CHECK_S)
                    continue
                others_wait_since = others_wait_since or time.monotonic()
                timeout_s = others_wait_since + self._straggler_s - time.monotonic()
                if timeout_s > 0:
                    self._for_leader.wait(timeout_s if self._begun else min(timeout_s, _LOOK_S))
                    continue
                late = sorted(self._late - self._draining)
                what = f"bucket {count} of {self._buckets}" if self._begun else "the pause"
                why = (
                    f"kept the other servers waiting for over {self._straggler_s:g} s with {what} of version "
                    f"{self.version}"
                )
                self._late -= set(late)
                for server in late:
                    del self._released[server]
                    self._unfinished.discard(server)
                    self._dropped[server] = why
            for server in late:
                self._on_drop(server, why)

    # ------------------------------------------------------------------------------------------- for the workers

    def seat(self, server: str, timeout_s: float, check: Callable[[], None]) -> "Seat":
        """A server's part in this push. Its waits call `check`. They are bounded by `timeout_s`, which the trainer has
        once it waits for no late server any more."""
        return Seat(self, server, timeout_s, check)

    def ended(self, server: str, seconds: dict[str, float] | None) -> None:
        """A server has acknowledged, with its seconds by phase, or (None) will not."""
        with self._lock:
            self._released.pop(server, None)
            self._draining.discard(server)
            self._unfinished.discard(server)
            if seconds is not None:
                self.servers[server] = seconds
                self.stops[server] = stop_until_now(seconds)
            self._not_late(server)
        self._settle()

    def _not_late(self, server: str) -> None:
        """Under the lock."""
        self._late.discard(server)
        if not self._late:
            self._for_leader.notify()

    def _settle(self) -> None:
        with self._lock:
            call = self._call
            if call is None or self._unfinished:
                return
            self._call = None
        call()


class Seat:
    """A server's `Feed` from the common push, whose state it shares. Every method raises Dropped if the push goes on
    without the server."""

    def __init__(self, push: Push, server: str, timeout_s: float, check: Callable[[], None]):
        self._push, self._server, self._check = push, server, check
        self._limit_s = push._straggler_s + timeout_s

    @property
    def version(self) -> int:
        return self._push.version

    def stopping(self) -> None:
        """The server is told to pause, now."""
        push, server = self._push, self._server
        with push._lock:
            self._raise_if_out()
            if push._released[server] == _MOVING:
                push._draining.add(server)

    def stopped(self) -> None:
        """The server is paused. Waits, bounded, until the push begins."""
        push, server = self._push, self._server
        with push._lock:
            self._raise_if_out()
            if push._released[server] == _MOVING:
                push._released[server] = 0
                push._draining.discard(server)
                push._not_late(server)
        # Every other server is draining by now, or will be dropped for being late.
        limit_s = self._limit_s + (push._drain_s or 0.0)
        self._wait(lambda: push._begun, "the other servers to pause for", limit_s)

    def bucket(self, index: int) -> tuple[torch.Tensor, torch.cuda.Event | None]:
        """See `Feed.bucket`."""
        offered, what = self._push._offered, f"the trainer to pack bucket {index + 1} of"
        self._wait(lambda: len(offered) > index, what, self._limit_s)
        return offered[index]

    def release(self, count: int) -> None:
        """See `Feed.release`."""
        push, server = self._push, self._server
        with push._lock:
            self._raise_if_out()
            push._released[server] = count
            if count >= push._awaited:
                push._not_late(server)

    def expected(self) -> list[int]:
        """See `Feed.expected`."""
        push = self._push
        self._wait(lambda: push._expected is not None, "the trainer to pack the checksums of", self._limit_s)
        assert push._expected is not None
        return push._expected

    def raise_if_dropped(self) -> None:
        """For waits on the server: once the push goes on without it, nothing that it does matters. Needs no lock."""
        self._check()
        self._raise_if_out()

    def _raise_if_out(self) -> None:
        push = self._push
        if self._server not in push._released:
            raise Dropped(push._dropped.get(self._server, f"the push of version {push.version} failed"))

    def _wait(self, ready: Callable[[], bool], what: str, limit_s: float) -> None:
        push, deadline = self._push, time.monotonic() + limit_s
        with push._lock:
            while True:
                self.raise_if_dropped()
                if ready():
                    return
                if time.monotonic() > deadline:
                    raise TimeoutError(f"timed out waiting for {what} version {push.version}")
                push._for_servers.wait(_LOOK_S)
