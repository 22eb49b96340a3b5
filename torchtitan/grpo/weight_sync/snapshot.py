"""Consistent copies of this rank's shards, cast to the dtype on the wire.

The copies are buffers, allocated once. With several ranks they are flat: shards lie in them in the order of the plan,
so a rank's part of a bucket is one contiguous slice. Gathering a bucket is then one collective without any
per-parameter work. A single rank may give memory of its own: the buckets.
"""

import math
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from torchtitan.grpo.model.shards import Slices, box_of, local

_CHECK_S = 0.05
_LARGE = 1 << 24  # elements; _foreach_copy_ launches a kernel for about as many, `copy_` one for any number


@dataclass(frozen=True)
class Holding:
    """A box of one parameter that a rank holds."""

    name: str
    slices: Slices

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(length for _, length in self.slices)

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


def held_slices(parameter: torch.Tensor) -> Slices | None:
    """The box of the full tensor that this rank holds; None if it holds nothing of it.

    Raises:
        ValueError: The parameter is a partial sum.
        RuntimeError: The local shard does not have the shape that its placements say.
    """
    slices, shard = box_of(parameter), local(parameter)
    if slices is not None and tuple(shard.shape) != tuple(length for _, length in slices):
        raise RuntimeError(
            f"this rank's shard has shape {tuple(shard.shape)}, expected {slices} of {tuple(parameter.shape)} from "
            f"placements {parameter.placements} on {parameter.device_mesh}"
        )
    return slices if shard.numel() else None


def primary_holdings(held: list[dict[str, Slices]], shapes: dict[str, tuple[int, ...]]) -> list[list[Holding]]:
    """Pick the lowest rank that holds each distinct box, so that replicas are sent once.

    Args:
        held: For each rank: name -> box that it holds.
        shapes: name -> full shape; its order is the order of the result.

    Returns:
        For each rank: what it sends, in the order of `shapes`.

    Raises:
        RuntimeError: The boxes of a parameter do not add up to the whole.
    """
    owned: list[list[Holding]] = [[] for _ in held]
    for name, shape in shapes.items():
        taken: set[Slices] = set()
        for rank, boxes in enumerate(held):
            box = boxes.get(name)
            if box is not None and box not in taken:
                taken.add(box)
                owned[rank].append(Holding(name, box))
        covered = sum(math.prod(length for _, length in box) for box in taken)
        if covered != math.prod(shape):
            raise RuntimeError(
                f"{name}: the trainer ranks hold {covered} of {math.prod(shape)} elements between them, in the boxes "
                f"{sorted(taken)}; its sharding is not one that weight sync can put together"
            )
    return owned


def overlap(a: Slices, b: Slices) -> Slices | None:
    """The box that two boxes of one tensor share; None if they share no element."""
    shared = []
    for (a_start, a_length), (b_start, b_length) in zip(a, b, strict=True):
        start, end = max(a_start, b_start), min(a_start + a_length, b_start + b_length)
        if end <= start:
            return None
        shared.append((start, end - start))
    return tuple(shared)


def within(box: Slices, outer: Slices) -> tuple[slice, ...]:
    """The index of `box` in a tensor that holds the box `outer` around it."""
    return tuple(
        slice(start - outer_start, start - outer_start + length)
        for (start, length), (outer_start, _) in zip(box, outer, strict=True)
    )


def joined(pieces: Sequence[Holding]) -> list[Holding]:
    """The same elements in the same order in fewer pieces: neighbours along the first dimension become one.

    A parameter of many experts is then copied as one tensor, though it is sent as many.
    """
    joined: list[Holding] = []
    for piece in pieces:
        last = joined[-1] if joined else None
        if last is not None and last.name == piece.name and last.slices and last.slices[1:] == piece.slices[1:]:
            (last_start, last_length), (start, length) = last.slices[0], piece.slices[0]
            if start == last_start + last_length:
                joined[-1] = Holding(piece.name, ((last_start, last_length + length), *piece.slices[1:]))
                continue
        joined.append(piece)
    return joined


@dataclass(eq=False)
class SnapshotBuffer:
    """One copy of the shards. `version` is -1 while the buffer is empty or being written.

    Attributes:
        flat: All of it, if `Snapshots.allocate` made it.
        began, taken: Before and after the copy, on CUDA.
        released: After the last reader's work, on CUDA.
        cpu_s: How long the copy took, on the CPU.
    """

    index: int
    flat: torch.Tensor | None
    version: int = -1
    readers: int = 0
    began: torch.cuda.Event | None = None
    taken: torch.cuda.Event | None = None
    released: torch.cuda.Event | None = None
    cpu_s: float = 0.0

    def seconds(self) -> float:
        """How long the copy took on the device. Waits for it."""
        if self.taken is None:
            return self.cpu_s
        self.taken.synchronize()
        return self.began.elapsed_time(self.taken) / 1e3


