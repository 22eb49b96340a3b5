"""`[activation_checkpoint] offload`: the inputs of checkpointed blocks on the host, from forward to backward pass."""

import functools
import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.tensor import DTensor

from torchtitan.grpo.errors import UserError
from torchtitan.grpo.host_memory.pinned import CopyStream, page_lock

LEAST_BYTES = 1 << 20
"""Smaller inputs stay on the device: to copy one takes the host longer than its memory is worth."""


@dataclass(eq=False)
class _Input:
    """A block's input between its forward and its backward pass.

    Attributes:
        device: It on the device, while it is there.
        host: Its place in host memory; None: it stays on the device.
        version: How often `device` had been changed in place when it was copied.
        done: The event after which the newest copy of it is whole; None on CPU.
        before: The input of the block before, as long as autograd has it.
    """

    device: Tensor | None
    host: Tensor | None = None
    version: int = 0
    done: torch.cuda.Event | None = None
    before: Callable[[], "_Input | None"] = lambda: None


class BlockInputs:
    """What full activation checkpointing keeps of each block but the last, on the host from forward to backward.

    Forward: the copy of a block's input runs beside the block. The next block starts after it, on the device, and the
    input's device memory is free from there on. Backward: while a block runs, the input of the block before it comes
    back. So two inputs are on the device at most. The host waits for neither copy.

    No memory is marked by `record_stream`, after which the allocator would reuse it only when the device has got
    there: the host runs whole rows ahead, and would find nothing free. Instead the compute stream waits for a copy
    before it gives the memory back.

    Pinned memory goes back to a list when autograd drops an input. All copies are on one stream, so that the next copy
    into it comes after the last one out of it.

    Args:
        blocks: In the order of the forward pass. The first argument of each is the hidden states. Compiled blocks are
            given as a whole: what is saved for autograd passes hooks outside of the compiled region.
        device: Where they compute. On CPU the same code copies at once.
        host_bytes: Of an input of the longest row.
    """

    def __init__(self, blocks: Iterable[nn.Module], device: torch.device, host_bytes: int) -> None:
        self._copies = CopyStream(device)
        self._host_bytes = host_bytes
        self._free: list[Tensor] = []
        self._allocated = 0
        self._pending: _Input | None = None  # with a copy that the compute stream has not waited for
        self._newest: Callable[[], _Input | None] = lambda: None
        blocks = list(blocks)
        for block in blocks:
            forward = functools.partial(self._forward, block.forward, block is not blocks[-1])
            block.forward = forward

    def metrics(self) -> dict[str, float]:
        """Metrics since the last call. Waits for copies.

        Returns:
            `offload/activations_gib`: pinned memory for inputs.
            `offload/activations_out_s`, `offload/activations_in_s`: seconds of copying each way.
            `offload/activations_exposed_s`: seconds that the compute stream waited for it.
        """
        seconds = self._copies.take_seconds()
        named = {f"offload/activations_{name}_s": seconds.get(name, 0.0) for name in ("out", "in", "exposed")}
        return {"offload/activations_gib": self._allocated / 2**30} | named

    def _forward(self, forward: Callable[..., Any], leaves: bool, states: Tensor, *args: Any, **kwargs: Any) -> Any:
        self._settle()
        small, plain = states.nbytes < LEAST_BYTES, states.is_contiguous() and not isinstance(states, DTensor)
        if small or not plain or not torch.is_grad_enabled():
            return forward(states, *args, **kwargs)
        kept = _Input(states.detach(), before=self._newest)
        self._newest = weakref.ref(kept)
        if leaves:
            self._start_out(kept)
        same = _values_of(states)  # the hooks may live as long as the graph, and must not hold the tensor

        def pack(saved: Tensor) -> Any:
            is_input = not isinstance(saved, DTensor) and saved.is_contiguous() and _values_of(saved) == same
            return (kept, saved.shape) if is_input else saved  # the others: weights, rotary embeddings

        with saved_tensors_hooks(pack, self._unpack):
            return forward(states, *args, **kwargs)

    def _unpack(self, packed: Any) -> Tensor:
        if isinstance(packed, Tensor):
            return packed
        kept, shape = packed
        if kept.device is None:
            self._start_in(kept)
        tensor = kept.device.view(shape)
        if kept is self._pending:
            self._settle()
        before = kept.before()
        if before is not None and before.device is None:
            self._start_in(before)
        return tensor

    def _start_out(self, kept: _Input) -> None:
        assert kept.device is not None
        memory = self._free.pop() if self._free else None
        if memory is None or memory.nbytes < kept.device.nbytes:
            memory = self._allocate(max(self._host_bytes, kept.device.nbytes), instead_of=memory)
        weakref.finalize(kept, self._free.append, memory)
        kept.host = memory[: kept.device.nbytes].view(kept.device.dtype).view(kept.device.shape)
        with self._copies.after_compute("out") as kept.done:
            kept.host.copy_(kept.device, non_blocking=True)
        kept.version = kept.device._version
        self._pending = kept

    def _start_in(self, kept: _Input) -> None:
        assert kept.host is not None
        self._settle()
        # Of the compute stream's memory, whose last user may be under way: the copy starts after it.
        kept.device = torch.empty(kept.host.shape, dtype=kept.host.dtype, device=self._copies.device)
        with self._copies.after_compute("in") as kept.done:
            kept.device.copy_(kept.host, non_blocking=True)
        kept.version = kept.device._version
        self._pending = kept

    def _settle(self) -> None:
        """Order later work on the compute stream after the newest copy, and give up its device memory."""
        kept, self._pending = self._pending, None
        if kept is None or kept.device is None:
            return
        if kept.device._version != kept.version:
            raise UserError("a block changes its input in place: set [activation_checkpoint] offload = false")
        self._copies.order_compute_after(kept.done)
        kept.device = None

    def _allocate(self, nbytes: int, instead_of: Tensor | None) -> Tensor:
        if instead_of is not None and self._copies.stream is not None:
            self._copies.stream.synchronize()  # a copy may still be in it
        self._allocated += nbytes - (0 if instead_of is None else instead_of.nbytes)
        memory = torch.empty(nbytes, dtype=torch.uint8)
        if self._copies.stream is not None:
            page_lock(memory, "set [activation_checkpoint] offload = false, or fewer [training] tokens_per_microbatch")
        return memory


def _values_of(tensor: Tensor) -> tuple[int, int, torch.dtype]:
    """Equal for contiguous tensors with the same elements in the same memory."""
    return tensor.data_ptr(), tensor.numel(), tensor.dtype
