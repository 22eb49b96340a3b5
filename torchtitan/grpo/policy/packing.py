"""Samples of different lengths -> packed rows under a token budget, the same number of rows on every rank."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np

from torchtitan.grpo.data.kept_tokens import KeptTokens
from torchtitan.grpo.data.routes import free
from torchtitan.grpo.data.samples import TopTokens
from torchtitan.grpo.errors import UserError
from torchtitan.grpo.policy.assignment import Part, assign, groups_by_prompt
from torchtitan.grpo.policy.rows import PackedRow, PackedSample


def pack(
    samples: list[PackedSample],
    budget_tokens: int,
    num_ranks: int,
    pad_multiple: int = 1,
    attention_tokens: float = math.inf,
    share_prompts: bool = True,
) -> list[list[PackedRow]]:
    """Rows of at most `budget_tokens` for each rank, on the host: `result[rank]` holds that rank's rows.

    All ranks gather sharded parameters together, so every rank gets the same number of rows, at least one. A rank with
    too little work gets rows of padding. The longest sample goes first, each into the least loaded row that has room.
    Of all ways that are tried, those with the fewest rows count, and of these the one whose turns cost least. Rows at
    the same position of their ranks' lists run together, and the most expensive one sets the time. Such a turn
    therefore gets rows of similar cost. The result is a function of the arguments alone. Samples without a trained
    token are left out.

    A document of L tokens costs L + L^2 / (2 `attention_tokens`). A token of padding costs 1. Three loads are tried:
    cost, attention alone (right where padding makes all rows as long) and tokens, and first fit where none has room.

    Samples with the same prompt stay together in parts of their group, and each part has the prompt once. Parts of
    several sizes are tried (`assignment.PARTS_OF_A_ROW`).

    Args:
        budget_tokens: `[training] tokens_per_microbatch`, a multiple of `pad_multiple`.
        pad_multiple: Rows are padded to a multiple of this; the budget itself gives rows of one fixed length.
        attention_tokens: The position from which a token's attention costs more than its other layers, from
            `model.flops.TrainingFlops`; infinity balances tokens.
        share_prompts: False gives every document its own prompt.

    Raises:
        UserError: a sample exceeds the budget, or the budget is not a multiple of `pad_multiple`.
        ValueError: an empty prompt, or values per token that do not match the answer.
    """
    if budget_tokens < 1 or budget_tokens % pad_multiple:
        raise UserError(
            f"[training] tokens_per_microbatch = {budget_tokens} must be a positive multiple of {pad_multiple}, to "
            "which rows are padded"
        )
    for i, sample in enumerate(samples):
        _check(i, sample, budget_tokens)
    lengths = {i: tokens for i, sample in enumerate(samples) if (tokens := sample.document_tokens)}
    groups = groups_by_prompt(samples, lengths) if share_prompts else [Part([i], 0) for i in lengths]
    rows = assign(groups, lengths, budget_tokens, num_ranks, pad_multiple, attention_tokens)
    turns, no_routes = len(rows) // num_ranks, _no_routes(samples)
    k = max((sample.top.ids.shape[1] for sample in samples if sample.top is not None), default=0)
    return [
        [_build(samples, rows[turn * num_ranks + rank], pad_multiple, no_routes, k) for turn in range(turns)]
        for rank in range(num_ranks)
    ]


@dataclass(frozen=True)
class Layout:
    """How a run's rows are cut: the arguments of `pack`."""

    row_tokens: int
    ranks: int
    multiple: int
    attention_tokens: float
    share_prompts: bool = True

    def pack(self, samples: list[PackedSample]) -> list[list[PackedRow]]:
        return pack(samples, self.row_tokens, self.ranks, self.multiple, self.attention_tokens, self.share_prompts)


def packing_sums(minibatches: list[list[list[PackedRow]]], attention_tokens: float = math.inf) -> list[float]:
    """Of the results of calls of `pack`: padding, all tokens, tokens that are shared, the cost (see `pack`) of each
    turn's most expensive row, and the mean of its ranks."""
    rows = [row for rows_by_rank in minibatches for rows in rows_by_rank for row in rows]
    padding = sum(row.padding for row in rows)
    tokens, shared = sum(len(row.tokens) for row in rows), sum(int(row.shared.sum()) for row in rows)
    turns = [turn for rows_by_rank in minibatches for turn in zip(*rows_by_rank, strict=True)]
    costs = [[_row_cost(row, attention_tokens) for row in turn] for turn in turns]
    return [padding, tokens, shared, sum(map(max, costs)), sum(sum(turn) / len(turn) for turn in costs)]


