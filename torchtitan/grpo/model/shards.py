"""Parameters that are sharded or wrapped: their names, a rank's part of them, and the whole."""

import torch
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import _StridedShard


def canonical_name(name: str) -> str:
    """The parameter's name without the parts that activation checkpointing and compilation add to it."""
    return name.replace("_checkpoint_wrapped_module.", "").replace("_orig_mod.", "")


def local(parameter: torch.Tensor) -> torch.Tensor:
    """This rank's shard; a tensor that is not sharded as it is."""
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter


def shard_of(full: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """This rank's shard of `parameter` as a view of `full`, by torch.chunk's rule on each mesh axis."""
    if not isinstance(parameter, DTensor):
        return full
    coordinate = parameter.device_mesh.get_coordinate()
    axes = [axis for axis, placement in enumerate(parameter.placements) if not placement.is_replicate()]
    # FSDP2 shards what tensor parallelism has sharded, though its mesh axis comes first: it is marked as strided.
    for axis in sorted(axes, key=lambda axis: isinstance(parameter.placements[axis], _StridedShard)):
        dim, ranks = parameter.placements[axis].dim, parameter.device_mesh.size(axis)
        rows = -(-full.shape[dim] // ranks)
        start = min(rows * coordinate[axis], full.shape[dim])
        full = full.narrow(dim, start, min(rows, full.shape[dim] - start))
    return full


def fill(parameter: torch.Tensor, values: torch.Tensor, row: int | None = None) -> None:
    """Copy this rank's shard out of the full values.

    Args:
        values: Of the parameter's shape. With `row` those of one row, [1, ...], and the others stay as they are.
    """
    if row is None:
        local(parameter).copy_(shard_of(values, parameter))
        return
    numbers = torch.arange(parameter.shape[0]).view(-1, *[1] * (parameter.dim() - 1)).expand(parameter.shape)
    own_rows = shard_of(numbers, parameter)
    if own_rows.numel():
        found = own_rows.flatten(1)[:, 0] == row
        if found.any():
            local(parameter)[int(found.nonzero())].copy_(shard_of(values.expand(parameter.shape), parameter)[0])


def whole(parameter: torch.Tensor) -> torch.Tensor:
    """The full tensor, on every rank. Collective."""
    return parameter.full_tensor() if isinstance(parameter, DTensor) else parameter
