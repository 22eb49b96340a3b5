"""JSON values and flat tensors between ranks over gloo, without pickle. Who calls bounds the waits, and names them.
And sums on the device."""

import json
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

Wait = Callable[[dist.Work], None]
"""Returns when the work is done; raises when its time is over."""


def broadcast(tensor: torch.Tensor | None, dtype: torch.dtype, group: dist.ProcessGroup, wait: Wait) -> torch.Tensor:
    """Rank 0's flat tensor on every rank. None on the others, which do not know its length."""
    length = torch.tensor([0 if tensor is None else len(tensor)])
    wait(dist.broadcast(length, src=0, group=group, async_op=True))
    if tensor is None:
        tensor = torch.empty(int(length), dtype=dtype)
    wait(dist.broadcast(tensor, src=0, group=group, async_op=True))
    return tensor


def broadcast_json(value: Any, is_source: bool, group: dist.ProcessGroup, wait: Wait) -> Any:
    """Rank 0's value on every rank. The others' is ignored."""
    return _value(broadcast(_tensor(value) if is_source else None, torch.uint8, group, wait))


def scatter(
    parts: Sequence[bytes | memoryview] | None, size: int, group: dist.ProcessGroup, wait: Wait
) -> torch.Tensor:
    """This rank's of rank 0's parts, one for each rank, as uint8 with zeros up to `size`. The others give None."""
    own, padded = torch.empty(size, dtype=torch.uint8), None
    if parts is not None:
        same = {id(part): _padded(part, size) for part in parts}  # ranks may share one
        padded = [same[id(part)] for part in parts]
    wait(dist.scatter(own, padded, src=0, group=group, async_op=True))
    return own


def gather_json(value: Any, group: dist.ProcessGroup | None, wait: Wait) -> list[Any]:
    """Every rank's value on every rank, in rank order, as JSON gives it back. Without a group there is one rank."""
    own = _tensor(value)
    if group is None:
        return [_value(own)]
    longest = torch.tensor(len(own))
    wait(dist.all_reduce(longest, dist.ReduceOp.MAX, group=group, async_op=True))
    own = torch.cat([own, own.new_full((int(longest) - len(own),), ord(" "))])  # JSON may end in spaces
    rows = [torch.empty_like(own) for _ in range(group.size())]
    wait(dist.all_gather(rows, own, group=group, async_op=True))
    return [_value(row) for row in rows]


def sum_over_ranks(
    sums: dict[str, torch.Tensor], device: torch.device, group: dist.ProcessGroup | None
) -> dict[str, Any]:
    """Each summed over the group's ranks: a number, a list for a vector, and lists for a matrix. One copy from the
    device for all.

    Args:
        group: The data-parallel ranks; None if this rank is the only one.
    """
    values = [torch.as_tensor(value, device=device).double() for value in sums.values()]
    total = torch.cat([value.flatten() for value in values])
    if group is not None:
        dist.all_reduce(total, group=group)
    parts = total.cpu().split([value.numel() for value in values])
    return {name: part.view(value.shape).tolist() for name, value, part in zip(sums, values, parts, strict=True)}


def _padded(part: bytes | memoryview, size: int) -> torch.Tensor:
    padded = torch.zeros(size, dtype=torch.uint8)
    padded.numpy()[: len(part)] = np.frombuffer(part, np.uint8)
    return padded


def _tensor(value: Any) -> torch.Tensor:
    return torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)


def _value(data: torch.Tensor) -> Any:
    return json.loads(data.numpy().tobytes())
