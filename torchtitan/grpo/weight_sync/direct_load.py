"""Loading weights straight into an engine's own storage, once that is shown to be all that the engine's loading does.

An engine's `load_weights` takes names and tensors through Python for every update, though for most unquantised models
nothing comes of it but copies, always between the same places. `DirectLoading` learns those places once and then loads
a bucket with one `_foreach_copy_` per dtype. Storage stays what it was, so CUDA graphs stay valid. It goes direct only
after all of this held, on the very server that uses it, and otherwise stays with the engine's own loading:

1. Record: `load_weights` runs over stand-ins for the received tensors, with writes held back. All that it does with a
   stand-in is take views and copy them, dtype unchanged, into parameters.
2. Coverage: those copies (and constants for padding) fill every byte of every parameter exactly once.
3. Proof: through one whole update by the engine's own loading, received bytes were only viewed and copied, nothing but
   parameters holds any of them afterwards, and each recorded destination has the checksum of its recorded source.

Imports torch only, as `receiver`. Kernels that an engine launches outside torch's dispatcher are not seen in step 3,
except by the checksums.
"""

import gc
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from torchtitan.grpo.weight_sync.buckets import Bucket, Checksum

LoadWeights = Callable[[list[tuple[str, torch.Tensor]]], Any]

_aten = torch.ops.aten
_COPY = _aten.copy_.default
_FILLS = (_aten.fill_.Scalar, _aten.zero_.default)
_MAX_RUNS = 1 << 22
_LET_GO_S = 0.5


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
    """Padding: the engine writes a constant there whatever it receives."""

    destination: torch.Tensor
    value: float


@dataclass(frozen=True, eq=False)
class Place:
    """A parameter where it was registered, and where its elements lay."""

    registry: dict[str, torch.nn.Parameter | None]
    key: str
    parameter: torch.nn.Parameter
    data: torch.Tensor

    def holds(self) -> bool:
        with torch._C.DisableTorchFunctionSubclass():  # engines subclass Parameter, which makes calls slow
            return self.registry.get(self.key) is self.parameter and _same_place(self.parameter, self.data)

    def restore(self) -> None:
        self.registry[self.key] = self.parameter
        self.parameter.data = self.data


@dataclass(frozen=True, eq=False)
class Recording:
    """What `load_weights` does with a plan's buckets."""

    copies: list[Copy]
    fills: list[Fill]
    places: list[Place]
    parameters: int


def record(
    model: torch.nn.Module,
    buckets: Sequence[Bucket],
    load_weights: LoadWeights,
    device: torch.device,
    excluded: Iterable[str] = (),
) -> Recording:
    """Learn where every received tensor ends up, leaving all weights as they are.

    Args:
        model: Its parameters are where weights go.
        buckets: The plan.
        load_weights: The engine's own, called once per bucket with (name, tensor) pairs whose values mean nothing.
        device: Where buckets arrive. One bucket's bytes are allocated at a time.
        excluded: Parameters that no update fills (a tied output layer with storage of its own).

    Raises:
        NotDirectError: Loading is more than copying, or does not fill every parameter exactly once.
    """
    places = [
        Place(module._parameters, key, parameter, parameter.data.as_subclass(torch.Tensor))
        for module in model.modules()
        for key, parameter in module._parameters.items()
        if parameter is not None
    ]
    recorder = _Recorder({_storage(place.data) for place in places if place.data.numel()})
    for bucket in buckets:
        recorder.bucket = bucket.index
        stand_in = torch.empty(bucket.wire_bytes, dtype=torch.uint8, device=device)
        recorder.stand_in = _storage(stand_in)
        tensors = bucket.views(stand_in)
        try:
            with torch.no_grad(), recorder:
                load_weights(tensors)
        except Exception as error:  # whatever it is, the engine's own loading is what raises it to the user
            # What the recorder said counts, even if a loader made something else of it.
            recorder.reason = recorder.reason or f"load_weights raised {type(error).__name__}: {error}"
        moved = [place for place in places if not place.holds()]
        for place in moved:
            place.restore()
        if moved:
            recorder.reason = recorder.reason or "load_weights replaces parameters"
        if recorder.reason:
            raise NotDirectError(recorder.reason)
        del tensors
    excluded = set(excluded)
    required = {name: parameter for name, parameter in model.named_parameters() if name not in excluded}
    _check_coverage(required, [each.destination for each in (*recorder.copies, *recorder.fills)])
    return Recording(recorder.copies, recorder.fills, places, len(required))


