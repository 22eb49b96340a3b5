"""Device memory and its twin in pinned host memory: streams, copies, and what they cost.

Only the memory behind tensors moves. A storage is emptied (`resize_(0)`, as FSDP does with gathered parameters) and
filled again. So parameters, DTensors, FSDP2's references to them and `optimizer.state` stay the same objects. On CPU
the same code copies at once, and nothing overlaps.
"""

import time
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

FLAT_BYTES = 1 << 30
"""Small tensors share device buffers of about this size. So copies are few, and their blocks are easy to allocate when
they come back."""

_CHUNK_BYTES = 1 << 29
"""Pinned memory is allocated in pieces of this size. torch rounds each piece up to a power of two, which could double
the size of a large one."""

ALIGN = 512
"""Bytes. The CUDA allocator's own rounding: together, tensors take no more memory than alone."""


class CopyStream:
    """Copies beside the compute stream (the calling thread's current stream), and their seconds."""

    def __init__(self, device: torch.device):
        self.device = device
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._spans: list[tuple[str, torch.cuda.Event, torch.cuda.Event]] = []
        self._seconds: dict[str, float] = {}
        self._last: torch.cuda.Event | None = None

    @contextmanager
    def after_compute(self, name: str, also: torch.cuda.Event | None = None) -> Iterator[torch.cuda.Event | None]:
        """Copies enqueued in this context start when the device has done what the compute stream holds now.

        Args:
            name: Name for their seconds.
            also: They wait for this event too.

        Yields:
            The event of their end; None on CPU.
        """
        if self.stream is None:
            start = time.perf_counter()
            yield None
            seconds = time.perf_counter() - start
            self._add(name, seconds)
            self._add("exposed", seconds)
            return
        self.stream.wait_stream(torch.cuda.current_stream(self.device))
        if also is not None:
            self.stream.wait_event(also)
        with torch.cuda.stream(self.stream), self._timed(name, self.stream) as done:
            yield done
        self._last = done

    def order_compute_after(self, done: torch.cuda.Event | None) -> None:
        """Make later work on the compute stream wait on the device for the event, and time that wait."""
        if done is not None:
            compute = torch.cuda.current_stream(self.device)
            with self._timed("exposed", compute):
                compute.wait_event(done)

    def idle(self) -> bool:
        """Whether all copies have ended. Any thread may call it."""
        return self._last is None or self._last.query()

    def take_seconds(self) -> dict[str, float]:
        """Seconds by name since the last call. Waits for the copies, so it belongs at the end of a step."""
        for name, begun, done in self._spans:
            done.synchronize()
            self._add(name, begun.elapsed_time(done) / 1e3)
        seconds, self._seconds = self._seconds, {}
        self._spans.clear()
        return seconds

    @contextmanager
    def _timed(self, name: str, stream: torch.cuda.Stream) -> Iterator[torch.cuda.Event]:
        begun, done = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begun.record(stream)
        yield done
        done.record(stream)
        self._spans.append((name, begun, done))

    def _add(self, name: str, seconds: float) -> None:
        self._seconds[name] = self._seconds.get(name, 0.0) + seconds


