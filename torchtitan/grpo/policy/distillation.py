"""On-policy distillation: a teacher's scores as advantages, or as a loss. Pure functions.

As advantages: the student samples a token, and its advantage is how much likelier the teacher finds it. The policy
gradient of that is the gradient of the negative reverse KL divergence KL(student || teacher) of each token's
distribution, at the states that the student visits (GKD, arXiv 2306.13649; "On-Policy Distillation", Thinking Machines,
2025, as a reward per token with a discount of 0). The loss functions know nothing of it: they take any advantage per
token.

As a loss: the forward KL divergence KL(teacher || student) of each token's distribution, at the same states (GKD too),
from the teacher's likeliest tokens. It says of all of them what to do, where an advantage says it of the sampled one.
"""

import torch
from torch import Tensor

from torchtitan.grpo.data.samples import IMPOSSIBLE, Sample


def teacher_advantages(sample: Sample, coef: float) -> list[float]:
    """What the teacher contributes to the advantage of each token: coef * (log p_teacher - log p_sampler).

    0 for a token that the teacher finds impossible: its number only stands for -inf, or NaN. Empty without a teacher.
    Outside `loss_mask` the values mean nothing, as the log-probabilities there.
    """
    if sample.teacher_logprobs is None:
        return []
    pairs = zip(sample.teacher_logprobs, sample.logprobs, strict=True)
    return [coef * (t - s) if t > IMPOSSIBLE else 0.0 for t, s in pairs]


def reverse_kl_sum(sample: Sample) -> float:
    """The estimate of KL(sampler || teacher), summed over the tokens that the model sampled; in nats."""
    mask = sample.loss_mask or [True] * len(sample.token_ids)
    return -sum(a for a, sampled in zip(teacher_advantages(sample, 1.0), mask, strict=True) if sampled)


def top_k_kl(teacher_logprobs: Tensor, logprobs: Tensor) -> Tensor:
    """KL(teacher || student) [T] in nats, where all tokens but the teacher's K likeliest are one outcome.

    It is 0 if the student has the teacher's probabilities, else over 0, and at most the divergence of the whole
    distributions.

    Args:
        teacher_logprobs: [T, K]; -inf is no token. Without any token at a position, the divergence there is 0.
        logprobs: The student's of the same tokens and of all others together, [T, K + 1], from
            `model.logprobs.token_logprobs`. The result is differentiable in them.
    """
    known = teacher_logprobs > -torch.inf
    theirs, ours = teacher_logprobs.where(known, 0), logprobs[:, :-1].where(known, 0)
    shares = theirs.exp().where(known, 0)
    rest = (1 - shares.sum(1)).clamp(min=0)  # of float32 numbers that a server sent: its error is theirs
    return (shares * (theirs - ours)).sum(1) + torch.xlogy(rest, rest) - rest * logprobs[:, -1]


def teacher_sums(divergence: Tensor, teacher_logprobs: Tensor, weights: Tensor) -> dict[str, Tensor]:
    """Divergence from the teacher, and the probability that its known tokens have by it: sums over the tokens with a
    weight. `divergence` is of `top_k_kl`, [T], and `teacher_logprobs` are [T, K]."""
    trained = weights != 0
    return {
        "top_k_kl_sum": divergence.detach().where(trained, 0).sum(),
        "top_k_mass_sum": teacher_logprobs.exp().sum(1).where(trained, 0).sum(),
    }
