"""Where the documents of a packed row are, and which of its positions a model has to compute.

Two documents that begin with the same tokens have the same hidden states there: under causal attention, a state depends
on the tokens up to its own position and on nothing else. All answers of a group begin with the same prompt, and short
answers are often equal. A packed row may hold a group's prompt once (see `policy/rows.py`). On a CPU `shared_prefixes`
keeps each distinct prefix once, as in a trie of the row's documents.
"""

import dataclasses
import functools
from dataclasses import dataclass
from typing import Self

import numpy as np
import torch
from torch import Tensor

from torchtitan.grpo.policy.rows import SharedPrompts
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

    The rest are further elements, no attributes: FSDP2 builds the tuples among its arguments anew, without attributes.

    Attributes:
        prompts: Those that the row holds once for several documents.
        padded: For attention that takes one length.
    """

    def __new__(
        cls,
        cu_seq_q: Tensor,
        cu_seq_k: Tensor,
        max_q: int,
        max_k: int,
        prompts: SharedPrompts | None = None,
        padded: PaddedDocuments | None = None,
    ) -> Self:
        return tuple.__new__(cls, (cu_seq_q, cu_seq_k, max_q, max_k, prompts, padded))

    @property
    def prompts(self) -> SharedPrompts | None:
        return self[4]  # torch.compile knows no tuple.__getitem__

    @functools.cached_property
    def padded(self) -> PaddedDocuments:
        given: PaddedDocuments | None = self[5]
        if given is not None:
            return given
        positions = torch.arange(int(self.cu_seq_q[-1]), device=self.cu_seq_q.device)
        return _padded(Extents.of(self.cu_seq_q, self.prompts), positions)


def for_compiled_blocks(
    prompts: SharedPrompts | None, row_tokens: int, longest: int, device: torch.device
) -> SharedPrompts:
    """The same for blocks that are compiled once for all rows, which have any sizes, or no shared prompts at all.

    Args:
        longest: Constant upper bound for a document's length.
    """
    if prompts is None:
        # More groups than tails. No size is 0 or 1 or another's, which torch.compile would take for a rule.
        indices = torch.zeros(2, dtype=torch.int64, device=device), torch.zeros(3, dtype=torch.int64, device=device)
        bounds = torch.zeros(4, dtype=torch.int32, device=device)
        prompts = SharedPrompts(*indices, bounds, bounds.clone(), 0, 0)
    for tensor in (prompts.tails, prompts.prompts, prompts.cu_tails, prompts.cu_prompts):
        torch._dynamo.maybe_mark_dynamic(tensor, 0)
    return prompts._replace(longest_tails=row_tokens, longest_prompt=longest)


def is_empty(tails: Tensor, cu_tails: Tensor) -> bool:
    """Whether these stand for no shared prompts, see `for_compiled_blocks`. Every group has a tail."""
    return tails.shape[0] < cu_tails.shape[0] - 1


@dataclass
class Extents:
    """Where a row has its documents, each with its prompt: two ranges of positions.

    Attributes:
        lengths: int64 [docs], positions of each document.
        shared: int64 [docs], how many of them are an earlier document's, from its start on; 0 for a whole document.
        prompts: int64 [docs], where those start.
        own: int64 [docs], where the others start.
    """

    lengths: Tensor
    shared: Tensor
    prompts: Tensor
    own: Tensor

    @classmethod
    def of(cls, cu_seqlens: Tensor, prompts: SharedPrompts | None) -> Self:
        own, lengths = cu_seqlens[:-1].long(), cu_seqlens.diff().long()
        if prompts is None or is_empty(prompts.tails, prompts.cu_tails):
            return cls(lengths, torch.zeros_like(own), own, own)
        first, last = prompts.tails[prompts.cu_tails[:-1]], prompts.tails[prompts.cu_tails[1:] - 1]
        group = (torch.searchsorted(first, own, right=True) - 1).clamp(min=0)
        lacks = (own >= first[group]) & (own <= last[group])
        shared = prompts.cu_prompts.diff().long()[group].where(lacks, 0)
        start = prompts.prompts[prompts.cu_prompts[:-1]][group].where(lacks, own)
        return cls(lengths + shared, shared, start, own)

    def select(self, documents: Tensor) -> Self:
        return dataclasses.replace(self, **{name: x[documents] for name, x in vars(self).items()})

    def at(self, columns: Tensor) -> Tensor:
        """int64 [docs, columns], the positions that are `columns` into the documents; their last one behind the end."""
        inside = torch.minimum(columns, self.lengths[:, None] - 1)
        shared = self.shared[:, None]
        return (self.prompts[:, None] + inside).where(inside < shared, self.own[:, None] + inside - shared)


def shared_prefixes(
    tokens: Tensor, cu_seqlens: Tensor, prompts: SharedPrompts | None = None
) -> tuple[Documents, Tensor, Tensor] | None:
    """What to compute of a row [T] on the host; None if its documents have no prefix in common that it holds twice.

    Sorted, a document has no longer prefix in common with any before it than with the one right before it.

    Args:
        prompts: Those that the row holds once.

    Returns:
        The documents, as attention over the computed positions takes them; int64 [U], the positions of the row that
        are computed; int64 [T], which of these has the state of each position of the row.
    """
    extents = Extents.of(cu_seqlens, prompts)
    longest = int(extents.lengths.max())
    width = min(longest, SHARED_TOKENS_MAX // len(extents.lengths))
    if len(extents.lengths) < 2 or width < 1:
        return None
    columns = torch.arange(width)
    exists = (columns < extents.lengths[:, None]).numpy()
    positions = extents.at(columns).numpy()
    # -1 sorts behind every token: a document follows those that it is a prefix of.
    table = np.where(exists, tokens.numpy()[positions], -1)
    order = np.argsort(np.ascontiguousarray(table, np.int32).view(f"V{4 * width}").ravel(), kind="stable")
    table, positions, exists = table[order], positions[order], exists[order]
    same = np.zeros_like(exists)
    same[1:] = np.logical_and.accumulate((table[1:] == table[:-1]) & exists[1:], axis=1)
    # The first document that has a prefix owns its last position.
    owner = np.maximum.accumulate(np.where(same, 0, np.arange(len(same))[:, None]), axis=0)
    owned = np.arange(int(cu_seqlens[-1]))
    owned[positions[exists]] = np.take_along_axis(positions, owner, axis=0)[exists]
    kept = (owned == np.arange(len(owned))).nonzero()[0]
    if len(kept) == len(owned):
        return None
    place = np.empty_like(owned)
    place[kept] = np.arange(len(kept))
    index = torch.from_numpy(place[owned])
    extents = extents.select(torch.from_numpy(order))
    lengths = extents.lengths.numpy()
    last = np.minimum(lengths, width) - 1
    whole = ~same[np.arange(len(same)), last] | (lengths > width)  # the others are the beginning of one of these
    padded = _padded(extents.select(torch.from_numpy(whole)), index)
    return Documents(cu_seqlens, cu_seqlens, longest, longest, None, padded), torch.from_numpy(kept), index


def _padded(extents: Extents, index: Tensor) -> PaddedDocuments:
    """Group documents by length up to a power of two: padding at most doubles the work.

    Args:
        index: For each position of the row, the one that is read in its place.
    """
    classes = torch.ceil(torch.log2(extents.lengths.clamp(min=1).double())).long()
    slots, shapes = [], []
    taken = torch.full((int(index.max()) + 1,), torch.iinfo(torch.int64).max, device=index.device)
    first = 0
    for length_class in classes.unique().tolist():
        members = extents.select(classes == length_class)
        columns = torch.arange(int(members.lengths.max()), device=index.device)
        valid = columns < members.lengths[:, None]
        # Under a causal mask no valid query sees the padding on its right: any position will do there.
        read = index[members.at(columns)]
        slots.append(read.flatten())
        shapes.append((read.shape[0], read.shape[1]))
        # Documents with a common prefix give its states alike. The first one's are taken, so that gradients repeat.
        taken.scatter_reduce_(0, read[valid], first + valid.flatten().nonzero().flatten(), "amin")
        first += read.numel()
    return PaddedDocuments(torch.cat(slots), shapes, taken)
