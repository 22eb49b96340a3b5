"""`buckets.Checksum` on a GPU in one pass over memory, as a Triton kernel. torch's own operations take about four.

The same pass tells whether the payload's floating-point elements are finite. Needs Triton and a C compiler, which
`buckets` finds out: without them it uses torch.
"""

import torch
import triton
import triton.language as tl

_BLOCK = 1024
_ROUNDS = 16
_SPAN = _BLOCK * _ROUNDS
"""Words of one program."""
_EXPONENTS = {
    torch.bfloat16: 0x7F80,
    torch.float16: 0x7C00,
    torch.float32: 0x7F800000,
    torch.float64: 0x7FF0000000000000,
}
"""Bits that are all set in an infinite or NaN element."""


@triton.jit(do_not_specialize=["count", "chunk_words", "programs_per_chunk"])
def _sum_words(  # type: ignore[no-untyped-def]  # Triton reads the annotations
    words,
    sums,
    not_finite,
    count,
    chunk_words,
    programs_per_chunk,
    MIX: tl.constexpr,
    LANES: tl.constexpr,
    EXPONENT: tl.constexpr,
    BLOCK: tl.constexpr,
    ROUNDS: tl.constexpr,
):
    program = tl.program_id(0)
    chunk = (program // programs_per_chunk).to(tl.int64)
    first = (program % programs_per_chunk) * (BLOCK * ROUNDS)
    total = tl.zeros([BLOCK], tl.int64)
    bad = tl.zeros([BLOCK], tl.int32)
    for i in range(ROUNDS):
        place = first + i * BLOCK + tl.arange(0, BLOCK)
        index = chunk * chunk_words + place
        word = tl.load(words + index, mask=(place < chunk_words) & (index < count), other=0)
        total += word * (((place.to(tl.int64) + 1) * MIX) | 1)
        for lane in tl.static_range(LANES):
            bad |= (((word >> (lane * (64 // LANES))) & EXPONENT) == EXPONENT).to(tl.int32)
    tl.store(sums + program, tl.sum(total, 0))
    tl.store(not_finite + program, tl.max(bad, 0))


def sum_words(
    words: torch.Tensor, chunk_words: int, mix: int, dtype: torch.dtype | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """The sums of `buckets.Checksum`, one for each chunk, on the current stream.

    Args:
        words: int64 [count], contiguous.
        chunk_words: Words of a chunk; the last may have fewer.
        mix: Word i of a chunk is multiplied by ((i + 1) * mix) | 1.
        dtype: Of the elements that must be finite; None looks at none.

    Returns:
        int64 [chunks], and whether all elements are finite, as a scalar.
    """
    count = words.numel()
    chunks, each = -(-count // chunk_words), -(-chunk_words // _SPAN)
    sums = torch.empty(chunks * each, dtype=torch.int64, device=words.device)
    not_finite = torch.empty(chunks * each, dtype=torch.int32, device=words.device)
    lanes, exponent = (8 // dtype.itemsize, _EXPONENTS[dtype]) if dtype is not None else (0, 0)
    with torch.cuda.device_of(words):
        _sum_words[(chunks * each,)](
            words, sums, not_finite, count, chunk_words, each, mix, lanes, exponent, _BLOCK, _ROUNDS
        )
    return sums.view(chunks, each).sum(1), ~not_finite.any()
