"""Copies received weights straight into an engine's own storage, if that is all that the engine's loading does.

An engine's `load_weights` runs Python code for every tensor of every update. For most unquantised models the outcome is
a set of copies, always between the same places. `DirectLoading` learns those places once. It then loads a bucket with
one `_foreach_copy_` per dtype. Storage stays the same, so CUDA graphs stay valid. It copies directly only after all of
these steps succeeded on the very server that uses it. Otherwise it keeps to the engine's own loading.

1. Record: `load_weights` runs on stand-ins for the received tensors, with writes held back. It must do nothing with a
   stand-in but take views and copy them into parameters of the same dtype.
2. Coverage: those copies, and constants for padding, fill every byte of every parameter exactly once.
3. Proof: during one whole update by the engine's own loading, received bytes are only viewed and copied. Afterwards
   only parameters hold any of them, and each recorded destination has the checksum of its recorded source.

Imports torch only. Step 3 does not see kernels that an engine launches outside torch's dispatcher, except through the
checksums.
"""

import gc
import itertools
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from torchtitan.grpo.inside_vllm.load_recording import (
    COPY,
    FILLS,
    Copy,
    LoadWeights,
    NotDirectError,
    Recording,
    only_views,
    record,
    storage_of,
    tensors_in,
    writes,
)
from torchtitan.grpo.weight_wire.buckets import Bucket, Checksum, checksum_of

_LET_GO_S = 0.5


class _Trace(TorchDispatchMode):
    """Follows received bytes through an engine's own loading: what holds them, and is anything computed from them?"""

    def __init__(self) -> None:
        super().__init__()
        self.reason = ""
        # A weak reference keeps the address of a storage from being reused. It does not keep its memory.
        self._holders: dict[int, StorageWeakRef] = {}

    def received(self, wire: torch.Tensor) -> None:
        self._hold(wire)

    def holders_besides(self, tensors: Iterable[torch.Tensor]) -> int:
        """How many storages, besides those of `tensors`, hold received bytes."""
        allowed = {tensor.untyped_storage()._cdata for tensor in tensors}
        return sum(key not in allowed and not ref.expired() for key, ref in self._holders.items())

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        held = {storage_of(tensor) for tensor in tensors_in((args, kwargs)) if self._is_held(tensor)}
        result = func(*args, **kwargs)
        if not held or func in FILLS:
            return result
        if func is COPY and self._is_held(args[1]):
            destination, source = args[:2]
            if destination.is_meta:  # vLLM counts elements this way
                return result
            if (destination.dtype, destination.shape) == (source.dtype, source.shape):
                self._hold(destination)
                return result
        elif func is COPY or (not writes(func) and only_views(result, held)):
            return result
        self.reason = self.reason or f"the engine uses {func} on a weight"
        return result

    def _hold(self, tensor: torch.Tensor) -> None:
        reference = StorageWeakRef(tensor.untyped_storage())
        self._holders.setdefault(reference.cdata, reference)

    def _is_held(self, tensor: torch.Tensor) -> bool:
        return not tensor.is_meta and tensor.untyped_storage()._cdata in self._holders


class _Proof:
    """Compares one update by the engine's own loading with what was recorded."""

    def __init__(self, recording: Recording, device: torch.device):
        self.trace = _Trace()
        self.recording = recording
        self._sources: dict[Copy, torch.Tensor] = {}
        self._checksum = Checksum(device, max(copy.destination.nbytes for copy in recording.copies) + 8)

    def received(self, bucket: Bucket, wire: torch.Tensor) -> None:
        self.trace.received(wire)
        for copy in self.recording.copies:
            if copy.bucket == bucket.index:
                source = copy.source(wire.view(copy.destination.dtype))
                self._sources[copy] = checksum_of(source, self._checksum)

    def check(self) -> None:
        """NotDirectError unless copies alone would have done the same. Waits for the device; nothing else here does."""
        recording = self.recording
        if len(self._sources) != len(recording.copies):
            raise NotDirectError("not every bucket of the update was loaded")
        if not recording.holds():
            raise NotDirectError("the engine's own loading puts parameters elsewhere")
        if self.trace.reason:
            raise NotDirectError(self.trace.reason)
        parameters = [parameter.data for parameter in recording.registered]
        # Two holders are not the engine's: a reference cycle, and a transport that lets go of a wire late (NCCL's
        # watchdog looks at finished work every 0.1 s).
        deadline = time.monotonic() + _LET_GO_S
        while (holders := self.trace.holders_besides(parameters)) and time.monotonic() < deadline:
            gc.collect()
            time.sleep(0.02)
        if holders:
            raise NotDirectError(f"the engine keeps weights in {holders} places that are not parameters")
        equal = [self._sources[copy] == checksum_of(copy.destination, self._checksum) for copy in recording.copies]
        equal += [(fill.destination == fill.value).all() for fill in recording.fills]
        if differing := int((~torch.stack(equal)).sum()):
            raise NotDirectError(f"{differing} of {len(equal)} places do not hold what was received for them")


