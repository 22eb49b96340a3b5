"""Learns what an engine's `load_weights` does with received tensors, without changing a weight.

This is the first of the three steps of `direct_load`, with the helpers that its other steps share. Torch only.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from torchtitan.grpo.weight_wire.buckets import Bucket

LoadWeights = Callable[[list[tuple[str, torch.Tensor]]], Any]

_aten = torch.ops.aten
COPY = _aten.copy_.default
FILLS = (_aten.fill_.Scalar, _aten.zero_.default)
_MAX_RUNS = 1 << 22


class NotDirectError(RuntimeError):
    """Why a model's weights cannot be loaded by copies alone."""


@dataclass(frozen=True, eq=False)
class Copy:
    """`size` elements, `stride` apart, from element `offset` of a received bucket, go to `destination`."""

    bucket: int
    offset: int
    size: tuple[int, ...]
    stride: tuple[int, ...]
    destination: torch.Tensor

    def source(self, elements: torch.Tensor) -> torch.Tensor:
        """The view to copy; `elements` is the received bucket as a flat tensor of the destination's dtype."""
        return elements.as_strided(self.size, self.stride, elements.storage_offset() + self.offset)


@dataclass(frozen=True, eq=False)
class Fill:
    """Padding: the engine writes this constant there, whatever it receives."""

    destination: torch.Tensor
    value: float


@dataclass(frozen=True, eq=False)
class RegisteredParameter:
    """A parameter, the module entry that registers it, and its memory at the time of recording."""

    registry: dict[str, torch.nn.Parameter | None]
    key: str
    parameter: torch.nn.Parameter
    data: torch.Tensor

    def holds(self) -> bool:
        with torch._C.DisableTorchFunctionSubclass():  # engines subclass Parameter; that makes calls slow
            return self.registry.get(self.key) is self.parameter and same_memory(self.parameter, self.data)

    def restore(self) -> None:
        self.registry[self.key] = self.parameter
        self.parameter.data = self.data


@dataclass(frozen=True, eq=False)
class Recording:
    """What `load_weights` does with a plan's buckets."""

    copies: list[Copy]
    fills: list[Fill]
    registered: list[RegisteredParameter]
    parameters: int

    def holds(self) -> bool:
        """Whether every parameter is where it was."""
        return all(parameter.holds() for parameter in self.registered)


def record(
    model: torch.nn.Module,
    buckets: Sequence[Bucket],
    load_weights: LoadWeights,
    device: torch.device,
    excluded: Iterable[str] = (),
) -> Recording:
    """Learn where every received tensor ends up. All weights stay as they are.

    Args:
        model: Its parameters are where weights go.
        buckets: The plan.
        load_weights: The engine's own. It is called once per bucket, with (name, tensor) pairs of arbitrary values.
        device: Where buckets arrive. The bytes of one bucket at a time are allocated there.
        excluded: Parameters that no update fills (a tied output layer with its own storage).

    Raises:
        NotDirectError: Loading is more than copying, or does not fill every parameter exactly once.
    """
    registered = [
        RegisteredParameter(module._parameters, key, parameter, parameter.data.as_subclass(torch.Tensor))
        for module in model.modules()
        for key, parameter in module._parameters.items()
        if parameter is not None
    ]
    recorder = _Recorder({storage_of(parameter.data) for parameter in registered if parameter.data.numel()})
    for bucket in buckets:
        recorder.bucket = bucket.index
        stand_in = torch.empty(bucket.wire_bytes, dtype=torch.uint8, device=device)
        recorder.stand_in = storage_of(stand_in)
        tensors = bucket.views(stand_in)
        try:
            with torch.no_grad(), recorder:
                load_weights(tensors)
        except Exception as error:  # the engine's own loading will raise it to the user
            # The recorder's reason counts, even if a loader caught its error and raised another.
            recorder.reason = recorder.reason or f"load_weights raised {type(error).__name__}: {error}"
        moved = [parameter for parameter in registered if not parameter.holds()]
        for parameter in moved:
            parameter.restore()
        if moved:
            recorder.reason = recorder.reason or "load_weights replaces parameters"
        if recorder.reason:
            raise NotDirectError(recorder.reason)
        del tensors
    excluded = set(excluded)
    required = {name: parameter for name, parameter in model.named_parameters() if name not in excluded}
    written = [copy.destination for copy in recorder.copies] + [fill.destination for fill in recorder.fills]
    _check_coverage(required, written)
    return Recording(recorder.copies, recorder.fills, registered, len(required))