class Snapshots:
    """This rank's shards at the newest versions, in `count` persistent buffers (I2).

    The trainer's thread takes snapshots. The sync thread holds one at a time while it reads it. A version is never
    written into a buffer that is held, so two buffers are enough for a trainer that never waits: one is being sent, the
    other takes the newest version.

    Args:
        parameters: What to take, by name, in the order in which it is sent; see `published.PublishedWeights`.
        dtype: What to cast to.
        count: Buffers.

    Attributes:
        count: Buffers. `allocate` makes them, or `add` is called for each.
        held: name -> the box of that parameter that this rank holds.
        shapes: name -> full shape.
        newest: The newest version taken, -1 before the first.
    """

    def __init__(self, parameters: dict[str, torch.Tensor], dtype: torch.dtype, count: int = 2):
        self.dtype = dtype
        self.shapes = {name: tuple(parameter.shape) for name, parameter in parameters.items()}
        self._parameters = parameters
        self.held: dict[str, Slices] = {}
        for name, parameter in parameters.items():
            slices = held_slices(parameter)
            if slices is not None:
                self.held[name] = slices
        self.device = next(iter(parameters.values())).device
        self.buffers: list[SnapshotBuffer] = []
        self.newest = -1
        self.count = count
        self._copies: list[tuple[list[torch.Tensor], list[torch.Tensor]]] = []
        self._parts: list[tuple[slice, ...] | None] = []
        # A stream of its own: a snapshot must not queue behind a transfer.
        self._stream = torch.cuda.Stream(self.device) if self.device.type == "cuda" else None
        self._changed = threading.Condition()
        self._last: SnapshotBuffer | None = None
        self._taking = False
        self._agreeing: SnapshotBuffer | None = None
        self._awaited: int | None = None
        self._arrived: SnapshotBuffer | None = None

    def allocate(self, pieces: Sequence[Holding]) -> None:
        """Allocate the buffers for what this rank sends, in this order: parts of what it holds."""
        pieces = joined(pieces)
        sizes = [piece.numel for piece in pieces]
        for _ in range(self.count):
            flat = torch.empty(sum(sizes), dtype=self.dtype, device=self.device)
            self.add(pieces, flat.split(sizes), flat)

    def add(self, pieces: Sequence[Holding], memory: Sequence[torch.Tensor], flat: torch.Tensor | None = None) -> None:
        """One more buffer, in memory that exists: a contiguous tensor for each piece."""
        self._parts = [
            None if piece.slices == self.held[piece.name] else within(piece.slices, self.held[piece.name])
            for piece in pieces
        ]
        targets = [target.view(piece.shape) for target, piece in zip(memory, pieces, strict=True)]
        self._copies.append((targets, [self._parameters[piece.name] for piece in pieces]))
        self.buffers.append(SnapshotBuffer(len(self.buffers), flat))

    @torch.no_grad()
    def take(self, version: int, timeout_s: float = 0.0, check: Callable[[], None] = lambda: None) -> None:
        """Copy the weights as they are now, without waiting for the device.

        On CUDA the copy is ordered after all work on the calling thread's stream (the optimizer step). Call
        `order_writes_after` before the weights change again.

        Args:
            version: Greater than any before.
            timeout_s: Longest wait for a buffer that is not being read. With two buffers one is free, except for the
                second version that is taken while the ranks exchange one message (`hold`).
            check: Called while waiting; may raise.

        Raises:
            TimeoutError: No buffer became free.
        """
        with self._changed:
            if version <= self.newest:
                raise ValueError(f"version {version} of the weights after version {self.newest}")
            what = f"buffer for version {version}: all of {len(self.buffers)} are being sent"
            self._wait(lambda: bool(self._free()), timeout_s, check, what)
            buffer = min(self._free(), key=lambda b: b.version)
            buffer.version, self._taking = -1, True
        if self._stream is None:
            started = time.perf_counter()
            self._copy(buffer)
            buffer.cpu_s = time.perf_counter() - started
        else:
            self._stream.wait_stream(torch.cuda.current_stream(self.device))
            if buffer.released is not None:
                self._stream.wait_event(buffer.released)
            with torch.cuda.stream(self._stream):
                buffer.began, buffer.taken = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
                buffer.began.record()
                self._copy(buffer)
                buffer.taken.record()
        with self._changed:
            buffer.version = self.newest = version
            self._taking = False
            self._last = buffer
            self._hold_awaited()
            self._changed.notify_all()

    def order_writes_after(self) -> None:
        """Make the calling thread's stream (the next optimizer step) wait for the last `take`. The host does not."""
        if self._last is not None and self._last.taken is not None:
            torch.cuda.current_stream(self.device).wait_event(self._last.taken)

    @contextmanager
    def hold(
        self, agree: Callable[[int], int], timeout_s: float, check: Callable[[], None]
    ) -> Iterator[SnapshotBuffer]:
        """Keep the version that all ranks agree on while it is read.

        On CUDA the current stream is ordered after the copy. The buffer's next use is ordered after the work that is on
        the current stream when the block ends.

        Args:
            agree: Takes this rank's newest version, returns the greatest of all ranks'. Every rank takes every version,
                so this rank has that version or will take it next.
            timeout_s: Longest wait for this rank to take that version.
            check: Called while waiting; may raise.

        Raises:
            TimeoutError: This rank did not take that version in time.
        """
        # Hold the newest version before the ranks agree: this rank may take more versions meanwhile. Wait first if one
        # is being taken, since it overwrites a version that another rank may be at.
        self._wait(self._hold_newest, timeout_s, check, "first snapshot")
        buffer = self._agreeing
        try:
            version = agree(buffer.version)
            with self._changed:
                self._agreeing = None
                if buffer.version != version:
                    buffer.readers -= 1
                    buffer = None
                    self._awaited = version
                    self._hold_awaited()
                self._changed.notify_all()
            if buffer is None:
                self._wait(lambda: self._arrived is not None, timeout_s, check, f"snapshot of version {version}")
                buffer, self._arrived = self._arrived, None
            assert buffer is not None  # either wait ended with a version that is held
            if buffer.taken is not None:
                torch.cuda.current_stream(self.device).wait_event(buffer.taken)
            yield buffer
        finally:
            if buffer is not None and self._stream is not None:
                buffer.released = torch.cuda.Event()
                buffer.released.record()
            with self._changed:
                # If the wait for a version was given up and it arrived later, it has a reader too.
                for held in {buffer, self._arrived} - {None}:
                    held.readers -= 1
                self._agreeing = self._awaited = self._arrived = None
                self._changed.notify_all()

    def _free(self) -> list[SnapshotBuffer]:
        """Buffers that may be overwritten. While the ranks agree, they may settle on the version in `_agreeing` or on
        the one after it, so both stay. Under the lock."""
        agreeing = self._agreeing.version if self._agreeing is not None else math.inf
        return [buffer for buffer in self.buffers if not buffer.readers and buffer.version < agreeing]

    def _hold_newest(self) -> bool:
        """Hold the newest version, if there is one and none is being taken. Under the lock."""
        newest = max(self.buffers, key=lambda b: b.version)
        if newest.version < 0 or self._taking:
            return False
        newest.readers += 1
        self._agreeing = newest
        return True

    def _hold_awaited(self) -> None:
        """Hold the awaited version as soon as it is there, before it can be overwritten. Under the lock."""
        for buffer in self.buffers:
            if self._awaited is not None and buffer.version == self._awaited:
                buffer.readers += 1
                self._awaited, self._arrived = None, buffer

    def _wait(self, ready: Callable[[], bool], timeout_s: float, check: Callable[[], None], what: str) -> None:
        deadline = time.monotonic() + timeout_s
        with self._changed:
            while not ready():
                check()
                if time.monotonic() > deadline:
                    raise TimeoutError(f"timed out waiting for this rank's {what}; its newest is {self.newest}")
                self._changed.wait(_CHECK_S)

    def _copy(self, buffer: SnapshotBuffer) -> None:
        targets, parameters = self._copies[buffer.index]
        if targets:
            shards = [local(parameter) for parameter in parameters]
            parts = [s if part is None else s[part] for s, part in zip(shards, self._parts, strict=True)]
            small: tuple[list[torch.Tensor], list[torch.Tensor]] = ([], [])
            for target, part in zip(targets, parts, strict=True):
                if target.numel() > _LARGE:
                    target.copy_(part)
                else:
                    small[0].append(target)
                    small[1].append(part)
            if small[0]:
                torch._foreach_copy_(*small)
