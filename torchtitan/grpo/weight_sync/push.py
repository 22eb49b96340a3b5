"""One version on its way to several servers: who has which bucket, who is late, who has acknowledged.

The lead fills wire buffers and offers them in order; each server's worker sends them to its own server and lets go of
them. A buffer is filled again when all have let go of it, so a push is as fast as its slowest server: one that keeps
the others waiting is dropped. Invariant I4 rests on this file; it knows nothing of devices or networks.
"""

import threading
import time
from collections.abc import Callable
from typing import Protocol

import torch

_CHECK_S = 0.05
_LOOK_S = 0.25
_MOVING = -1
"""In place of how many buckets a server has let go of: it does not stand still yet."""


class Dropped(Exception):
    """The push goes on without this server."""


class Feed(Protocol):
    """Where a worker gets the buckets of one version from: a push in common, or a copy for it alone."""

    version: int

    def bucket(self, index: int) -> tuple[torch.Tensor, torch.cuda.Event | None]:
        """Bucket `index` as uint8 [wire_bytes], and the event after which it is filled. Waits for it, bounded."""
        ...

    def let_go(self, count: int) -> None:
        """The first `count` buckets have left the wire."""
        ...

    def expected(self) -> list[int]:
        """The acknowledgement of a server that has it all (`receiver.ACK_FIELDS`). Waits for it, bounded."""
        ...


class Push:
    """The common push of one version.

    With `drain_s` servers finish their running answers first, some much sooner than others. Then nothing is packed and
    no server listens before all stand still: what is packed is the newest version by then, and no transfer waits for
    an answer. Being late does not count while a server drains, which is bounded by itself.

    Args:
        version: Weight version; with `drain_s` the one known so far, see `begin`.
        buckets: How many buckets it has.
        num_buffers: Wire buffers: bucket k is offered in the buffer that bucket k - num_buffers had.
        servers: Who takes part.
        straggler_s: How long one may be behind while another is ready to go on, or has it all and is ready for the
            next version.
        on_drop: Called with a server and the reason when it is dropped, on the lead's thread.
        drain_s: How long a server may take for the answers that it finishes first; None if it does not.
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
    ):
        self.version = version
        self.seconds: dict[str, float] = {}
        self.servers: dict[str, dict[str, float]] = {}
        self.started = time.perf_counter()
        self.invited = len(servers)
        self._buckets = buckets
        self._num_buffers = num_buffers
        self._straggler_s = straggler_s
        self._on_drop = on_drop
        # Two conditions on one lock: with many servers, what one does must not wake all the others.
        self._lock = threading.Lock()
        self._for_lead = threading.Condition(self._lock)
        self._for_servers = threading.Condition(self._lock)
        self._offered: list[tuple[torch.Tensor, torch.cuda.Event | None]] = []
        self._drain_s = drain_s
        self._let_go = dict.fromkeys(servers, 0 if drain_s is None else _MOVING)
        self._draining: set[str] = set()
        self._begun = drain_s is None
        self._awaited = 0
        self._late: set[str] = set()
        self._dropped: dict[str, str] = {}
        self._unfinished = set(servers)
        self._expected: list[int] | None = None
        self._failure: BaseException | None = None
        self._call: Callable[[], None] | None = None

    # ------------------------------------------------------------------------------------------------ the lead's

    def wait_until_still(self, check: Callable[[], None]) -> None:
        """Wait until every server that takes part stands still; `check` is called while waiting."""
        self._wait_until_let_go(0, check)

    def begin(self, version: int) -> None:
        """The version is settled; servers may listen."""
        with self._lock:
            self.version, self._begun = version, True
            self._for_servers.notify_all()

    def wait_for_buffer(self, index: int) -> None:
        """Wait until the buffer of bucket `index` is free."""
        self._wait_until_let_go(index - self._num_buffers + 1)

    def offer(self, wire: torch.Tensor, filled: torch.cuda.Event | None) -> None:
        """Give the next bucket to all that take part."""
        with self._lock:
            self._offered.append((wire, filled))
            self._for_servers.notify_all()

    def complete(self, expected: list[int], seconds: dict[str, float]) -> None:
        """All buckets were offered: say what a server must acknowledge, wait until all have let go of all of them."""
        with self._lock:
            self._expected = expected
            self._for_servers.notify_all()
        self._wait_until_let_go(self._buckets)
        self.seconds = seconds

    def fail(self, error: BaseException) -> None:
        """No more buckets will come."""
        with self._lock:
            self._failure = error
            self._let_go.clear()
            self._for_servers.notify_all()

    def _wait_until_let_go(self, count: int, check: Callable[[], None] = lambda: None) -> None:
        with self._lock:
            self._awaited = count
            self._late = {server for server, done in self._let_go.items() if done < count}
        others_wait_since = None
        while True:
            check()
            with self._lock:
                if not self._late:
                    return
                nobody_waits = len(self._late) == len(self._let_go) and not self.servers
                if nobody_waits or self._late <= self._draining:
                    others_wait_since = None  # who was ready has left, and nobody has it all already
                    self._for_lead.wait(_CHECK_S)
                    continue
                others_wait_since = others_wait_since or time.monotonic()
                timeout_s = others_wait_since + self._straggler_s - time.monotonic()
                if timeout_s > 0:
                    self._for_lead.wait(timeout_s if self._begun else min(timeout_s, _LOOK_S))
                    continue
                late = sorted(self._late - self._draining)
                what = f"bucket {count} of {self._buckets}" if self._begun else "the pause"
                why = (
                    f"kept the other servers waiting for over {self._straggler_s:g} s with {what} of version "
                    f"{self.version}"
                )
                self._late -= set(late)
                for server in late:
                    del self._let_go[server]
                    self._unfinished.discard(server)
                    self._dropped[server] = why
            for server in late:
                self._on_drop(server, why)

    def _not_late(self, server: str) -> None:
        """Under the lock."""
        self._late.discard(server)
        if not self._late:
            self._for_lead.notify()

    # --------------------------------------------------------------------------------------------- the workers'

    def seat(self, server: str, timeout_s: float, check: Callable[[], None]) -> "Seat":
        """A server's part in this push."""
        return Seat(self, server, timeout_s, check)

    def ended(self, server: str, seconds: dict[str, float] | None) -> None:
        """A server has acknowledged, in so many seconds by phase, or (None) will not."""
        with self._lock:
            self._let_go.pop(server, None)
            self._draining.discard(server)
            self._unfinished.discard(server)
            if seconds is not None:
                self.servers[server] = seconds
            self._not_late(server)
        self._settle()

    def on_settled(self, call: Callable[[], None]) -> None:
        """Have `call` called, once and by whoever is last, when every server has acknowledged or is out of it."""
        self._call = call
        self._settle()

    def _settle(self) -> None:
        with self._lock:
            call = self._call
            if call is None or self._unfinished:
                return
            self._call = None
        call()


