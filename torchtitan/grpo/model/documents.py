"""Where the documents of a packed row are, and which of its positions a model has to compute.

Two documents that begin with the same tokens have the same hidden states there: under causal attention, a state depends
on the tokens up to its own position and on nothing else. All answers of a group begin with the same prompt, and short
answers are often equal. `shared_prefixes` keeps each distinct prefix once, as in a trie of the row's documents.
"""

import functools
from dataclasses import dataclass
from typing import Self

import numpy as np
import torch
from torch import Tensor

from torchtitan.models.attention import VarlenMetadata

SHARED_TOKENS_MAX = 1 << 22
"""Most cells of the table that `shared_prefixes` compares, 16 MiB. Later positions of a row are not shared."""


@dataclass
class PaddedDocuments:
    """Documents in batches of similar length, for an attention kernel that takes one length.

    Attributes:
        slots: int64 [S], for each padded slot the position that it reads. Batches follow each other.
        shapes: Of each batch, (documents, slots of each).
        taken: int64 [positions], the slot whose output is the position's.
    """

    slots: Tensor
    shapes: list[tuple[int, int]]
    taken: Tensor


class Documents(VarlenMetadata):
    """Where each document of a packed row starts (`cu_seq_q`, int32 [docs + 1]), as torchtitan's layers expect it."""

    @functools.cached_property
    def padded(self) -> PaddedDocuments:
        starts = self.cu_seq_q.long()
        return _padded(starts[:-1], starts.diff(), torch.arange(int(starts[-1]), device=starts.device))


class SharedPrefixes(Documents):
    """Documents of which each distinct prefix is computed once.

    `padded` is a fifth element, no attribute: FSDP2 builds the tuples among its arguments anew, without attributes.
    """

    def __new__(cls, cu_seq_q: Tensor, cu_seq_k: Tensor, max_q: int, max_k: int, padded: PaddedDocuments) -> Self:
        return tuple.__new__(cls, (cu_seq_q, cu_seq_k, max_q, max_k, padded))

    @functools.cached_property
    def padded(self) -> PaddedDocuments:
        return tuple.__getitem__(self, 4)


def shared_prefixes(tokens: Tensor, cu_seqlens: Tensor, longest: int) -> tuple[SharedPrefixes, Tensor, Tensor] | None:
    """What to compute of a row [T] on the host; None if its documents have no prefix in common.

    Sorted, a document has no longer prefix in common with any before it than with the one right before it.

    Args:
        longest: Tokens of the longest document.

    Returns:
        The documents, as attention over the computed positions takes them; int64 [U], the positions of the row that
        are computed; int64 [T], which of these has the state of each position of the row.
    """
    starts, ends = cu_seqlens[:-1].numpy().astype(np.int64), cu_seqlens[1:].numpy().astype(np.int64)
    width = min(longest, SHARED_TOKENS_MAX // len(starts))
    if len(starts) < 2 or width < 1:
        return None
    columns = np.arange(width)
    lengths = ends - starts
    exists = columns < lengths[:, None]
    # -1 sorts behind every token: a document follows those that it is a prefix of.
    table = np.where(exists, tokens.numpy()[np.minimum(starts[:, None] + columns, ends[:, None] - 1)], -1)
    order = np.argsort(np.ascontiguousarray(table, np.int32).view(f"V{4 * width}").ravel(), kind="stable")
    table, starts, lengths, exists = table[order], starts[order], lengths[order], exists[order]
    same = np.zeros_like(exists)
    same[1:] = np.logical_and.accumulate((table[1:] == table[:-1]) & exists[1:], axis=1)
    if not same.any():
        return None
    # The first document that has a prefix owns its last position.
    owner = np.maximum.accumulate(np.where(same, 0, np.arange(len(starts))[:, None]), axis=0)
    owned = np.arange(int(cu_seqlens[-1]))
    owned[(starts[:, None] + columns)[exists]] = (starts[owner] + columns)[exists]
    kept = (owned == np.arange(len(owned))).nonzero()[0]
    place = np.empty_like(owned)
    place[kept] = np.arange(len(kept))
    index = torch.from_numpy(place[owned])
    last = np.minimum(lengths, width) - 1
    whole = ~same[np.arange(len(starts)), last] | (lengths > width)  # the others are the beginning of one of these
    padded = _padded(torch.from_numpy(starts[whole]), torch.from_numpy(lengths[whole]), index)
    return SharedPrefixes(cu_seqlens, cu_seqlens, longest, longest, padded), torch.from_numpy(kept), index


def _padded(starts: Tensor, lengths: Tensor, index: Tensor) -> PaddedDocuments:
    """Group documents by length up to a power of two: padding at most doubles the work.

    Args:
        index: For each position of the row, the one that is read in its place.
    """
    classes = torch.ceil(torch.log2(lengths.clamp(min=1).double())).long()
    slots, shapes = [], []
    taken = torch.full((int(index.max()) + 1,), torch.iinfo(torch.int64).max, device=index.device)
    first = 0
    for length_class in classes.unique().tolist():
        members = classes == length_class
        columns = torch.arange(int(lengths[members].max()), device=starts.device)
        valid = columns < lengths[members, None]
        # Under a causal mask no valid query sees the padding on its right: any position will do there.
        read = index[torch.where(valid, starts[members, None] + columns, starts[members, None])]
        slots.append(read.flatten())
        shapes.append((read.shape[0], read.shape[1]))
        # Documents with a common prefix give its states alike. The first one's are taken, so that gradients repeat.
        taken.scatter_reduce_(0, read[valid], first + valid.flatten().nonzero().flatten(), "amin")
        first += read.numel()
    return PaddedDocuments(torch.cat(slots), shapes, taken)
