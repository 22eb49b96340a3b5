"""Samples as the model takes them, without a trainer."""

from dataclasses import fields
from typing import Any

import numpy as np

from torchtitan.grpo.policy.microbatch import Microbatch
from torchtitan.grpo.policy.packing import pack
from torchtitan.grpo.policy.rows import PackedRow, PackedSample


def microbatches(samples: list[PackedSample], *args: float, **kwargs: float) -> list[list[Microbatch]]:
    """`pack`'s rows on the CPU, by rank, ready for a model. Arguments are those of `pack`."""
    return [[Microbatch.of(row, "cpu") for row in rows] for rows in pack(samples, *args, **kwargs)]


class Spread:
    """A packed row whose values lie at the positions that predict their tokens, [T]: elsewhere they are 0, the server
    is -1, and there is no token of a teacher."""

    def __init__(self, row: PackedRow) -> None:
        self._row = row
        own = row.sample_ids
        self.sample_index = np.append(row.samples, -1)[own]
        at = own[row.trained]
        token_advantages = row.advantages[at] if row.token_advantages is None else row.token_advantages
        self.advantages, self.weights = self._laid(token_advantages), self._laid(row.weights[at])
        self.targets, self.ages = self._laid(row.targets), self._laid(row.ages)
        self.servers, self.sampler_logprobs = self._laid(row.servers, -1), self._laid(row.sampler_logprobs)
        if row.top_ids is not None:
            self.top_ids, self.top_logprobs = self._laid(row.top_ids, -1), self._laid(row.top_logprobs, -np.inf)

    def _laid(self, values: np.ndarray, elsewhere: float = 0) -> np.ndarray:
        laid = np.full((len(self.trained), *values.shape[1:]), elsewhere, values.dtype)
        laid[self.trained] = values
        return laid

    def __getattr__(self, name: str) -> Any:
        return getattr(self._row, name)


def assert_equal(rows: list[PackedRow], others: list[PackedRow]) -> None:
    """In every field, its type included."""
    for a, b in zip(rows, others, strict=True):
        for f in fields(PackedRow):
            x, y = getattr(a, f.name), getattr(b, f.name)
            assert (x is y is None) or (x.dtype == y.dtype and np.array_equal(x, y)), f.name
