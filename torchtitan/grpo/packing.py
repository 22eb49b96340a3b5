"""Samples of different lengths -> packed rows under a token budget, the same number of rows on every rank.

A row ("microbatch") is documents laid end to end with no gaps: attention is kept inside each document by `cu_seqlens`
and positions restart at 0. A document is prompt + answer less its last token, which predicts nothing that is trained.
"""

import heapq
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from torchtitan.grpo.errors import UserError

INT_ROWS = ("tokens", "positions", "targets", "loss_mask", "sample_index")
FLOAT_ROWS = ("advantages", "weights", "sampler_logprobs")


@dataclass
class PackedSample:
    """One prompt and answer with what the loss needs.

    Attributes:
        advantage: Of the whole answer.
        weight: Of each answer token in the step's global sum (`losses.token_weights`).
        sampler_logprobs: One per answer token; zeros for supervised training.
    """

    prompt_ids: list[int]
    answer_ids: list[int]
    advantage: float
    weight: float
    sampler_logprobs: list[float]


@dataclass
class Microbatch:
    """One packed row; tensors are [T] unless said. Padding, if any, is last: documents that train nothing.

    A value about answer token `y` sits at the position that predicts it: `targets[t] == y`, and its `advantages`,
    `weights` and `sampler_logprobs` are at the same t. They are 0 where `loss_mask` is False.

    Attributes:
        tokens: int64, input of the model.
        positions: int64, 0 at the start of each document.
        targets: int64, the next token of the document where it is an answer token, else 0.
        loss_mask: bool, True where the target is an answer token.
        sample_ids: int64, nondecreasing 0..n-1 over the row's samples, -1 on padding.
        cu_seqlens: int32 [docs + 1], where documents start, and T; padding documents included.
        max_seqlen: Longest document in tokens, padding included.
        advantages, weights, sampler_logprobs: float32.
        sample_index: int64 [n], which of the samples given to `pack` has sample id k.
    """

    tokens: Tensor
    positions: Tensor
    targets: Tensor
    loss_mask: Tensor
    sample_ids: Tensor
    cu_seqlens: Tensor
    max_seqlen: int
    advantages: Tensor
    weights: Tensor
    sampler_logprobs: Tensor
    sample_index: Tensor

    def to(self, device: torch.device | str) -> "Microbatch":
        """The same row on `device`; copies from pinned memory do not block."""
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        return Microbatch(**{k: v.to(device, non_blocking=True) if k != "max_seqlen" else v for k, v in values.items()})

    def to_tensors(self) -> tuple[Tensor, Tensor, Tensor]:
        """Header int64 [3] (integer rows, float rows, T), int64 [rows, T] and float32 [rows, T], to be sent to a rank.

        The receiver gets the header first, allocates with `empty_tensors(header)`, and calls `from_tensors`.
        """
        if len(self.sample_index):
            sample_index = self.sample_index[self.sample_ids.clamp(min=0)].where(self.sample_ids >= 0, -1)
        else:
            sample_index = torch.full_like(self.tokens, -1)
        ints = torch.stack([self.tokens, self.positions, self.targets, self.loss_mask.long(), sample_index])
        floats = torch.stack([getattr(self, name) for name in FLOAT_ROWS])
        header = torch.tensor([len(INT_ROWS), len(FLOAT_ROWS), len(self.tokens)], dtype=torch.int64)
        return header.to(ints.device), ints, floats

    @staticmethod
    def empty_tensors(header: Tensor) -> tuple[Tensor, Tensor]:
        """Uninitialised int64 [rows, T] and float32 [rows, T] on the header's device, to receive into."""
        int_rows, float_rows, length = header.tolist()
        return (
            torch.empty(int_rows, length, dtype=torch.int64, device=header.device),
            torch.empty(float_rows, length, dtype=torch.float32, device=header.device),
        )

    @staticmethod
    def from_tensors(ints: Tensor, floats: Tensor) -> "Microbatch":
        """Inverse of `to_tensors`. Document bounds and sample ids follow from positions (0 starts a document)."""
        rows = dict(zip(INT_ROWS, ints, strict=True)) | dict(zip(FLOAT_ROWS, floats, strict=True))
        starts = (rows["positions"] == 0).nonzero().flatten()
        cu_seqlens = torch.cat([starts, starts.new_tensor([ints.shape[1]])]).int()
        document = (rows["positions"] == 0).cumsum(0) - 1
        index_at_start = rows["sample_index"][starts]
        return Microbatch(
            tokens=rows["tokens"],
            positions=rows["positions"],
            targets=rows["targets"],
            loss_mask=rows["loss_mask"].bool(),
            sample_ids=document.where(rows["sample_index"] >= 0, -1),
            cu_seqlens=cu_seqlens,
            max_seqlen=int(cu_seqlens.diff().max()),
            advantages=rows["advantages"],
            weights=rows["weights"],
            sampler_logprobs=rows["sampler_logprobs"],
            sample_index=index_at_start[index_at_start >= 0],
        )


