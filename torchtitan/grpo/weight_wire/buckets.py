"""The plan: which tensor travels at which byte of which bucket, and how a bucket is checked. Pure functions on torch.

Order, cuts and offsets depend on the published tensors and the config only (I7, docs/weight_sync.md). The trainer
computes the plan once and sends it once to each server, as JSON. Both ends read every bucket by it.

A bucket on the wire is one uint8 tensor: `payload_bytes` of tensors at 16-byte aligned offsets, then a trailer of four
int64 values: weight version, bucket index, payload bytes, checksum of the payload.
"""

import functools
import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

logger = logging.getLogger(__name__)

ALIGNMENT_BYTES = 16
"""Offsets are multiples of this, so a received slice can be viewed as any dtype and copied in wide words."""

NUM_BUFFERS = 2
"""Buckets in flight at once: one is packed while the other is on the wire."""
BUCKET_BYTES_MAX = 1 << 30

TRAILER_FIELDS = 4
TRAILER_BYTES = TRAILER_FIELDS * 8

WIRE_DTYPES = {
    str(dtype).removeprefix("torch."): dtype for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64)
}

_CHUNK_WORDS = 1 << 22
_WORD_MIX = -0x61C8864680B583EB  # 2^64 / golden ratio as a signed word, odd
_CHUNK_MIX = -0x3D4D51C2D82B14B1  # odd, so multiplication by it is invertible
_INT64_SPAN = 1 << 64


@dataclass(frozen=True)
class TensorSpec:
    """A tensor on the wire: Hugging Face name, dtype and full (unsharded) shape."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class Bucket:
    """Tensors that travel together. `offsets` has one entry per tensor: bytes from the start of the payload."""

    index: int
    tensors: tuple[TensorSpec, ...]
    offsets: tuple[int, ...]
    payload_bytes: int

    @property
    def wire_bytes(self) -> int:
        """Payload and trailer: the size of the tensor that is broadcast."""
        return self.payload_bytes + TRAILER_BYTES

    def views(self, wire: torch.Tensor) -> list[tuple[str, torch.Tensor]]:
        """(name, tensor) pairs that share memory with `wire` (uint8, at least `payload_bytes` long)."""
        return [
            (spec.name, wire[offset : offset + spec.bytes].view(spec.dtype).view(spec.shape))
            for spec, offset in zip(self.tensors, self.offsets, strict=True)
        ]

    def gaps(self) -> list[tuple[int, int]]:
        """(start, end) of the payload's alignment padding. These bytes are zero."""
        ends = [offset + spec.bytes for spec, offset in zip(self.tensors, self.offsets, strict=True)]
        starts = [*self.offsets[1:], self.payload_bytes]
        return [(end, start) for end, start in zip(ends, starts, strict=True) if end < start]

    def trailer(self, wire: torch.Tensor) -> torch.Tensor:
        """The trailer, int64 [4], sharing memory with `wire`."""
        return wire[self.payload_bytes : self.wire_bytes].view(torch.int64)