class _Recorder(TorchDispatchMode):
    """Notes copies from a stand-in, and constants, without carrying them out. Refuses every other write."""

    def __init__(self, targets: set[int]):
        super().__init__()
        self.copies: list[Copy] = []
        self.fills: list[Fill] = []
        self.bucket = self.stand_in = 0
        self.reason = ""
        self._targets = targets

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        given = any(storage_of(tensor) == self.stand_in for tensor in tensors_in((args, kwargs)))
        if func is COPY and storage_of(args[1]) == self.stand_in:
            self._note_copy(*args[:2])
            return args[0]
        if func in FILLS and not given:
            if args[0].numel():
                self._check_target(func, args[0])
                self.fills.append(Fill(_plain(args[0]), args[1] if len(args) > 1 else kwargs.get("value", 0)))
            return args[0]
        if writes(func):
            self._refuse(f"load_weights uses {func}")
        result = func(*args, **kwargs)
        if given and not only_views(result, {self.stand_in}):
            self._refuse(f"load_weights uses {func} on a received tensor")
        return result

    def _note_copy(self, destination: torch.Tensor, source: torch.Tensor) -> None:
        if destination.numel() == 0:
            return
        self._check_target(COPY, destination)
        if (destination.dtype, destination.shape) != (source.dtype, source.shape):
            self._refuse(
                f"{source.dtype} {list(source.shape)} is received for {destination.dtype} {list(destination.shape)}"
            )
        destination, offset = _plain(destination), source.storage_offset()
        if destination.is_contiguous() and source.is_contiguous():
            # Flat on both sides. Otherwise strides of dimensions of size 1 keep it off the fast path.
            copy = Copy(self.bucket, offset, (source.numel(),), (1,), destination.view(-1))
        else:
            copy = Copy(self.bucket, offset, tuple(source.shape), source.stride(), destination)
        self.copies.append(copy)

    def _check_target(self, func: torch._ops.OpOverload, tensor: torch.Tensor) -> None:
        if storage_of(tensor) not in self._targets:
            self._refuse(f"load_weights uses {func} on something that is not a parameter")

    def _refuse(self, reason: str) -> None:
        self.reason = self.reason or reason
        raise NotDirectError(reason)


def _check_coverage(required: dict[str, torch.Tensor], destinations: list[torch.Tensor]) -> None:
    """NotDirectError unless `destinations` cover each byte of the required parameters once, and no other byte."""
    for name, parameter in required.items():
        if parameter.is_meta:
            raise NotDirectError(f"{name} is on meta")
    for found in (written := _by_storage(destinations)).values():
        starts, ends = found
        if (starts[1:] < ends[:-1]).any():
            raise NotDirectError("load_weights writes some elements twice")
    merged = {storage: _merge(*found) for storage, found in written.items()}
    wanted = {storage: _merge(*found) for storage, found in _by_storage(required.values()).items()}
    for name, parameter in required.items():
        if parameter.numel() and merged.get(storage_of(parameter)) != wanted[storage_of(parameter)]:
            raise NotDirectError(f"load_weights does not fill {name} exactly")
    if merged.keys() != wanted.keys():
        raise NotDirectError("load_weights fills a parameter that is none of the model's own weights")


def _by_storage(tensors: Iterable[torch.Tensor]) -> dict[int, tuple[torch.Tensor, torch.Tensor]]:
    """Per storage: sorted starts and ends (bytes, int64 [runs]) of the contiguous runs of `tensors`."""
    runs: dict[int, list[torch.Tensor]] = {}
    for tensor in tensors:
        if tensor.numel():
            runs.setdefault(storage_of(tensor), []).append(_runs(tensor))
    sorted_runs = {}
    for storage, parts in runs.items():
        starts, ends = torch.cat(parts, dim=1)
        starts, order = starts.sort()
        sorted_runs[storage] = starts, ends[order]
    return sorted_runs


def _runs(tensor: torch.Tensor) -> torch.Tensor:
    """Starts and ends of a tensor's contiguous runs in its storage (bytes, int64 [2, runs])."""
    length = 1
    starts = torch.tensor([tensor.storage_offset()])
    for size, stride in sorted(zip(tensor.shape, tensor.stride(), strict=True), key=lambda dim: dim[1]):
        if size == 1:
            continue
        if stride == length and starts.numel() == 1:
            length *= size
            continue
        if stride < length or starts.numel() * size > _MAX_RUNS:
            raise NotDirectError(f"a parameter is written as {list(tensor.shape)} with strides {tensor.stride()}")
        starts = (starts[:, None] + torch.arange(size) * stride).flatten()
    return torch.stack([starts, starts + length]) * tensor.element_size()


def _merge(starts: torch.Tensor, ends: torch.Tensor) -> tuple[list[int], list[int]]:
    """Sorted runs, with adjoining and overlapping ones merged."""
    reach = ends.cummax(0).values
    gap = starts[1:] > reach[:-1]
    first = torch.cat([torch.tensor([True]), gap])
    last = torch.cat([gap, torch.tensor([True])])
    return starts[first].tolist(), reach[last].tolist()


def storage_of(tensor: Any) -> int:
    """The address of a tensor's storage; 0 if it has none."""
    return 0 if not isinstance(tensor, torch.Tensor) or tensor.is_meta else tensor.untyped_storage().data_ptr()


def same_memory(tensor: torch.Tensor, other: torch.Tensor) -> bool:
    return not tensor.is_meta and tensor.data_ptr() == other.data_ptr() and tensor.shape == other.shape


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory without autograd and without an engine's subclass."""
    return tensor.detach().as_subclass(torch.Tensor)


def tensors_in(values: Any) -> list[torch.Tensor]:
    return [value for value in tree_leaves(values) if isinstance(value, torch.Tensor)]


def writes(func: torch._ops.OpOverload) -> bool:
    """Whether an operator writes to any of its arguments."""
    return any(argument.alias_info is not None and argument.alias_info.is_write for argument in func._schema.arguments)


def only_views(result: Any, storages: set[int]) -> bool:
    """Whether a result consists of views of the given storages (or of tensors on meta, which have no values)."""
    leaves = tree_leaves(result)
    return bool(leaves) and all(
        isinstance(leaf, torch.Tensor) and (leaf.is_meta or storage_of(leaf) in storages) for leaf in leaves
    )
