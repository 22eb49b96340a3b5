"""From scored groups to samples with weights and advantages."""

import itertools
from dataclasses import replace

import pytest
import torch

from torchtitan.grpo.config.job_config import Grpo
from torchtitan.grpo.data.samples import Prompt, Sample
from torchtitan.grpo.engines.protocol import SamplingParams
from torchtitan.grpo.policy.batch import counted_samples, has_signal, shaped_reward, split, training_samples
from torchtitan.grpo.policy.kl_reward import kl_by_sample
from torchtitan.grpo.policy.microbatch import Microbatch
from torchtitan.grpo.policy.packing import pack
from torchtitan.grpo.rollouts.environment import checked

LIMIT = 8


def answer(reward: float | None, tokens: int = 2, finish_reason: str = "stop", version: int = 3, **changed) -> Sample:
    sample = Sample(
        Prompt(0, [5, 6], "2 + 2 ="), [7] * tokens, [-1.0] * tokens, [version] * tokens, finish_reason, reward=reward
    )
    return replace(sample, **changed)


@pytest.mark.parametrize("n", [0, 1, 5, 8])
@pytest.mark.parametrize("parts", [1, 3, 8])
def test_split_covers_everything_once_in_even_parts(n, parts):
    ranges = split(n, parts)
    assert list(itertools.chain(*ranges)) == list(range(n))
    lengths = [len(part) for part in ranges]
    assert len(ranges) == parts and max(lengths) - min(lengths) <= 1


def test_the_overlong_penalty_makes_the_signal_of_a_group_with_equal_rewards():
    group = [answer(1.0, 2), answer(1.0, 7)]
    assert not has_signal(group, Grpo(), LIMIT)
    grpo = Grpo(overlong_buffer_tokens=4, overlong_penalty=1.0)
    assert [shaped_reward(sample, grpo, LIMIT) for sample in group] == [1.0, 1.0 - 3 / 4]
    assert has_signal(group, grpo, LIMIT)
    branch = replace(answer(1.0, 2), prompt=Prompt(0, [5, 6, 7, 8, 9], ""))
    checked([branch], "tests:play", Prompt(0, [5, 6], ""), SamplingParams(1, 1.0, LIMIT))
    assert shaped_reward(branch, grpo, LIMIT) == 1.0 - 1 / 4, "it has as many tokens beyond the prompt as one of 5"


def test_which_samples_count():
    group = [answer(0.0), answer(1.0, finish_reason="length"), answer(0.0, finish_reason="abort")]
    assert counted_samples(group, Grpo(), LIMIT) == [True, True, False]
    assert counted_samples(group, Grpo(overlong_filter=True), LIMIT) == [True, False, False]
    equal = [answer(1.0), answer(1.0)]
    assert counted_samples(equal, Grpo(zero_variance_groups="keep"), LIMIT) == [True, True]
    assert counted_samples(equal, Grpo(zero_variance_groups="drop"), LIMIT) == [False, False]
    unscored = [answer(1.0), answer(None), answer(0.0)]
    assert counted_samples(unscored, Grpo(), LIMIT) == [True, False, True]
    assert has_signal(unscored, Grpo(), LIMIT) and not has_signal(unscored[:2], Grpo(), LIMIT)


@pytest.mark.parametrize(("aggregation", "weights"), [("token", [1 / 6, 1 / 6]), ("sequence", [1 / 4, 1 / 8])])
def test_an_answer_without_a_reward_is_in_no_normaliser_and_not_trained(aggregation, weights):
    group = [answer(1.0, 2), answer(None, 7), answer(0.0, 4)]
    grpo = Grpo(loss_aggregation=aggregation)
    packed = training_samples([group], [[0.5, 0.0, -0.5]], 3, grpo, LIMIT)
    assert [(sample.advantage, sample.weight) for sample in packed] == list(zip([0.5, -0.5], weights, strict=True))
    grpo = Grpo(loss_aggregation=aggregation, kl_coef=0.1, kl_placement="reward")
    placed = training_samples([group], [[0.5, 0.0, -0.5]], 3, grpo, LIMIT)
    assert [sample.weight for sample in placed] == [weights[0], 0.0, weights[1]], "KL by sample needs its place"


def test_samples_hold_advantage_weight_and_the_age_of_each_token():
    groups = [[answer(1.0, 2, version=4), answer(0.0, 3, versions=[2, 3, 4])], [answer(0.0, 5, finish_reason="abort")]]
    grpo = Grpo(loss_aggregation="token", zero_variance_groups="keep")
    advantages = [[0.5, -0.5], [0.1]]
    first, second = training_samples(groups, advantages, 4, grpo, LIMIT, lambda sample: [1] * len(sample.token_ids))
    assert first.servers == [1, 1] and second.servers == [1, 1, 1]
    assert (first.advantage, second.advantage) == (0.5, -0.5)
    assert first.weight == second.weight == 1 / 5  # the aborted answer is in no normaliser, and is not trained
    assert first.ages.tolist() == [0, 0] and second.ages.tolist() == [2, 1, 0]


def test_a_sample_without_weight_is_kept_where_its_reward_may_still_change():
    """KL in the reward gives a group of equal rewards a signal that is known only after the forward pass."""
    grpo = Grpo(zero_variance_groups="drop", kl_coef=0.1, kl_placement="reward", kl_estimator="k1")
    found = training_samples([[answer(1.0), answer(1.0)]], [[0.0, 0.0]], version=3, grpo=grpo, max_answer_tokens=LIMIT)
    assert [sample.weight for sample in found] == [0.0, 0.0]


def test_kl_is_summed_by_sample_wherever_its_row_is():
    tokens = [2, 4, 1]
    groups = [[answer(float(i), n) for i, n in enumerate(tokens)]]
    samples = training_samples(groups, [[1.0, 0.0, -1.0]], version=3, grpo=Grpo(), max_answer_tokens=LIMIT)
    rows = [Microbatch.of(row, "cpu") for (row,) in pack(samples, 8, 2)]
    assert len(rows) == 2
    fixed = [(torch.zeros(len(row.targets)), torch.full((len(row.targets),), -0.5)) for row in rows]
    assert kl_by_sample(rows, fixed, 3, "k1").tolist() == [0.5 * n for n in tokens]
