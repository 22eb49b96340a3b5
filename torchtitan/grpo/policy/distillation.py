"""On-policy distillation: a teacher's scores as advantages, or as a loss. Pure functions.

As advantages: the student samples a token, and its advantage is how much likelier the teacher finds it. The policy
gradient of that is the gradient of the negative reverse KL divergence KL(student || teacher) of each token's
distribution, at the states that the student visits (GKD, arXiv 2306.13649; "On-Policy Distillation", Thinking Machines,
2025, as a reward per token with a discount of 0). The loss functions know nothing of it: they take any advantage per
token.

As a loss: the forward KL divergence KL(teacher || student) of each token's distribution, at the same states (GKD too),
from the teacher's likeliest tokens. It says of all of them what to do, where an advantage says it of the sampled one.
"""

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
