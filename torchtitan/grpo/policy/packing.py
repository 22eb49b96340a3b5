"""Samples of different lengths -> packed rows under a token budget, the same number of rows on every rank.

A row ("microbatch") is documents laid end to end with no gaps: attention is kept inside each document by `cu_seqlens`
and positions restart at 0. A document is prompt + answer up to the last token that is trained, less that token, which
predicts nothing that is trained.
"""

import heapq
import math
from collections.abc import Iterable
from dataclasses import dataclass, field, fields
from itertools import accumulate, chain

import numpy as np
import torch
from torch import Tensor

from torchtitan.grpo.errors import UserError

INT_ROWS = ("tokens", "positions", "targets", "loss_mask", "sample_index", "ages")
FLOAT_ROWS = ("advantages", "weights", "sampler_logprobs")
# Padding is cut into documents of this length: a longer one costs attention, and FlashAttention's backward takes memory
# for 128 more tokens a document.
PADDING_DOCUMENT_TOKENS = 256


@dataclass
class PackedSample:
    """One prompt and answer with what the loss needs.

    Attributes:
        advantage: Of the whole answer.
        weight: Of each trained token in the step's global sum (`losses.token_weights`).
        sampler_logprobs: One per answer token; zeros for supervised training.
        ages: One per answer token, the version that is trained less the one that sampled it. Empty: zeros.
        loss_mask: One per answer token, False where an environment gave it: context, not trained. None: all are.
    """

    prompt_ids: list[int]
    answer_ids: list[int]
    advantage: float
    weight: float
    sampler_logprobs: list[float]
    ages: list[int] = field(default_factory=list)
    loss_mask: list[bool] | None = None

    @property
    def trained_end(self) -> int:
        """Answer tokens up to the last one that is trained; 0 if none is."""
        if self.loss_mask is None:
            return len(self.answer_ids)
        return len(self.loss_mask) - self.loss_mask[::-1].index(True) if True in self.loss_mask else 0

    @property
    def document_tokens(self) -> int:
        """Positions that it takes in a row; 0 if it trains nothing."""
        end = self.trained_end
        return len(self.prompt_ids) + end - 1 if end else 0


@dataclass
class Answers:
    """What the loss reads of a row: its values at `Microbatch.answer_positions`, each [A], ready without a host sync.

    Copies of the row's own: what changes an answer's value after packing changes it here.

    Attributes:
        targets, sample_ids, ages: int64.
        advantages, weights, sampler_logprobs: float32.
    """

    targets: Tensor
    sample_ids: Tensor
    ages: Tensor
    advantages: Tensor
    weights: Tensor
    sampler_logprobs: Tensor


