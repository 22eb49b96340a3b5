import math
import statistics
import sys

import pytest

from torchtitan.grpo.config.job_config import Grpo
from torchtitan.grpo.errors import UserError
from torchtitan.grpo.policy.advantages import (
    check_baseline,
    group_advantages,
    overlong_penalty,
    with_penalties,
    zero_variance,
)

GROUPS = [[1.0, 0.0, 0.0, 1.0, 1.0], [0.3, -2.0], [5.0, 5.5, 7.25]]


@pytest.mark.parametrize("divide_by_std", [False, True])
def test_mean_baseline_follows_the_published_formula(divide_by_std):
    for group, advantages in zip(GROUPS, group_advantages(GROUPS, "mean", divide_by_std), strict=True):
        scale = statistics.stdev(group) + 1e-4 if divide_by_std else 1.0
        for reward, advantage in zip(group, advantages, strict=True):
            assert advantage == pytest.approx((reward - statistics.fmean(group)) / scale, abs=1e-12)
        assert sum(advantages) == pytest.approx(0, abs=1e-12)


@pytest.mark.parametrize("divide_by_std", [False, True])
def test_leave_one_out_subtracts_the_mean_of_the_others(divide_by_std):
    for group, advantages in zip(GROUPS, group_advantages(GROUPS, "leave_one_out", divide_by_std), strict=True):
        scale = statistics.stdev(group) + 1e-4 if divide_by_std else 1.0
        for i, reward in enumerate(group):
            others = group[:i] + group[i + 1 :]
            assert advantages[i] == pytest.approx((reward - statistics.fmean(others)) / scale, abs=1e-12)


@pytest.mark.parametrize("baseline", ["mean", "leave_one_out"])
@pytest.mark.parametrize("divide_by_std", [False, True])
def test_groups_without_signal_get_exact_zeros(baseline, divide_by_std):
    # 0.1 three times: the mean in floating point is not 0.1
    groups = [[], [3.0], [0.1, 0.1, 0.1], [0.0, 0.0]]
    assert group_advantages(groups, baseline, divide_by_std) == [[], [0.0], [0.0, 0.0, 0.0], [0.0, 0.0]]
    assert group_advantages([], baseline, divide_by_std) == []


@pytest.mark.parametrize("baseline", ["mean", "leave_one_out"])
@pytest.mark.parametrize("divide_by_std", [False, True])
def test_an_answer_without_a_reward_is_no_part_of_its_group(baseline, divide_by_std):
    with_gaps = [[None, *group, None] for group in GROUPS]
    plain = group_advantages(GROUPS, baseline, divide_by_std)
    assert group_advantages(with_gaps, baseline, divide_by_std) == [[0.0, *group, 0.0] for group in plain]
    assert group_advantages([[None, 1.0, None], [None]], baseline, divide_by_std) == [[0.0] * 3, [0.0]]


def test_a_reward_less_an_infinite_kl_makes_a_step_that_is_left_out():
    """It is no fault of the baseline, which would be named."""
    rewards = with_penalties([[1.0, 0.0], [1.0, 0.0]], [0.1, float("inf"), 0.0, 0.0])
    bad, good = group_advantages(rewards, "mean", True)
    assert all(map(math.isnan, bad)) and all(map(math.isfinite, good))


def test_an_own_baseline_is_a_function_of_one_groups_rewards(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", [*sys.path])
    (tmp_path / "own_baselines.py").write_text(
        "def mean(rewards):\n    return rewards - rewards.mean()\n"
        "import numpy\ndef median(rewards):\n    rewards -= numpy.median(rewards)\n    return rewards.tolist()\n"
        "def alone(rewards, prompt):\n    return rewards\n"
        "def one(rewards):\n    return rewards.mean()\n"
        "def endless(rewards):\n    return [numpy.inf for _ in rewards]\n"
        "def broken(rewards):\n    return rewards.nothing\n"
    )
    assert group_advantages(GROUPS, "own_baselines:mean", True) == group_advantages(GROUPS, "mean", True)
    check_baseline(Grpo(advantage_baseline="own_baselines:median"))
    assert group_advantages([[1.0, None, 4.0, 5.0]], "own_baselines:median", False) == [[-3.0, 0.0, 0.0, 1.0]]
    for name, message in {
        "alone": "must take 1 arguments",
        "one": "it must return a finite number for each",
        "endless": "it must return a finite number for each",
        "broken": r"failed on a trial: AttributeError.*own_baselines.py:14",
        "mode": "has no function",
        "": 'must be "module:function"',
    }.items():
        with pytest.raises(UserError, match=rf"^\[grpo\] advantage_baseline: .*{message}"):
            check_baseline(Grpo(advantage_baseline=f"own_baselines:{name}"))


def test_zero_variance():
    assert zero_variance([]) and zero_variance([1.0]) and zero_variance([0.5, 0.5])
    assert not zero_variance([0.5, 0.5, 0.5 + 1e-9])
    assert zero_variance([None, None]) and zero_variance([None, 1.0, 1.0]) and not zero_variance([None, 0.0, 1.0])


def test_penalties_stay_with_their_answers():
    assert with_penalties([[1.0, None], [], [0.5]], [0.25, 9.0, 0.5]) == [[0.75, None], [], [0.0]]


def test_overlong_penalty_falls_linearly_over_the_buffer():
    values = [overlong_penalty(n, max_answer_tokens=100, buffer_tokens=20, penalty=0.5) for n in (0, 80, 81, 90, 100)]
    assert values == pytest.approx([0, 0, -0.5 / 20, -0.25, -0.5])
    assert overlong_penalty(101, 100, 20, 0.5) == -0.5
    assert overlong_penalty(100, 100, 0, 0.5) == 0.0
