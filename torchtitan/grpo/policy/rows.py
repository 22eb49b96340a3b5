"""A step's answers in the three forms that they take: sample, packed row on the host, microbatch on the device.

A row is documents laid end to end with no gaps. A document is a prompt and its answer up to the last trained token,
less that token, which predicts nothing that is trained.

Answers of a group have their prompt in common. Under causal attention its states depend on nothing behind it, so a row
can hold it once: the first document is whole, and those right behind it begin with the prompt's last token, which
predicts each one's first. They attend to the prompt's other positions in the first document.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import accumulate
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from torchtitan.grpo.data.samples import TopTokens

INT_ROWS = ("tokens", "positions", "targets", "servers", "sample_index", "ages")
FLOAT_ROWS = ("advantages", "weights", "sampler_logprobs")
OPTIONAL_ROWS = ("routes", "top_ids", "top_logprobs")
"""Fields of `PackedRow` that all rows of a step have, or none has. They have more dimensions than positions."""


@dataclass
class PackedSample:
    """One prompt and answer with what the loss needs. Arrays, in place of lists, are packed several times as fast.

    Attributes:
        advantage: Of the whole answer.
        weight: Of each trained token in the step's global sum (`losses.token_weights`).
        sampler_logprobs: One per answer token. None means zeros, for supervised training.
        ages: One per answer token: version in training minus version that sampled it. Empty means zeros.
        loss_mask: One per answer token. False marks context that an environment gave, which is not trained. None
            trains all.
        servers: One per answer token, see `SamplerCheck.numbers`. Empty means zeros.
        token_advantages: One per answer token, added to `advantage`. Empty means zeros.
        routes: The experts of each position of the document, and maybe more, see `data/routes.py`. None leaves the
            choice to the routers.
        top: The teacher's likeliest tokens at each answer token. None: there are none.
    """

    prompt_ids: list[int] | np.ndarray
    answer_ids: list[int] | np.ndarray
    advantage: float
    weight: float
    sampler_logprobs: list[float] | None
    ages: list[int] = field(default_factory=list)
    loss_mask: list[bool] | np.ndarray | None = None
    servers: list[int] = field(default_factory=list)
    token_advantages: list[float] = field(default_factory=list)
    routes: np.ndarray | None = None
    top: TopTokens | None = None

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
    """One packed row on the host: what rank 0 packs and sends. Every tensor is [T].

    A value about answer token `y` sits at the position that predicts it: if `targets[t] == y`, its advantage, weight,
    sampler log-probability and age are at the same t. They are 0 where `loss_mask` is False. Padding comes last.

    Attributes:
        tokens: int64, input of the model.
        positions: int64, in the whole document: 0 at its start, but for a document that lacks its prompt. Padding
            documents stay within the row's largest position, or within 1, so that they never leave the model's RoPE
            table.
        targets: int64, the document's next token where that is trained, else 0.
        servers: int64, the number of the server that the target is compared with, from 1, or 0 for none; -1 where the
            target is not trained.
        sample_index: int64, which of the samples given to `pack`; -1 on padding.
        ages: int64, see `PackedSample`.
        advantages, weights, sampler_logprobs: float32.
        routes: uint8 or int16 [T, layers, top_k], see `PackedSample`; all `routes.free` where the router chooses.
        top_ids, top_logprobs: int32 and float32 [T, K], see `TopTokens`; no token where the target is not trained.
    """

    tokens: Tensor
    positions: Tensor
    targets: Tensor
    servers: Tensor
    sample_index: Tensor
    ages: Tensor
    advantages: Tensor
    weights: Tensor
    sampler_logprobs: Tensor
    routes: Tensor | None = None
    top_ids: Tensor | None = None
    top_logprobs: Tensor | None = None

    @staticmethod
    def from_tensors(ints: Tensor, floats: Tensor, optional: Mapping[str, Tensor]) -> "PackedRow":
        """Inverse of `to_tensors` and `optional`."""
        named = dict(zip(INT_ROWS, ints, strict=True)) | dict(zip(FLOAT_ROWS, floats, strict=True))
        return PackedRow(**named, **optional)

    @property
    def optional(self) -> dict[str, Tensor]:
        """Those of `OPTIONAL_ROWS` that the row has."""
        return {name: tensor for name in OPTIONAL_ROWS if (tensor := getattr(self, name)) is not None}

    def to_tensors(self) -> tuple[Tensor, Tensor]:
        """int64 [6, T] and float32 [3, T], to be sent to another rank, beside `optional`."""
        ints = torch.stack([getattr(self, name) for name in INT_ROWS])
        return ints, torch.stack([getattr(self, name) for name in FLOAT_ROWS])

    @cached_property
    def loss_mask(self) -> Tensor:
        """bool [T], True where the target is trained."""
        return self.servers >= 0

    @cached_property
    def cu_seqlens(self) -> Tensor:
        """int32 [docs + 1]: where each document starts, then T. Padding documents are included."""
        starts = self._begins.nonzero().flatten()
        return torch.cat([starts, starts.new_tensor([len(self.tokens)])]).int()

    @cached_property
    def sample_ids(self) -> Tensor:
        """int64 [T], nondecreasing 0..n-1 over the row's samples; -1 on padding."""
        document = self._begins.cumsum(0) - 1
        return document.where(self.sample_index >= 0, -1)

    @property
    def samples(self) -> Tensor:
        """int64 [n], which of the samples given to `pack` has sample id k."""
        first = self.sample_index[self.cu_seqlens[:-1].long()]
        return first[first >= 0]

    @property
    def lengths(self) -> Tensor:
        """int32 [n], positions that the row has of the document of sample id k."""
        return self.cu_seqlens.diff()[self.sample_index[self.cu_seqlens[:-1].long()] >= 0]

    @property
    def shared(self) -> Tensor:
        """int64 [n], positions that sample id k has in an earlier document: its first one's position."""
        starts = self.cu_seqlens[:-1].long()
        return self.positions[starts[self.sample_index[starts] >= 0]]

    @property
    def _begins(self) -> Tensor:
        """bool [T], True at each document's first position."""
        begins = self.positions == 0
        begins[1:] |= self.sample_index[1:] != self.sample_index[:-1]
        return begins

    def to(self, device: torch.device | str) -> "Microbatch":
        """What a training step reads of the row, on `device`: one copy, which does not block towards CUDA."""
        # Indexing by the mask on a CUDA device would make the host wait: only the device knows how many it selects.
        at = self.loss_mask.nonzero().flatten()
        of_teacher = ("top_ids", "top_logprobs") if self.top_ids is not None else ()
        answers = {name: getattr(self, name).index_select(0, at) for name in (*ANSWER_FIELDS, *of_teacher)}
        tensors = {
            "tokens": self.tokens,
            "positions": self.positions,
            "cu_seqlens": self.cu_seqlens,
            "answer_positions": at,
            "samples": self.samples,
            **answers,
        } | ({"routes": self.routes} if self.routes is not None else {})
        keys = DocumentKeys.of(self.positions, self.cu_seqlens)
        moved = [*tensors.values(), *(keys[:-1] if keys is not None else ())]
        device = torch.device(device)
        if device != self.tokens.device:
            moved = _move(moved, device)
        if keys is not None:
            positions, cu_keys, order, bounds = moved[len(tensors) :]
            keys = keys._replace(positions=positions, cu_keys=cu_keys, order=order, bounds=bounds)
        tensors = dict(zip(tensors, moved, strict=False))
        return Microbatch(**tensors, max_seqlen=int(self.cu_seqlens.diff().max()), keys=keys)


