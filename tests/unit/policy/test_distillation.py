"""A teacher's log-probabilities as advantages: against the formula, and the exact gradient of the reverse KL."""

import dataclasses

import numpy as np
import pytest
import torch

from torchtitan.grpo.config.job_config import Distill, Grpo
from torchtitan.grpo.data.samples import Prompt, Sample, TopTokens
from torchtitan.grpo.policy.advantages import reward_advantages
from torchtitan.grpo.policy.batch import counted_samples, has_signal, training_samples
from torchtitan.grpo.policy.distillation import reverse_kl_sum, top_k_kl
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


def test_the_divergence_over_all_tokens_is_torchs_and_fewer_give_less_of_it():
    generator = torch.Generator().manual_seed(0)
    student = torch.randn(40, 9, generator=generator, dtype=torch.float64).log_softmax(-1)
    teacher = (3 * torch.randn(40, 9, generator=generator, dtype=torch.float64)).log_softmax(-1)
    whole = torch.nn.functional.kl_div(student, teacher, log_target=True, reduction="none").sum(-1)
    torch.testing.assert_close(top_k_kl(teacher, student), whole, rtol=0, atol=1e-9)
    before = torch.zeros(40, dtype=torch.float64)
    for k in range(1, 9):
        theirs, ids = teacher.topk(k)
        found = top_k_kl(theirs, student.gather(1, ids))
        coarse = [torch.cat([p.exp(), 1 - p.exp().sum(1, keepdim=True)], 1) for p in (theirs, student.gather(1, ids))]
        expected = (coarse[0] * (coarse[0] / coarse[1]).log()).sum(1)  # over K + 1 outcomes
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-9)
        assert (found >= before - 1e-12).all() and (found <= whole + 1e-12).all()
        before = found
    assert (top_k_kl(teacher.topk(3).values, teacher.topk(3).values).abs() < 1e-12).all()


def test_the_divergence_and_its_gradient_are_finite_at_the_edges():
    """No token at a position, a token that the teacher excludes, a student that is certain, one that is certain of
    another token."""
    none, never = -torch.inf, -9999.0
    teacher = torch.tensor([[none, none], [-0.1, never], [-0.1, -2.5], [0.0, -30.0], [-0.1, none]])
    student = torch.tensor([[-1.0, -2.0], [-0.3, -1.5], [0.0, -40.0], [-40.0, 0.0], [-0.1, -1.0]]).requires_grad_()
    found = top_k_kl(teacher, student)
    found.sum().backward()
    found = found.detach()
    assert found[0] == 0 and student.grad[0].tolist() == [0, 0]
    assert student.grad[4, 1] == 0 and found[4] == pytest.approx(0, abs=1e-6)
    assert found.isfinite().all() and (found > -1e-6).all() and student.grad.isfinite().all()
    assert found[3] == pytest.approx(40, rel=1e-3)


def test_the_loss_from_a_teachers_tokens_is_the_weighted_divergence_and_leaves_no_advantage():
    """Environment tokens and a sample whose teacher failed add nothing. In `add` the reward's advantage stays."""
    generator = torch.Generator().manual_seed(1)
    distill = dataclasses.replace(DISTILL, top_k=2)
    theirs = torch.randn(3, V, generator=generator).log_softmax(-1).topk(2)
    top = TopTokens(theirs.indices.int().numpy(), theirs.values.numpy())
    one = taught([-1.0, 0.0, -3.0], [-0.25, -7.0, -4.5], loss_mask=[True, False, True], teacher_top=top)
    failed = taught([-2.0], None, reward=None)
    samples = training_samples([[one, failed]], [[0.75, 0.0]], 0, Grpo(), 8, distill=distill)
    [[row]] = pack(samples, 64, 1)
    batch = row.to("cpu")
    assert batch.advantages.tolist() == [0.75] * 2 and batch.targets.tolist() == [1, 3]
    logits = torch.randn(2, V, generator=generator).requires_grad_()
    logprobs = logits.log_softmax(-1)
    of_top = logprobs.gather(1, batch.top_ids.long())
    own = logprobs.gather(1, batch.targets[:, None])[:, 0]
    arguments = own, torch.zeros(2), batch, Grpo(importance_correction="none")
    without, _ = row_loss(*arguments)
    loss, sums = row_loss(*arguments, distill_coef=0.5, top_logprobs=of_top)
    kl = top_k_kl(torch.from_numpy(top.logprobs[[0, 2]]), of_top)
    torch.testing.assert_close(loss - without, 0.5 * kl.mean())
    assert sums["loss"] == loss and sums["top_k_kl_sum"] == pytest.approx(kl.sum().item())
    assert sums["top_k_mass_sum"] == pytest.approx(np.exp(top.logprobs[[0, 2]]).sum(), rel=1e-6)
    # By each logit of the teacher's tokens the gradient is p - q.
    (found,) = torch.autograd.grad(kl.sum(), logits)
    at, q = batch.top_ids.long(), batch.top_logprobs.exp()
    torch.testing.assert_close(found.gather(1, at), logprobs.exp().gather(1, at) - q, rtol=0, atol=1e-6)
