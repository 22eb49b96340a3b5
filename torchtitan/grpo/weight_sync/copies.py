"""A version kept whole, for servers that are fed alone."""

from typing import Any

import torch

from torchtitan.grpo.weight_sync.push import Feed


class VersionCopy:
    """A full version, for servers that are fed alone. The leader writes it while it has no readers.

    Readers come and go under the board's lock. A server that has left may still read what is written then, and it is
    not taken into service.

    Attributes:
        version: The version in it, -1 while it is being written.
        readers: Workers that read it, with the `time.monotonic()` at which they began; inf while their server drains.
        expected: The acknowledgement of a server that has all of it.
    """

    def __init__(self) -> None:
        self.version = -1
        self.readers: dict[Any, float] = {}
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


class MemoryCopy(VersionCopy):
    """A version in host memory, as the buckets that go on the wire.

    Args:
        wire_bytes: Size of each bucket.
        device: Where buckets come from. On CUDA the memory is pinned.
    """

    def __init__(self, wire_bytes: list[int], device: torch.device):
        super().__init__()
        # One allocation per bucket: torch rounds pinned memory up to a power of two, which could double a full version.
        pinned = device.type == "cuda"
        self.wires = [torch.empty(size, dtype=torch.uint8, pin_memory=pinned) for size in wire_bytes]
        self.device = device

    def store(self, index: int, wire: torch.Tensor) -> None:
        self.wires[index].copy_(wire, non_blocking=True)

    def feed(self) -> Feed:
        return HostFeed(self)


class HostFeed:
    """A `Feed` from a host copy."""

    def __init__(self, copy: MemoryCopy):
        self.version = copy.version
        self._copy = copy

    def bucket(self, index: int) -> tuple[torch.Tensor, torch.cuda.Event | None]:
        wire = self._copy.wires[index]
        if self._copy.device.type != "cuda":
            return wire, None
        return wire.to(self._copy.device, non_blocking=True), None  # on the worker's stream, like the broadcast

    def release(self, count: int) -> None:
        pass

    def expected(self) -> list[int]:
        return self._copy.expected