class _Recorder(TorchDispatchMode):
    """Notes copies from a stand-in and constants without carrying them out; refuses all else."""

    def __init__(self, targets: set[int]):
        super().__init__()
        self.copies: list[Copy] = []
        self.fills: list[Fill] = []
        self.bucket = self.stand_in = 0
        self.reason = ""
        self._targets = targets

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        given = any(_storage(tensor) == self.stand_in for tensor in _tensors((args, kwargs)))
        if func is _COPY and _storage(args[1]) == self.stand_in:
            self._note_copy(*args[:2])
            return args[0]
        if func in _FILLS and not given:
            if args[0].numel():
                self._check_target(func, args[0])
                self.fills.append(Fill(_plain(args[0]), args[1] if len(args) > 1 else kwargs.get("value", 0)))
            return args[0]
        if _writes(func):
            self._refuse(f"load_weights uses {func}")
        result = func(*args, **kwargs)
        if given and not _only_views(result, {self.stand_in}):
            self._refuse(f"load_weights uses {func} on a received tensor")
        return result

    def _note_copy(self, destination: torch.Tensor, source: torch.Tensor) -> None:
        if destination.numel() == 0:
            return
        self._check_target(_COPY, destination)
        if (destination.dtype, destination.shape) != (source.dtype, source.shape):
            self._refuse(
                f"{source.dtype} {list(source.shape)} is received for {destination.dtype} {list(destination.shape)}"
            )
        destination, offset = _plain(destination), source.storage_offset()
        if destination.is_contiguous() and source.is_contiguous():
            # Flat on both sides, so that strides of dimensions of size 1 do not keep it off the fast path.
            copy = Copy(self.bucket, offset, (source.numel(),), (1,), destination.view(-1))
        else:
            copy = Copy(self.bucket, offset, tuple(source.shape), source.stride(), destination)
        self.copies.append(copy)

    def _check_target(self, func: torch._ops.OpOverload, tensor: torch.Tensor) -> None:
        if _storage(tensor) not in self._targets:
            self._refuse(f"load_weights uses {func} on something that is not a parameter")

    def _refuse(self, reason: str) -> None:
        self.reason = self.reason or reason
        raise NotDirectError(reason)


class _Trace(TorchDispatchMode):
    """Follows received bytes through an engine's own loading: who holds them, and was anything computed from them?"""

    def __init__(self) -> None:
        super().__init__()
        self.reason = ""
        # A weak reference keeps the storage's address from being used again, but not its memory.
        self._holders: dict[int, StorageWeakRef] = {}

    def received(self, wire: torch.Tensor) -> None:
        self._hold(wire)

    def holders_besides(self, tensors: Iterable[torch.Tensor]) -> int:
        """How many storages, besides those of `tensors`, hold received bytes."""
        allowed = {tensor.untyped_storage()._cdata for tensor in tensors}
        return sum(key not in allowed and not ref.expired() for key, ref in self._holders.items())

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        held = {_storage(tensor) for tensor in _tensors((args, kwargs)) if self._is_held(tensor)}
        result = func(*args, **kwargs)
        if not held or func in _FILLS:
            return result
        if func is _COPY and self._is_held(args[1]):
            destination, source = args[:2]
            if destination.is_meta:  # vLLM counts elements so
                return result
            if (destination.dtype, destination.shape) == (source.dtype, source.shape):
                self._hold(destination)
                return result
        elif func is _COPY or (not _writes(func) and _only_views(result, held)):
            return result
        self.reason = self.reason or f"the engine uses {func} on a weight"
        return result

    def _hold(self, tensor: torch.Tensor) -> None:
        reference = StorageWeakRef(tensor.untyped_storage())
        self._holders.setdefault(reference.cdata, reference)

    def _is_held(self, tensor: torch.Tensor) -> bool:
        return not tensor.is_meta and tensor.untyped_storage()._cdata in self._holders


