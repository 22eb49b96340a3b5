"""Losses against a second implementation: plain loops over sequences, from the formulas as published."""

import math
import random
import sys
from types import SimpleNamespace

import pytest
import torch

from torchtitan.grpo.config.job_config import Grpo
from torchtitan.grpo.errors import UserError
from torchtitan.grpo.policy.batch import token_weights
from torchtitan.grpo.policy.losses import (
    POLICY_LOSSES,
    check_loss,
    importance_weights,
    kl_estimate,
    past_the_clip,
    policy_loss,
    row_loss,
)
from torchtitan.grpo.policy.sums import age_sums, by_server, mismatch_sums, server_values, surprise_values

LENGTHS = [3, 1, 6, 2]
COUNTED = [True, True, True, True]


def batch(lengths=LENGTHS, seed=0, spread=0.5):
    """float64 log-probabilities wide enough apart that every clip is met, one advantage a sequence, both signs."""
    rng = torch.Generator().manual_seed(seed)
    tokens = sum(lengths)
    old = -torch.rand(tokens, generator=rng, dtype=torch.float64) * 3 - 0.1
    new = (old + spread * torch.randn(tokens, generator=rng, dtype=torch.float64)).requires_grad_()
    per_sequence = torch.tensor([(-1) ** i * (0.5 + i) for i in range(len(lengths))], dtype=torch.float64)
    sample_ids = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    return new, old, per_sequence[sample_ids], sample_ids


def weights_of(lengths, aggregation="token", max_answer_tokens=8, counted=None):
    per_sample = token_weights(lengths, aggregation, max_answer_tokens, counted or [True] * len(lengths))
    return torch.tensor([w for w, n in zip(per_sample, lengths, strict=True) for _ in range(n)], dtype=torch.float64)


def sequences(values, lengths=LENGTHS):
    """[T] -> one list of 0-dim tensors per sequence."""
    split, start = [], 0
    for n in lengths:
        split.append([values[start + t] for t in range(n)])
        start += n
    return split


# The published objectives, per token or sequence, as losses (negated); clip() is written out.


def clip(x, low, high):
    if x < low:
        return torch.tensor(low, dtype=torch.float64)
    if x > high:
        return torch.tensor(high, dtype=torch.float64)
    return x


def published_clipped(ratio, advantage, low, high, c=0.0):
    """PPO: min(r A, clip(r, 1 - low, 1 + high) A); dual clip, arXiv 1912.09729 eq. 5: max(that, c A) where A < 0."""
    objective = min(ratio * advantage, clip(ratio, 1 - low, 1 + high) * advantage)
    if c and advantage < 0:
        objective = max(objective, c * advantage)
    return -objective


def published_loss(grpo, new, old, advantages, lengths=LENGTHS):
    """Loss of every token, as lists per sequence."""
    low, high, c = grpo.ratio_clip_min, grpo.ratio_clip_max, grpo.ratio_clip_c
    result = []
    rows = zip(sequences(new, lengths), sequences(old, lengths), sequences(advantages, lengths), strict=True)
    for new_row, old_row, advantage_row in rows:
        row = []
        mean_log_ratio = sum(n - o for n, o in zip(new_row, old_row, strict=True)) / len(new_row)
        for n, o, a in zip(new_row, old_row, advantage_row, strict=True):
            if grpo.policy_loss == "ppo":
                row.append(published_clipped((n - o).exp(), a, low, high, c))
            elif grpo.policy_loss == "gspo":  # eq. 5 and 7: s_i = exp(1/|y| sum log ratio), the same for all its tokens
                row.append(published_clipped(mean_log_ratio.exp(), a, low, high, c))
            else:  # CISPO eq. 4 and 5: sg(clip(r)) A log pi
                row.append(-clip((n - o).exp(), 1 - low, 1 + high).item() * a * n)
        result.append(row)
    return result


def trl_aggregate(rows, aggregation, max_answer_tokens):
    """TRL's published aggregation: mean of sequence means (grpo), mean over tokens (dapo, bnpo), constant (dr_grpo)."""
    if aggregation == "sequence":
        return sum(sum(row) / len(row) for row in rows) / len(rows)
    total = sum(sum(row) for row in rows)
    return total / sum(len(row) for row in rows) if aggregation == "token" else total / (len(rows) * max_answer_tokens)


CONFIGS = [
    Grpo(policy_loss="ppo"),
    Grpo(policy_loss="ppo", ratio_clip_min=0.2, ratio_clip_max=0.28),
    Grpo(policy_loss="ppo", ratio_clip_c=1.5),
    Grpo(policy_loss="gspo", ratio_clip_min=0.05, ratio_clip_max=0.1),
    Grpo(policy_loss="gspo", ratio_clip_min=0.5, ratio_clip_max=0.5),
    Grpo(policy_loss="cispo", ratio_clip_min=0.2, ratio_clip_max=0.28),
    Grpo(policy_loss="cispo", ratio_clip_min=1.0, ratio_clip_max=0.28),
]


