"""A teacher's log-probabilities as advantages: against the formula, and the exact gradient of the reverse KL."""

import dataclasses

import numpy as np
import pytest
import torch

from tests.helpers.microbatches import Spread
from torchtitan.grpo.config.job_config import Distill, Grpo
from torchtitan.grpo.data.samples import Prompt, Sample, TopTokens
from torchtitan.grpo.model.logprobs import token_logprobs
from torchtitan.grpo.policy.advantages import reward_advantages
from torchtitan.grpo.policy.batch import counted_samples, has_signal, training_samples
from torchtitan.grpo.policy.distillation import reverse_kl_sum
from torchtitan.grpo.policy.losses import row_loss
from torchtitan.grpo.policy.microbatch import Microbatch
from torchtitan.grpo.policy.packing import pack
from torchtitan.grpo.policy.teacher_loss import top_k_kl

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
        [taught([-0.5, -0.5], None), taught([-0.125, -0.125], [-9.0, -9999.0])],
    ]
    advantages = [[0.75, -0.75], [0.25, -0.25]]
    samples = training_samples(groups, advantages, 0, Grpo(), 8, distill=dataclasses.replace(DISTILL, coef=coef))
    [[row]] = pack(samples, 64, 1)
    row = Spread(row)
    found = {i: row.advantages[(row.sample_index == i) & row.trained].tolist() for i in range(4)}
    assert found == {
        0: [0.75 + coef * (-0.25 - -1.0), 0.75 + coef * (-4.5 - -3.0)],
        1: [-0.75],
        2: [0.25, 0.25],  # its teacher failed
        3: [-0.25 + coef * (-9.0 - -0.125), -0.25],  # the number stands for an impossible token
    }
    assert not row.advantages[~row.trained].any()
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
        assert has_signal(group, grpo, 8, DISTILL) and counted_samples(group, grpo, 8, DISTILL) == [True, False]
    assert not has_signal([taught([-1.0], None), taught([-1.0], None)], Grpo(), 8, DISTILL)
    assert not has_signal([taught([-1.0], [-1.0], reward=None)], Grpo(), 8, DISTILL)


@pytest.mark.parametrize("zero_variance", ["keep", "drop"])
def test_scores_of_a_teacher_that_this_run_has_not_change_no_gradient(zero_variance):
    """They are in a record that is replayed, and in the groups of a checkpoint."""
    grpo, scores = Grpo(zero_variance_groups=zero_variance), ([-7.0, -0.5], [-0.25, -4.0])
    tops = TopTokens(np.zeros((2, 3), np.int32), np.full((2, 3), -2.0, np.float32))
    gradients = []
    for recorded in (True, False):
        groups = [
            [taught([-1.0, -2.0], own if recorded else None, reward=reward, top=tops if recorded else None)
             for own, reward in zip(scores, rewards, strict=True)]
            for rewards in ([1.0, 0.0], [1.0, 1.0])
        ]  # fmt: skip
        advantages = reward_advantages([[s.reward for s in group] for group in groups], grpo, Distill())
        [[row]] = pack(training_samples(groups, advantages, 0, grpo, 8, distill=Distill()), 64, 1)
        batch = Microbatch.of(row, "cpu")
        logits = torch.linspace(-1, 1, len(batch.targets) * V).view(-1, V).requires_grad_()
        logprobs = logits.log_softmax(-1).gather(1, batch.targets[:, None])[:, 0]
        row_loss(logprobs, torch.zeros_like(logprobs), batch, grpo)[0].backward()
        gradients.append(logits.grad)
    assert gradients[1].norm() > 0
    torch.testing.assert_close(*gradients, rtol=0, atol=0)


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
    n, first = 6_000, 4
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
    batch = Microbatch.of(row, "cpu")
    logprobs = logprobs_of(student, batch.tokens[batch.answer_positions], batch.targets)
    loss, _ = row_loss(logprobs, torch.zeros_like(logprobs), batch, Grpo())
    loss.backward()

    found, student.grad = student.grad, None
    kl = exact_reverse_kl(student, teacher, first)
    kl.backward()
    exact = DISTILL.coef * student.grad
    assert (found - exact).norm() < 0.05 * exact.norm()  # 18,000 tokens; 0.025 of it
    assert sum(map(reverse_kl_sum, group)) / (n * ANSWER) == pytest.approx(kl.item(), rel=0.05)
    with torch.no_grad():
        assert exact_reverse_kl(student - 0.5 * found, teacher, first) < kl - 0.01


def with_rest(logprobs: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """[T, V] and [T, K] -> [T, K + 1]: of the tokens, and of all others together."""
    others = torch.ones_like(logprobs, dtype=torch.bool).scatter(1, ids, False)
    rest = logprobs.masked_fill(~others, -torch.inf).logsumexp(1, keepdim=True).clamp(min=-1e4)
    return torch.cat([logprobs.gather(1, ids), rest], 1)


def test_the_divergence_over_all_tokens_is_torchs_and_fewer_give_less_of_it():
    generator = torch.Generator().manual_seed(0)
    student = torch.randn(40, 9, generator=generator, dtype=torch.float64).log_softmax(-1)
    teacher = (3 * torch.randn(40, 9, generator=generator, dtype=torch.float64)).log_softmax(-1)
    whole = torch.nn.functional.kl_div(student, teacher, log_target=True, reduction="none").sum(-1)
    every = torch.arange(9).expand(40, 9)
    torch.testing.assert_close(top_k_kl(teacher, with_rest(student, every)), whole, rtol=0, atol=1e-9)
    before = torch.zeros(40, dtype=torch.float64)
    for k in range(1, 9):
        theirs, ids = teacher.topk(k)
        found = top_k_kl(theirs, with_rest(student, ids))
        coarse = [torch.cat([p.exp(), 1 - p.exp().sum(1, keepdim=True)], 1) for p in (theirs, student.gather(1, ids))]
        expected = (coarse[0] * (coarse[0] / coarse[1]).log()).sum(1)  # over K + 1 outcomes
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-9)
        assert (found >= before - 1e-12).all() and (found <= whole + 1e-12).all()
        before = found
    assert (top_k_kl(teacher.topk(3).values, with_rest(teacher, teacher.topk(3).indices)).abs() < 1e-12).all()