def packing_fractions(sums: Sequence[float]) -> dict[str, float]:
    """What packing costs and saves.

    `pack/padding_fraction` is the share of padding in all tokens. `pack/shared_fraction` is the share of the documents'
    tokens that no row has, because an earlier document has them. `pack/imbalance` is the cost (see `pack`) of each
    turn's most expensive row over the mean of its ranks, both summed over turns. It is 1 if no rank waits.
    """
    padding, tokens, shared, slowest, mean = sums
    return {
        "pack/padding_fraction": padding / tokens,
        "pack/shared_fraction": shared / max(1, tokens - padding + shared),
        "pack/imbalance": slowest / mean,
    }


def _row_cost(row: PackedRow, attention_tokens: float) -> float:
    lengths = np.diff(row.cu_seqlens).astype(float)
    starts: np.ndarray = np.append(row.shared, np.zeros(len(lengths) - len(row.shared)))
    return float((lengths + lengths * (2 * starts + lengths) / (2 * attention_tokens)).sum())


def _check(index: int, sample: PackedSample, budget_tokens: int) -> None:
    if not len(sample.prompt_ids):
        raise ValueError(f"sample {index} has an empty prompt: no position predicts its first answer token")
    for name, values in (
        (
            "sampler log-probabilities",
            sample.answer_ids if sample.sampler_logprobs is None else sample.sampler_logprobs,
        ),
        ("ages", sample.ages if len(sample.ages) else sample.answer_ids),
        ("servers", sample.servers if len(sample.servers) else sample.answer_ids),
        ("token advantages", sample.token_advantages or sample.answer_ids),
        ("positions with likeliest tokens", sample.answer_ids if sample.top is None else sample.top.ids),
        ("positions with kept tokens", sample.answer_ids if sample.kept is None else sample.kept),
        ("loss mask values", sample.answer_ids if sample.loss_mask is None else sample.loss_mask),
    ):
        if len(values) != len(sample.answer_ids):
            raise ValueError(f"sample {index} has {len(values)} {name} for {len(sample.answer_ids)} answer tokens")
    if sample.routes is not None and len(sample.routes) < sample.document_tokens:
        raise ValueError(f"sample {index} has routes of {len(sample.routes)} positions, not {sample.document_tokens}")
    if sample.document_tokens > budget_tokens:
        raise UserError(
            f"sample {index} takes {sample.document_tokens} tokens (prompt {len(sample.prompt_ids)}, answer "
            f"{sample.trained_end}, less the last), over the budget of {budget_tokens}: raise [training] "
            "tokens_per_microbatch, or lower [rollout] max_answer_tokens or [data] max_prompt_tokens"
        )


