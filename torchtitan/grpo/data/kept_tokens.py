"""Which tokens a sampler could draw, where top-k, top-p or min-p cut the others.

A loss needs it: the sampler's probabilities are those of the kept tokens alone, so the trainer's must be of the same
("Keep Sampling Mask": DeepSeek-V3.2, arXiv 2512.02556, section 3.1).
"""

import base64
import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

KEPT_MAX = 4096
"""No server tells more of a position: SGLang's room for a `top_k`, and for tokens that are as likely as the last."""


@dataclass(frozen=True, eq=False)
class KeptTokens:
    """The tokens that could be drawn at each of T positions: 4 bytes for each of them, and 4 for the position.

    Attributes:
        counts: int32 [T], how many; 0 is all of the vocabulary.
        ids: int32 [sum of counts], ascending at each position.
    """

    counts: np.ndarray
    ids: np.ndarray

    @staticmethod
    def all(positions: int) -> "KeptTokens":
        """Nothing is cut, as where no token is sampled."""
        return KeptTokens(np.zeros(positions, np.int32), np.empty(0, np.int32))

    @staticmethod
    def of(masks: str | Sequence[Sequence[int]], sampled: Sequence[int], vocab_size: int) -> "KeptTokens":
        """As servers send them: lists of ids, in any order, or as `inside_vllm.flat_logprobs.kept_text` writes them.

        Args:
            sampled: The token that was drawn at each position.

        Raises:
            ValueError: They cannot be: another number of positions than of tokens, over KEPT_MAX at one, an id outside
                the vocabulary or twice, or a sampled token that is not kept.
        """
        if isinstance(masks, str):
            values = np.frombuffer(base64.b64decode(masks, validate=True), "<i4")
            counts, ids = values[: len(sampled)], values[len(sampled) :]
            if int(counts.min(initial=0)) < 0 or int(counts.sum(dtype=np.int64)) != len(ids):
                raise ValueError(f"{len(values)} numbers do not say what was kept in place of {len(sampled)} tokens")
        else:
            counts, ids = _laid(masks)
        positions, most = len(counts), vocab_size + 1
        if positions != len(sampled):
            raise ValueError(f"{positions} positions say which tokens were kept, and {len(sampled)} tokens came")
        if (longest := int(counts.max(initial=0))) > KEPT_MAX:
            raise ValueError(f"{longest} tokens were kept at a position, more than any server has room for")
        if len(ids) and not 0 <= int(ids.min()) <= int(ids.max()) < vocab_size:
            raise ValueError(f"tokens {int(ids.min())} to {int(ids.max())} were kept, the model has {vocab_size}")
        keys = np.repeat(np.arange(positions) * most, counts) + ids  # ascending by position and id
        if (np.diff(keys) <= 0).any():
            keys.sort()
            ids = keys % most
            if (np.diff(keys) == 0).any():
                raise ValueError("a token is kept twice at a position")
        drawn = np.arange(positions) * most + np.fromiter(sampled, np.int64, positions)
        missing = np.append(keys, -1)[np.searchsorted(keys, drawn)] != drawn
        if missing.any():
            at = int(missing.argmax())
            raise ValueError(f"token {sampled[at]} was sampled at position {at} and is not among the kept")
        return KeptTokens(counts.astype(np.int32), ids.astype(np.int32))._without_whole(vocab_size)

    @staticmethod
    def joined(parts: Sequence["KeptTokens"]) -> "KeptTokens":
        """One after the other."""
        parts = [KeptTokens.all(0), *parts]
        return KeptTokens(np.concatenate([p.counts for p in parts]), np.concatenate([p.ids for p in parts]))

    def __len__(self) -> int:
        """Positions."""
        return len(self.counts)

    def first(self, positions: int) -> "KeptTokens":
        """Those of so many positions at the beginning."""
        return KeptTokens(self.counts[:positions], self.ids[: self.counts[:positions].sum()])

    def where(self, wanted: np.ndarray) -> "KeptTokens":
        """Those of the positions for which `wanted`, bool [T], is true."""
        return KeptTokens(self.counts[wanted], self.ids[np.repeat(wanted, self.counts)])

    def _without_whole(self, vocab_size: int) -> "KeptTokens":
        whole = self.counts == vocab_size
        if not whole.any():
            return self
        return KeptTokens(np.where(whole, 0, self.counts).astype(np.int32), self.where(~whole).ids)


def _laid(masks: Sequence[Sequence[int]]) -> tuple[np.ndarray, np.ndarray]:
    """How many ids there are at each position, and all of them end to end."""
    counts = np.fromiter(map(len, masks), np.int32, len(masks))
    return counts, np.fromiter(itertools.chain.from_iterable(masks), np.int64, int(counts.sum()))
