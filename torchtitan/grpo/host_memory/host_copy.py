"""A copy of a run's state in host memory: training goes on while it is written."""

from collections.abc import Iterable
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_flatten, tree_unflatten

from torchtitan.grpo.host_memory.pinned import ALIGN, CopyStream, local_tensor, page_lock


class HostCopy:
    """Host memory for a state dict, allocated by the first `take` and used again by the next.

    On CUDA the copy runs beside the compute stream, and the host does not wait for pinned memory. Call
    `order_writes_after` before the tensors change, and `wait` before the copy is read.

    torch's own stager (`torch.distributed.checkpoint.staging`) orders its copies neither after the last optimizer step
    nor before the next one.

    Args:
        device: Of the tensors. Those that are in host memory anyway are copied at once.
        pinned: Whether the memory is page-locked. Copies into other memory are slow, and the host waits for them.
    """

    def __init__(self, device: torch.device, pinned: bool) -> None:
        self._copies = CopyStream(device)
        self._pinned = pinned and device.type == "cuda"
        self._memory = torch.empty(0, dtype=torch.uint8)
        self._layout: list[tuple[torch.Size, torch.dtype]] = []
        self._targets: list[Tensor] = []
        self._done: torch.cuda.Event | None = None
        self._ordered = True

    @torch.no_grad()
    def take(self, states: dict[str, Any]) -> dict[str, Any]:
        """Copy all tensors as they are after the work on the calling thread's stream. Overwrites the copy before.

        Returns:
            The same structure. A DTensor's copy has its mesh and placements, and its shard in host memory. Tensors
            with the same memory (tied weights) have one copy.
        """
        leaves, structure = tree_flatten(states)
        sources = {_memory_of(leaf): local_tensor(leaf) for leaf in leaves if isinstance(leaf, Tensor)}
        self._allocate(sources.values())
        with self._copies.after_compute("copy") as self._done:
            for target, source in zip(self._targets, sources.values(), strict=True):
                target.copy_(source, non_blocking=True)
                if source.is_cuda:  # offloading may free it before the copy is done
                    source.record_stream(torch.cuda.current_stream(source.device))
        self._ordered = False
        copies = dict(zip(sources, self._targets, strict=True))
        return tree_unflatten(
            [_like(leaf, copies[_memory_of(leaf)]) if isinstance(leaf, Tensor) else leaf for leaf in leaves], structure
        )

    def order_writes_after(self) -> None:
        """Make the calling thread's stream (the next optimizer step) wait for the last `take`. The host does not."""
        if not self._ordered:
            self._copies.order_compute_after(self._done)
            self._ordered = True

    def wait(self) -> None:
        """Wait on the host, in any thread, until the last copy is there."""
        if self._done is not None:
            self._done.synchronize()

    def take_waited_s(self) -> float:
        """Seconds since the last call that the device waited in `order_writes_after`. Waits for them."""
        seconds = self._copies.take_seconds()
        return seconds.get("exposed", 0.0) if self._copies.stream is not None else 0.0

    def _allocate(self, sources: Iterable[Tensor]) -> None:
        """One block for all: pinned in pieces, each would be rounded up to a power of two."""
        layout = [(source.shape, source.dtype) for source in sources]
        if layout == self._layout:
            return
        self._layout, self._targets = [], []
        sizes = [shape.numel() * dtype.itemsize for shape, dtype in layout]
        starts = [0, *accumulate(-(-size // ALIGN) * ALIGN for size in sizes)]
        self._memory = torch.empty(0, dtype=torch.uint8)  # the old block goes first
        self._memory = torch.empty(starts[-1], dtype=torch.uint8)
        if self._pinned:
            page_lock(self._memory, 'set [checkpoint] async_mode = "async" or "disabled"')
        block = self._memory.numpy()
        self._targets = [  # each with a storage of its own: torch's writer copies a tensor that is a part of one
            torch.frombuffer(block, dtype=dtype, count=shape.numel(), offset=start).view(shape)
            if shape.numel()
            else torch.empty(shape, dtype=dtype)
            for (shape, dtype), start in zip(layout, starts, strict=False)
        ]
        self._layout = layout


def _memory_of(tensor: Tensor) -> tuple[Any, ...]:
    """Equal for tensors with the same elements in the same memory."""
    local = local_tensor(tensor)
    return local.data_ptr(), local.shape, local.stride(), local.dtype


def _like(tensor: Tensor, local: Tensor) -> Tensor:
    # `DTensor.from_local` would move the shard to the mesh's device.
    return DTensor(local, tensor._spec, requires_grad=False) if isinstance(tensor, DTensor) else local
