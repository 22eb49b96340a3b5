"""On-policy distillation as a loss, see `distillation.py`: the divergence from a teacher's likeliest tokens."""

import torch
from torch import Tensor


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
