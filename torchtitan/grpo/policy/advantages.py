"""Groups of rewards -> advantages. Pure functions over plain floats."""

import functools
import math
from collections.abc import Iterable, Sequence
from typing import Protocol

import numpy as np

from torchtitan.grpo.config.job_config import Distill, Grpo
from torchtitan.grpo.errors import UserError
from torchtitan.grpo.process.import_path import load_function, trial

STD_EPSILON = 1e-4  # added to the standard deviation, as in TRL's GRPOTrainer


def reward_advantages(rewards: Sequence[Sequence[float | None]], grpo: Grpo, distill: Distill) -> list[list[float]]:
    """What rewards give the advantage of each answer: `group_advantages`, or zeros if only a teacher counts."""
    if distill.teacher_urls and distill.mode == "only":
        return [[0.0] * len(group) for group in rewards]
    return group_advantages(rewards, grpo.advantage_baseline, grpo.advantage_std)


class Baseline(Protocol):
    """What `[grpo] advantage_baseline` names: compares the answers of one group."""

    def __call__(self, rewards: np.ndarray) -> np.ndarray:
        """
        Args:
            rewards: float64 [n], of the n answers that have one. They are not all equal.

        Returns:
            Their advantages [n], the same on every rank. `[grpo] advantage_std` divides them by the standard deviation
            of the rewards: set it to false if the function has scaled them.
        """


def _mean(rewards: np.ndarray) -> np.ndarray:
    return rewards - rewards.mean()


def _leave_one_out(rewards: np.ndarray) -> np.ndarray:
    n = len(rewards)
    return (rewards - rewards.mean()) * (n / (n - 1))  # r - (sum - r) / (n - 1)


BASELINES: dict[str, Baseline] = {"mean": _mean, "leave_one_out": _leave_one_out}
"""By `[grpo] advantage_baseline`, which may also be the "module:function" of another."""
_KEY = "[grpo] advantage_baseline"


@functools.cache
def named_baseline(name: str) -> Baseline:
    """The baseline of this name.

    Raises:
        UserError: There is no such function, or it does not take one argument.
    """
    return BASELINES.get(name) or load_function(_KEY, name, "rewards")


def check_baseline(grpo: Grpo) -> None:
    """Try `[grpo] advantage_baseline` on a group of three rewards.

    Raises:
        UserError: There is no such function, it raises, or it does not return what `Baseline` says.
    """
    with trial(_KEY, grpo.advantage_baseline):
        group_advantages([[0.0, 0.5, 1.0]], grpo.advantage_baseline, grpo.advantage_std)


def group_advantages(
    rewards: Sequence[Sequence[float | None]], baseline: str, divide_by_std: bool
) -> list[list[float]]:
    """Advantage of each answer relative to the other answers to the same prompt.

    `mean` subtracts the group's mean (GRPO, arXiv 2402.03300). `leave_one_out` subtracts the mean of the other answers,
    which does not depend on the answer itself (RLOO, arXiv 2402.14740). `divide_by_std` divides by the group's unbiased
    standard deviation (n - 1, as in TRL) + 1e-4; Dr. GRPO (arXiv 2503.20783) does not divide. A group of one answer, or
    of equal rewards, gets exact zeros. Groups may differ in size; an empty one stays empty.

    An answer whose reward is None counts in no mean, deviation or size of its group, and gets 0. A group with a reward
    that is not finite gets NaN.

    Raises:
        UserError: A function of the user's own does not return a finite number for each reward.
    """
    return [_one_group(group, baseline, divide_by_std) for group in rewards]


def _one_group(group: Sequence[float | None], baseline: str, divide_by_std: bool) -> list[float]:
    if zero_variance(group):
        return [0.0] * len(group)
    rewards = np.array([reward for reward in group if reward is not None])
    if not np.isfinite(rewards).all():  # less a KL that is not finite: `FiniteSteps` leaves the step out
        return [math.nan] * len(group)
    advantages = np.asarray(named_baseline(baseline)(rewards.copy()), np.float64)
    if advantages.shape != rewards.shape or not np.isfinite(advantages).all():
        raise UserError(
            f'{_KEY}: "{baseline}" returned {advantages.tolist()} for the rewards {rewards.tolist()}: it must return a '
            "finite number for each"
        )
    if divide_by_std:
        advantages = advantages / (rewards.std(ddof=1) + STD_EPSILON)
    scored = iter(advantages.tolist())
    return [0.0 if reward is None else next(scored) for reward in group]


def zero_variance(rewards: Sequence[float | None]) -> bool:
    """Whether all rewards of a group are equal, so that the group carries no signal; true for no or one reward."""
    return len(set(rewards) - {None}) <= 1


def with_penalties(rewards: Sequence[Sequence[float | None]], penalties: Iterable[float]) -> list[list[float | None]]:
    """Each reward less its penalty. `penalties` has one per answer, also for an answer without a reward."""
    left = iter(penalties)
    pairs = [[(reward, next(left)) for reward in group] for group in rewards]
    return [[None if reward is None else reward - penalty for reward, penalty in group] for group in pairs]


def overlong_penalty(answer_tokens: int, max_answer_tokens: int, buffer_tokens: int, penalty: float) -> float:
    """DAPO's soft overlong punishment (arXiv 2503.14476, eq. 13), to be added to the reward; between -`penalty` and 0.

    0 up to `max_answer_tokens - buffer_tokens`, then linear in the length down to -`penalty` at `max_answer_tokens`.
    `buffer_tokens = 0` turns it off.
    """
    if buffer_tokens == 0:
        return 0.0
    excess_tokens = answer_tokens - (max_answer_tokens - buffer_tokens)
    return -penalty * min(max(excess_tokens / buffer_tokens, 0.0), 1.0)
