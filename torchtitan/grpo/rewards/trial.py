"""What the rewards say of a right, a wrong and an empty answer, before a model has given any."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from torchtitan.grpo.config.tables import training_sources
from torchtitan.grpo.data.prompts import plain
from torchtitan.grpo.data.samples import Prompt, Sample
from torchtitan.grpo.rewards.runner import ODD_ANSWERS, RewardRunner

if TYPE_CHECKING:
    from torchtitan.config import JobConfig

_SHOWN_CHARS = 60


def trial_lines(config: JobConfig, rewards: RewardRunner, prompts: Sequence[Prompt]) -> list[str]:
    """Score answers as a step does, each by itself, and functions that take a group all at once.

    Args:
        rewards: Of `[reward]`.
        prompts: The first two of each source. The second one's answer is wrong for the first.
    """
    if not config.reward.functions:
        return ["rewards: none are tried, since [reward] functions is empty"]
    columns = {source.name: source.data.answer_column for source in training_sources(config)}
    lines: list[str] = []
    for _, of_source in itertools.groupby(prompts, lambda prompt: prompt.source):
        first, *others = of_source
        column = columns.get(first.source, config.data.answer_column)
        lines += _lines(rewards, first, _answers(first, column, [other.answer for other in others]))
    return lines


def _answers(prompt: Prompt, column: str, others: Sequence[str]) -> dict[str, str]:
    """Answers to try, and what each is. The wrong one and the empty one come last."""
    wrong = next((other for other in others if other not in ("", prompt.answer)), "")
    made = ODD_ANSWERS[1] if prompt.answer != ODD_ANSWERS[1] else ODD_ANSWERS[1] * 2
    tried = {"": "", wrong or made: "another row's answer" if wrong else "a wrong answer"}
    # `[reward] answer_pattern` may look for what is around the answer in its column.
    tried |= {plain(prompt.columns.get(column)): f"the row's own column {column!r}"} if prompt.answer else {}
    tried |= {prompt.answer: "the row's own answer"} | {"": "an empty answer"}
    return dict(reversed(tried.items()))


def _lines(rewards: RewardRunner, prompt: Prompt, answers: dict[str, str]) -> Iterator[str]:
    source = prompt.source and f' of "{prompt.source}"'
    yield f"rewards of answers to the first prompt{source}"
    samples = [Sample(prompt, [], [], [], "stop", text=text) for text in answers]
    seconds = []
    for together in [samples] if rewards.scores_groups else [[sample] for sample in samples]:
        began = time.monotonic()
        rewards.score(together)
        seconds += [time.monotonic() - began] * len(together)
    for name, sample, spent_s in zip(answers.values(), samples, seconds, strict=True):
        text = repr(sample.text[:_SHOWN_CHARS]) + "..." * (len(sample.text) > _SHOWN_CHARS)
        said = [f"{function} {value:g}" for function, value in sample.rewards.items()]
        said += [f"{function} {why}" for function, why in sample.reward_failures.items()]
        reward = "none" if sample.reward is None else f"{sample.reward:g}"
        yield f"  {reward:>6} in {spent_s:.3f} s  {name}, {text}: {', '.join(said)}"
    if any(sample.reward is None for sample in samples):
        yield "  an answer on which a function fails is left out: return 0 for a wrong one"
    if not prompt.answer:
        yield "  the data has no answer, so no right one was tried"
        return
    scores = [-math.inf if sample.reward is None else sample.reward for sample in samples]
    if max(scores[:-2]) <= max(scores[-2:]):
        yield "  the row's own answer gets NO more than others: see [reward] answer_pattern, and docs/rewards.md"