def _aligned(n: int) -> int:
    return -(-n // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


def bucket_bytes(device_memory_bytes: int, buffer_memory_ratio: float) -> int:
    """Payload limit of one bucket: the NUM_BUFFERS in flight share `buffer_memory_ratio` of the device's memory.

    At least 1 MiB: with a small ratio a push is slow rather than impossible.
    """
    share = int(device_memory_bytes * buffer_memory_ratio / NUM_BUFFERS)
    return _aligned(max(1 << 20, min(share, BUCKET_BYTES_MAX)))


def plan_buckets(specs: Sequence[TensorSpec], limit_bytes: int) -> list[Bucket]:
    """Cut `specs`, in their order, into buckets of at most `limit_bytes` of payload.

    The order is kept, since an engine that reloads layer by layer finishes a layer when its last tensor arrives. A
    tensor is never cut: one that is over the limit has a bucket of its own.
    """
    buckets: list[Bucket] = []
    tensors: list[TensorSpec] = []
    offsets: list[int] = []
    end = 0

    def close() -> None:
        buckets.append(Bucket(len(buckets), tuple(tensors), tuple(offsets), end))

    for spec in specs:
        size = _aligned(spec.bytes)
        if tensors and end + size > limit_bytes:
            close()
            tensors, offsets, end = [], [], 0
        tensors.append(spec)
        offsets.append(end)
        end += size
    if tensors:
        close()
    return buckets


def plan_to_json(buckets: Sequence[Bucket]) -> list[list[list]]:
    """The plan as JSON values: per bucket, per tensor `[name, dtype, shape, offset]`."""
    return [
        [
            [spec.name, str(spec.dtype).removeprefix("torch."), list(spec.shape), offset]
            for spec, offset in zip(bucket.tensors, bucket.offsets, strict=True)
        ]
        for bucket in buckets
    ]


def plan_from_json(plan: list[list[list]]) -> list[Bucket]:
    """Inverse of `plan_to_json`.

    Raises:
        ValueError: Tensors overlap or leave gaps, a name appears twice, or a dtype is unknown.
    """
    buckets = []
    seen: set[str] = set()
    for index, entries in enumerate(plan):
        tensors, offsets, end = [], [], 0
        for name, dtype_name, shape, offset in entries:
            if dtype_name not in WIRE_DTYPES:
                raise ValueError(f"weight plan: {name} has dtype {dtype_name}, expected one of {sorted(WIRE_DTYPES)}")
            spec = TensorSpec(name, WIRE_DTYPES[dtype_name], tuple(int(n) for n in shape))
            if offset != end or min(spec.shape, default=0) < 0:
                raise ValueError(f"weight plan: {name} {shape} at byte {offset} of bucket {index}, expected byte {end}")
            if name in seen:
                raise ValueError(f"weight plan: {name} appears twice")
            seen.add(name)
            tensors.append(spec)
            offsets.append(offset)
            end += _aligned(spec.bytes)
        buckets.append(Bucket(index, tuple(tensors), tuple(offsets), end))
    return buckets


class Checksum:
    """Order-sensitive 64-bit sum of a payload, computed on the payload's device without waiting for it.

    Each int64 word is multiplied by an odd factor that depends on its position, and the results are added with
    wraparound. An odd factor maps words one to one, so any change of a single word changes the sum. Factors that depend
    on the position detect swapped words. The sum guards against torn, stale and misplaced bytes, not an adversary: of
    words that differ in their highest bit alone, it tells only whether their number is odd.

    On a GPU with Triton a kernel computes the same sum in one pass over memory.
    """

    def __init__(self, device: torch.device, largest_payload_bytes: int):
        words = self._words = min(_CHUNK_WORDS, max(1, largest_payload_bytes // 8))
        self._kernel = _kernel(device) if device.type == "cuda" else None
        if self._kernel is not None:
            chunks = -(-largest_payload_bytes // (8 * words))
            powers = [_signed(pow(_CHUNK_MIX, n, _INT64_SPAN)) for n in reversed(range(max(1, chunks)))]
            self._powers = torch.tensor(powers, dtype=torch.int64, device=device)
            return
        self._mix = torch.arange(1, words + 1, dtype=torch.int64, device=device).mul_(_WORD_MIX).bitwise_or_(1)

    def __call__(self, payload: torch.Tensor) -> torch.Tensor:
        """Checksum of a uint8 tensor whose length is a multiple of 8, as an int64 scalar tensor on its device."""
        return self.with_finite(payload)[0]

    def with_finite(
        self, payload: torch.Tensor, dtype: torch.dtype | None = None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The checksum, and whether the payload's elements of `dtype` are finite; None if that takes another pass."""
        words = payload.view(torch.int64)
        if self._kernel is not None:
            sums, finite = self._kernel(words, self._words, _WORD_MIX, dtype)
            return (sums * self._powers[self._powers.numel() - sums.numel() :]).sum(), finite
        total = torch.zeros((), dtype=torch.int64, device=payload.device)
        for start in range(0, words.numel(), self._mix.numel()):
            chunk = words[start : start + self._mix.numel()]
            total = total * _CHUNK_MIX + (chunk * self._mix[: chunk.numel()]).sum()
        return total, None


def checksum_of(tensor: torch.Tensor, checksum: Checksum | None = None) -> torch.Tensor:
    """The checksum of a tensor's bytes, padded with zeros to whole words, as an int64 scalar tensor on its device.

    Args:
        checksum: One that is made already. Sums by checksums for other sizes may differ.
    """
    data = tensor.contiguous().flatten().view(torch.uint8)
    if (missing := -len(data) % 8) or data.storage_offset() % 8:  # no view as words; `pad` copies
        data = torch.nn.functional.pad(data, (0, missing))
    return (checksum or Checksum(data.device, len(data)))(data)


@functools.cache
def _kernel(device: torch.device) -> Callable[..., tuple[torch.Tensor, torch.Tensor]] | None:
    """`checksum_kernel.sum_words`, if it works on this GPU and agrees with torch."""
    words = torch.arange(-(1 << 16), 1 << 16, device=device) * _CHUNK_MIX
    mix = torch.arange(1, 50_001, device=device).mul_(_WORD_MIX).bitwise_or_(1)
    expected = torch.stack([(chunk * mix[: chunk.numel()]).sum() for chunk in words.split(50_000)])
    try:
        from torchtitan.grpo.weight_wire.checksum_kernel import sum_words

        sums, _ = sum_words(words, 50_000, _WORD_MIX)
        if torch.equal(sums, expected):
            return sum_words
        why = "it computes other sums than torch"
    except Exception as error:  # Triton's own, and a compiler's
        why = f"{type(error).__name__}: {error}"
    logger.warning("checksums of weights take several passes, because the Triton kernel does not run here: %s", why)
    return None


def combine_checksums(checksums: Sequence[int]) -> int:
    """One signed 64-bit number for the bucket checksums, in their order."""
    total = 0
    for value in checksums:
        total = (total * _CHUNK_MIX + value) % _INT64_SPAN
    return _signed(total)


def _signed(value: int) -> int:
    return value - _INT64_SPAN if value >= _INT64_SPAN // 2 else value