@pytest.mark.parametrize("aggregation", ["token", "sequence", "constant"])
@pytest.mark.parametrize("grpo", CONFIGS, ids=lambda g: f"{g.policy_loss}-{g.ratio_clip_max}-{g.ratio_clip_c}")
@pytest.mark.parametrize("seed", [0, 1])
def test_loss_and_gradient_follow_the_published_formula(grpo, aggregation, seed):
    new, old, advantages, sample_ids = batch(seed=seed)
    loss, _ = policy_loss(new, old, advantages, weights_of(LENGTHS, aggregation), sample_ids, grpo)
    expected = trl_aggregate(published_loss(grpo, new, old, advantages), aggregation, max_answer_tokens=8)
    assert loss.item() == pytest.approx(expected.item(), rel=1e-12)
    (grad,) = torch.autograd.grad(loss, new)
    (expected_grad,) = torch.autograd.grad(expected, new)
    torch.testing.assert_close(grad, expected_grad, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("name", sorted(POLICY_LOSSES))
def test_first_step_has_the_policy_gradient_of_reinforce(name):
    """With old = new nothing is clipped: the gradient is -weight * A (GSPO spreads a sequence's evenly: the same)."""
    new, _, advantages, sample_ids = batch()
    weights = weights_of(LENGTHS, "sequence")
    loss, metrics = policy_loss(new, new.detach(), advantages, weights, sample_ids, Grpo(policy_loss=name))
    (grad,) = torch.autograd.grad(loss, new)
    torch.testing.assert_close(grad, -weights * advantages)
    assert metrics["ratio_sum"] == metrics["tokens"] == sum(LENGTHS)
    assert metrics["clipped_low_tokens"] == metrics["clipped_high_tokens"] == metrics["policy_kl_sum"] == 0


@pytest.mark.parametrize("name", sorted(POLICY_LOSSES))
@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_gradcheck_with_every_term(name, estimator):
    new, old, advantages, sample_ids = batch(spread=0.05)  # inside the clips: finite differences meet no kink
    reference = old - 0.3
    importance = torch.linspace(0.5, 1.5, len(new), dtype=torch.float64)
    # CISPO's ratio is held constant, which finite differences cannot know: bounds that meet make it so
    bounds = {"ratio_clip_min": -0.1, "ratio_clip_max": 0.1} if name == "cispo" else {}
    grpo = Grpo(policy_loss=name, kl_coef=0.1, kl_estimator=estimator, entropy_coef=0.01, **bounds)

    def loss_of(logprobs):
        given = {"importance": importance, "reference_logprobs": reference, "entropy": logprobs.square()}
        return policy_loss(logprobs, old, advantages, weights_of(LENGTHS), sample_ids, grpo, **given)[0]

    assert torch.autograd.gradcheck(loss_of, (new,))


def test_terms_add_up_by_hand():
    """Policy term scaled by the importance weight; KL and entropy terms not."""
    new, old, advantages, sample_ids = batch()
    weights, reference = weights_of(LENGTHS), old + 0.2
    importance = torch.linspace(0, 2, len(new), dtype=torch.float64)
    entropy = (-new).clamp(min=0)
    grpo = Grpo(kl_coef=0.1, kl_estimator="k2", entropy_coef=0.3)
    given = {"importance": importance, "reference_logprobs": reference, "entropy": entropy}
    loss, metrics = policy_loss(new, old, advantages, weights, sample_ids, grpo, **given)
    policy = [loss for row in published_loss(grpo, new, old, advantages) for loss in row]
    expected, kl_sum = 0.0, 0.0
    for t in range(len(new)):
        kl = 0.5 * (new[t].item() - reference[t].item()) ** 2
        kl_sum += kl
        expected += weights[t].item() * (importance[t].item() * policy[t].item() + 0.1 * kl - 0.3 * entropy[t].item())
    assert loss.item() == pytest.approx(expected, rel=1e-12)
    assert metrics["kl_sum"].item() == pytest.approx(kl_sum, rel=1e-6)
    assert metrics["entropy_sum"].item() == pytest.approx(entropy.sum().item(), rel=1e-6)
    assert metrics["importance_sum"].item() == pytest.approx(importance.sum().item(), rel=1e-6)
    assert metrics["importance_masked_tokens"] == 1
    assert not any(value.requires_grad for value in metrics.values())


def test_kl_in_the_reward_is_measured_but_not_in_the_loss():
    new, old, advantages, sample_ids = batch()
    weights = weights_of(LENGTHS)
    plain, _ = policy_loss(new, old, advantages, weights, sample_ids, Grpo())
    grpo = Grpo(kl_coef=0.5, kl_placement="reward")
    loss, metrics = policy_loss(new, old, advantages, weights, sample_ids, grpo, reference_logprobs=old)
    assert loss == plain and metrics["kl_sum"] > 0


def test_clip_metrics_count_where_the_gradient_changed():
    old = torch.zeros(6)
    new = torch.tensor([0.5, 1.5, 0.5, 1.5, 9.0, 1.0]).log().requires_grad_()
    advantages = torch.tensor([1.0, 1.0, -1.0, -1.0, -1.0, 1.0])
    grpo = Grpo(ratio_clip_c=3.0)
    loss, metrics = policy_loss(new, old, advantages, torch.ones(6), torch.arange(6), grpo)
    (grad,) = torch.autograd.grad(loss, new)
    assert (grad == 0).tolist() == [False, True, True, False, True, False]
    counts = [metrics[name].item() for name in ("clipped_low_tokens", "clipped_high_tokens", "dual_clipped_tokens")]
    assert counts == [1, 1, 1]
    assert loss.item() == pytest.approx(-0.5 - 1.2 + 0.8 + 1.5 + 3.0 - 1.0)


@pytest.mark.parametrize("name", sorted(POLICY_LOSSES))
@pytest.mark.parametrize("aggregation", ["token", "sequence", "constant"])
def test_any_split_into_microbatches_gives_the_same_sums(name, aggregation):
    lengths = [4, 1, 7, 3, 2, 5]
    counted = [True, True, False, True, True, True]
    new, old, advantages, _ = batch(lengths)
    per_sample = token_weights(lengths, aggregation, 8, counted)
    grpo = Grpo(policy_loss=name, kl_coef=0.2)

    def run(split):
        loss, grad, sums = 0.0, torch.zeros_like(new), {}
        starts = [sum(lengths[:i]) for i in range(len(lengths))]
        for part in split:
            tokens = torch.tensor([starts[i] + t for i in part for t in range(lengths[i])], dtype=torch.long)
            ids = torch.tensor([k for k, i in enumerate(part) for _ in range(lengths[i])], dtype=torch.long)
            weights = torch.tensor([per_sample[i] for i in part for _ in range(lengths[i])], dtype=torch.float64)
            reference = old[tokens] + 0.1
            part_loss, metrics = policy_loss(
                new[tokens], old[tokens], advantages[tokens], weights, ids, grpo, reference_logprobs=reference
            )
            grad += torch.autograd.grad(part_loss, new)[0]
            loss += part_loss.item()
            sums = {k: sums.get(k, 0.0) + v.item() for k, v in metrics.items()}
        return loss, grad, sums

    loss, grad, sums = run([range(6)])
    assert sums["tokens"] == sum(lengths) - lengths[2]  # what does not count is in no metric
    start = sum(lengths[:2])
    assert (grad[start : start + lengths[2]] == 0).all()
    rng = random.Random(0)
    for parts in (2, 3, 6):
        order = rng.sample(range(6), 6)
        split = [sorted(order[i::parts]) for i in range(parts)] + [[]]  # and one microbatch with nothing in it
        other_loss, other_grad, other_sums = run(split)
        assert other_loss == pytest.approx(loss, rel=1e-12)
        torch.testing.assert_close(other_grad, grad, rtol=1e-12, atol=1e-14)
        assert other_sums == pytest.approx(sums, rel=1e-5)


@pytest.mark.parametrize("name", sorted(POLICY_LOSSES))
def test_no_tokens_and_one_token(name):
    grpo = Grpo(policy_loss=name, kl_coef=0.1)
    nothing = torch.zeros(0, requires_grad=True)
    empty = torch.zeros(0)
    loss, metrics = policy_loss(
        nothing, empty, empty, empty, torch.zeros(0, dtype=torch.long), grpo, reference_logprobs=empty
    )
    loss.backward()
    assert loss == 0 and nothing.grad.shape == (0,) and all(v == 0 for v in metrics.values())
    one = torch.tensor([-1.0], requires_grad=True)
    loss, _ = policy_loss(
        one,
        one.detach(),
        torch.tensor([2.0]),
        torch.ones(1),
        torch.zeros(1, dtype=torch.long),
        grpo,
        reference_logprobs=one.detach(),
    )
    loss.backward()
    assert one.grad.item() == pytest.approx(-2.0)


@pytest.mark.parametrize("name", sorted(POLICY_LOSSES))
def test_extreme_ratios_stay_finite(name):
    new = torch.tensor([-1e-4, -200.0, -50.0], requires_grad=True)
    old = torch.tensor([-300.0, -1e-4, -300.0])
    grpo = Grpo(policy_loss=name, kl_coef=0.1)
    loss, metrics = policy_loss(
        new, old, torch.tensor([0.0, 1.0, -1.0]), torch.ones(3), torch.arange(3), grpo, reference_logprobs=old
    )
    loss.backward()
    assert loss.isfinite() and new.grad.isfinite().all() and all(v.isfinite() for v in metrics.values())


CPU = torch.device("cpu")
OWN = """
import torch

def clipped(logprobs, old_logprobs, advantages, sample_ids, grpo):
    ratio = (logprobs - old_logprobs).exp()
    held = ratio.clamp(1 - grpo.ratio_clip_min, 1 + grpo.ratio_clip_max)
    return torch.maximum(-ratio * advantages, -held * advantages)

def short(logprobs, old_logprobs, advantages):
    return -logprobs

def mean(logprobs, old_logprobs, advantages, sample_ids, grpo):
    return (-logprobs * advantages).mean()

def detached(logprobs, old_logprobs, advantages, sample_ids, grpo):
    return -logprobs.detach()

def endless(logprobs, old_logprobs, advantages, sample_ids, grpo):
    return -logprobs / 0

def of_some(logprobs, old_logprobs, advantages, sample_ids, grpo):
    return logprobs / logprobs.max()

def scales(logprobs, old_logprobs, advantages, sample_ids, grpo):
    return -logprobs * advantages.mul_(2)

def silent(logprobs, old_logprobs, advantages, sample_ids, grpo):
    from torchtitan.grpo.policy.losses import TokenLosses
    return TokenLosses(-logprobs * advantages, logprobs.detach().exp(), None, None, None)

def both(logprobs, old_logprobs, advantages, sample_ids, grpo):
    return -logprobs, {}

def leaves(logprobs, old_logprobs, advantages, sample_ids, grpo):
    raise SystemExit("no loss today")
"""


@pytest.fixture
def own(tmp_path, monkeypatch):
    """A module of losses in the folder where a run is started."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", [*sys.path])
    (tmp_path / "own_losses.py").write_text(OWN)
    return "own_losses"


def test_an_own_loss_is_trained_as_a_built_in_one(own):
    new, old, advantages, ids = batch()
    results = []
    for name in ("ppo", f"{own}:clipped"):
        grpo = Grpo(policy_loss=name, kl_coef=0.1, entropy_coef=0.01)
        given = {"importance": new.detach().exp(), "reference_logprobs": old - 0.3, "entropy": new.square()}
        check_loss(grpo, CPU)
        loss, sums = policy_loss(new, old, advantages, weights_of(LENGTHS), ids, grpo, **given)
        results.append((loss, *torch.autograd.grad(loss, new), sums))
    (loss, grad, sums), (own_loss, own_grad, own_sums) = results
    assert own_loss == loss and own_grad.equal(grad) and sums["clipped_high_tokens"] > 0
    assert own_sums == sums | {"clipped_low_tokens": 0, "clipped_high_tokens": 0}  # it does not say what it clips


def test_an_own_loss_is_tried_on_the_trainers_device(own):
    with pytest.raises(UserError, match=r"failed on a trial: .*[Mm]eta"):  # a tensor there has no values
        check_loss(Grpo(policy_loss=f"{own}:clipped"), torch.device("meta"))


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("short", r"must take 5 arguments \(logprobs, old_logprobs, advantages, sample_ids, grpo\)"),
        ("mean", r"failed on a trial: ValueError: its losses have the shape \[\], not one value for each of 4 tokens"),
        ("detached", "failed on a trial: RuntimeError: .*does not require grad"),
        ("endless", r"failed on a trial: ValueError: losses \[inf"),
        ("of_some", r"failed on a trial: RuntimeError: .*\(.*own_losses.py:22\)"),
        ("clip", r'has no function "clip"'),
        ("scales", "failed on a trial: ValueError: it changes a tensor that it gets"),
        ("silent", "failed on a trial: ValueError: its clipped_low have None, not one value for each of 4 tokens"),
        ("leaves", "failed on a trial: SystemExit: no loss today"),
        ("both", "failed on a trial: ValueError: it returned a tuple, not a tensor or TokenLosses"),
    ],
)
def test_a_wrong_own_loss_is_refused(own, name, message):
    with pytest.raises(UserError, match=rf"^\[grpo\] policy_loss: .*{message}"):
        check_loss(Grpo(policy_loss=f"{own}:{name}"), CPU)


def test_missing_inputs_and_unknown_names_are_errors():
    new, old, advantages, ids = batch()
    weights = weights_of(LENGTHS)
    for grpo, match in (
        (Grpo(policy_loss="reinforce"), r'\[grpo\] policy_loss: "reinforce" must be'),
        (Grpo(kl_coef=0.1), "reference_logprobs"),
        (Grpo(entropy_coef=0.1), "entropy_coef"),
    ):
        with pytest.raises(ValueError, match=match):
            policy_loss(new, old, advantages, weights, ids, grpo)
    with pytest.raises(ValueError, match="would do nothing"):
        policy_loss(new, old, advantages, weights, ids, Grpo(entropy_coef=0.1), entropy=old)
    with pytest.raises(ValueError, match="constant"):
        token_weights([1], "mean", 8, [True])


def test_token_weights_by_hand():
    lengths, counted = [2, 3, 5, 0], [True, False, True, True]
    assert token_weights(lengths, "token", 10, counted) == [1 / 7, 0, 1 / 7, 0]
    assert token_weights(lengths, "sequence", 10, counted) == [1 / 4, 0, 1 / 10, 0]
    assert token_weights(lengths, "constant", 10, counted) == [1 / 20, 0, 1 / 20, 0]
    for aggregation in ("token", "sequence", "constant"):
        assert token_weights([], aggregation, 10, []) == []
        assert token_weights([3, 0], aggregation, 10, [False, True]) == [0.0, 0.0]
    assert token_weights([1], "token", 10, [True]) == [1.0]


def corrected(correction: str, level: str, minimum: float, maximum: float) -> Grpo:
    keys = {"importance_correction": correction, "importance_level": level}
    return Grpo(importance_min=minimum, importance_max=maximum, **keys)


@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("correction", ["none", "truncate", "mask"])
def test_importance_weights_by_loops(correction, level):
    minimum, maximum = 0.7, 1.4
    trainer, sampler, _, sample_ids = batch(seed=3)
    weights, clipped = importance_weights(trainer, sampler, sample_ids, corrected(correction, level, minimum, maximum))
    expected, expected_clipped, outside = [], [], 0
    for row, other in zip(sequences(trainer), sequences(sampler), strict=True):
        ratios = [math.exp(a.item() - b.item()) for a, b in zip(row, other, strict=True)]
        if level == "sequence":
            ratios = [math.prod(ratios)] * len(ratios)
        for ratio in ratios:
            inside = minimum <= ratio <= maximum
            outside += not inside
            expected_clipped.append(correction != "none" and not inside)
            if correction == "none":
                expected.append(1.0)
            elif correction == "truncate":
                expected.append(min(max(ratio, minimum), maximum))
            else:
                expected.append(ratio if inside else 0.0)
    assert 0 < outside < len(expected)  # both sides are tested
    assert weights.tolist() == pytest.approx(expected, rel=1e-12)
    assert clipped.tolist() == expected_clipped
    assert not weights.requires_grad


def test_importance_of_equal_policies_is_one_and_overflow_is_bounded():
    logprobs = torch.tensor([-1.0, -2.0, -500.0])
    ids = torch.zeros(3, dtype=torch.long)
    for level in ("token", "sequence"):
        assert importance_weights(logprobs, logprobs, ids, corrected("mask", level, 0.5, 2.0))[0].tolist() == [1, 1, 1]
    far = torch.tensor([-900.0, -900.0, -900.0])
    assert importance_weights(logprobs, far, ids, corrected("truncate", "sequence", 0.0, 2.0))[0].tolist() == [2, 2, 2]
    assert importance_weights(logprobs, far, ids, corrected("mask", "sequence", 0.0, 2.0))[0].tolist() == [0, 0, 0]


def test_kl_estimators_by_formula_and_in_expectation():
    p = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64)
    q = torch.tensor([0.4, 0.4, 0.2], dtype=torch.float64)
    log_p, log_q = p.log(), q.log()
    for estimator, by_hand in (
        ("k1", [math.log(a / b) for a, b in zip(p.tolist(), q.tolist(), strict=True)]),
        ("k2", [0.5 * math.log(a / b) ** 2 for a, b in zip(p.tolist(), q.tolist(), strict=True)]),
        ("k3", [b / a - 1 - math.log(b / a) for a, b in zip(p.tolist(), q.tolist(), strict=True)]),
    ):
        assert kl_estimate(log_p, log_q, estimator).tolist() == pytest.approx(by_hand, rel=1e-12)
        leaf = log_p.clone().requires_grad_()
        assert torch.autograd.gradcheck(lambda x, e=estimator: kl_estimate(x, log_q, e), (leaf,))
    divergence = (p * (log_p - log_q)).sum().item()
    assert (p * kl_estimate(log_p, log_q, "k1")).sum().item() == pytest.approx(divergence)
    assert (p * kl_estimate(log_p, log_q, "k3")).sum().item() == pytest.approx(divergence)
    assert (kl_estimate(log_p, log_q, "k3") >= 0).all()


def test_k3_far_from_the_reference_never_pushes_away_from_it():
    """Value and gradient, against the formula and finite differences, on both sides of the bound on log q/p."""
    log_ratios = [-300.0, -30.0, -1.0, 0.0, 1.0, 10.0, 19.9, 20.1, 25.0, 300.0]
    logprobs = (-torch.tensor(log_ratios, dtype=torch.float64)).requires_grad_()
    reference = torch.zeros_like(logprobs)
    values = kl_estimate(logprobs, reference, "k3")
    (gradient,) = torch.autograd.grad(values.sum(), logprobs)
    bounded = [min(x, 20.0) for x in log_ratios]
    assert values.tolist() == pytest.approx([math.expm1(x) - x for x in bounded], rel=1e-12)
    assert gradient.tolist() == pytest.approx([-math.expm1(x) if x < 20 else 0.0 for x in log_ratios], rel=1e-12)
    with torch.no_grad():
        above, below = (kl_estimate(logprobs + step, reference, "k3") for step in (1e-6, -1e-6))
    torch.testing.assert_close((above - below) / 2e-6, gradient, rtol=1e-5, atol=1e-5)
    assert (values.diff() >= 0)[3:].all(), "more divergence never costs less"


def test_mismatch_sums():
    trainer, sampler = torch.tensor([-1.0, -2.0, -3.0]), torch.tensor([-1.5, -2.0, 5.0])
    sums = mismatch_sums(trainer, sampler, torch.tensor([0.5, 0.5, 0.0]))
    assert sums["mismatch_tokens"].item() == 2
    assert sums["mismatch_abs_sum"].item() == pytest.approx(0.5)
    assert sums["mismatch_kl_sum"].item() == pytest.approx(math.exp(0.5) - 1 - 0.5)


# `[grpo] proximal_logprobs = "sampler"`: the sampler's log-probabilities are the old ones, and nothing else corrects.


def behaviour(seed=0, vocabulary=5, versions=3):
    """Tokens of several sequences sampled by tabular policies of several versions within one answer, and the trained
    policy: logits [T, V] with gradient, tokens [T], the sampler's log-probabilities [T], advantages [T], sample ids."""
    rng = torch.Generator().manual_seed(seed)
    total = sum(LENGTHS)
    logits = torch.randn(versions, total, vocabulary, generator=rng, dtype=torch.float64)
    sampled_by = torch.randint(versions, (total,), generator=rng)
    sampler = logits[sampled_by, torch.arange(total)].log_softmax(-1)
    tokens = torch.multinomial(sampler.exp(), 1, generator=rng)[:, 0]
    trained = (logits[-1] + 0.3 * torch.randn(total, vocabulary, generator=rng, dtype=torch.float64)).requires_grad_()
    _, _, advantages, sample_ids = batch(seed=seed)
    return trained, tokens, sampler.gather(1, tokens[:, None])[:, 0], advantages, sample_ids


@pytest.mark.parametrize("aggregation", ["token", "sequence", "constant"])
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_proximal_sampler_is_plain_ppo_against_the_behaviour_policy(aggregation, seed):
    """Value and gradient in the logits, by loops over probabilities: r = pi_new(y) / mu(y), d r / d logit by hand."""
    trained, tokens, sampler, advantages, sample_ids = behaviour(seed)
    grpo = Grpo(proximal_logprobs="sampler", importance_correction="none", ratio_clip_min=0.2, ratio_clip_max=0.28)
    logprobs = trained.log_softmax(-1).gather(1, tokens[:, None])[:, 0]
    loss, sums = policy_loss(logprobs, sampler, advantages, weights_of(LENGTHS, aggregation), sample_ids, grpo)
    (grad,) = torch.autograd.grad(loss, trained)

    normaliser = {"token": sum(LENGTHS), "constant": len(LENGTHS) * 8}
    expected, clipped, expected_grad = 0.0, 0, torch.zeros_like(trained)
    for t, (y, mu) in enumerate(zip(tokens.tolist(), sampler.exp().tolist(), strict=True)):
        exps = [math.exp(x) for x in trained[t].tolist()]
        probabilities = [x / sum(exps) for x in exps]
        ratio, a = probabilities[y] / mu, advantages[t].item()
        weight = 1 / normaliser.get(aggregation, len(LENGTHS) * LENGTHS[sample_ids[t]])
        kept = ratio * a <= min(max(ratio, 0.8), 1.28) * a  # else the bound is the smaller, and has no gradient
        expected -= weight * (ratio if kept else min(max(ratio, 0.8), 1.28)) * a
        clipped += not kept
        for v, p in enumerate(probabilities):
            expected_grad[t, v] -= weight * a * ratio * ((v == y) - p) * kept
    assert 0 < clipped < len(tokens)  # both sides are tested
    assert loss.item() == pytest.approx(expected, rel=1e-12)
    torch.testing.assert_close(grad, expected_grad, rtol=1e-10, atol=1e-14)
    assert sums["clipped_low_tokens"] + sums["clipped_high_tokens"] == clipped
    assert sums["ratio_sum"].item() == pytest.approx((logprobs - sampler).exp().sum().item(), rel=1e-6)


def test_proximal_policies_agree_where_no_bound_is_met():
    """pi / mu at once, or pi / old clipped and old / mu as importance weight, are then one loss and one gradient."""
    trained, tokens, sampler, advantages, sample_ids = behaviour()
    logprobs = trained.log_softmax(-1).gather(1, tokens[:, None])[:, 0]
    old, weights = logprobs.detach() + 0.05 * torch.sin(torch.arange(len(tokens))), weights_of(LENGTHS)
    wide = Grpo(ratio_clip_min=1.0, ratio_clip_max=1e6)
    importance, _ = importance_weights(old, sampler, sample_ids, corrected("truncate", "token", 0.0, 1e6))
    decoupled, _ = policy_loss(logprobs, old, advantages, weights, sample_ids, wide, importance=importance)
    plain, _ = policy_loss(logprobs, sampler, advantages, weights, sample_ids, wide)
    assert plain.item() == pytest.approx(decoupled.item(), rel=1e-12)
    plain_grad, decoupled_grad = (
        torch.autograd.grad(loss, logprobs, retain_graph=True)[0] for loss in (plain, decoupled)
    )
    torch.testing.assert_close(plain_grad, decoupled_grad, rtol=1e-12, atol=1e-14)


def row_of(sampler, advantages, sample_ids, ages):
    """What `row_loss` reads of a `Microbatch`."""
    fields = {"sampler_logprobs": sampler, "advantages": advantages, "sample_ids": sample_ids, "ages": ages}
    return SimpleNamespace(**fields, weights=weights_of(LENGTHS))


def gradient_of_a_row(grpo, logprobs, *row, max_age=4):
    loss, sums = row_loss(logprobs, torch.zeros_like(logprobs), row_of(*row), grpo, max_age=max_age)
    return torch.autograd.grad(loss, logprobs, retain_graph=True)[0], sums


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_old_tokens_are_clipped_around_their_sampler(seed):
    """In a step's first minibatch, PPO against the sampler has the same gradient, if all tokens are old and the
    importance weights are not truncated. Tokens of the policy's own version keep their gradient."""
    trained, tokens, sampler, advantages, sample_ids = behaviour(seed)
    logprobs = trained.log_softmax(-1).gather(1, tokens[:, None])[:, 0]
    old, young = torch.full_like(sample_ids, 2), torch.zeros_like(sample_ids)
    row = sampler, advantages, sample_ids
    wide = {"importance_max": 1e6, "ratio_clip_max": 0.28}
    plain, plain_sums = gradient_of_a_row(
        Grpo(proximal_logprobs="sampler", importance_correction="none", ratio_clip_max=0.28), logprobs, *row, young
    )
    clipped, sums = gradient_of_a_row(Grpo(**wide), logprobs, *row, old)
    torch.testing.assert_close(clipped, plain, rtol=1e-12, atol=1e-14)
    left_out = sums["left_out_tokens"].item()
    assert 0 < left_out < len(tokens)
    assert left_out == plain_sums["clipped_low_tokens"] + plain_sums["clipped_high_tokens"]
    assert sums["importance_masked_tokens"] == sums["clipped_low_tokens"] == sums["clipped_high_tokens"] == 0
    assert "left_out_tokens" not in gradient_of_a_row(Grpo(**wide), logprobs, *row, young, max_age=0)[1], "synchronous"

    unclipped, _ = gradient_of_a_row(Grpo(**wide), logprobs, *row, young)
    assert torch.equal(clipped == 0, past_the_clip(logprobs, sampler, advantages, old, Grpo(**wide)))
    assert torch.equal(clipped[clipped != 0], unclipped[clipped != 0])


def test_which_old_tokens_are_past_the_clip():
    ratios = [1.3, 1.3, 1.1, 0.7, 0.7, 0.9, 1.0, 1.3]
    advantages = torch.tensor([1.0, -1.0, 1.0, 1.0, -1.0, -1.0, 0.0, 1.0])
    ages = torch.tensor([1, 1, 1, 3, 3, 3, 1, 0])
    found = past_the_clip(torch.tensor(ratios).log(), torch.zeros(8), advantages, ages, Grpo())
    assert found.tolist() == [True, False, False, False, True, False, False, False]
    for other in (Grpo(policy_loss="gspo"), Grpo(policy_loss="cispo"), Grpo(proximal_logprobs="sampler")):
        assert not past_the_clip(torch.tensor(ratios).log(), torch.zeros(8), advantages, ages, other).any()


def test_rounding_alone_takes_old_tokens_past_no_clip():
    """A sampler that rounds, and a policy that has not moved: what is trained raises as much as it lowers."""
    torch.manual_seed(0)
    logprobs = torch.full((100_000,), -1.0)
    sampler = logprobs + 0.25 * torch.randn_like(logprobs)
    advantages = torch.ones_like(logprobs).where(torch.arange(100_000) % 2 == 0, -1)
    given = logprobs, sampler, advantages, torch.ones_like(logprobs)
    weights = (logprobs - sampler).exp() * advantages
    for rounded, share, balance in ((False, 0.2, -0.08), (True, 0.004, 0.0)):
        past = past_the_clip(*given, Grpo(), rounded)
        assert past.float().mean().item() == pytest.approx(share, abs=0.02 if share > 0.1 else 0.004)
        assert weights.where(~past, 0).mean().item() == pytest.approx(balance, abs=0.02)
    moved = past_the_clip(logprobs, logprobs - 0.8 * advantages, *given[2:], Grpo(), True)
    assert moved.all(), "a policy that has moved by more than rounding is held"
    assert not past_the_clip(
        logprobs, logprobs - 0.8 * advantages, *given[2:], Grpo(ratio_clip_min=0.9, ratio_clip_max=9), True
    ).any()


def test_age_sums_by_loops():
    trainer, sampler, _, sample_ids = batch(seed=4)
    ages = torch.tensor([0, 1, 1, 2, 3, 0, -1, 7, 1, 0, 2, 3])  # -1 counts as 0, 3 and 7 as 2
    weights = weights_of(LENGTHS, counted=[True, True, True, False])  # the last two tokens do not count
    _, clipped = importance_weights(trainer, sampler, sample_ids, corrected("truncate", "token", 0.7, 1.3))
    sums = age_sums(trainer, sampler, weights, ages, 2, clipped)
    expected = {name: [0.0] * 3 for name in sums}
    for t in range(10):
        age = min(max(ages[t].item(), 0), 2)
        ratio = math.exp(trainer[t].item()) / math.exp(sampler[t].item())
        expected["age_tokens"][age] += 1
        expected["age_ratio_sum"][age] += ratio
        expected["age_ratio_squared_sum"][age] += ratio * ratio
        expected["age_clipped_tokens"][age] += ratio < 0.7 or ratio > 1.3
        expected["age_mismatch_kl_sum"][age] += ratio - 1 - math.log(ratio)
    assert 0 < sum(expected["age_clipped_tokens"]) < 10 and expected["age_tokens"] == [4, 3, 3]
    assert len(sums) == 5
    for name, values in sums.items():
        assert values.tolist() == pytest.approx(expected[name], rel=1e-12), name
        assert values.dtype == torch.float64 and not values.requires_grad
    mismatch = mismatch_sums(trainer, sampler, weights)
    assert sums["age_mismatch_kl_sum"].sum().item() == pytest.approx(mismatch["mismatch_kl_sum"].item())


def test_server_sums_by_loops():
    trainer, sampler, _, _ = batch(seed=6)
    servers = torch.tensor([1, 1, 3, 0, 3, 3, 1, 0, 1, 3, 3, 1])
    ages = torch.tensor([0, 1, 1, 0, 0, 2, 0, 1, -1, 0, 0, 0])  # -1 counts as 0, 2 as 1
    weights = weights_of(LENGTHS, counted=[True, True, True, False])  # the last two tokens do not count
    sums = by_server(server_values(trainer, sampler), weights, ages, 1, servers, 3)
    expected = [
        [(trainer[t] - sampler[t]).abs().item() for t in range(10) if servers[t] == s and (ages[t] > 0) == age]
        for s in (1, 2, 3)
        for age in (0, 1)
    ]
    assert sums["server_tokens"].tolist() == [3, 1, 0, 0, 2, 2] == [len(values) for values in expected]
    assert sums["server_mismatch_abs_sum"].tolist() == pytest.approx([sum(values) for values in expected], rel=1e-12)
    excess = [
        [(sampler[t] - trainer[t]).item() for t in range(10) if servers[t] == s and (ages[t] > 0) == age]
        for s in (1, 2, 3)
        for age in (0, 1)
    ]
    bounded = [[max(-0.1, min(0.1, value)) for value in values] for values in excess]
    assert sums["server_excess_sum"].tolist() == pytest.approx([sum(values) for values in bounded])
    assert sums["server_bounded_sum"].tolist() == pytest.approx([sum(map(abs, values)) for values in bounded])
    assert any(abs(value) > 0.1 for values in excess for value in values)
    assert all(values.dtype == torch.float64 and not values.requires_grad for values in sums.values())
    none = by_server(server_values(trainer[:0], sampler[:0]), weights[:0], ages[:0], 0, servers[:0], 2)
    assert [values.tolist() for values in none.values()] == [[0, 0]] * 4


def test_surprise_of_tokens_that_are_drawn_and_of_those_that_are_cut():
    """Its mean is 0 for draws from the distribution, within five standard errors, and below for draws from its top."""
    generator = torch.Generator().manual_seed(0)
    n, weights, ages = 20_000, torch.ones(20_000), torch.zeros(20_000, dtype=torch.int64)
    logprobs = torch.randn(n, 50, generator=generator).mul(2).log_softmax(-1)
    entropy = -(logprobs.exp() * logprobs).sum(-1)
    cut = logprobs.exp().where(logprobs >= logprobs.topk(10).values[:, -1:], 0)
    tokens = [torch.multinomial(p, 1, generator=generator) for p in (logprobs.exp(), cut)]
    means, errors = [], []
    for number, token in enumerate(tokens, 1):
        servers = torch.full((n,), number)
        values = surprise_values(logprobs.gather(-1, token)[:, 0], entropy)
        sums = by_server(values, weights, ages, 0, servers, 2)
        count, of_entropy, surprise, squared = (values[number - 1].item() for values in sums.values())
        assert count == n and of_entropy == pytest.approx(entropy.sum().item(), rel=1e-5)
        assert [values[2 - number].item() for values in sums.values()] == [0] * 4
        means.append(surprise / n)
        errors.append((squared / n) ** 0.5 / n**0.5)
    assert abs(means[0]) < 5 * errors[0] and means[1] < -20 * errors[1]


def test_age_sums_of_any_split_add_up():
    trainer, sampler, _, _ = batch(seed=5)
    ages, weights = torch.arange(12) % 3, weights_of(LENGTHS)
    clipped = torch.arange(12) % 5 == 0
    whole = age_sums(trainer, sampler, weights, ages, 4, clipped)
    assert whole["age_tokens"].tolist() == [4, 4, 4, 0, 0]
    parts = [
        age_sums(trainer[part], sampler[part], weights[part], ages[part], 4, clipped[part])
        for part in (slice(0, 0), slice(0, 1), slice(1, 7), slice(7, 12))
    ]
    for name, values in whole.items():
        assert sum(part[name] for part in parts).tolist() == pytest.approx(values.tolist(), rel=1e-12), name


def test_age_sums_of_nothing_and_of_values_without_bounds():
    empty = torch.zeros(0)
    ages = torch.zeros(0, dtype=torch.int64)
    for values in age_sums(empty, empty, empty, ages, 1, empty.bool()).values():
        assert values.tolist() == [0, 0]
    # ratios that overflow are bounded, and what does not count may be anything
    trainer, sampler = torch.tensor([-1.0, -500.0, float("nan")]), torch.tensor([-900.0, -1.0, 0.0])
    ages, clipped = torch.tensor([0, 1, 1]), torch.tensor([True, True, True])
    sums = age_sums(trainer, sampler, torch.tensor([1.0, 1.0, 0.0]), ages, 1, clipped)
    assert sums["age_tokens"].tolist() == sums["age_clipped_tokens"].tolist() == [1, 1]
    assert sums["age_ratio_sum"].tolist() == pytest.approx([math.exp(20), math.exp(-20)])
    assert sums["age_ratio_squared_sum"].tolist() == pytest.approx([math.exp(40), math.exp(-40)])
    assert sums["age_mismatch_kl_sum"].tolist() == pytest.approx([math.exp(20) - 1 - 20, math.exp(-499) - 1 + 499])
