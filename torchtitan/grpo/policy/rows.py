"""A step's answers before they reach a device: sample, and packed row on the host. Nothing here needs torch.

A row is documents laid end to end with no gaps. A document is a prompt and its answer up to the last trained token,
less that token, which predicts nothing that is trained.

Answers of a group have their prompt in common. Under causal attention its states depend on nothing behind it, so a row
can hold it once: the first document is whole, and those right behind it begin with the prompt's last token, which
predicts each one's first. They attend to the prompt's other positions in the first document.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from functools import cached_property

import numpy as np

from torchtitan.grpo.data import array_bytes
from torchtitan.grpo.data.kept_tokens import KeptTokens
from torchtitan.grpo.data.samples import TopTokens

PADDING_DOCUMENT_TOKENS = 256
"""Padding is cut into documents of this length. A longer one costs attention; a shorter one costs memory, because
FlashAttention's backward pass allocates room for 128 extra tokens per document."""


@dataclass
class PackedSample:
    """One prompt and answer with what the loss needs. Arrays, in place of lists, are packed several times as fast.

    Attributes:
        advantage: Of the whole answer.
        weight: Of each trained token in the step's global sum (`batch.token_weights`).
        sampler_logprobs: One per answer token. None means zeros, for supervised training.
        ages: One per answer token: version in training minus version that sampled it. Empty means zeros.
        loss_mask: One per answer token. False marks context that an environment gave, which is not trained. None
            trains all.
        servers: One per answer token, see `SamplerCheck.numbers`. Empty means zeros.
        token_advantages: One per answer token, added to `advantage`. Empty means zeros.
        routes: The experts of each position of the document, and maybe more, see `data/routes.py`. None leaves the
            choice to the routers.
        top: The teacher's or the sampler's likeliest tokens at each answer token. None: there are none.
        kept: The tokens that could be drawn in place of each answer token. None: all.
    """

    prompt_ids: list[int] | np.ndarray
    answer_ids: list[int] | np.ndarray
    advantage: float
    weight: float
    sampler_logprobs: list[float] | None
    ages: list[int] | np.ndarray = field(default_factory=list)
    loss_mask: list[bool] | np.ndarray | None = None
    servers: list[int] | np.ndarray = field(default_factory=list)
    token_advantages: list[float] = field(default_factory=list)
    routes: np.ndarray | None = None
    top: TopTokens | None = None
    kept: KeptTokens | None = None

    @property
    def trained_end(self) -> int:
        """Answer tokens up to the last trained one; 0 if none is trained."""
        mask = self.loss_mask
        if mask is None:
            return len(self.answer_ids)
        if isinstance(mask, np.ndarray):
            return int(mask.nonzero()[0].max(initial=-1)) + 1
        return len(mask) - mask[::-1].index(True) if True in mask else 0

    @property
    def document_tokens(self) -> int:
        """Positions that the sample takes in a row; 0 if it trains nothing."""
        end = self.trained_end
        return len(self.prompt_ids) + end - 1 if end else 0


@dataclass
class PackedRow:
    """One packed row on the host, as few bytes as it takes: 5 for each position and 12 for each trained token.

    T positions hold n documents, then padding. A value about answer token `y` belongs to the position that predicts it;
    A of them are trained.

    Attributes:
        tokens: int32 [T], input of the model.
        trained: bool [T], whether the position's prediction is trained.
        samples: int32 [n], which of the samples given to `pack` each document is.
        lengths: int32 [n], positions that the row has of it.
        shared: int32 [n], positions that it has in an earlier document: the position of its first.
        advantages, weights: float32 [n], see `PackedSample`.
        targets: int32 [A], the document's next token.
        sampler_logprobs: float32 [A].
        ages, servers: int16 [A]. A server is numbered from 1, and 0 is none.
        token_advantages: float32 [A], in place of `advantages`; None where an answer has one for all its tokens.
        routes: uint8 or int16 [T, layers, top_k], see `PackedSample`; all `routes.free` where the router chooses.
        top_ids, top_logprobs: int32 and float32 [A, K], see `TopTokens`.
        kept_counts, kept_ids: int32 [A] and their sum, see `KeptTokens`.
    """

    tokens: np.ndarray
    trained: np.ndarray
    samples: np.ndarray
    lengths: np.ndarray
    shared: np.ndarray
    advantages: np.ndarray
    weights: np.ndarray
    targets: np.ndarray
    sampler_logprobs: np.ndarray
    ages: np.ndarray
    servers: np.ndarray
    token_advantages: np.ndarray | None = None
    routes: np.ndarray | None = None
    top_ids: np.ndarray | None = None
    top_logprobs: np.ndarray | None = None
    kept_counts: np.ndarray | None = None
    kept_ids: np.ndarray | None = None

    @property
    def padding(self) -> int:
        """Positions of padding."""
        return len(self.tokens) - int(self.lengths.sum())

    @property
    def cu_seqlens(self) -> np.ndarray:
        """int32 [docs + 1]: where each document starts, then T. Padding documents are included."""
        padding = self.padding
        of_padding = np.full(-(-padding // PADDING_DOCUMENT_TOKENS), PADDING_DOCUMENT_TOKENS)
        of_padding[-1:] -= -padding % PADDING_DOCUMENT_TOKENS
        return np.concatenate([[0], self.lengths, of_padding]).cumsum().astype(np.int32)

    @property
    def positions(self) -> np.ndarray:
        """int64 [T], in the whole document. Padding documents stay within the row's largest position, or within 1, so
        that they never leave the model's RoPE table."""
        lengths: np.ndarray = self.lengths.astype(np.int64)
        padding = self.padding
        starts = lengths.cumsum() - lengths - self.shared
        positions = np.arange(lengths.sum()) - np.repeat(starts, lengths)
        of_padding = np.minimum(np.arange(padding) % PADDING_DOCUMENT_TOKENS, positions.max(initial=1))
        return np.append(positions, of_padding)

    @cached_property
    def sample_ids(self) -> np.ndarray:
        """int64 [T], nondecreasing 0..n-1 over the row's documents; -1 on padding."""
        return np.append(np.repeat(np.arange(len(self.lengths)), self.lengths), np.full(self.padding, -1))


def to_bytes(rows: Sequence[PackedRow]) -> bytes:
    """The rows for another process or rank: type, shape and bytes of each array, as MessagePack."""
    return array_bytes.to_bytes(
        [{f.name: x for f in fields(row) if (x := getattr(row, f.name)) is not None} for row in rows]
    )


def encoded(rows_by_rank: Sequence[Sequence[PackedRow]]) -> list[bytes | memoryview]:
    """Each rank's rows as bytes."""
    return [to_bytes(rows) for rows in rows_by_rank]


def documents(minibatches: Sequence[Sequence[Sequence[PackedRow]]]) -> tuple[list[int], list[int], int]:
    """Of the rows of all ranks: the positions of each document and those that it has in an earlier one, and the number
    of trained tokens."""
    rows = [row for rows_by_rank in minibatches for rows in rows_by_rank for row in rows]
    lengths, shared = ([n for row in rows for n in getattr(row, name).tolist()] for name in ("lengths", "shared"))
    return lengths, shared, sum(len(row.targets) for row in rows)


def from_bytes(data: bytes | memoryview) -> list[PackedRow]:
    """Inverse of `to_bytes`. The arrays cannot be written."""
    return [PackedRow(**arrays) for arrays in array_bytes.from_bytes(data)]
