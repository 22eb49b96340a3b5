"""From a step's scored groups to samples with advantages and weights. Pure functions on lists."""

import itertools
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from torchtitan.grpo.config.job_config import Distill, Grpo
from torchtitan.grpo.data.samples import Group, Sample
from torchtitan.grpo.policy.advantages import overlong_penalty, reward_advantages, with_penalties, zero_variance
from torchtitan.grpo.policy.distillation import teacher_advantages
from torchtitan.grpo.policy.losses import KLEstimator, kl_estimate, token_weights
from torchtitan.grpo.policy.rows import Microbatch, PackedSample

FixedLogprobs = tuple[Tensor | None, Tensor | None]
"""Log-probabilities [A] of a row that stay fixed during a step: the old policy's and the reference's."""


def split(n: int, parts: int) -> list[range]:
    """0..n-1 in `parts` consecutive ranges whose lengths differ by at most 1."""
    bounds = [i * n // parts for i in range(parts + 1)]
    return [range(start, end) for start, end in itertools.pairwise(bounds)]


def shaped_reward(sample: Sample, grpo: Grpo, max_answer_tokens: int) -> float | None:
    """The sample's reward with DAPO's penalty for answers that nearly reach `max_answer_tokens`; None without one."""
    if sample.reward is None:
        return None
    tokens = len(sample.token_ids)
    return sample.reward + overlong_penalty(
        tokens, max_answer_tokens, grpo.overlong_buffer_tokens, grpo.overlong_penalty
    )


def has_signal(group: Group, grpo: Grpo, max_answer_tokens: int, distill: Distill | None = None) -> bool:
    """Whether the group's rewards differ, or a teacher of this run scored it. Else its advantages are zero.

    A KL that is subtracted later makes advantages of equal rewards too, but is not asked: it says nothing of the task.
    """
    taught = [sample for sample in group if sample.teacher_logprobs is not None and sample.reward is not None]
    if taught and _has_teacher(distill):
        return True
    return not zero_variance([shaped_reward(sample, grpo, max_answer_tokens) for sample in group])


def _has_teacher(distill: Distill | None) -> bool:
    """Recorded samples, and groups from before a resume, may have scores of a teacher that this run has not."""
    return distill is not None and bool(distill.teacher_urls)


def counted_samples(group: Group, grpo: Grpo, max_answer_tokens: int, distill: Distill | None = None) -> list[bool]:
    """Which samples enter the loss and its normaliser.

    Those without a reward do not, nor aborted ones, nor truncated ones if they are filtered.
    """
    if grpo.zero_variance_groups != "keep" and not has_signal(group, grpo, max_answer_tokens, distill):
        return [False] * len(group)
    left_out = ("abort", "length") if grpo.overlong_filter else ("abort",)
    return [sample.reward is not None and sample.finish_reason not in left_out for sample in group]


def training_samples(
    groups: Sequence[Group],
    advantages: Sequence[Sequence[float]],
    version: int,
    grpo: Grpo,
    max_answer_tokens: int,
    servers_of: Callable[[Sample], list[int]] = lambda sample: [],
    distill: Distill | None = None,
) -> list[PackedSample]:
    """One minibatch's answers, ready to pack.

    Args:
        advantages: By group and sample.
        version: Of the weights that are trained; a token's age is this minus the version that sampled it.
        servers_of: Each token's `PackedSample.servers`.
        distill: How a teacher's scores, where there are any, become advantages. None, or without a teacher: not at all.
    """
    distill = distill if _has_teacher(distill) else None
    answers = [(s, a) for group, own in zip(groups, advantages, strict=True) for s, a in zip(group, own, strict=True)]
    weights = token_weights(
        [sample.sampled_tokens for sample, _ in answers],
        grpo.loss_aggregation,
        max_answer_tokens,
        [counted for group in groups for counted in counted_samples(group, grpo, max_answer_tokens, distill)],
    )
    return [
        PackedSample(
            sample.prompt.token_ids,
            sample.token_ids,
            advantage,
            weight,
            sample.logprobs,
            [version - sampled_by for sampled_by in sample.versions],
            sample.loss_mask,
            servers_of(sample),
            teacher_advantages(sample, distill.coef) if distill and not distill.top_k else [],
            sample.routes if grpo.routing_replay else None,
            sample.teacher_top if distill and distill.top_k else None,
        )
        for (sample, advantage), weight in zip(answers, weights, strict=True)
        if weight or grpo.kl_placement == "reward"  # a sample without weight costs nothing, unless KL needs its place
    ]


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