class _Proof:
    """One update by the engine's own loading, against what was recorded."""

    def __init__(self, recording: Recording, device: torch.device):
        self.trace = _Trace()
        self._recording = recording
        self._sources: dict[Copy, torch.Tensor] = {}
        self._checksum = Checksum(device, max(copy.destination.nbytes for copy in recording.copies) + 8)

    def received(self, bucket: Bucket, wire: torch.Tensor) -> None:
        self.trace.received(wire)
        for copy in self._recording.copies:
            if copy.bucket == bucket.index:
                self._sources[copy] = self._sum(copy.source(wire.view(copy.destination.dtype)))

    def check(self) -> None:
        """NotDirectError unless copies alone would have done the same. The only wait for the device is here."""
        recording = self._recording
        if len(self._sources) != len(recording.copies):
            raise NotDirectError("not every bucket of the update was loaded")
        if not all(place.holds() for place in recording.places):
            raise NotDirectError("the engine's own loading puts parameters elsewhere")
        if self.trace.reason:
            raise NotDirectError(self.trace.reason)
        parameters = [place.data for place in recording.places]
        # Not the engine's: what only a reference cycle keeps, and a wire that a transport lets go of late (NCCL's
        # watchdog looks at finished work every 0.1 s).
        deadline = time.monotonic() + _LET_GO_S
        while (holders := self.trace.holders_besides(parameters)) and time.monotonic() < deadline:
            gc.collect()
            time.sleep(0.02)
        if holders:
            raise NotDirectError(f"the engine keeps weights in {holders} places that are not parameters")
        equal = [self._sources[copy] == self._sum(copy.destination) for copy in recording.copies]
        equal += [(fill.destination == fill.value).all() for fill in recording.fills]
        if differing := int((~torch.stack(equal)).sum()):
            raise NotDirectError(f"{differing} of {len(equal)} places do not hold what was received for them")

    def _sum(self, tensor: torch.Tensor) -> torch.Tensor:
        payload = tensor.contiguous().view(-1).view(torch.uint8)
        if missing := -payload.numel() % 8:
            payload = torch.nn.functional.pad(payload, (0, missing))
        return self._checksum(payload)


class DirectLoading:
    """Loads one plan's buckets into one model: by the engine's own loading, and by copies once that is proved equal.

    Per update: `begin`, `load` per bucket, `finish`. A failed update leaves a mix of weights either way, and the next
    complete one repairs it, since every element is covered.

    Args:
        model, buckets, load_weights, device, excluded: As for `record`.
        refused: Why only the engine's own loading is to be used, if so.
        say: Takes the log line that tells which way was chosen.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        buckets: Sequence[Bucket],
        load_weights: LoadWeights,
        device: torch.device,
        excluded: Iterable[str] = (),
        refused: str = "",
        say: Callable[[str], None] = print,
    ):
        self.buckets = list(buckets)
        self._model = model
        self._load_weights = load_weights
        self._device = device
        self._excluded = set(excluded)
        self._say = say
        self._recording: Recording | None = None
        self._proof: _Proof | None = None
        self._refused = False
        self._groups: dict[int, list[list[Copy]]] = {}
        self._loaded: set[int] = set()
        self.active = False
        """Whether this update goes by copies: the engine must then neither be prepared for loading nor finished."""
        if refused:
            self._refuse(refused)

    def begin(self) -> bool:
        """Start an update; returns `active`. Called before the engine is prepared for loading."""
        self._loaded.clear()
        self._proof = None
        if self.active and not all(place.holds() for place in self._recording.places):
            self._say("direct loading: parameters have moved, their places are learned again")
            self.active, self._recording = False, None
        if self.active or self._refused:
            return self.active
        # A failed update may have left parts of the model on meta, with the storage put away: then this update goes
        # the engine's way, and the next one is for learning.
        if self._recording is None and not any(parameter.is_meta for parameter in self._model.parameters()):
            try:
                self._recording = record(self._model, self.buckets, self._load_weights, self._device, self._excluded)
            except NotDirectError as error:
                self._refuse(error)
        if self._recording is not None:
            self._proof = _Proof(self._recording, self._device)
        return False

    def load(self, bucket: Bucket, wire: torch.Tensor) -> Any:
        """Load one received bucket; returns what `load_weights` returned, or None for copies.

        Copies are asynchronous on the current stream, and the caller may drop `wire` at once: the caching allocator
        gives its memory only to later work of the same stream, and a collective on a stream of its own first waits
        for the stream that allocated its buffer.
        """
        self._loaded.add(bucket.index)
        if self.active:
            with torch.no_grad():
                for group in self._groups.get(bucket.index, ()):
                    elements = wire.view(group[0].destination.dtype)
                    torch._foreach_copy_(
                        [copy.destination for copy in group], [copy.source(elements) for copy in group]
                    )
            return None
        if self._proof is None:
            return self._load_weights(bucket.views(wire))
        self._proof.received(bucket, wire)
        tensors = bucket.views(wire)
        with self._proof.trace:
            return self._load_weights(tensors)

    @property
    def complete(self) -> bool:
        """Whether every bucket of the plan was loaded since `begin`."""
        return self._loaded == {bucket.index for bucket in self.buckets}

    def finish(self, finish_engine: Callable[[], None]) -> None:
        """End an update. `finish_engine`, the engine's own way to end one, is called unless it went by copies."""
        if self.active:
            return
        if self._proof is None:
            finish_engine()
            return
        proof, self._proof = self._proof, None
        with proof.trace:
            finish_engine()
        try:
            proof.check()
        except NotDirectError as error:
            self._refuse(error)
            return
        self._groups = _group(self._recording.copies)
        self.active = True
        self._say(
            f"direct loading: {len(self._recording.copies)} copies into {self._recording.parameters} parameters, "
            "proved by checksum"
        )

    def _refuse(self, reason: NotDirectError | str) -> None:
        self._refused, self._recording = True, None
        self._say(f"layer-wise loading: {reason}")


