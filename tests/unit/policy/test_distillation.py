"""A teacher's log-probabilities as advantages: against the formula, and the exact gradient of the reverse KL."""

import pytest
import torch

from torchtitan.grpo.config.job_config import Distill, Grpo
from torchtitan.grpo.data.samples import Prompt, Sample
from torchtitan.grpo.policy.advantages import reward_advantages
from torchtitan.grpo.policy.batch import counted_samples, has_signal, training_samples
from torchtitan.grpo.policy.distillation import reverse_kl_sum
from torchtitan.grpo.policy.losses import row_loss
from torchtitan.grpo.policy.packing import pack

V, ANSWER = 6, 3
DISTILL = Distill(teacher_urls=["http://teacher:8000"], coef=0.5)


def taught(logprobs: list[float], teacher: list[float] | None, **changed) -> Sample:
    tokens = len(logprobs)
    known = {"reward": 1.0, "teacher_logprobs": teacher} | changed
    return Sample(Prompt(0, [5, 4], ""), [1, 2, 3][:tokens], logprobs, [0] * tokens, "stop", **known)


@pytest.mark.parametrize("coef", [0.5, 2.0])
def test_an_advantage_is_that_of_the_reward_plus_the_teachers_term_where_the_model_sampled(coef):
    groups = [
        [taught([-1.0, 0.0, -3.0], [-0.25, -7.0, -4.5], loss_mask=[True, False, True]), taught([-2.0], [-2.0])],
        [taught([-0.5, -0.5], None), taught([-0.125], [-9.0])],
    ]
    advantages = [[0.75, -0.75], [0.25, -0.25]]
    samples = training_samples(groups, advantages, 0, Grpo(), 8, distill=Distill(coef=coef))
    [[row]] = pack(samples, 64, 1)
    found = {i: row.advantages[(row.sample_index == i) & row.loss_mask].tolist() for i in range(4)}
    assert found == {
        0: [0.75 + coef * (-0.25 - -1.0), 0.75 + coef * (-4.5 - -3.0)],
        1: [-0.75],
        2: [0.25, 0.25],  # its teacher failed
        3: [-0.25 + coef * (-9.0 - -0.125)],
    }
    assert row.advantages[~row.loss_mask].count_nonzero() == 0
    assert reverse_kl_sum(groups[0][0]) == (-1.0 - -0.25) + (-3.0 - -4.5)


def test_mode_only_takes_no_advantage_from_rewards_and_add_takes_it():
    rewards = [[1.0, 0.0, None], [0.5, 0.5]]
    plain = reward_advantages(rewards, Grpo(), Distill())
    assert plain[0][0] > 0
    assert reward_advantages(rewards, Grpo(), Distill(["http://a:1"], mode="add")) == plain
    assert reward_advantages(rewards, Grpo(), Distill(["http://a:1"])) == [[0.0] * 3, [0.0] * 2]


def test_equal_rewards_are_a_signal_where_a_teacher_scored():
    for choice in ("keep", "drop", "replace"):
        grpo = Grpo(zero_variance_groups=choice)
        group = [taught([-1.0], [-2.0]), taught([-1.0], None, reward=None)]
        assert has_signal(group, grpo, 8) and counted_samples(group, grpo, 8) == [True, False]
    assert not has_signal([taught([-1.0], None), taught([-1.0], None)], Grpo(), 8)
    assert not has_signal([taught([-1.0], [-1.0], reward=None)], Grpo(), 8)


def logprobs_of(table: torch.Tensor, before: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """Of a model whose logits depend on the token before: `table` [V, V]."""
    return table.log_softmax(-1)[before].gather(-1, tokens[..., None])[..., 0]


def exact_reverse_kl(student: torch.Tensor, teacher: torch.Tensor, first: int) -> torch.Tensor:
    """Mean over an answer's tokens of KL(student || teacher) at the states that the student visits. As the policy
    gradient does, it takes the visits as given."""
    kl = (student.softmax(-1) * (student.log_softmax(-1) - teacher.log_softmax(-1))).sum(-1)  # [V], by token before
    visits = torch.zeros(V)
    state = torch.nn.functional.one_hot(torch.tensor(first), V).float()
    for _ in range(ANSWER):
        visits += state / ANSWER
        state = state @ student.detach().softmax(-1)
    return visits @ kl


def test_the_gradient_of_the_loss_is_that_of_the_exact_reverse_kl_and_a_step_lowers_it():
    generator = torch.Generator().manual_seed(0)
    student = torch.randn(V, V, generator=generator).requires_grad_()
    teacher = torch.randn(V, V, generator=generator)
    n, first = 20_000, 4
    tokens = torch.empty(n, ANSWER, dtype=torch.int64)
    before = torch.full((n,), first)
    for t in range(ANSWER):
        before = torch.multinomial(student.detach().softmax(-1)[before], 1, generator=generator)[:, 0]
        tokens[:, t] = before
    shifted = torch.cat([torch.full((n, 1), first), tokens[:, :-1]], 1)
    sampled, scored = (logprobs_of(table.detach(), shifted, tokens).tolist() for table in (student, teacher))
    group = [
        Sample(Prompt(0, [5, first], ""), ids, own, [0] * ANSWER, "length", reward=0.0, teacher_logprobs=theirs)
        for ids, own, theirs in zip(tokens.tolist(), sampled, scored, strict=True)
    ]
    samples = training_samples([group], [[0.0] * n], 0, Grpo(), ANSWER, distill=DISTILL)
    [[row]] = pack(samples, n * (ANSWER + 1), 1)
    batch = row.to("cpu")
    logprobs = logprobs_of(student, batch.tokens[batch.answer_positions], batch.targets)
    loss, _ = row_loss(logprobs, torch.zeros_like(logprobs), batch, Grpo())
    loss.backward()

    found, student.grad = student.grad, None
    kl = exact_reverse_kl(student, teacher, first)
    kl.backward()
    exact = DISTILL.coef * student.grad
    assert (found - exact).norm() < 0.05 * exact.norm()  # 60,000 tokens
    assert sum(map(reverse_kl_sum, group)) / (n * ANSWER) == pytest.approx(kl.item(), rel=0.05)
    with torch.no_grad():
        assert exact_reverse_kl(student - 0.5 * found, teacher, first) < kl - 0.01