class DocumentKeys(NamedTuple):
    """Which positions each document attends to, in a row that holds a prompt once for several documents.

    Attributes:
        positions: int64 [K], those of each whole document, in its order. Documents follow each other.
        cu_keys: int32 [docs + 1], where each document's start in `positions`.
        order: int64 [K], the places in `positions` by position, for gradients: those of position t are `order[bounds[t]
            : bounds[t + 1]]`.
        bounds: int32 [T + 1].
        longest: Positions of the longest whole document.
    """

    positions: Tensor
    cu_keys: Tensor
    order: Tensor
    bounds: Tensor
    longest: int

    @classmethod
    def of(cls, positions: Tensor, cu_seqlens: Tensor) -> "DocumentKeys | None":
        """Those of a `PackedRow` on the host; None if all its documents are whole."""
        starts, lengths = cu_seqlens[:-1].long(), cu_seqlens.diff().long()
        shared = positions[starts]
        if not shared.any():
            return None
        documents = torch.arange(len(starts))
        whole = documents.where(shared == 0, 0).cummax(0).values  # the one with the prompt, of each document
        firsts, sizes = torch.stack([starts[whole], starts], 1).flatten(), torch.stack([shared, lengths], 1).flatten()
        offsets = sizes.cumsum(0) - sizes
        keys = (firsts - offsets).repeat_interleave(sizes) + torch.arange(int(sizes.sum()))
        return cls(
            keys,
            _bounds(shared + lengths),
            keys.argsort(stable=True),
            _bounds(keys.bincount(minlength=len(positions))),
            int((shared + lengths).max()),
        )


