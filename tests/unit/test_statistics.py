import pytest

from torchtitan.grpo.rollouts.samples import Prompt, Sample
from torchtitan.grpo.statistics import policy_metrics, rollout_metrics, validation_metrics

PROMPT = Prompt(index=0, token_ids=[1, 2], text="1+1=", answer="2")


def sample(reward: float, tokens: int, finish: str = "stop", failures: tuple[str, ...] = ()) -> Sample:
    return Sample(
        PROMPT, [5] * tokens, [-0.5] * tokens, [0] * tokens, finish, rewards={"exact_match": reward}, reward=reward,
        reward_failures=list(failures),
    )  # fmt: skip


def test_rollout_metrics_of_two_groups():
    groups = [
        [sample(1.0, 2), sample(0.0, 4, "length")],
        [sample(1.0, 3), sample(1.0, 7, "abort", ("exact_match",))],
    ]
    metrics = rollout_metrics(groups)
    assert metrics["reward/mean"] == 0.75
    assert metrics["reward/std"] == pytest.approx(0.1875**0.5)
    assert metrics["reward/exact_match"] == 0.75
    assert metrics["reward/zero_variance_fraction"] == 0.5
    assert metrics["reward/failures"] == 1
    assert (metrics["rollout/answer_tokens"], metrics["rollout/answer_tokens_max"]) == (16, 7)
    assert metrics["rollout/truncated_fraction"] == metrics["rollout/aborted_fraction"] == 0.25


def test_no_groups_give_no_metrics():
    assert rollout_metrics([]) == {}


def test_pass_at_k_counts_prompts_with_any_full_reward():
    greedy = [[sample(1.0, 2)], [sample(0.0, 2)], [sample(0.5, 2)]]
    sampled = [[sample(0.0, 1), sample(2.0, 1)], [sample(1.9, 1), sample(0.0, 1)], [sample(0.0, 1), sample(0.0, 1)]]
    metrics = validation_metrics(greedy, sampled, full_reward=2.0)
    assert metrics["validation/greedy_reward"] == 0.5
    assert metrics["validation/pass_at_2"] == pytest.approx(1 / 3)
    assert metrics["validation/sampled_reward"] == pytest.approx(3.9 / 6)


def test_policy_metrics_are_per_token_and_stand_a_step_without_tokens():
    sums = {"tokens": 4.0, "loss": 0.3, "clipped_low_tokens": 1.0, "clipped_high_tokens": 1.0, "ratio_sum": 4.4}
    sums |= {"mismatch_kl_sum": 0.4, "mismatch_abs_sum": 0.8}
    metrics = policy_metrics(sums)
    assert metrics["train/loss"] == 0.3
    assert metrics["policy/clip_fraction"] == 0.5
    assert metrics["policy/ratio"] == pytest.approx(1.1)
    assert metrics["policy/mismatch_abs"] == 0.2
    assert "policy/kl" not in metrics
    assert policy_metrics(sums | dict.fromkeys(sums, 0.0))["policy/clip_fraction"] == 0.0
