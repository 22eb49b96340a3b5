"""A version kept whole, for servers that are fed alone, and their seats at it."""

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from torchtitan.grpo.engines.server import Server
from torchtitan.grpo.weight_sync.push import Dropped, Feed

if TYPE_CHECKING:  # the board has the copy
    from torchtitan.grpo.weight_sync.board import Board


class VersionCopy:
    """A full version, for servers that are fed alone. The leader writes it while it has no readers.

    Readers come and go under the board's lock. A server that has left may still read what is written then, and it is
    not taken into service.

    Attributes:
        version: The version in it, -1 while it is being written.
        readers: Who reads it now.
        expected: The acknowledgement of a server that has all of it.
    """

    def __init__(self) -> None:
        self.version = -1
        self.readers: set[CopyReader] = set()
        self.expected: list[int] = []

    def invalidate(self) -> None:
        """A new version is about to be written: no more readers."""
        self.version = -1

    def begin(self) -> None:
        """Prepare to store the first bucket of a version."""
        self.invalidate()

    def store(self, index: int, wire: torch.Tensor) -> None:
        """Write the next bucket."""
        raise NotImplementedError

    def complete(self, version: int, expected: list[int]) -> None:
        """All buckets are written, and the device has finished."""
        self.expected = expected
        self.version = version

    def feed(self) -> Any:
        """The version in it, for one worker: what the links of this transport take."""
        raise NotImplementedError

    def close(self) -> None:
        """Release what is not memory."""


class CopyReader:
    """A server's seat at the copies, as `push.Seat` is one in a push.

    Attributes:
        began: When it began to read (`time.monotonic()`); inf while its server drains.
        dropped: Why the leader goes on without it; "" if it does not.
        too_late: How often it was dropped since its server last failed.
    """

    def __init__(self, server: Server, board: "Board"):
        self._server, self._board = server, board
        self.began = math.inf
        self.dropped = ""
        self.too_late = 0
        self._has = -1
        self._waits = False

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """It wants a version after the one that its server serves."""
        self._has, self._waits = self._server.version if self._server.in_traffic else -1, True
        try:
            yield
        finally:
            self._waits = False

    def may_take(self, copy: VersionCopy | None) -> bool:
        """Whether it waits for a copy, and this one is newer than what the server has and not older than `sent`."""
        ready = copy is not None and self._waits and not self._server.silent
        return ready and copy.version > self._has and copy.version >= self._board.sent

    def takes(self) -> bool:
        """Read the copy from now on, if it may; else ask for a newer one. Under the board's lock."""
        board, copy = self._board, self._board.copy
        if self.may_take(copy):
            self.began = time.monotonic() if board.pause.in_flight else math.inf
            copy.readers.add(self)
            return True
        if board.sent > self._has and not self._server.silent:
            board.ask_for_copy()
        return False

    def stopped(self) -> None:
        """The server is paused."""
        self.began = time.monotonic()

    def drop(self, why: str) -> None:
        """The leader goes on without it. Under the board's lock."""
        self._board.copy.readers.remove(self)
        self.dropped = why
        self.too_late += 1
        self._board.fleet.withdraw(self._server, why, lost=False)

    def raise_if_dropped(self) -> None:
        """For waits on the server. One that loads weights may be slow to reply."""
        self._board.check()
        if self.dropped or (self._server.silent and not self._server.updating):
            raise Dropped(self.dropped or "it does not reply")

    def leave(self) -> None:
        """It reads no more."""
        board = self._board
        with board.changed:
            board.copy.readers.discard(self)
            board.changed.notify_all()


class MemoryCopy(VersionCopy):
    """A version in host memory, as the buckets that go on the wire.

    Args:
        wire_bytes: Size of each bucket.
        pinned: Buckets come from a GPU.
    """

    def __init__(self, wire_bytes: list[int], pinned: bool):
        super().__init__()
        # One allocation per bucket: torch rounds pinned memory up to a power of two, which could double a full version.
        self.wires = [torch.empty(size, dtype=torch.uint8, pin_memory=pinned) for size in wire_bytes]

    def store(self, index: int, wire: torch.Tensor) -> None:
        self.wires[index].copy_(wire, non_blocking=True)

    def feed(self) -> Feed:
        return HostFeed(self)


class HostFeed:
    """A `Feed` from a host copy, whose buckets are in host memory."""

    def __init__(self, copy: MemoryCopy):
        self.version = copy.version
        self._copy = copy

    def bucket(self, index: int) -> tuple[torch.Tensor, torch.cuda.Event | None]:
        return self._copy.wires[index], None

    def release(self, count: int) -> None:
        pass

    def expected(self) -> list[int]:
        return self._copy.expected
