"""A consistent copy of this rank's shards of the weights, cast to the dtype that servers compute in.

One flat buffer per rank, allocated once. Parameters lie in it in the order of the plan, so that what a rank owes to a
bucket is one contiguous slice: the gather of a bucket is one collective without any per-parameter work.
"""

import math
import time
from dataclasses import dataclass

import torch
import torch.nn as nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Shard

Slices = tuple[tuple[int, int], ...]
"""Per tensor dimension: (start, length). One box of a full tensor."""


@dataclass(frozen=True)
class Holding:
    """A rank's part of one parameter: which box of the full tensor it is."""

    name: str
    slices: Slices

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(length for _, length in self.slices)

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


def canonical_name(name: str) -> str:
    """The parameter's name without what activation checkpointing and compilation put into it."""
    return name.replace("_checkpoint_wrapped_module.", "").replace("_orig_mod.", "")


def held_slices(parameter: torch.Tensor) -> Slices | None:
    """The box of the full tensor that this rank holds; None if it holds nothing of it.

    With FSDP2 over tensor parallelism, both on one dimension, torch marks FSDP's mesh dimension as strided: the tensor
    is split over the mesh dimensions to its right first. Applied in that order every shard is one contiguous box.
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
            raise ValueError(f"a parameter with placement {placement} has no well-defined value to publish")
        if not placement.is_replicate():
            splits.append((type(placement) is not Shard, mesh_dim, placement.dim))
    for _strided, mesh_dim, dim in sorted(splits):
        start, length = box[dim]
        chunk = -(-length // parameter.device_mesh.size(mesh_dim))  # torch.chunk's size: the last ones may be short
        low = min(coordinate[mesh_dim] * chunk, length)
        box[dim] = (start + low, min(low + chunk, length) - low)
    slices = tuple(box)
    local = parameter.to_local()
    if tuple(local.shape) != tuple(length for _, length in slices):
        raise RuntimeError(
            f"this rank's shard has shape {tuple(local.shape)}, expected {slices} of {tuple(parameter.shape)} from "
            f"placements {parameter.placements} on {parameter.device_mesh}"
        )
    return slices if local.numel() else None


def primary_holdings(held: list[dict[str, Slices]], shapes: dict[str, tuple[int, ...]]) -> list[list[Holding]]:
    """Pick for each distinct box the lowest rank that holds it, so that replicas are sent once.

    Args:
        held: Per rank: name -> box that it holds.
        shapes: name -> full shape; its order is the order of the result.

    Returns:
        Per rank: what it sends, in the order of `shapes`.

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


class Snapshot:
    """This rank's shards in a persistent flat buffer.

    Make it after `fully_shard`, `to_empty` and the optimizer, since it keeps references to the sharded parameters
    (FSDP2 swaps what the modules show while they are gathered, but updates and keeps these).

    Args:
        model: The parallelised model.
        names: Parameters to take, by canonical name, in the order in which they are to be sent.
        dtype: What to cast to.
    """

    def __init__(self, model: nn.Module, names: list[str], dtype: torch.dtype):
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()  # an evaluation may have left parameters gathered
        parameters = {canonical_name(name): parameter for name, parameter in model.named_parameters()}
        self.dtype = dtype
        self.shapes = {name: tuple(parameters[name].shape) for name in names}
        self._parameters = {name: parameters[name] for name in names}
        self.held: dict[str, Slices] = {}
        for name, parameter in self._parameters.items():
            slices = held_slices(parameter)
            if slices is not None:
                self.held[name] = slices
        self.device = next(iter(self._parameters.values())).device
        self.stream = torch.cuda.Stream(self.device) if self.device.type == "cuda" else None
        self.taken: torch.cuda.Event | None = None
        self._began: torch.cuda.Event | None = None
        self._cpu_s = 0.0
        self.flat = torch.empty(0, dtype=dtype, device=self.device)
        self._offsets: dict[str, int] = {}
        self._pieces: list[tuple[torch.Tensor, torch.Tensor]] = []

    def allocate(self, owned: list[Holding]) -> None:
        """Allocate the buffer for what this rank sends (`primary_holdings` of all ranks' `held`)."""
        end = 0
        for holding in owned:
            self._offsets[holding.name] = end
            end += holding.numel
        self.flat = torch.empty(end, dtype=self.dtype, device=self.device)
        self._pieces = [
            (
                self.flat[self._offsets[holding.name] :][: holding.numel].view(holding.shape),
                self._parameters[holding.name],
            )
            for holding in owned
        ]

    @torch.no_grad()
    def take(self) -> None:
        """Copy the weights as they are now, on the snapshot's stream, without waiting for the device.

        On CUDA the copy is ordered after all work that the calling thread's stream holds (the optimizer step) and
        `taken` is recorded after it. Before the weights change again, call `order_writes_after`. The buffer must not be
        under way to a server: the sender's work on `stream` is ordered before the copy, its host-side waits are not.
        """
        targets = [target for target, _ in self._pieces]
        if self.stream is None:
            started = time.perf_counter()
            self._copy(targets)
            self._cpu_s = time.perf_counter() - started
            return
        self.stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self.stream):
            self._began, self.taken = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            self._began.record()
            self._copy(targets)
            self.taken.record()

    def seconds(self) -> float:
        """How long the last `take` took on the device. Waits for it."""
        if self.taken is None:
            return self._cpu_s
        self.taken.synchronize()
        return self._began.elapsed_time(self.taken) / 1e3

    def order_writes_after(self) -> None:
        """Make the calling thread's stream (the next optimizer step) wait for the last `take`; the host goes on."""
        if self.taken is not None:
            torch.cuda.current_stream(self.device).wait_event(self.taken)

    def _copy(self, targets: list[torch.Tensor]) -> None:
        if targets:
            torch._foreach_copy_(targets, [p.to_local() if isinstance(p, DTensor) else p for _, p in self._pieces])
