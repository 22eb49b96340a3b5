"""What a step measures of its tokens, by age and by server: detached sums over the tokens of one microbatch.

They are summed over microbatches and ranks. `reporting/step_metrics.py` makes metrics of them. Tensors are [T], as in
`losses.py`.
"""

import torch
from torch import Tensor

from torchtitan.grpo.policy.ratios import k3, ratio_of

BOUND = 0.1
"""Nat of one token that count for the direction in which a server differs: few tokens that are far off say nothing."""


def mismatch_sums(trainer_logprobs: Tensor, sampler_logprobs: Tensor, weights: Tensor) -> dict[str, Tensor]:
    """Difference between sampler and trainer: detached sums over the tokens that have a weight (see `policy_loss`).

    `mismatch_tokens` counts these. `mismatch_kl_sum` is the k3 estimate of KL(sampler || trainer) from the sampler's
    tokens. `mismatch_abs_sum` is the absolute difference of log-probabilities.
    """
    trained = weights != 0
    log_ratio = (trainer_logprobs - sampler_logprobs).detach().where(trained, 0)
    return {
        "mismatch_tokens": trained.sum().float(),
        "mismatch_kl_sum": k3(log_ratio).sum(),
        "mismatch_abs_sum": log_ratio.abs().sum(),
    }


def age_sums(
    trainer_logprobs: Tensor,
    sampler_logprobs: Tensor,
    weights: Tensor,
    ages: Tensor,
    max_age: int,
    clipped: Tensor,
) -> dict[str, Tensor]:
    """The effect of staleness by age: detached sums, float64 [max_age + 1], over the tokens of each age with a weight.

    With w = exp(trainer - sampler) of a token at every correction level: `age_tokens`, `age_ratio_sum` of w,
    `age_ratio_squared_sum` of w^2, `age_clipped_tokens`, and `age_mismatch_kl_sum`, the k3 estimate of
    KL(sampler || trainer). The effective sample size of n tokens, as a share, is (sum w)^2 / (n sum w^2).

    Args:
        ages: int64, from `Microbatch.ages`, clamped to 0..max_age.
        clipped: bool, from `importance_weights`.
    """
    trained = weights != 0
    log_ratio = (trainer_logprobs - sampler_logprobs).detach().double().where(trained, 0)
    ratio = ratio_of(log_ratio)
    values = {
        "age_tokens": torch.ones_like(ratio),
        "age_ratio_sum": ratio,
        "age_ratio_squared_sum": ratio.square(),
        "age_clipped_tokens": clipped.double(),
        "age_mismatch_kl_sum": k3(log_ratio),
    }
    per_token = torch.stack(list(values.values())).where(trained, 0)
    sums = per_token.new_zeros(len(values), max_age + 1).index_add(1, ages.clamp(0, max_age), per_token)
    return dict(zip(values, sums, strict=True))


def server_values(trainer_logprobs: Tensor, sampler_logprobs: Tensor) -> dict[str, Tensor]:
    """Difference between sampler and trainer, for `by_server`: detached, float64 [T].

    Returns:
        Ones as `server_tokens`, `server_mismatch_abs_sum` of the absolute difference of log-probabilities, and of at
        most BOUND of it: `server_bounded_sum`, and `server_excess_sum` of sampler - trainer.
    """
    excess = (sampler_logprobs - trainer_logprobs).detach().double()
    bounded = excess.clamp(-BOUND, BOUND)
    return {
        "server_tokens": torch.ones_like(excess),
        "server_mismatch_abs_sum": excess.abs(),
        "server_bounded_sum": bounded.abs(),
        "server_excess_sum": bounded,
    }


def surprise_values(logprobs: Tensor, entropy: Tensor) -> dict[str, Tensor]:
    """Whether tokens are drawn from the policy, for `by_server`: detached, float64 [T].

    A token's surprise is `-logprobs - entropy`. Its mean is 0 if the token is drawn from the policy of both, whatever
    came before. It is negative if only a part of the vocabulary could be drawn, or at a lower temperature.

    Returns:
        `server_drawn_tokens`, `server_entropy_sum`, `server_surprise_sum` and `server_surprise_squared_sum`.
    """
    entropy = entropy.detach().double()
    surprise = -logprobs.detach().double() - entropy
    return {
        "server_drawn_tokens": torch.ones_like(surprise),
        "server_entropy_sum": entropy,
        "server_surprise_sum": surprise,
        "server_surprise_squared_sum": surprise.square(),
    }


def by_server(
    values: dict[str, Tensor], weights: Tensor, ages: Tensor, max_age: int, servers: Tensor, num_servers: int
) -> dict[str, Tensor]:
    """Sums of values over the tokens with a weight: [num_servers * (max_age + 1)], the first server's ages, then the
    second's.

    Args:
        ages: int64, from `Microbatch.ages`, clamped to 0..max_age.
        servers: int64, from `Microbatch.servers`: 1 to num_servers, or 0 for a token that enters no sum.
    """
    per_token = torch.stack(list(values.values())).where(weights != 0, 0)
    of_token = servers * (max_age + 1) + ages.clamp(0, max_age)
    sums = per_token.new_zeros(len(values), (num_servers + 1) * (max_age + 1)).index_add(1, of_token, per_token)
    return dict(zip(values, sums[:, max_age + 1 :], strict=True))


def route_sums(agrees: Tensor, weights: Tensor) -> dict[str, Tensor]:
    """How often the trainer's routers would have chosen the sampler's experts: sums over the tokens with a weight.

    `route_agreement_sum` has each token's share of layers that agree, `route_tokens_alike` counts those with all.

    Args:
        agrees: bool [A, layers], from `packed.make_packed`'s model.
    """
    agrees = agrees & (weights != 0)[:, None]
    return {"route_agreement_sum": agrees.double().mean(1).sum(), "route_tokens_alike": agrees.all(1).sum().double()}
