"""Sampling with noise that depends on the row and the position, not on the batch."""

import hashlib
import struct
from collections.abc import Mapping, Sequence

import numpy as np
import torch

from torchtitan.grpo.engines.protocol import SamplingParams

CHUNK_ELEMENTS = 1 << 25
"""Most logits that become float64 cumulative probabilities at once (256 MiB)."""

TEMPERATURE_MIN, TEMPERATURE_MAX = 1e-6, 1e6
"""Temperatures over 0 at which logits divided by it stay finite in float32."""

_WEYL = 0x9E3779B97F4A7C15 - (1 << 64)
_MIX_1 = 0xBF58476D1CE4E5B9 - (1 << 64)
_MIX_2 = 0x94D049BB133111EB - (1 << 64)


def noise_key(seed: int, sample: int) -> int:
    """The int64 key of the noise of answer number `sample` to a request with this seed."""
    message = struct.pack("<qq", seed, sample)
    return int.from_bytes(hashlib.blake2b(message, digest_size=8).digest(), "little", signed=True)


def _shift_right(x: torch.Tensor, bits: int) -> torch.Tensor:
    return (x >> bits) & ((1 << (64 - bits)) - 1)  # logical, on int64


def uniform(keys: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Uniform numbers in [0, 1), float64 [R], a pure function of key and position (int64 [R] each).

    It is SplitMix64 (Steele, Lea, Flood: Fast Splittable Pseudorandom Number Generators, 2014) as a counter-based
    generator. int64 arithmetic wraps around in the same way as its uint64.
    """
    x = keys + (positions + 1) * _WEYL
    x = (x ^ _shift_right(x, 30)) * _MIX_1
    x = (x ^ _shift_right(x, 27)) * _MIX_2
    x = x ^ _shift_right(x, 31)
    return _shift_right(x, 11).double() * 2.0**-53


def truncated(logprobs: torch.Tensor, cuts: Sequence[SamplingParams]) -> torch.Tensor:
    """Log-probabilities [R, V] of the tokens that are kept, -inf for the others.

    As in vLLM, top-p is a share of the probability that min-p and top-k leave: it keeps the most likely tokens until
    they have this share together. The most likely token is always kept.
    """

    def column(values: list[float]) -> torch.Tensor:
        return torch.tensor(values, dtype=logprobs.dtype, device=logprobs.device)[:, None]

    values, order = logprobs.sort(dim=-1, descending=True)
    ranks = torch.arange(values.shape[1], device=values.device)
    dropped = ranks >= column([cut.top_k or values.shape[1] for cut in cuts])
    dropped |= values < values[:, :1] + column([cut.min_p for cut in cuts]).log()
    probabilities = values.exp().masked_fill(dropped, 0)
    before, top_p = probabilities.cumsum(dim=-1) - probabilities, column([cut.top_p for cut in cuts])
    dropped |= (before >= top_p * probabilities.sum(dim=-1, keepdim=True)) & (top_p < 1)
    dropped[:, 0] = False
    return logprobs.masked_fill(torch.empty_like(dropped).scatter_(1, order, dropped), -torch.inf).log_softmax(dim=-1)


def sample(
    logits: torch.Tensor,
    temperatures: torch.Tensor,
    keys: torch.Tensor,
    positions: torch.Tensor,
    top: int = 0,
    cuts: Mapping[int, SamplingParams] | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, dict[int, np.ndarray]]:
    """Draw one token per row by inverting the cumulative distribution at the row's own uniform number.

    Each row and position has its own number. So a row draws the same token in any batch, as long as its logits are
    equal up to rounding. Temperature 0 takes the most likely token and reports log-probabilities at temperature 1.

    Args:
        logits: [R, V], any float dtype.
        temperatures: [R] float32, 0 or from TEMPERATURE_MIN to TEMPERATURE_MAX.
        keys, positions: [R] int64, see `uniform`.
        top: How many of the most likely tokens to return as well.
        cuts: Of the rows that keep a part of the vocabulary; see `truncated`. Other rows do not change by it.

    Returns:
        tokens [R] int64, log-probabilities [R] float32, and the most likely tokens' ids and log-probabilities, [R, top]
        each. Log-probabilities are NaN where the logits are. Last, the ids of the tokens that are kept, int32 in
        ascending order, by row of those whose `cuts` ask for them.
    """
    rows_per_chunk = max(1, CHUNK_ELEMENTS // logits.shape[1])
    numbers = uniform(keys, positions)
    greedy = temperatures == 0
    divisors = torch.where(greedy, 1.0, temperatures)
    tokens, logprobs, top_ids, top_logprobs = [], [], [], []
    kept: dict[int, np.ndarray] = {}
    for start in range(0, logits.shape[0], rows_per_chunk):
        rows = slice(start, start + rows_per_chunk)
        chunk = torch.log_softmax(logits[rows].float() / divisors[rows, None], dim=-1)
        if own := {row - start: cut for row, cut in (cuts or {}).items() if start <= row < start + len(chunk)}:
            places = torch.tensor(list(own)).to(chunk.device)
            chunk[places] = truncated(chunk[places], list(own.values()))
            kept |= _kept(chunk, [row for row, cut in own.items() if cut.kept], start)
        cumulative = chunk.exp().cumsum(dim=-1, dtype=torch.float64)
        # A number is < 1, so the target is below the last entry. `right` skips tokens of probability 0.
        targets = numbers[rows] * cumulative[:, -1]
        drawn = torch.searchsorted(cumulative, targets[:, None], right=True).squeeze(1)
        # Only NaN logits reach past the end. The clamp keeps their NaN log-probability, which the caller reports.
        drawn = torch.where(greedy[rows], chunk.argmax(dim=-1), drawn.clamp(max=logits.shape[1] - 1))
        tokens.append(drawn)
        logprobs.append(chunk.gather(1, drawn[:, None]).squeeze(1))
        best = chunk.topk(top, dim=-1)
        top_ids.append(best.indices)
        top_logprobs.append(best.values)
    return torch.cat(tokens), torch.cat(logprobs), torch.cat(top_ids), torch.cat(top_logprobs), kept


def _kept(logprobs: torch.Tensor, rows: list[int], first: int) -> dict[int, np.ndarray]:
    """The tokens over -inf of some rows, by row with `first` added."""
    if not rows:
        return {}
    places, ids = (logprobs[rows] > -torch.inf).nonzero().cpu().numpy().T
    ends = np.searchsorted(places, np.arange(1, len(rows)))
    return {first + row: own for row, own in zip(rows, np.split(ids.astype(np.int32), ends), strict=True)}
