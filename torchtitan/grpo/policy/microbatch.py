"""Packed rows on the device: what a model and its loss read. Rows on the host are in `rows.py`."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from torchtitan.grpo.policy.rows import PackedRow


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
        """Those of a row on the host; None if all its documents are whole."""
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


class Kept(NamedTuple):
    """The tokens that the sampler kept at each of T positions: probabilities are among these, and the others have none.

    Attributes:
        counts: int32 [T], how many; 0 is all.
        ids: int32 [sum of counts], different ones at each position.
        ends: int64 [T + 1] on the host: those of position t are `ids[ends[t] : ends[t + 1]]`.
    """

    counts: Tensor
    ids: Tensor
    ends: np.ndarray

    def part(self, rows: slice) -> "Kept":
        """Those of consecutive positions."""
        first, last = int(self.ends[rows.start]), int(self.ends[rows.stop])
        return Kept(self.counts[rows], self.ids[first:last], self.ends[rows.start : rows.stop + 1] - first)


@dataclass
class Microbatch:
    """One packed row on the device: what the model [T] and the loss [A] read. A is the number of trained answer tokens.

    Attributes:
        tokens: int64 [T].
        positions: int64 [T], see `PackedRow`.
        cu_seqlens: int32 [docs + 1].
        max_seqlen: Most positions that the row has of one document, padding included.
        answer_positions: int64 [A], the positions that predict a trained token.
        targets, ages, servers: int64 [A].
        sample_ids: int64 [A], nondecreasing 0..n-1.
        advantages, weights, sampler_logprobs: float32 [A].
        samples: int64 [n], which of the samples given to `pack` has sample id k.
        routes: See `PackedRow`.
        top_ids, top_logprobs: int32 and float32 [A, K].
        kept: The tokens that the sampler kept; None if all.
        keys: What documents attend to; None if each attends to the positions that the row has of it.
        answers_at: `answer_positions` on the host, ascending.
    """

    tokens: Tensor
    positions: Tensor
    cu_seqlens: Tensor
    max_seqlen: int
    answers_at: np.ndarray
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
    kept: Kept | None = None
    keys: DocumentKeys | None = None

    @classmethod
    def of(cls, row: PackedRow, device: torch.device | str) -> "Microbatch":
        """What a training step reads of the row, on `device`: one copy, which does not block towards CUDA."""
        device, cu_seqlens, at = torch.device(device), row.cu_seqlens, row.trained.nonzero()[0]
        sample_ids = row.sample_ids[at]
        wide = {
            "tokens": row.tokens,
            "positions": row.positions,
            "answer_positions": at,
            "targets": row.targets,
            "sample_ids": sample_ids,
            "ages": row.ages,
            "servers": row.servers,
            "samples": row.samples,
        }
        advantages = row.advantages[sample_ids] if row.token_advantages is None else row.token_advantages
        as_they_are = {
            "cu_seqlens": cu_seqlens,
            "advantages": advantages,
            "weights": row.weights[sample_ids],
            "sampler_logprobs": row.sampler_logprobs,
            "routes": row.routes,
            "top_ids": row.top_ids,
            "top_logprobs": row.top_logprobs,
            "kept_counts": row.kept_counts,
            "kept_ids": row.kept_ids,
        }
        tensors = {name: torch.from_numpy(array.astype(np.int64)) for name, array in wide.items()}
        tensors |= {name: _tensor(array) for name, array in as_they_are.items() if array is not None}
        keys = DocumentKeys.of(tensors["positions"], tensors["cu_seqlens"])
        moved = [*tensors.values(), *(keys[:-1] if keys is not None else ())]
        if device.type != "cpu":
            moved = _move(moved, device)
        if keys is not None:
            positions, cu_keys, order, bounds = moved[len(tensors) :]
            keys = keys._replace(positions=positions, cu_keys=cu_keys, order=order, bounds=bounds)
        tensors, kept = dict(zip(tensors, moved, strict=False)), None
        if row.kept_counts is not None:
            kept = Kept(tensors.pop("kept_counts"), tensors.pop("kept_ids"), np.append(0, row.kept_counts.cumsum()))
        return cls(**tensors, max_seqlen=int(np.diff(cu_seqlens).max()), answers_at=at, kept=kept, keys=keys)

    def without_routes(self) -> "Microbatch":
        """The same row for a model that routes by itself, as the reference does."""
        return self if self.routes is None else replace(self, routes=None)


def _tensor(array: np.ndarray) -> Tensor:
    """It shares the array's memory, or a copy's, if the array cannot be written."""
    return torch.from_numpy(array if array.flags.writeable else array.copy())


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
        if tensor.numel():  # without elements it has no strides to view
            block[span].copy_(tensor.contiguous().flatten().view(torch.uint8))
    moved = block.to(device, non_blocking=to_cuda)
    return [moved[span].view(tensor.dtype).view(tensor.shape) for tensor, span in zip(tensors, spans, strict=True)]
