"""What answers to held-out prompts say, each number with its standard error. docs/evaluation.md has the formulas."""

import math
from collections import Counter, defaultdict
from collections.abc import Sequence
from statistics import fmean, stdev
from typing import NamedTuple

from torchtitan.grpo.config.job_config import Reward
from torchtitan.grpo.config.tables import pass_counts
from torchtitan.grpo.data.held_out import HeldOutAnswers
from torchtitan.grpo.data.samples import Group, Prompt, Sample

_TOLERANCE = 1e-6
"""Rewards are sums of floats."""


class Estimate(NamedTuple):
    """A mean over prompts, and its standard error; None of a single prompt."""

    mean: float
    standard_error: float | None


def over_prompts(values: Sequence[float]) -> Estimate:
    """Mean of one value per prompt, and its standard error s / sqrt(P).

    A prompt's answers resemble one another, so prompts are what was sampled independently, not answers. With equally
    many answers each, this is the error clustered by prompt (Miller, arXiv 2411.00640).
    """
    return Estimate(fmean(values), stdev(values) / math.sqrt(len(values)) if len(values) > 1 else None)


def estimates(answers: HeldOutAnswers, reward: Reward) -> dict[str, Estimate]:
    """Mean rewards, pass@k for k = 1, 2, 4 ... n and majority@n of one held-out set, by metric name.

    Where several rewards add up to one, `greedy_reward/<name>` and `sampled_reward/<name>` are their own means.
    n is the number of sampled answers per prompt. An answer without a reward counts nowhere; k is then asked of prompts
    with k others only. A metric without any prompt is left out.
    """
    scored = [[sample for sample in group if sample.reward is not None] for group in answers.sampled]
    values = {
        "greedy_reward": [fmean(rewards) for group in answers.greedy if (rewards := _rewards(group))],
        "sampled_reward": [fmean(_rewards(group)) for group in scored if group],
    }
    names = sorted({name for group in answers.groups for sample in group for name in sample.rewards})
    for name in names if len(names) > 1 else ():
        values[f"greedy_reward/{name}"] = _means(answers.greedy, name)
        values[f"sampled_reward/{name}"] = _means(answers.sampled, name)
    n = max(map(len, answers.sampled), default=0)
    right = [[is_right(sample, reward) for sample in group] for group in scored]
    for k in pass_counts(n):
        values[f"pass_at_{k}"] = [pass_at_k(len(group), sum(group), k) for group in right if len(group) >= k]
    if n > 1:
        values[f"majority_at_{n}"] = [majority(group, reward) for group in scored if len(group) == n]
    return {name: over_prompts(own) for name, own in values.items() if own}


def _means(groups: Sequence[Group], name: str) -> list[float]:
    """One reward's mean of each group that has it."""
    found = [[sample.rewards[name] for sample in group if name in sample.rewards] for group in groups]
    return [fmean(of_group) for of_group in found if of_group]


def _rewards(group: Group) -> list[float]:
    return [sample.reward for sample in group if sample.reward is not None]


def pass_at_k(n: int, right: int, k: int) -> float:
    """Probability that k answers, drawn from n without replacement, hold one of the `right` ones.

    The unbiased estimator of pass@k: 1 - C(n - right, k) / C(n, k) (Chen et al., arXiv 2107.03374).
    """
    return 1.0 - math.comb(n - right, k) / math.comb(n, k)


def majority(group: Group, reward: Reward) -> float:
    """Whether the most frequent final answer of a group is right (self-consistency, Wang et al., arXiv 2203.11171).

    Of answers that are as frequent, the mean. An answer without a final one has no vote.
    """
    right: defaultdict[str, list[bool]] = defaultdict(list)
    for sample in group:
        if (final := final_answer(sample, reward)) is not None:
            right[final].append(is_right(sample, reward))
    votes = Counter({final: len(each) for final, each in right.items()})
    most = max(votes.values(), default=0)
    return fmean(fmean(right[final]) for final, count in votes.items() if count == most) if votes else 0.0


def final_answer(sample: Sample, reward: Reward) -> str | None:
    """What `[reward] answer_pattern` found last in an answer, else the whole text; None if it found nothing in time."""
    return sample.final if reward.answer_pattern else sample.text.strip()


def is_right(sample: Sample, reward: Reward) -> bool:
    """Whether an answer has the full reward: 1 from each function that scores it, times the weights. Penalties, whose
    weights are negative, make none right or wrong."""
    weights = _weights(sample.prompt, reward)
    penalty = sum(weights[name] * score for name, score in sample.rewards.items() if weights.get(name, 0.0) < 0)
    return sample.reward is not None and sample.reward - penalty >= full_reward(sample.prompt, reward) - _TOLERANCE


def full_reward(prompt: Prompt, reward: Reward) -> float:
    """The sum of the weights of the functions that score a prompt's answers, without penalties; 1 if that is nothing.

    An environment that gives rewards should give 1 to a right answer.
    """
    return sum(max(weight, 0.0) for weight in _weights(prompt, reward).values()) or 1.0


def _weights(prompt: Prompt, reward: Reward) -> dict[str, float]:
    """Of the functions that score a prompt's answers."""
    weights = dict(zip(reward.functions, reward.weights or [1.0] * len(reward.functions), strict=True))
    return {name: weights[name] for name in prompt.functions or reward.functions}