def test_no_token_at_a_position_and_one_that_the_teacher_excludes():
    none, never = -torch.inf, -9999.0
    teacher = torch.tensor([[none, none], [-0.1, none], [0.0, never]])
    student = torch.tensor([[-1.0, -2.0, 0.0], [-0.1, -1.0, np.log(-np.expm1(-0.1))], [-0.5, -1.0, -3.0]])
    found = top_k_kl(teacher, student.requires_grad_())
    found.sum().backward()
    assert found.tolist() == pytest.approx([0, 0, 0.5], abs=1e-6)
    assert student.grad[0].tolist() == [0, 0, -1] and student.grad[1, 1] == student.grad[2, 1] == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("lead", [2, 20, 26, 60])
@pytest.mark.parametrize("k", [1, 20])
def test_a_student_that_is_certain_and_wrong_still_learns(dtype, lead, k):
    """Against float64. The student is certain of one of the teacher's tokens. From a lead of 17 on, the difference of 1
    and their probabilities is 0 in float32, and with it the rest's gradient."""
    generator = torch.Generator().manual_seed(k)
    hidden, weight = torch.randn(6, 17, generator=generator), torch.randn(500, 17, generator=generator) / 8
    hidden[:, -1], weight[:, -1] = 1, 0
    weight[7] = 0
    weight[7, -1] = (hidden @ weight.T).max() + lead
    hidden, weight = hidden.to(dtype), weight.to(dtype)
    teacher = torch.randn(6, 500, generator=generator)
    teacher[:, 7] += 8
    theirs, ids = teacher.log_softmax(1).topk(k)
    assert (ids == 7).any(1).all()
    ours, exact = hidden.clone().requires_grad_(), hidden.double().requires_grad_()
    *_, found = token_logprobs(ours, weight, ids[:, 0], 1.0, others=ids)
    top_k_kl(theirs, found).sum().backward()
    expected = with_rest((exact @ weight.double().T).log_softmax(1), ids)
    kl = top_k_kl(theirs.double(), expected)
    kl.sum().backward()
    torch.testing.assert_close(top_k_kl(theirs, found).double(), kl, rtol=1e-3, atol=1e-5)
    assert (ours.grad.double() - exact.grad).norm() < (1e-5 if dtype == torch.float32 else 0.01) * exact.grad.norm()


def test_the_loss_from_a_teachers_tokens_is_the_weighted_divergence_and_leaves_no_advantage():
    """Environment tokens and a sample whose teacher failed add nothing. In `add` the reward's advantage stays."""
    generator = torch.Generator().manual_seed(1)
    distill = dataclasses.replace(DISTILL, top_k=2)
    theirs = torch.randn(3, V, generator=generator).log_softmax(-1).topk(2)
    top = TopTokens(theirs.indices.int().numpy(), theirs.values.numpy())
    one = taught([-1.0, 0.0, -3.0], [-0.25, -7.0, -4.5], loss_mask=[True, False, True], top=top)
    failed = taught([-2.0], None, reward=None)
    keeps_all = Grpo(kl_placement="reward", importance_correction="none")
    samples = training_samples([[one, failed]], [[0.75, 0.0]], 0, keeps_all, 8, distill=distill)
    [[row]] = pack(samples, 64, 1)
    batch = Microbatch.of(row, "cpu")
    assert batch.advantages.tolist() == [0.75, 0.75, 0] and batch.targets.tolist() == [1, 3, 1]
    logits = torch.randn(3, V, generator=generator).requires_grad_()
    logprobs = logits.log_softmax(-1)
    of_top = with_rest(logprobs, batch.top_ids.long().clamp(min=0))
    own = logprobs.gather(1, batch.targets[:, None])[:, 0]
    arguments = own, torch.zeros(3), batch, keeps_all
    without, _ = row_loss(*arguments)
    loss, sums = row_loss(*arguments, distill_coef=0.5, top_logprobs=of_top)
    kl = top_k_kl(torch.from_numpy(top.logprobs[[0, 2]]), of_top[:2])
    torch.testing.assert_close(loss - without, 0.5 * kl.mean())
    assert sums["loss"] == loss and sums["top_k_kl_sum"] == pytest.approx(kl.sum().item())
    assert sums["top_k_mass_sum"] == pytest.approx(np.exp(top.logprobs[[0, 2]]).sum(), rel=1e-6)
    # By each logit of the teacher's tokens the gradient is p - q.
    (found,) = torch.autograd.grad(kl.sum(), logits)
    at, q = batch.top_ids[:2].long(), batch.top_logprobs[:2].exp()
    torch.testing.assert_close(found[:2].gather(1, at), logprobs[:2].exp().gather(1, at) - q, rtol=0, atol=1e-6)
    assert found[2].count_nonzero() == 0
