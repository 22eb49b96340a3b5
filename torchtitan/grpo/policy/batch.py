"""From scored groups, or conversations, to samples with advantages and weights. Pure functions on lists."""

import itertools
from collections.abc import Callable, Sequence
from typing import Literal

import numpy as np

from torchtitan.grpo.config.job_config import Distill, Grpo
from torchtitan.grpo.data.group_arrays import as_array
from torchtitan.grpo.data.samples import Document, Group, Sample
from torchtitan.grpo.policy.advantages import overlong_penalty, zero_variance
from torchtitan.grpo.policy.distillation import teacher_advantages
from torchtitan.grpo.policy.rows import PackedSample

NO_TEACHER = Distill()


def split(n: int, parts: int) -> list[range]:
    """0..n-1 in `parts` consecutive ranges whose lengths differ by at most 1."""
    bounds = [i * n // parts for i in range(parts + 1)]
    return [range(start, end) for start, end in itertools.pairwise(bounds)]


def shaped_reward(sample: Sample, grpo: Grpo, max_answer_tokens: int) -> float | None:
    """The sample's reward with DAPO's penalty for answers that nearly reach `max_answer_tokens`; None without one."""
    if sample.reward is None:
        return None
    tokens = sample.beyond + len(sample.token_ids)
    return sample.reward + overlong_penalty(
        tokens, max_answer_tokens, grpo.overlong_buffer_tokens, grpo.overlong_penalty
    )


def has_signal(group: Group, grpo: Grpo, max_answer_tokens: int, distill: Distill = NO_TEACHER) -> bool:
    """Whether the group's rewards differ, or a teacher of this run scored it. Else its advantages are zero.

    A KL that is subtracted later makes advantages of equal rewards too, but is not asked: it says nothing of the task.
    """
    taught = [sample for sample in group if sample.teacher_logprobs is not None and sample.reward is not None]
    # Recorded samples, and groups from before a resume, may have scores of a teacher that this run has not.
    if taught and distill.teacher_urls:
        return True
    return not zero_variance([shaped_reward(sample, grpo, max_answer_tokens) for sample in group])


def counted_samples(group: Group, grpo: Grpo, max_answer_tokens: int, distill: Distill = NO_TEACHER) -> list[bool]:
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
    servers_of: Callable[[Sample], list[int] | np.ndarray] = lambda sample: [],
    distill: Distill = NO_TEACHER,
    totals: tuple[int, int] | None = None,
) -> list[PackedSample]:
    """One minibatch's answers, ready to pack.

    Args:
        advantages: By group and sample.
        version: Of the weights that are trained; a token's age is this minus the version that sampled it.
        servers_of: Each token's `PackedSample.servers`.
        distill: How a teacher's scores, where there are any, become advantages.
        totals: Answers and tokens that enter the loss, if others have some of the minibatch; see `counted_totals`.
    """
    likeliest = distill.top_k if distill.teacher_urls else grpo.score_centering
    adds_scores = distill.teacher_urls and not distill.top_k
    answers = [(s, a) for group, own in zip(groups, advantages, strict=True) for s, a in zip(group, own, strict=True)]
    weights = token_weights(
        [sample.sampled_tokens for sample, _ in answers],
        grpo.loss_aggregation,
        max_answer_tokens,
        [counted for group in groups for counted in counted_samples(group, grpo, max_answer_tokens, distill)],
        totals,
    )
    return [
        PackedSample(
            sample.prompt.token_ids,
            sample.token_ids,
            advantage,
            weight,
            sample.logprobs,
            version - as_array(sample.versions, np.int32),
            sample.loss_mask,
            servers_of(sample),
            teacher_advantages(sample, distill.coef) if adds_scores else [],
            sample.routes if grpo.routing_replay else None,
            sample.top if sample.top and sample.top.ids.shape[1] == likeliest else None,
            sample.kept,
        )
        for (sample, advantage), weight in zip(answers, weights, strict=True)
        if weight or grpo.kl_placement == "reward"  # a sample without weight costs nothing, unless KL needs its place
    ]


def counted_totals(
    groups: Sequence[Group], grpo: Grpo, max_answer_tokens: int, distill: Distill = NO_TEACHER
) -> tuple[int, int]:
    """Answers that enter the loss, and their tokens: what normalises it."""
    lengths = [
        sample.sampled_tokens
        for group in groups
        for sample, counts in zip(group, counted_samples(group, grpo, max_answer_tokens, distill), strict=True)
        if counts
    ]
    return sum(n > 0 for n in lengths), sum(lengths)


def token_weights(
    trained_tokens: list[int],
    aggregation: Literal["token", "sequence", "constant"],
    max_answer_tokens: int,
    counted: list[bool],
    totals: tuple[int, int] | None = None,
) -> list[float]:
    """Weight of each TOKEN of sample i, which has `trained_tokens[i]` tokens, in the sum over all tokens of the step.

    With N counted samples, the weight is, by `aggregation`:
        token: 1 / (tokens of all counted samples), DAPO, arXiv 2503.14476
        sequence: 1 / (N * own tokens), GRPO, arXiv 2402.03300
        constant: 1 / (N * max_answer_tokens), Dr. GRPO, arXiv 2503.20783

    Tokens that an environment gave are not trained and are not in `trained_tokens`. A sample that is not `counted`, or
    has no tokens, gets weight 0 and enters no normaliser.

    Args:
        totals: N, and the tokens of all counted samples, if these samples are not all of them.
    """
    tokens = [n if c else 0 for n, c in zip(trained_tokens, counted, strict=True)]
    num_samples, total = totals or (sum(n > 0 for n in tokens), sum(tokens))
    if aggregation == "token":
        return [1 / total if n else 0.0 for n in tokens]
    if aggregation == "sequence":
        return [1 / (num_samples * n) if n else 0.0 for n in tokens]
    if aggregation == "constant":
        return [1 / (num_samples * max_answer_tokens) if n else 0.0 for n in tokens]
    raise ValueError(f"unknown aggregation {aggregation!r}: use 'token', 'sequence' or 'constant'")


def supervised_samples(documents: Sequence[Document]) -> list[PackedSample]:
    """Documents as samples whose weighted sum is the mean loss per trained token of all of them."""
    trained = sum(int(document.trained[1:].sum()) for document in documents)  # the first token is predicted by none
    samples = []
    for document in documents:
        first = 1 + int(np.argmax(document.trained[1:]))  # what precedes it is the prompt
        ids, mask = document.token_ids, document.trained[first:]
        samples.append(PackedSample(ids[:first], ids[first:], 1.0, 1 / max(1, trained), None, loss_mask=mask))
    return samples
