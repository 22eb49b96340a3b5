"""Score centering (arXiv 2609.20807): take its mean under the sampler out of each token's gradient.

The score of a token is the gradient of its log-probability. Under the policy p scores have mean zero, so a constant
added to an advantage changes nothing in expectation. Under an older sampler q they have not: what advantage the tokens
of a position have in common then pushes p in a direction that says nothing of rewards, at every step.

A token's gradient is advantage x weight x score, with the weight that corrects for the sampler. Its mean over the
tokens that q might have sampled in its place is subtracted. The sampler names its K likeliest ones; all others are one
more outcome, with the probability that is left of q and of p. That is the paper's model of the tail: with p's shares.
"""

from collections.abc import Callable

import torch
from torch import Tensor

MASS_ERROR = 1e-6
"""Less than this is no probability of other tokens, but the rounding of float32 numbers that were added."""


def expected_score(
    weights: Callable[[Tensor, Tensor], Tensor], logprobs: Tensor, sampler_logprobs: Tensor
) -> tuple[Tensor, dict[str, Tensor]]:
    """The sampler's mean of weight x score [T], as a number whose gradient it is. The number is 0, so that a loss keeps
    its value. At a position of which the sampler names no token, the gradient is 0 too.

    Args:
        weights: (log-probabilities, the sampler's) -> the detached weight of each outcome. All are [T, K + 1].
        logprobs: Of the sampler's tokens and of all others together [T, K + 1], with gradient.
        sampler_logprobs: [T, K]; -inf is no token.

    Returns:
        The mean, and for metrics, detached [T]: `centering_rest`, the sampler's probability of the tokens that it did
        not name, and `centering`, half the sum over outcomes of the absolute gradient by their logits: the distance of
        sampler and policy in total variation, if all weights are 1.
    """
    shares = sampler_logprobs.exp()
    rest = (1 - shares.sum(1, keepdim=True)).clamp(min=0) * (shares > 0).any(1, keepdim=True)
    shares = torch.cat([shares, rest.where(rest > MASS_ERROR, 0)], 1)
    known, ours = shares > 0, logprobs.detach()
    means = shares * weights(ours.where(known, 0), shares.log().where(known, 0))
    by_logits = means - ours.exp().where(known, 0) * means.sum(1, keepdim=True)
    sizes = {"centering_rest": rest[:, 0], "centering": by_logits.abs().sum(1) / 2}
    return (means * (logprobs - ours)).sum(1), sizes
