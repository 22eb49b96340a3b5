"""The mean of a token's gradient under the sampler is taken out of it, against sums over the whole vocabulary."""

from types import SimpleNamespace

import pytest
import torch

from torchtitan.grpo.config.job_config import Grpo
from torchtitan.grpo.policy.losses import row_loss
from torchtitan.grpo.policy.score_centering import expected_score

V, K = 11, 4
LOSSES = {
    "truncated weights": Grpo(),
    "bounds on both sides": Grpo(importance_min=0.7, importance_max=1.3),
    "masked weights": Grpo(importance_correction="mask", importance_min=0.5),
    "no weights": Grpo(importance_correction="none"),
    "cispo": Grpo(policy_loss="cispo", proximal_logprobs="sampler", importance_correction="none"),
    "cispo from the trainer's policy": Grpo(policy_loss="cispo"),
}


def policies(seed=0):
    """The policy's logits [V], and the sampler's log-probabilities with a tail that is in proportion to the policy's.
    Tokens are in the sampler's order."""
    rng = torch.Generator().manual_seed(seed)
    logits = torch.randn(V, generator=rng, dtype=torch.float64)
    head = logits[:K] + torch.randn(K, generator=rng, dtype=torch.float64)
    sampler = torch.cat([head, logits[K:] - 0.4]).log_softmax(0)
    return logits.requires_grad_(), sampler


def gradient(grpo, logits, sampler, token, advantage, k, age=0, max_age=4):
    """By the logits, of a row of one token that was sampled, if the sampler names its tokens 0 to k - 1."""
    logprobs = logits.log_softmax(0)
    rest = logprobs[k:].logsumexp(0, keepdim=True) if k < V else logprobs.new_full((1,), -80.0)
    row = SimpleNamespace(
        sampler_logprobs=sampler[token, None],
        advantages=torch.full((1,), advantage, dtype=torch.float64),
        sample_ids=torch.zeros(1, dtype=torch.int64),
        ages=torch.full((1,), age),
        weights=torch.ones(1, dtype=torch.float64),
        top_logprobs=sampler[None, :k],
    )
    top_logprobs = torch.cat([logprobs[:k], rest])[None] if grpo.score_centering else None
    own = logprobs[token, None]
    loss, sums = row_loss(own, torch.zeros_like(own), row, grpo, max_age=max_age, top_logprobs=top_logprobs)
    return torch.autograd.grad(loss, logits)[0], sums


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("k", [V, K])
@pytest.mark.parametrize("advantage", [1.5, -0.5])
def test_the_samplers_mean_is_zero_after_it_and_not_before(name, k, advantage):
    """With the whole vocabulary, and with few tokens if the tail is as it is taken to be."""
    logits, sampler = policies()
    means = []
    for centering in (0, k):
        grpo = Grpo(**vars(LOSSES[name]) | {"score_centering": centering})
        given = [gradient(grpo, logits, sampler, token, advantage, k)[0] for token in range(V)]
        means.append((sampler.exp()[:, None] * torch.stack(given)).sum(0))
    assert means[1].abs().max() < 1e-14 < 1e-3 < means[0].abs().max()


@pytest.mark.parametrize("correction", ["none", "truncate", "mask"])
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_the_term_is_the_papers(correction, seed):
    """Equation 14 with the tail rho p, for a sampler whose tail is another. The loss keeps its value."""
    rng = torch.Generator().manual_seed(seed)
    logits = torch.randn(V, generator=rng, dtype=torch.float64).requires_grad_()
    sampler = torch.randn(V, generator=rng, dtype=torch.float64).log_softmax(0).sort(descending=True).values
    low, high, advantage = 0.6, 1.4, -0.75
    keys = {"importance_correction": correction, "importance_min": low, "importance_max": high}
    found, sums = gradient(Grpo(**keys, score_centering=K), logits, sampler, 7, advantage, K)
    plain, plain_sums = gradient(Grpo(**keys), logits, sampler, 7, advantage, K)

    p, q = logits.softmax(0)[:K], sampler[:K].exp()
    rho = (1 - q.sum()) / (1 - p.sum()).clamp(min=1e-6)
    if correction == "none":
        mass, alpha = q, rho
    elif correction == "truncate":
        mass, alpha = torch.clamp(p, low * q, high * q), torch.clamp(torch.ones_like(rho), low * rho, high * rho)
    else:
        mass = torch.where((p / q >= low) & (p / q <= high), p, 0)
        alpha = torch.where((1 / rho >= low) & (1 / rho <= high), 1.0, 0.0)
    term = advantage * ((mass - alpha * p).detach() * p.log()).sum()
    torch.testing.assert_close(found - plain, torch.autograd.grad(term, logits)[0], rtol=1e-9, atol=1e-12)
    assert sums["loss"] == plain_sums["loss"]
    assert sums["centering_rest_sum"] == pytest.approx(1 - q.sum().item())


def test_it_is_nothing_where_the_sampler_is_the_policy():
    logits, _ = policies()
    same = logits.detach().log_softmax(0)
    found, sums = gradient(Grpo(score_centering=K), logits, same, 1, 1.0, K)
    torch.testing.assert_close(found, gradient(Grpo(), logits, same, 1, 1.0, K)[0], rtol=0, atol=1e-15)
    assert sums["centering_sum"] < 1e-15


def test_the_clip_of_old_tokens_stays_as_it_is():
    """Its own mean is not taken out: that would push on where it has stopped."""
    logits, sampler = policies()
    clipped = 0
    for token in range(V):
        plain, centered = Grpo(), Grpo(score_centering=K)
        young, old = (
            [gradient(grpo, logits, sampler, token, 1.0, K, age)[0] for grpo in (plain, centered)] for age in (0, 2)
        )
        torch.testing.assert_close(old[1] - old[0], young[1] - young[0], rtol=0, atol=1e-15)
        clipped += int(not old[0].any())
    assert 0 < clipped < V


def test_nothing_is_taken_where_the_sampler_names_no_token():
    """As at a position of a group from before a resume."""
    logprobs = torch.zeros(1, K + 1, requires_grad=True)
    score, sizes = expected_score(lambda ours, theirs: ours - theirs + 1, logprobs, torch.full((1, K), -torch.inf))
    assert not torch.autograd.grad(score.sum(), logprobs)[0].any()
    assert not score.any() and not sizes["centering"].any() and not sizes["centering_rest"].any()
