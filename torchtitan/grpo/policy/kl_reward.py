"""KL to the reference as part of the reward: advantages of rewards less each answer's KL."""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from torchtitan.grpo.config.job_config import Distill, Grpo
from torchtitan.grpo.policy.advantages import reward_advantages, with_penalties
from torchtitan.grpo.policy.batch import split
from torchtitan.grpo.policy.losses import KLEstimator, kl_estimate
from torchtitan.grpo.policy.microbatch import Microbatch

FixedLogprobs = tuple[Tensor | None, Tensor | None]
"""Log-probabilities [A] of a row that stay fixed during a step: the old policy's and the reference's."""


def subtract_kl(
    rewards: Sequence[Sequence[float | None]],
    minibatches: Sequence[Sequence[Microbatch]],
    fixed: Sequence[Sequence[FixedLogprobs]],
    grpo: Grpo,
    distill: Distill,
    group: dist.ProcessGroup | None,
) -> list[list[float]]:
    """Advantages of rewards less `kl_coef` times the KL estimate of each answer, which the rows get. Collective.

    Args:
        rewards: By group and sample, of the whole step on every rank.
        minibatches, fixed: This rank's rows of each minibatch, and their log-probabilities.
        group: The data-parallel ranks; None if this rank is the only one.

    Returns:
        The advantages by group and sample.
    """
    result: list[list[float]] = []
    for part, rows, own in zip(split(len(rewards), len(minibatches)), minibatches, fixed, strict=True):
        of_part = [rewards[i] for i in part]
        kl = kl_by_sample(rows, own, sum(map(len, of_part)), grpo.kl_estimator)
        if group is not None:
            dist.all_reduce(kl, group=group)
        by_group = reward_advantages(with_penalties(of_part, (grpo.kl_coef * kl).tolist()), grpo, distill)
        advantages = torch.tensor([a for own in by_group for a in own], device=kl.device)
        for row in rows:
            row.advantages = advantages[row.samples[row.sample_ids]]
        result += by_group
    return result


def kl_by_sample(
    rows: Sequence[Microbatch], fixed: Sequence[FixedLogprobs], samples: int, estimator: KLEstimator
) -> Tensor:
    """Each sample's KL estimate against the reference, summed over its tokens, float32 [samples], from these rows."""
    kl = torch.zeros(samples, device=rows[0].tokens.device)
    for row, (old, reference) in zip(rows, fixed, strict=True):
        kl.index_add_(0, row.samples[row.sample_ids], kl_estimate(old, reference, estimator))
    return kl