def _group(copies: list[Copy]) -> dict[int, list[list[Copy]]]:
    """Per bucket, copies that one `_foreach_copy_` does fast: of one dtype, and all dense or none.

    One source that is not dense (a column slice for tensor parallelism) would put the whole call on the slow path.
    """
    groups: dict[tuple, list[Copy]] = {}
    for copy in copies:
        groups.setdefault((copy.bucket, copy.destination.dtype, copy.stride == (1,)), []).append(copy)
    by_bucket: dict[int, list[list[Copy]]] = {}
    for (bucket, *_), group in groups.items():
        by_bucket.setdefault(bucket, []).append(group)
    return by_bucket


def _check_coverage(required: dict[str, torch.Tensor], destinations: list[torch.Tensor]) -> None:
    """NotDirectError unless `destinations` hold every byte of the required parameters exactly once, and no other."""
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
        if parameter.numel() and merged.get(_storage(parameter)) != wanted[_storage(parameter)]:
            raise NotDirectError(f"load_weights does not fill {name} exactly")
    if merged.keys() != wanted.keys():
        raise NotDirectError("load_weights fills a parameter that is none of the model's own weights")


def _by_storage(tensors: Iterable[torch.Tensor]) -> dict[int, tuple[torch.Tensor, torch.Tensor]]:
    """Per storage, sorted starts and ends (bytes, int64) of the contiguous runs that `tensors` are made of."""
    runs: dict[int, list[torch.Tensor]] = {}
    for tensor in tensors:
        if tensor.numel():
            runs.setdefault(_storage(tensor), []).append(_runs(tensor))
    sorted_runs = {}
    for storage, parts in runs.items():
        starts, ends = torch.cat(parts, dim=1)
        starts, order = starts.sort()
        sorted_runs[storage] = starts, ends[order]
    return sorted_runs


def _runs(tensor: torch.Tensor) -> torch.Tensor:
    """Starts and ends in its storage (bytes, int64 [2, runs]) of the contiguous pieces of a tensor."""
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
    """Sorted runs, adjoining and overlapping ones put together."""
    reach = ends.cummax(0).values
    gap = starts[1:] > reach[:-1]
    first = torch.cat([torch.tensor([True]), gap])
    last = torch.cat([gap, torch.tensor([True])])
    return starts[first].tolist(), reach[last].tolist()


def _storage(tensor: Any) -> int:
    """Where the storage of a tensor begins; 0 for what has none."""
    return 0 if not isinstance(tensor, torch.Tensor) or tensor.is_meta else tensor.untyped_storage().data_ptr()


def _same_place(tensor: torch.Tensor, other: torch.Tensor) -> bool:
    return not tensor.is_meta and tensor.data_ptr() == other.data_ptr() and tensor.shape == other.shape


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory without autograd and without an engine's subclass."""
    return tensor.detach().as_subclass(torch.Tensor)


def _tensors(values: Any) -> list[torch.Tensor]:
    return [value for value in tree_leaves(values) if isinstance(value, torch.Tensor)]


def _writes(func: torch._ops.OpOverload) -> bool:
    """Whether an operator writes to any of its arguments."""
    return any(argument.alias_info is not None and argument.alias_info.is_write for argument in func._schema.arguments)


def _only_views(result: Any, storages: set[int]) -> bool:
    """Whether a result is nothing but views of given storages (or shapes without values, on meta)."""
    leaves = tree_leaves(result)
    return bool(leaves) and all(
        isinstance(leaf, torch.Tensor) and (leaf.is_meta or _storage(leaf) in storages) for leaf in leaves
    )
