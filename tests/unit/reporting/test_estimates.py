"""pass@k, majority@k and standard errors against their definitions, counted out."""

import itertools
import random
from dataclasses import replace
from statistics import fmean, pvariance

import pytest

from torchtitan.grpo.config.job_config import Reward
from torchtitan.grpo.data.held_out import HeldOut, HeldOutAnswers
from torchtitan.grpo.data.samples import Prompt, Sample
from torchtitan.grpo.reporting.estimates import estimates, full_reward, majority, over_prompts, pass_at_k
from torchtitan.grpo.rewards.runner import RewardRunner

ONE = Reward(functions=["exact_match"])
PROMPT = Prompt(0, [1], "1+1=", "2")


def sample(text: str, reward: float | None = None, prompt: Prompt = PROMPT) -> Sample:
    return Sample(prompt, [5], [-0.5], [0], "stop", text=text, reward=float(text == "2") if reward is None else reward)


@pytest.mark.parametrize(("n", "right"), [(1, 0), (1, 1), (5, 0), (5, 2), (5, 5), (6, 1)])
def test_pass_at_k_is_the_share_of_all_choices_of_k_answers_with_a_right_one(n, right):
    answers = [i < right for i in range(n)]
    for k in range(1, n + 1):
        chosen = list(itertools.combinations(answers, k))
        assert pass_at_k(n, right, k) == pytest.approx(sum(map(any, chosen)) / len(chosen))
    assert pass_at_k(2**14, 1, 2**13) == pytest.approx(0.5)


@pytest.mark.parametrize(
    ("texts", "expected"),
    [
        (["2", "2", "3"], 1.0),
        (["3", "3", "2"], 0.0),
        (["2", "3"], 0.5),
        (["2", "3", "4", "4", "3"], 0.0),
        ([" 2", "2\n", "5"], 1.0),
    ],
)
def test_majority_of_equally_frequent_answers_is_their_mean(texts, expected):
    assert majority([sample(text, float(text.strip() == "2")) for text in texts], ONE) == expected


def test_majority_votes_with_final_answers_only():
    reward = Reward(functions=["exact_match"], answer_pattern=r"= (\d+)")
    group = [sample("1+1 = 2", 1.0), sample("= 3, no = 2", 1.0), sample("what?", 0.0), sample("never", 0.0)]
    with RewardRunner(reward) as runner:
        runner.find_finals(group)
    assert majority(group, reward) == 1.0
    assert majority(group[2:], reward) == 0.0


def test_the_standard_error_is_that_of_prompts():
    """Drawn again and again, means of answers scatter as their standard error says, however alike a prompt's are."""
    draw = random.Random(0)
    means, errors = [], []
    for _ in range(1000):
        prompts = [draw.random() for _ in range(12)]  # what share of a prompt's answers is right
        estimate = over_prompts([fmean(draw.random() < share for _ in range(20)) for share in prompts])
        means.append(estimate.mean)
        errors.append(estimate.standard_error**2)
    assert fmean(errors) == pytest.approx(pvariance(means), rel=0.15)
    assert over_prompts([0.25]).standard_error is None


def test_estimates_of_a_set():
    greedy = [[sample("2")], [sample("3")]]
    sampled = [[sample(text) for text in texts] for texts in ("222333", "345672")]
    result = estimates(HeldOutAnswers(HeldOut("", [], 6, 1.0, 8), greedy, sampled), ONE)
    assert list(result) == [
        "greedy_reward", "sampled_reward", "pass_at_1", "pass_at_2", "pass_at_4", "pass_at_6", "majority_at_6",
    ]  # fmt: skip
    assert result["greedy_reward"] == (0.5, 0.5)
    assert result["pass_at_1"].mean == result["sampled_reward"].mean == pytest.approx((3 / 6 + 1 / 6) / 2)
    assert result["pass_at_6"] == (1.0, 0.0)
    assert result["majority_at_6"].mean == pytest.approx((0.5 + 1 / 6) / 2)
    alone = estimates(HeldOutAnswers(HeldOut("", [], 1, 1.0, 8), greedy, greedy), ONE)
    assert list(alone) == ["greedy_reward", "sampled_reward", "pass_at_1"]


def test_several_rewards_have_their_own_means_too():
    def scored(*rewards: dict[str, float]) -> list[Sample]:
        return [replace(sample("2", sum(each.values())), rewards=each) for each in rewards]

    greedy = [scored({"right": 1.0, "short": 0.5}), scored({"right": 0.0, "short": 0.0})]
    sampled = [scored({"right": 1.0, "short": 0.2}, {"right": 0.0}), scored({"right": 1.0, "short": 0.4}, {})]
    result = estimates(HeldOutAnswers(HeldOut("", [], 2, 1.0, 8), greedy, sampled), ONE)
    means = {name: estimate.mean for name, estimate in result.items() if "/" in name}
    assert means == {
        "greedy_reward/right": 0.5,
        "greedy_reward/short": 0.25,
        "sampled_reward/right": 0.75,
        "sampled_reward/short": pytest.approx(0.3),
    }


def test_a_full_reward_counts_the_functions_of_the_prompt():
    reward = Reward(functions=["exact_match", "my:format"], weights=[1.0, 0.5])
    assert full_reward(PROMPT, reward) == 1.5
    assert full_reward(Prompt(0, [1], "", functions=("my:format",)), reward) == 0.5
    assert full_reward(PROMPT, Reward(functions=[])) == 1.0
    assert full_reward(PROMPT, Reward(functions=["my:too_long"], weights=[-0.5])) == 1.0, "no answer is right by it"


@pytest.mark.parametrize(("weight", "sign", "right"), [(0.5, -1, 0.0), (-0.5, 1, 0.5), (-1.0, 1, 0.5)])
def test_a_penalty_with_a_negative_weight_makes_no_answer_right_or_wrong(weight, sign, right):
    reward = Reward(functions=["exact_match", "my:too_long"], weights=[1.0, weight])
    scores = [{"exact_match": match, "my:too_long": sign * long} for match in (1.0, 0.0) for long in (1.0, 0.0)]
    group = [replace(sample("2", each["exact_match"] + weight * each["my:too_long"]), rewards=each) for each in scores]
    answers = HeldOutAnswers(HeldOut("", [], 4, 1.0, 8), [group], [group])
    assert estimates(answers, reward)["pass_at_1"].mean == right