class PinnedTwin:
    """Device storages, all full at first, and pinned host memory for their bytes.

    Args:
        storages: Distinct storages; every tensor in them moves with them.
        copies: The stream of copies to the host.
        copies_in: The stream of copies to the device, by default the same.
    """

    def __init__(
        self, storages: Sequence[torch.UntypedStorage], copies: CopyStream, copies_in: CopyStream | None = None
    ):
        self._storages = [(storage, storage.nbytes()) for storage in storages]
        self.nbytes = sum(size for _, size in self._storages)
        self.on_device = True
        self.saved: torch.cuda.Event | None = None
        self.emptied: list[torch.cuda.Event] = []
        """The events after which the allocator has the memory again."""
        self._loaded: torch.cuda.Event | None = None
        self._out, self._in = copies, copies_in or copies
        device = copies.device
        self._views = [torch.empty(0, dtype=torch.uint8, device=device).set_(storage) for storage in storages]
        sizes = [min(_CHUNK_BYTES, self.nbytes - start) for start in range(0, self.nbytes, _CHUNK_BYTES)]
        pinned = device.type == "cuda"
        self._chunks = [torch.empty(size, dtype=torch.uint8, pin_memory=pinned) for size in sizes]
        self._pieces = list(self._pair())

    def save(self) -> None:
        """Copy the storages to the host."""
        with self._out.after_compute("out") as self.saved:
            for device_piece, host_piece in self._pieces:
                host_piece.copy_(device_piece, non_blocking=True)

    def empty(self) -> None:
        """Give the device memory back to the allocator, without waiting for `save`."""
        if self._out.stream is not None:
            # The memory belongs to the compute stream. The caching allocator would give it to the next allocation on
            # that stream at once, whose kernels might overwrite what the copy still reads. record_stream tells it that
            # the copy stream uses the memory too. Then it records an event there when the memory is freed, and reuses
            # the memory only after that event. It checks at each allocation, and waits only if the device has no other
            # memory left. memory_allocated counts the bytes as freed from here on.
            for view in self._views:
                view.record_stream(self._out.stream)
        for storage, _ in self._storages:
            storage.resize_(0)
        # Behind the allocator's own events, on both streams: it also waits for later copies to the device.
        streams = {self._out.stream, self._in.stream}
        self.emptied = [stream.record_event() for stream in streams if stream is not None]
        self.on_device = False

    def load(self) -> None:
        """Allocate device memory and copy back. Call `use` before the first use.

        The memory is allocated on the compute stream, so it can reuse that stream's cached blocks. Kernels that are
        enqueued but not done may still use those blocks, so the copy starts after them.
        """
        for storage, size in self._storages:
            storage.resize_(size)
        self.on_device = True
        with self._in.after_compute("in", self.saved) as self._loaded:
            for device_piece, host_piece in self._pieces:
                device_piece.copy_(host_piece, non_blocking=True)
        if self._in.stream is not None:
            for view in self._views:  # if the tensors are dropped now, their memory must not be reused
                view.record_stream(self._in.stream)

    def use(self) -> None:
        """Make the compute stream wait for the bytes of the last `load`. The host does not wait."""
        self._in.order_compute_after(self._loaded)
        self._loaded = None

    def _pair(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Pieces of device memory with their places in host memory, where storages follow each other."""
        offset = 0
        for view in self._views:
            start = 0
            while start < view.numel():
                chunk, in_chunk = divmod(offset, _CHUNK_BYTES)
                length = min(view.numel() - start, _CHUNK_BYTES - in_chunk)
                yield view[start : start + length], self._chunks[chunk][in_chunk : in_chunk + length]
                start, offset = start + length, offset + length


def local_tensor(tensor: Tensor) -> Tensor:
    """This rank's part of a DTensor (the object itself); any other tensor as it is."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


@torch.no_grad()
def put_together(tensors: Sequence[Tensor], flat_bytes: int = FLAT_BYTES) -> list[torch.UntypedStorage]:
    """Move dense tensors into shared storages of at most `flat_bytes`, or of one tensor. They stay the same objects.

    Meanwhile it needs the memory of one more such storage.
    """
    groups: list[list[tuple[Tensor, int]]] = []
    filled = flat_bytes
    for tensor in tensors:
        size = tensor.numel() * tensor.itemsize
        if filled + size > flat_bytes:
            groups.append([])
            filled = 0
        groups[-1].append((tensor, filled))
        filled += -(-size // ALIGN) * ALIGN
    storages = []
    for group in groups:
        last, offset = group[-1]
        flat = torch.empty(offset + last.numel() * last.itemsize, dtype=torch.uint8, device=last.device)
        for tensor, offset in group:
            piece = flat[offset : offset + tensor.numel() * tensor.itemsize].view(tensor.dtype)
            target = piece.as_strided(tensor.shape, tensor.stride())
            target.copy_(tensor)
            tensor.set_(flat.untyped_storage(), target.storage_offset(), tensor.shape, tensor.stride())
        storages.append(flat.untyped_storage())
    return storages


def page_lock(memory: Tensor, advice: str) -> None:
    """Pin host memory as it is, for as long as the tensor lives. torch's own pinned memory is rounded up.

    Raises:
        MemoryError: It cannot be pinned. The message ends with `advice`.
    """
    cudart = torch.cuda.cudart()
    status = int(cudart.cudaHostRegister(memory.data_ptr(), memory.nbytes, 0))
    if status:
        raise MemoryError(
            f"{memory.nbytes / 2**30:.1f} GiB of host memory cannot be pinned (CUDA error {status}): {advice}"
        )
    weakref.finalize(memory, cudart.cudaHostUnregister, memory.data_ptr()).atexit = False