def _build(
    samples: list[PackedSample], parts: list[list[int]], pad_multiple: int, no_routes: np.ndarray | None, top_k: int
) -> PackedRow:
    """Lay the samples of one row end to end and pad; an empty row is `pad_multiple` tokens of padding.

    Args:
        parts: Samples with one prompt in each, which the first one's document has.
        no_routes: From `_no_routes`.
        top_k: Most likeliest tokens that a sample has at a position.
    """
    row = [i for part in parts for i in part]
    laid = [samples[i] for i in row]
    ends = [s.trained_end for s in laid]
    firsts = [k == 0 for part in parts for k in range(len(part))]
    skips = [0 if first else len(s.prompt_ids) - 1 for first, s in zip(firsts, laid, strict=True)]
    skipped = np.array(skips, np.int64)
    prompts, answers = np.array([len(s.prompt_ids) for s in laid], np.int64), np.array(ends, np.int64)
    documents = prompts + answers - 1 - skipped
    length = int(documents.sum())
    total = length + (-length % pad_multiple if length else pad_multiple)
    tokens: np.ndarray = np.zeros(total, np.int32)
    parts_of_tokens = [
        ids
        for s, skip, end in zip(laid, skips, ends, strict=True)
        for ids in (s.prompt_ids[skip:], s.answer_ids[: end - 1])
    ]
    tokens[:length] = _flat(parts_of_tokens, np.int32, length)

    kept = np.ones(answers.sum(), bool)  # the answer tokens that are trained
    if any(s.loss_mask is not None for s in laid):
        masks = [
            np.ones(end, bool) if s.loss_mask is None else np.asarray(s.loss_mask[:end], bool)
            for s, end in zip(laid, ends, strict=True)
        ]
        kept = _flat(masks, bool, len(kept))
    trained: np.ndarray = np.zeros(total, bool)
    in_document = np.arange(length) - np.repeat(documents.cumsum() - documents - skipped, documents)
    trained[(in_document >= np.repeat(prompts - 1, documents)).nonzero()[0][kept]] = True

    def laid_out(answer_values: Iterable[Any], dtype: type) -> np.ndarray:
        """One value for each trained token."""
        parts = [part[:end] for part, end in zip(answer_values, ends, strict=True)]
        return _flat(parts, dtype, len(kept))[kept]

    def laid_out_if_any(name: str, dtype: type) -> np.ndarray:
        """The same of the attribute `name`; zeros where a sample has none."""
        given = [() if (values := getattr(s, name)) is None else values for s in laid]
        if not any(map(len, given)):
            return np.zeros(kept.sum(), dtype)
        return laid_out(
            (values if len(values) else np.zeros(end, dtype) for values, end in zip(given, ends, strict=True)), dtype
        )

    result = PackedRow(
        tokens=tokens,
        trained=trained,
        samples=np.array(row, np.int32),
        lengths=documents.astype(np.int32),
        shared=skipped.astype(np.int32),
        advantages=np.array([s.advantage for s in laid], np.float32),
        weights=np.array([s.weight for s in laid], np.float32),
        targets=laid_out((s.answer_ids for s in laid), np.int32),
        sampler_logprobs=laid_out_if_any("sampler_logprobs", np.float32),
        ages=laid_out_if_any("ages", np.int16),
        servers=laid_out_if_any("servers", np.int16),
    )
    if any(s.token_advantages for s in laid):
        terms = (s.token_advantages or [0.0] * end for s, end in zip(laid, ends, strict=True))
        sums = ([s.advantage + a for a in own] for s, own in zip(laid, terms, strict=True))
        result.token_advantages = laid_out(sums, np.float32)
    if no_routes is not None:
        result.routes = _routes(laid, skips, documents, total, no_routes)
    if top_k:
        tops = [s.top or TopTokens.none(end, top_k) for s, end in zip(laid, ends, strict=True)]
        none = TopTokens.none(0, top_k)
        result.top_ids = np.concatenate([none.ids, *(t.ids[:end] for t, end in zip(tops, ends, strict=True))])[kept]
        logprobs = [none.logprobs, *(t.logprobs[:end] for t, end in zip(tops, ends, strict=True))]
        result.top_logprobs = np.concatenate(logprobs)[kept]
    if any(s.kept is not None for s in laid):
        cuts = [s.kept.first(end) if s.kept else KeptTokens.all(end) for s, end in zip(laid, ends, strict=True)]
        cut = KeptTokens.joined(cuts).where(kept)
        result.kept_counts, result.kept_ids = cut.counts, cut.ids
    return result


def _no_routes(samples: list[PackedSample]) -> np.ndarray | None:
    """An empty array with the layers, top_k and dtype of the samples' routes; None if none has any."""
    return next((s.routes[:0] for s in samples if s.routes is not None), None)


def _routes(
    laid: list[PackedSample], skips: list[int], documents: np.ndarray, total: int, no_routes: np.ndarray
) -> np.ndarray:
    """The row's routes; free where a sample has none, and on padding."""
    routes = np.full((total, *no_routes.shape[1:]), free(no_routes.dtype), no_routes.dtype)
    end = 0
    for sample, skip, length in zip(laid, skips, documents.tolist(), strict=True):
        start, end = end, end + length
        if sample.routes is not None:
            routes[start:end] = sample.routes[skip : skip + length]
    return routes


def _flat(parts: Sequence[Any], dtype: np.dtype | type, length: int) -> np.ndarray:
    """The values of all parts end to end. Arrays are copied as blocks; of lists, one element at a time."""
    if parts and all(isinstance(part, np.ndarray) for part in parts):
        return np.concatenate(parts, dtype=dtype)
    return np.fromiter(chain.from_iterable(parts), dtype, length)