class DirectLoading:
    """Loads one plan's buckets into one model: by the engine's own loading, then by copies once they are proved equal.

    Per update: `begin`, `load` per bucket, `finish`. A failed update leaves a mix of weights either way. The next
    complete update repairs it, because every element is covered.

    Args:
        model, buckets, load_weights, device, excluded: As for `record`.
        refused: Why only the engine's own loading may be used. Empty: no reason.
        say: Receives a log line that says which way was chosen.
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
        """Whether this update is loaded by copies. The engine is then neither prepared for loading nor finished."""
        if refused:
            self._refuse(refused)

    def begin(self) -> bool:
        """Start an update; returns `active`. Called before the engine is prepared for loading."""
        self._loaded.clear()
        self._proof = None
        if self._recording is not None and self.active and not self._recording.holds():
            self._say("direct loading: parameters have moved, so their places are learned again")
            self.active, self._recording = False, None
        if self.active or self._refused:
            return self.active
        # A failed update may have left parts of the model on meta, with their storage put away. This update then uses
        # the engine's loading, and the next one records.
        if self._recording is None and not any(parameter.is_meta for parameter in self._model.parameters()):
            try:
                self._recording = record(self._model, self.buckets, self._load_weights, self._device, self._excluded)
            except NotDirectError as error:
                self._refuse(error)
        if self._recording is not None:
            self._proof = _Proof(self._recording, self._device)
        return False

    def load(self, bucket: Bucket, wire: torch.Tensor) -> Any:
        """Load one received bucket. Returns what `load_weights` returned, or None for copies.

        Copies are asynchronous on the current stream. The caller may still drop `wire` at once: the caching allocator
        gives its memory only to later work on the same stream, and a collective on another stream first waits for the
        stream that allocated its buffer.
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

    def held(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Published tensors as the model has them now, read back from where they are loaded to. None before copies are
        proved, and those of which other workers have a part are left out."""
        for bucket in self.buckets if self.active else ():
            wire = torch.zeros(bucket.wire_bytes, dtype=torch.uint8, device=self._device)
            filled = torch.zeros_like(wire)
            for copy in itertools.chain.from_iterable(self._groups.get(bucket.index, ())):
                copy.source(wire.view(copy.destination.dtype)).copy_(copy.destination)
                copy.source(filled.view(copy.destination.dtype)).fill_(1)
            for (name, tensor), (_, mark) in zip(bucket.views(wire), bucket.views(filled), strict=True):
                if bool((mark != 0).all()):
                    yield name, tensor

    def finish(self, finish_engine: Callable[[], None]) -> None:
        """End an update. Calls `finish_engine`, the engine's own way to end one, unless it was loaded by copies."""
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
        copies, parameters = proof.recording.copies, proof.recording.parameters
        self._groups = _group(copies)
        self.active = True
        self._say(f"direct loading: {len(copies)} copies into {parameters} parameters, proved by checksum")

    def _refuse(self, reason: NotDirectError | str) -> None:
        self._refused, self._recording = True, None
        self._say(f"layer-wise loading: {reason}")


def _group(copies: list[Copy]) -> dict[int, list[list[Copy]]]:
    """Per bucket, groups of copies for one fast `_foreach_copy_` each: of one dtype, and all dense or none.

    A single source that is not dense (a column slice for tensor parallelism) puts the whole call on the slow path.
    """
    groups: dict[tuple, list[Copy]] = {}
    for copy in copies:
        groups.setdefault((copy.bucket, copy.destination.dtype, copy.stride == (1,)), []).append(copy)
    by_bucket: dict[int, list[list[Copy]]] = {}
    for (bucket, *_), group in groups.items():
        by_bucket.setdefault(bucket, []).append(group)
    return by_bucket