@dataclass
class Microbatch:
    """One packed row; tensors are [T] unless said. Padding, if any, is last: documents that train nothing.

    A value about answer token `y` sits at the position that predicts it: `targets[t] == y`, and its `advantages`,
    `weights`, `sampler_logprobs` and `ages` are at the same t. They are 0 where `loss_mask` is False.

    Attributes:
        tokens: int64, input of the model.
        positions: int64, 0 at the start of each document. In padding they end at the row's largest, or at 1 if that is
            0, so that they stay within the model's table.
        targets: int64, the next token of the document where it is trained, else 0.
        loss_mask: bool, True where the target is an answer token that is trained.
        sample_ids: int64, nondecreasing 0..n-1 over the row's samples, -1 on padding.
        cu_seqlens: int32 [docs + 1], where documents start, and T; padding documents included.
        max_seqlen: Longest document in tokens, padding included.
        advantages, weights, sampler_logprobs: float32.
        ages: int64, by how many versions the weights that sampled the target are older than those that are trained.
        sample_index: int64 [n], which of the samples given to `pack` has sample id k.
        answer_positions: int64 [A], where `loss_mask` is True. To index a tensor with the mask itself makes the host
            wait for a CUDA device, which alone knows how many there are.
        answers: The values there.
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
    ages: Tensor
    sample_index: Tensor
    answer_positions: Tensor
    answers: Answers

    def to(self, device: torch.device | str) -> "Microbatch":
        """The same row on `device`: itself if it is there, else by one copy, which does not block towards CUDA."""
        device = torch.device(device)
        if self.tokens.device == device:
            return self
        names = [f.name for f in fields(self) if f.name not in ("max_seqlen", "answers")]
        answer_names = [f.name for f in fields(self.answers)]
        tensors = [getattr(self, name) for name in names] + [getattr(self.answers, name) for name in answer_names]
        moved = _move(tensors, device)
        answers = Answers(**dict(zip(answer_names, moved[len(names) :], strict=True)))
        row = dict(zip(names, moved[: len(names)], strict=True))
        return Microbatch(**row, max_seqlen=self.max_seqlen, answers=answers)

    def to_tensors(self) -> tuple[Tensor, Tensor, Tensor]:
        """Header int64 [3] (integer rows, float rows, T), int64 [rows, T] and float32 [rows, T], to be sent to a rank.

        The receiver gets the header first, allocates with `empty_tensors(header)`, and calls `from_tensors`.
        """
        if len(self.sample_index):
            sample_index = self.sample_index[self.sample_ids.clamp(min=0)].where(self.sample_ids >= 0, -1)
        else:
            sample_index = torch.full_like(self.tokens, -1)
        changed = {"loss_mask": self.loss_mask.long(), "sample_index": sample_index}
        ints = torch.stack([changed.get(name, getattr(self, name)) for name in INT_ROWS])
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
        rows["sample_ids"] = document.where(rows["sample_index"] >= 0, -1)
        answer_positions = rows["loss_mask"].nonzero().flatten()
        return Microbatch(
            tokens=rows["tokens"],
            positions=rows["positions"],
            targets=rows["targets"],
            loss_mask=rows["loss_mask"].bool(),
            sample_ids=rows["sample_ids"],
            cu_seqlens=cu_seqlens,
            max_seqlen=int(cu_seqlens.diff().max()),
            advantages=rows["advantages"],
            weights=rows["weights"],
            sampler_logprobs=rows["sampler_logprobs"],
            ages=rows["ages"],
            sample_index=index_at_start[index_at_start >= 0],
            answer_positions=answer_positions,
            answers=Answers(**{f.name: rows[f.name].index_select(0, answer_positions) for f in fields(Answers)}),
        )


def _move(tensors: list[Tensor], device: torch.device) -> list[Tensor]:
    """All tensors on `device` by one copy, as views of one block of bytes; the host's side is pinned for CUDA.

    PyTorch keeps pinned memory and gives it out again only after the copies from it are done.
    """
    sizes = [tensor.numel() * tensor.element_size() for tensor in tensors]
    # Each starts at a multiple of 16 bytes: torch.compile copies inputs that do not.
    starts = [0, *accumulate(-(-size // 16) * 16 for size in sizes)]
    spans = [slice(start, start + size) for start, size in zip(starts[:-1], sizes, strict=True)]
    to_cuda = device.type == "cuda"
    source = tensors[0].device
    block = torch.empty(starts[-1], dtype=torch.uint8, device=source, pin_memory=to_cuda and source.type == "cpu")
    for tensor, span in zip(tensors, spans, strict=True):
        block[span].copy_(tensor.contiguous().view(torch.uint8))
    moved = block.to(device, non_blocking=to_cuda)
    return [moved[span].view(tensor.dtype) for tensor, span in zip(tensors, spans, strict=True)]


def pack(
    samples: list[PackedSample],
    budget_tokens: int,
    num_ranks: int,
    pad_multiple: int = 1,
    attention_tokens: float = math.inf,
) -> list[list[Microbatch]]:
    """Rows of at most `budget_tokens` for each rank: `result[rank]` is that rank's microbatches, on the CPU.

    Every rank gets the same number of rows (sharded parameters are gathered by all ranks at once), at least one; a rank
    with too little work gets rows of padding alone. The longest samples go first into the least loaded of as few rows
    as hold them that way, or as first-fit-decreasing needs if that is fewer. Rows of similar cost go to the ranks in
    the same turn, because a turn takes as long as its dearest row. The result is a function of the arguments alone.
    Samples without a trained token are left out.

    A document of L tokens costs L + L^2 / (2 `attention_tokens`), a token of padding costs 1. As dear documents are
    few to a row and cheap ones fill the budget, rows are loaded by cost, by attention alone (right where padding makes
    all rows as long) and by tokens, and what makes the turns' dearest rows cheapest in sum is taken.

    Args:
        budget_tokens: `[training] tokens_per_microbatch`, a multiple of `pad_multiple`.
        pad_multiple: Rows are padded to a multiple of this; the budget itself gives rows of one fixed length.
        attention_tokens: The position from which a token's attention costs more than its linear layers, from
            `packed_model.attention_tokens`; infinity balances tokens.
    Raises:
        UserError: a sample exceeds the budget, or the budget is not a multiple of `pad_multiple`.
        ValueError: an empty prompt, or log-probabilities, ages or a loss mask that do not match the answer.
    """
    if budget_tokens < 1 or budget_tokens % pad_multiple:
        raise UserError(
            f"[training] tokens_per_microbatch = {budget_tokens} must be a positive multiple of {pad_multiple}, to "
            "which rows are padded"
        )
    for i, sample in enumerate(samples):
        _check(i, sample, budget_tokens)
    lengths = {i: tokens for i, sample in enumerate(samples) if (tokens := sample.document_tokens)}
    rows = _assign(lengths, budget_tokens, num_ranks, pad_multiple, attention_tokens)
    turns = len(rows) // num_ranks
    return [
        [_build(samples, rows[turn * num_ranks + rank], pad_multiple) for turn in range(turns)]
        for rank in range(num_ranks)
    ]


def packing_metrics(minibatches: list[list[list[Microbatch]]], attention_tokens: float = math.inf) -> dict[str, float]:
    """What packing costs, over the results of one or more calls of `pack`.

    `pack/padding_fraction` is padding tokens over all tokens of all rows. `pack/imbalance` is the cost (see `pack`) of
    each turn's dearest row over the mean of its ranks, both summed over turns: 1 if no rank waits for another.
    """
    rows = [row for rows_by_rank in minibatches for rows in rows_by_rank for row in rows]
    padding = sum(int((row.sample_ids < 0).sum()) for row in rows)
    turns = [turn for rows_by_rank in minibatches for turn in zip(*rows_by_rank, strict=True)]
    costs = [[_row_cost(row, attention_tokens) for row in turn] for turn in turns]
    return {
        "pack/padding_fraction": padding / sum(len(row.tokens) for row in rows),
        "pack/imbalance": sum(map(max, costs)) / sum(sum(turn) / len(turn) for turn in costs),
    }


def _row_cost(row: Microbatch, attention_tokens: float) -> float:
    lengths = row.cu_seqlens.diff().double()
    return float((lengths + lengths.square() / (2 * attention_tokens)).sum())


def _check(index: int, sample: PackedSample, budget_tokens: int) -> None:
    if not sample.prompt_ids:
        raise ValueError(f"sample {index} has an empty prompt: no position predicts its first answer token")
    for name, values in (
        ("sampler log-probabilities", sample.sampler_logprobs),
        ("ages", sample.ages or sample.answer_ids),
        ("loss mask values", sample.answer_ids if sample.loss_mask is None else sample.loss_mask),
    ):
        if len(values) != len(sample.answer_ids):
            raise ValueError(f"sample {index} has {len(values)} {name} for {len(sample.answer_ids)} answer tokens")
    if sample.document_tokens > budget_tokens:
        raise UserError(
            f"sample {index} takes {sample.document_tokens} tokens (prompt {len(sample.prompt_ids)}, answer "
            f"{sample.trained_end}, less the last), over the budget of {budget_tokens}: raise [training] "
            "tokens_per_microbatch, or lower [rollout] max_answer_tokens or [data] max_prompt_tokens"
        )


def _assign(
    lengths: dict[int, int], budget_tokens: int, num_ranks: int, pad_multiple: int, attention_tokens: float
) -> list[list[int]]:
    """Sample indices of each row, rows in falling order of cost; a multiple of `num_ranks` rows, at least that many."""
    attention = {i: tokens**2 / (2 * attention_tokens) for i, tokens in lengths.items()}
    costs = {i: tokens + attention[i] for i, tokens in lengths.items()}
    all_loads = [lengths] if attention_tokens == math.inf else [costs, attention, lengths]

    def cost(row: list[int]) -> float:
        tokens = sum(lengths[i] for i in row)
        return max(1, -(-tokens // pad_multiple)) * pad_multiple + sum(attention[i] for i in row)

    def duration(rows: list[list[int]]) -> float:
        return sum(sorted(map(cost, rows), reverse=True)[::num_ranks])

    longest_first = sorted(lengths, key=lambda i: (-lengths[i], i))
    tight = _first_fit(longest_first, lengths, budget_tokens)
    least_turns = max(1, -(-sum(lengths.values()) // (budget_tokens * num_ranks)))
    most_turns = max(1, -(-len(tight) // num_ranks))
    for turns in range(least_turns, most_turns + 1):
        tried = (_least_loaded(longest_first, lengths, loads, budget_tokens, turns * num_ranks) for loads in all_loads)
        balanced = [rows for rows in tried if rows]
        if balanced:
            rows = min(balanced, key=duration)
            break
    else:  # balancing wastes room that first fit does not
        rows = tight + [[] for _ in range(most_turns * num_ranks - len(tight))]
    return sorted(map(sorted, rows), key=lambda row: (-cost(row), -sum(lengths[i] for i in row)))


def _least_loaded(
    order: list[int], lengths: dict[int, int], loads: dict[int, float], budget_tokens: int, num_rows: int
) -> list[list[int]]:
    """Each sample into the row with the least load of those that have room for it; [] if none has."""
    rows: list[list[int]] = [[] for _ in range(num_rows)]
    room = [budget_tokens] * num_rows
    heap = [(0, row) for row in range(num_rows)]  # (load, row)
    for i in order:
        full = []
        while heap and room[heap[0][1]] < lengths[i]:
            full.append(heapq.heappop(heap))
        if not heap:
            return []
        load, row = heap[0]
        heapq.heapreplace(heap, (load + loads[i], row))
        rows[row].append(i)
        room[row] -= lengths[i]
        for entry in full:
            heapq.heappush(heap, entry)
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
    laid = [samples[i] for i in row]
    ends = [s.trained_end for s in laid]
    prompts, answers = np.array([len(s.prompt_ids) for s in laid], np.int64), np.array(ends, np.int64)
    documents = prompts + answers - 1
    length = int(documents.sum())
    padding = -length % pad_multiple if length else pad_multiple
    all_ints = np.zeros((len(INT_ROWS), length + padding), np.int64)
    all_floats = np.zeros((len(FLOAT_ROWS), length + padding), np.float32)
    ints, floats = dict(zip(INT_ROWS, all_ints, strict=True)), dict(zip(FLOAT_ROWS, all_floats, strict=True))

    positions = np.arange(length) - np.repeat(documents.cumsum() - documents, documents)
    pad_positions = np.minimum(np.arange(padding) % PADDING_DOCUMENT_TOKENS, documents.max(initial=2) - 1)
    ints["positions"][:] = np.append(positions, pad_positions)
    ints["sample_index"][:] = np.append(np.repeat(np.array(row, np.int64), documents), np.full(padding, -1))
    tokens = (ids for s, end in zip(laid, ends, strict=True) for ids in (s.prompt_ids, s.answer_ids[: end - 1]))
    ints["tokens"][:length] = np.fromiter(chain.from_iterable(tokens), np.int64, length)

    trained = np.ones(answers.sum(), bool)  # over answer tokens, as `lay` gets them
    if any(s.loss_mask for s in laid):
        masks = (s.loss_mask[:end] if s.loss_mask else [True] * end for s, end in zip(laid, ends, strict=True))
        trained = np.fromiter(chain.from_iterable(masks), bool, len(trained))
    where = (positions >= np.repeat(prompts - 1, documents)).nonzero()[0][trained]

    def lay(values: np.ndarray, answer_values: Iterable[list]) -> None:
        """Put one value per answer token where it is predicted, less those that are not trained."""
        parts = (part[:end] for part, end in zip(answer_values, ends, strict=True))
        values[where] = np.fromiter(chain.from_iterable(parts), values.dtype, len(trained))[trained]

    lay(ints["targets"], (s.answer_ids for s in laid))
    lay(ints["ages"], (s.ages or [0] * end for s, end in zip(laid, ends, strict=True)))
    lay(floats["sampler_logprobs"], (s.sampler_logprobs for s in laid))
    ints["loss_mask"][where] = 1
    floats["advantages"][where] = np.repeat(np.array([s.advantage for s in laid], np.float32), answers)[trained]
    floats["weights"][where] = np.repeat(np.array([s.weight for s in laid], np.float32), answers)[trained]
    return Microbatch.from_tensors(torch.from_numpy(all_ints), torch.from_numpy(all_floats))