def pack(
    samples: list[PackedSample], budget_tokens: int, num_ranks: int, pad_multiple: int = 1
) -> list[list[Microbatch]]:
    """Rows of at most `budget_tokens` for each rank: `result[rank]` is that rank's microbatches, on the CPU.

    Every rank gets the same number of rows (sharded parameters are gathered by all ranks at once), at least one; a rank
    with too little work gets rows of padding alone. The longest samples go first into the least loaded of as few rows
    as hold them that way, or as first-fit-decreasing needs if that is fewer. Rows of similar length go to the ranks in
    the same turn, because a turn takes as long as its longest row. The result is a function of the arguments alone.
    Samples with an empty answer have nothing to train and are left out.

    Args:
        budget_tokens: `[training] tokens_per_microbatch`, a multiple of `pad_multiple`.
        pad_multiple: Rows are padded to a multiple of this; the budget itself gives rows of one fixed length.
    Raises:
        UserError: a sample exceeds the budget, or the budget is not a multiple of `pad_multiple`.
        ValueError: an empty prompt, or log-probabilities that do not match the answer.
    """
    if budget_tokens < 1 or budget_tokens % pad_multiple:
        raise UserError(
            f"[training] tokens_per_microbatch = {budget_tokens} must be a positive multiple of {pad_multiple}, to "
            "which rows are padded"
        )
    for i, sample in enumerate(samples):
        _check(i, sample, budget_tokens)
    trained = [i for i, sample in enumerate(samples) if sample.answer_ids]
    rows = _assign({i: _document_tokens(samples[i]) for i in trained}, budget_tokens, num_ranks)
    turns = len(rows) // num_ranks
    return [
        [_build(samples, rows[turn * num_ranks + rank], pad_multiple) for turn in range(turns)]
        for rank in range(num_ranks)
    ]


def _document_tokens(sample: PackedSample) -> int:
    return len(sample.prompt_ids) + len(sample.answer_ids) - 1


def _check(index: int, sample: PackedSample, budget_tokens: int) -> None:
    if not sample.prompt_ids:
        raise ValueError(f"sample {index} has an empty prompt: no position predicts its first answer token")
    if len(sample.sampler_logprobs) != len(sample.answer_ids):
        raise ValueError(
            f"sample {index} has {len(sample.sampler_logprobs)} sampler log-probabilities for "
            f"{len(sample.answer_ids)} answer tokens"
        )
    if _document_tokens(sample) > budget_tokens:
        raise UserError(
            f"sample {index} takes {_document_tokens(sample)} tokens (prompt {len(sample.prompt_ids)}, answer "
            f"{len(sample.answer_ids)}, less the last), over the budget of {budget_tokens}: raise [training] "
            "tokens_per_microbatch, or lower [rollout] max_answer_tokens or [data] max_prompt_tokens"
        )


def _assign(lengths: dict[int, int], budget_tokens: int, num_ranks: int) -> list[list[int]]:
    """Sample indices of each row, rows in falling order of load; a multiple of `num_ranks` rows, at least that many."""
    longest_first = sorted(lengths, key=lambda i: (-lengths[i], i))
    tight = _first_fit(longest_first, lengths, budget_tokens)
    least_turns = max(1, -(-sum(lengths.values()) // (budget_tokens * num_ranks)))
    most_turns = max(1, -(-len(tight) // num_ranks))
    for turns in range(least_turns, most_turns + 1):
        rows = _least_loaded(longest_first, lengths, budget_tokens, turns * num_ranks)
        if rows:
            break
    else:  # balancing wastes room that first fit does not
        rows = tight + [[] for _ in range(most_turns * num_ranks - len(tight))]
    return sorted(map(sorted, rows), key=lambda row: -sum(lengths[i] for i in row))


def _least_loaded(order: list[int], lengths: dict[int, int], budget_tokens: int, num_rows: int) -> list[list[int]]:
    """Each sample into the row with the fewest tokens; [] if one exceeds the budget there, as it then does in all."""
    rows: list[list[int]] = [[] for _ in range(num_rows)]
    heap = [(0, row) for row in range(num_rows)]  # (tokens, row)
    for i in order:
        load, row = heap[0]
        if load + lengths[i] > budget_tokens:
            return []
        heapq.heapreplace(heap, (load + lengths[i], row))
        rows[row].append(i)
    return rows


def _first_fit(order: list[int], lengths: dict[int, int], budget_tokens: int) -> list[list[int]]:
    rows: list[list[int]] = []
    room: list[int] = []
    for i in order:
        row = next((r for r, free in enumerate(room) if free >= lengths[i]), len(rows))
        if row == len(rows):
            rows.append([])
            room.append(budget_tokens)
        rows[row].append(i)
        room[row] -= lengths[i]
    return rows


def _build(samples: list[PackedSample], row: list[int], pad_multiple: int) -> Microbatch:
    """Lay the samples of one row end to end and pad; an empty row is `pad_multiple` tokens of padding."""
    ints: dict[str, list[int]] = {name: [] for name in INT_ROWS}
    floats: dict[str, list[float]] = {name: [] for name in FLOAT_ROWS}

    def lay(tokens: list[int], answer: list[int], logprobs: list[float], index: int, advantage: float, weight: float):
        context = len(tokens) - len(answer)  # positions that predict no answer token
        ints["tokens"] += tokens
        ints["positions"] += range(len(tokens))
        ints["targets"] += [0] * context + answer
        ints["loss_mask"] += [0] * context + [1] * len(answer)
        ints["sample_index"] += [index] * len(tokens)
        floats["advantages"] += [0.0] * context + [advantage] * len(answer)
        floats["weights"] += [0.0] * context + [weight] * len(answer)
        floats["sampler_logprobs"] += [0.0] * context + logprobs

    for i in row:
        s = samples[i]
        lay([*s.prompt_ids, *s.answer_ids[:-1]], s.answer_ids, s.sampler_logprobs, i, s.advantage, s.weight)
    length = len(ints["tokens"])
    padding = -length % pad_multiple if length else pad_multiple
    # No padding document is longer than the row's longest: positions stay within the model's table.
    longest = max((_document_tokens(samples[i]) for i in row), default=1)
    for start in range(0, padding, longest):
        lay([0] * min(longest, padding - start), [], [], -1, 0.0, 0.0)
    return Microbatch.from_tensors(
        torch.tensor([ints[name] for name in INT_ROWS], dtype=torch.int64),
        torch.tensor([floats[name] for name in FLOAT_ROWS], dtype=torch.float32),
    )