class Seat:
    """A `Feed` from the common push."""

    def __init__(self, push: Push, server: str, timeout_s: float, check: Callable[[], None]):
        self._push, self._server, self._timeout_s, self._check = push, server, timeout_s, check

    @property
    def version(self) -> int:
        return self._push.version

    def stopping(self) -> None:
        """The server is told to stop, now."""
        push = self._push
        with push._lock:
            self._raise_if_out()
            if push._let_go[self._server] == _MOVING:
                push._draining.add(self._server)

    def stopped(self) -> None:
        """The server stands still. Waits, bounded, until the push begins."""
        push = self._push
        with push._lock:
            self._raise_if_out()
            if push._let_go[self._server] == _MOVING:
                push._let_go[self._server] = 0
                push._draining.discard(self._server)
                push._not_late(self._server)
        # By now every other is draining, or is dropped for being late.
        limit_s = push._straggler_s + (push._drain_s or 0.0) + self._timeout_s
        self._wait(lambda: push._begun, "the other servers to stand still for", limit_s)

    def bucket(self, index: int) -> tuple[torch.Tensor, torch.cuda.Event | None]:
        offered = self._push._offered
        self._wait(lambda: len(offered) > index, f"the trainer to pack bucket {index + 1} of")
        return offered[index]

    def let_go(self, count: int) -> None:
        push = self._push
        with push._lock:
            self._raise_if_out()
            push._let_go[self._server] = count
            if count >= push._awaited:
                push._not_late(self._server)

    def expected(self) -> list[int]:
        push = self._push
        self._wait(lambda: push._expected is not None, "the trainer to pack the checksums of")
        return push._expected

    def raise_if_dropped(self) -> None:
        """For waits on the server: nothing that it still does matters to a push that has gone on."""
        self._check()
        self._raise_if_out()

    def _raise_if_out(self) -> None:
        if self._server not in self._push._let_go:
            raise Dropped(self._push._dropped.get(self._server, f"the push of version {self.version} failed"))

    def _wait(self, ready: Callable[[], bool], what: str, timeout_s: float | None = None) -> None:
        push, deadline = self._push, time.monotonic() + (timeout_s or self._timeout_s)
        with push._lock:
            while True:
                self.raise_if_dropped()
                if ready():
                    return
                if time.monotonic() > deadline:
                    raise TimeoutError(f"timed out waiting for {what} version {self.version}")
                push._for_servers.wait(_LOOK_S)


class Copy:
    """A whole version, for servers that are fed alone. The lead writes it while it has no readers.

    Attributes:
        version: What is in it, -1 while it is being written.
        readers: Workers that read it.
        expected: What a server that has it all acknowledges.
    """

    def __init__(self) -> None:
        self.version = -1
        self.readers = 0
        self.expected: list[int] = []

    def begin(self) -> None:
        """A version is going to be written."""
        self.version = -1

    def store(self, index: int, wire: torch.Tensor) -> None:
        """Write the next bucket."""
        raise NotImplementedError

    def complete(self, version: int, expected: list[int]) -> None:
        """All buckets are written, and the device has done its part."""
        self.expected = expected
        self.version = version

    def feed(self) -> Feed:
        """The version that is in it, for one worker."""
        raise NotImplementedError

    def close(self) -> None:
        """Release what is not memory."""


class HostCopy(Copy):
    """A version in host memory, as the buckets that go on the wire.

    Args:
        wire_bytes: Size of each bucket.
        device: Where buckets come from; on CUDA the memory is pinned.
    """

    def __init__(self, wire_bytes: list[int], device: torch.device):
        super().__init__()
        # One by one: torch rounds a piece of pinned memory up to a power of two, which could double a whole version.
        pinned = device.type == "cuda"
        self.wires = [torch.empty(size, dtype=torch.uint8, pin_memory=pinned) for size in wire_bytes]
        self.device = device

    def store(self, index: int, wire: torch.Tensor) -> None:
        self.wires[index].copy_(wire, non_blocking=True)

    def feed(self) -> Feed:
        return HostFeed(self)


class HostFeed:
    """A `Feed` from a host copy."""

    def __init__(self, copy: HostCopy):
        self.version = copy.version
        self._copy = copy

    def bucket(self, index: int) -> tuple[torch.Tensor, torch.cuda.Event | None]:
        wire = self._copy.wires[index]
        if self._copy.device.type != "cuda":
            return wire, None
        return wire.to(self._copy.device, non_blocking=True), None  # on the worker's stream, as the broadcast is

    def let_go(self, count: int) -> None:
        pass

    def expected(self) -> list[int]:
        return self._copy.expected