@dataclass
class Microbatch:
    """One packed row on the device: what the model [T] and the loss [A] read. A is the number of trained answer tokens.

    Attributes:
        tokens, positions: int64 [T], see `PackedRow`.
        cu_seqlens: int32 [docs + 1].
        max_seqlen: Most positions that the row has of one document, padding included.
        answer_positions: int64 [A], the positions that predict a trained token.
        targets, ages, servers: int64 [A].
        sample_ids: int64 [A], nondecreasing 0..n-1.
        advantages, weights, sampler_logprobs: float32 [A].
        samples: int64 [n], which of the samples given to `pack` has sample id k.
        routes: See `PackedRow`.
        top_ids, top_logprobs: int32 and float32 [A, K].
        keys: What documents attend to; None if each attends to the positions that the row has of it.
    """

    tokens: Tensor
    positions: Tensor
    cu_seqlens: Tensor
    max_seqlen: int
    answer_positions: Tensor
    targets: Tensor
    sample_ids: Tensor
    ages: Tensor
    servers: Tensor
    advantages: Tensor
    weights: Tensor
    sampler_logprobs: Tensor
    samples: Tensor
    routes: Tensor | None = None
    top_ids: Tensor | None = None
    top_logprobs: Tensor | None = None
    keys: DocumentKeys | None = None

    def without_routes(self) -> "Microbatch":
        """The same row for a model that routes by itself, as the reference does."""
        return self if self.routes is None else replace(self, routes=None)


ANSWER_FIELDS = ("targets", "sample_ids", "ages", "servers", "advantages", "weights", "sampler_logprobs")
"""Fields of `Microbatch` that hold one value per trained answer token."""


def _bounds(sizes: Tensor) -> Tensor:
    """[n] -> int32 [n + 1], where each of n parts starts, then their sum."""
    return torch.cat([sizes.new_zeros(1), sizes.cumsum(0)]).int()


def _move(tensors: Sequence[Tensor], device: torch.device) -> list[Tensor]:
    """All tensors on `device` by one copy, as views of one block of bytes. The host's side is pinned for CUDA.

    PyTorch's caching allocator reuses pinned memory only after the copies from it are done.
    """
    sizes = [tensor.numel() * tensor.element_size() for tensor in tensors]
    # Each starts at a multiple of 16 bytes: torch.compile copies inputs that do not.
    starts = [0, *accumulate(-(-size // 16) * 16 for size in sizes)]
    spans = [slice(start, start + size) for start, size in zip(starts[:-1], sizes, strict=True)]
    to_cuda = device.type == "cuda"
    source = tensors[0].device
    block = torch.empty(starts[-1], dtype=torch.uint8, device=source, pin_memory=to_cuda and source.type == "cpu")
    for tensor, span in zip(tensors, spans, strict=True):
        block[span].copy_(tensor.contiguous().flatten().view(torch.uint8))
    moved = block.to(device, non_blocking=to_cuda)
    return [moved[span].view(tensor.dtype).view(tensor.shape) for tensor, span in zip(tensors, spans, strict=True)]
