"""Parameters that are sharded or wrapped: their names, a rank's part of them, and the whole."""

import torch
from torch.distributed.tensor import DTensor, Shard

Slices = tuple[tuple[int, int], ...]
"""A box of a full tensor: (start, length) in each dimension."""


def canonical_name(name: str) -> str:
    """The parameter's name without the parts that activation checkpointing and compilation add to it."""
    return name.replace("_checkpoint_wrapped_module.", "").replace("_orig_mod.", "")


def local(parameter: torch.Tensor) -> torch.Tensor:
    """This rank's shard; a tensor that is not sharded as it is."""
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter


def box_of(parameter: torch.Tensor) -> Slices | None:
    """The box of the full tensor that this rank's shard is; None if the rank is not in the parameter's mesh.

    With FSDP2 over tensor parallelism on the same dimension, torch marks FSDP's mesh dimension as strided: the tensor
    is split over the mesh dimensions to its right first. Applied in that order, every shard is one contiguous box.

    Raises:
        ValueError: The parameter is a partial sum.
    """
    if not isinstance(parameter, DTensor):
        return tuple((0, size) for size in parameter.shape)
    coordinate = parameter.device_mesh.get_coordinate()
    if coordinate is None:
        return None
    box = [(0, size) for size in parameter.shape]
    splits = []
    for mesh_dim, placement in enumerate(parameter.placements):
        if placement.is_partial():
            raise ValueError(f"a parameter with placement {placement} has no well-defined value")
        if not placement.is_replicate():
            splits.append((type(placement) is not Shard, mesh_dim, placement.dim))
    for _strided, mesh_dim, dim in sorted(splits):
        start, length = box[dim]
        chunk = -(-length // parameter.device_mesh.size(mesh_dim))  # torch.chunk's size: the last ones may be short
        low = min(coordinate[mesh_dim] * chunk, length)
        box[dim] = (start + low, min(low + chunk, length) - low)
    return tuple(box)


def shard_of(full: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """This rank's shard of `parameter` as a view of `full`."""
    return full[tuple(slice(start, start + length) for start, length in box_of(parameter) or ())]


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
