"""Where the documents of a packed row are, and which of its positions a model has to compute.

Two documents that begin with the same tokens have the same hidden states there: under causal attention, a state depends
on the tokens up to its own position and on nothing else. All answers of a group begin with the same prompt, and short
answers are often equal. A packed row may hold a group's prompt once (see `policy/rows.py`). On a CPU `shared_prefixes`
keeps each distinct prefix once, as in a trie of the row's documents.
"""

import functools
from dataclasses import dataclass
from typing import Self

import numpy as np
import torch
from torch import Tensor

from torchtitan.grpo.policy.microbatch import DocumentKeys, Microbatch
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
    """Where each document of a packed row starts (`cu_seq_q`, int32 [docs + 1]), as torchtitan's layers expect it.

    `cu_seq_k` is that of `keys`, if documents attend to more than the positions that the row has of them. The elements
    behind it are no attributes: FSDP2 builds the tuples among its arguments anew, without attributes.

    Attributes:
        keys: What documents attend to; None: their own positions.
        padded: The same for attention that takes one length.
    """

    def __new__(
        cls,
        cu_seq_q: Tensor,
        cu_seq_k: Tensor,
        max_q: int,
        max_k: int,
        keys: DocumentKeys | None = None,
        padded: PaddedDocuments | None = None,
    ) -> Self:
        return tuple.__new__(cls, (cu_seq_q, cu_seq_k, max_q, max_k, keys, padded))

    @property
    def keys(self) -> DocumentKeys | None:
        return self[4]  # torch.compile knows no tuple.__getitem__

    @functools.cached_property
    def padded(self) -> PaddedDocuments:
        given: PaddedDocuments | None = self[5]
        if given is not None:
            return given
        row = torch.arange(int(self.cu_seq_q[-1]), device=self.cu_seq_q.device)
        return _padded(self.cu_seq_k, row if self.keys is None else self.keys.positions, row)

    def with_padded(self) -> Self:
        """The same, so that `padded` is computed once for all blocks."""
        return type(self)(self.cu_seq_q, self.cu_seq_k, self.max_q, self.max_k, self.keys, self.padded)


def documents_of(row: Microbatch) -> Documents:
    keys = row.keys
    if keys is None:
        return Documents(row.cu_seqlens, row.cu_seqlens, row.max_seqlen, row.max_seqlen)
    return Documents(row.cu_seqlens, keys.cu_keys, row.max_seqlen, keys.longest, keys)


def documents_for_compiled_blocks(row: Microbatch, longest: int) -> Documents:
    """The same for blocks that are compiled once for rows of one length, whatever their documents.

    Args:
        longest: Constant upper bound for a document's length; the kernels take any.
    """
    keys = row.keys
    if keys is None:  # each position once
        each = torch.arange(len(row.tokens), device=row.tokens.device)
        bounds = torch.arange(len(row.tokens) + 1, dtype=torch.int32, device=each.device)
        keys = DocumentKeys(each, row.cu_seqlens.clone(), each.clone(), bounds, longest)
    keys = keys._replace(longest=longest)
    for tensor in (row.cu_seqlens, keys.positions, keys.cu_keys, keys.order):
        torch._dynamo.maybe_mark_dynamic(tensor, 0)
    return Documents(row.cu_seqlens, keys.cu_keys, longest, longest, keys)


def shared_prefixes(tokens: Tensor, documents: Documents) -> tuple[Documents, Tensor, Tensor] | None:
    """What to compute of a row [T] on the host; None if its documents have no prefix in common that it holds twice.

    Sorted, a document has no longer prefix in common with any before it than with the one right before it.

    Returns:
        The documents, as attention over the computed positions takes them; int64 [U], the positions of the row that
        are computed; int64 [T], which of these has the state of each position of the row.
    """
    cu_keys, count = documents.cu_seq_k, len(documents.cu_seq_k) - 1
    keys = torch.arange(len(tokens)) if documents.keys is None else documents.keys.positions
    lengths = cu_keys.diff().long()
    width = min(int(lengths.max()), SHARED_TOKENS_MAX // count)
    if count < 2 or width < 1:
        return None
    columns = torch.arange(width)
    exists = (columns < lengths[:, None]).numpy()
    positions = _positions(cu_keys, keys, columns).numpy()
    # -1 sorts behind every token: a document follows those that it is a prefix of.
    table = np.where(exists, tokens.numpy()[positions], -1)
    order = np.argsort(np.ascontiguousarray(table, np.int32).view(f"V{4 * width}").ravel(), kind="stable")
    table, positions, exists = table[order], positions[order], exists[order]
    same = np.zeros_like(exists)
    same[1:] = np.logical_and.accumulate((table[1:] == table[:-1]) & exists[1:], axis=1)
    # The first document that has a prefix owns its last position.
    owner = np.maximum.accumulate(np.where(same, 0, np.arange(count)[:, None]), axis=0)
    owned = np.arange(len(tokens))
    owned[positions[exists]] = np.take_along_axis(positions, owner, axis=0)[exists]
    kept = (owned == np.arange(len(owned))).nonzero()[0]
    if len(kept) == len(owned):
        return None
    place = np.empty_like(owned)
    place[kept] = np.arange(len(kept))
    index = torch.from_numpy(place[owned])
    ends = lengths.numpy()[order]
    whole = ~same[np.arange(count), np.minimum(ends, width) - 1] | (ends > width)
    which = torch.from_numpy(order[whole])  # the others are the beginning of one of these
    padded = _padded(cu_keys, keys, index, which)
    computed = Documents(documents.cu_seq_q, cu_keys, documents.max_q, documents.max_k, None, padded)
    return computed, torch.from_numpy(kept), index


def _positions(cu_keys: Tensor, keys: Tensor, columns: Tensor) -> Tensor:
    """int64 [docs, columns], the positions that are `columns` into the documents; their last one behind the end."""
    starts, lengths = cu_keys[:-1].long(), cu_keys.diff().long()
    return keys[starts[:, None] + torch.minimum(columns, lengths[:, None] - 1)]


def _padded(cu_keys: Tensor, keys: Tensor, index: Tensor, which: Tensor | None = None) -> PaddedDocuments:
    """Group documents by length up to a power of two: padding at most doubles the work.

    Args:
        index: For each position of the row, the one that is read in its place.
        which: Documents that are needed; None: all.
    """
    starts, lengths = cu_keys[:-1].long(), cu_keys.diff().long()
    if which is not None:
        starts, lengths = starts[which], lengths[which]
    classes = torch.ceil(torch.log2(lengths.clamp(min=1).double())).long()
    slots, shapes = [], []
    taken = torch.full((int(index.max()) + 1,), torch.iinfo(torch.int64).max, device=index.device)
    first = 0
    for length_class in classes.unique().tolist():
        members = classes == length_class
        columns = torch.arange(int(lengths[members].max()), device=index.device)
        valid = columns < lengths[members, None]
        # Under a causal mask no valid query sees the padding on its right: any position will do there.
        read = index[keys[torch.where(valid, starts[members, None] + columns, starts[members, None])]]
        slots.append(read.flatten())
        shapes.append((read.shape[0], read.shape[1]))
        # Documents with a common prefix give its states alike. The first one's are taken, so that gradients repeat.
        taken.scatter_reduce_(0, read[valid], first + valid.flatten().nonzero().flatten(), "amin")
        first += read.numel()
    return PaddedDocuments(torch.cat(slots), shapes, taken)
