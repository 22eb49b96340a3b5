"""Several sources of prompts as one, interleaved by their weights."""

import hashlib
import itertools
import logging
from bisect import bisect
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from torchtitan.grpo.config.job_config import MixtureSource
from torchtitan.grpo.data.prompts import NothingToAsk, PromptSource
from torchtitan.grpo.data.samples import Prompt
from torchtitan.grpo.errors import UserError

logger = logging.getLogger(__name__)

_GOLDEN = 0x9E3779B97F4A7C15  # 2**64 over the golden ratio


def source_of_draw(draw: int, weights: Sequence[float], seed: int) -> int:
    """Which source gives prompt number `draw` of a run: a pure function, so a resumed run needs the number only.

    The draws are multiples of the golden ratio modulo 1, the most even sequence without a period. So every stretch of
    the run has close to each source's share: of n consecutive draws, n * share and about log(n) more or less.

    Args:
        weights: One per source, 0 for one that gives none. A source's share is its weight over their sum.
        seed: Where the sequence starts.
    """
    start = int.from_bytes(hashlib.blake2b(f"mixture/{seed}".encode(), digest_size=8).digest(), "little")
    point = (start + draw * _GOLDEN) % 2**64 / 2**64
    ends = list(itertools.accumulate(weights))
    return min(bisect(ends, point * ends[-1]), len(ends) - 1)


class Mixture:
    """Endless training prompts of `[[data.mixture]]`. It has the methods of `PromptSource`, which it has one of each.

    A prompt's index counts through all sources, in their order. If the curriculum refuses all prompts of a source, the
    others go on without it.

    Args:
        tables: The sources, as configured.
        prompts: Their prompts, in the same order.
        seed: `debug.seed`.
    """

    def __init__(self, tables: Sequence[MixtureSource], prompts: Sequence[PromptSource], seed: int) -> None:
        self.tables, self._prompts, self._seed = tables, prompts, seed
        self._offsets = [0, *itertools.accumulate(source.rows for source in prompts)]
        self._drawn = 0
        self._exhausted: set[int] = set()

    def __len__(self) -> int:
        return sum(map(len, self._prompts))

    def counts(self) -> list[str]:
        """See `PromptSource.counts`."""
        each = zip(self.tables, self._prompts, strict=True)
        return [f"{table.name}: {line}" for table, source in each for line in source.counts()]

    def keys(self) -> set[str]:
        """See `PromptSource.keys`."""
        return set().union(*(source.keys() for source in self._prompts))

    def next(self, n: int) -> list[Prompt]:
        """The next `n` prompts.

        Raises:
            UserError: The curriculum refuses every prompt of every source, or fails.
        """
        prompts: list[Prompt] = []
        while len(prompts) < n:
            draws = range(self._drawn, self._drawn + n - len(prompts))
            self._drawn = draws.stop
            weights = [0.0 if i in self._exhausted else table.weight for i, table in enumerate(self.tables)]
            sources = [source_of_draw(draw, weights, self._seed) for draw in draws]
            taken = {i: iter(self._take(i, count)) for i, count in Counter(sources).items()}
            prompts += [prompt for i in sources if (prompt := next(taken[i], None)) is not None]
        return prompts

    def at(self, indices: list[int]) -> list[Prompt]:
        """The prompts with these indices, in this order. No position changes."""
        places = [self._place(index) for index in indices]
        return [self._own(i, self._prompts[i].at([position])[0]) for i, position in places]

    def first(self, n: int) -> list[Prompt]:
        """The first `n` prompts of each source."""
        return [self._own(i, prompt) for i, source in enumerate(self._prompts) for prompt in source.first(n)]

    def record(self, index: int, mean_reward: float) -> None:
        """See `PromptSource.record`."""
        i, position = self._place(index)
        self._prompts[i].record(position, mean_reward)

    def epochs(self) -> dict[str, float]:
        """Passes over all prompts and over those of each source so far, as metrics."""
        epochs = [source.epochs()["data/epoch"] for source in self._prompts]
        taken = sum(epoch * len(source) for epoch, source in zip(epochs, self._prompts, strict=True))
        of_source = {f"data/{table.name}/epoch": epoch for table, epoch in zip(self.tables, epochs, strict=True)}
        return {"data/epoch": taken / len(self)} | of_source

    def state_dict(self) -> dict[str, Any]:
        """How many prompts were drawn, and where each source is, as JSON values."""
        return {
            "seed": self._seed,
            "drawn": self._drawn,
            "exhausted": sorted(self._exhausted),
            "sources": {
                table.name: source.state_dict() for table, source in zip(self.tables, self._prompts, strict=True)
            },
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue exactly where `state_dict` was taken. Weights may differ: they hold from now on.

        Raises:
            UserError: The sources or their prompts differ from those of the checkpoint.
        """
        names, saved = [table.name for table in self.tables], list(state.get("sources", []))
        if names != saved:
            raise UserError(
                f"[[data.mixture]] has the sources {names}, and the checkpoint was trained on "
                f"{saved or '[data] alone'}: restore them in this order, or start in another [job] dump_folder"
            )
        for name, source in zip(names, self._prompts, strict=True):
            source.load_state_dict(state["sources"][name])
        self._seed, self._drawn = state["seed"], state["drawn"]
        # Without a curriculum, which the checkpoint's run had, a source has all of its prompts again.
        self._exhausted = {i for i in state["exhausted"] if self.tables[i].data.curriculum}

    def _take(self, i: int, count: int) -> list[Prompt]:
        """The next `count` prompts of a source; none if the curriculum refuses all of them."""
        try:
            return [self._own(i, prompt) for prompt in self._prompts[i].next(count)]
        except NothingToAsk as error:
            self._exhausted.add(i)
            if len(self._exhausted) == len(self._prompts):
                raise
            logger.warning("The mixture goes on without %r: %s", self.tables[i].name, error)
            return []

    def _place(self, index: int) -> tuple[int, int]:
        """The source of an index, and the position in it."""
        i = bisect(self._offsets, index) - 1
        return i, index - self._offsets[i]

    def _own(self, i: int, prompt: Prompt) -> Prompt:
        """A source's prompt as the mixture's."""
        table = self.tables[i]
        functions = prompt.functions or tuple(table.functions)
        return replace(prompt, index=self._offsets[i] + prompt.index, source=table.name, functions=functions)
