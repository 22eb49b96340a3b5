"""Policy losses and off-policy corrections over packed answer tokens. Pure functions.

Every tensor is [T] over the answer tokens of one microbatch. A loss is a weighted SUM over tokens. The weights hold the
normaliser of the whole step (`token_weights`), so sums over microbatches and ranks are the step's loss. Nothing is
divided anywhere else, and gradients are summed, not averaged.
"""

import functools
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal, Protocol

import torch
from torch import Tensor

from torchtitan.grpo.config.job_config import Grpo
from torchtitan.grpo.policy.advantages import check_baseline
from torchtitan.grpo.policy.microbatch import Microbatch
from torchtitan.grpo.policy.ratios import k3, ratio_of
from torchtitan.grpo.policy.score_centering import expected_score
from torchtitan.grpo.policy.sums import age_sums, by_server, mismatch_sums, server_values, surprise_values
from torchtitan.grpo.policy.teacher_loss import teacher_sums, top_k_kl
from torchtitan.grpo.process.import_path import load_function, trial

KLEstimator = Literal["k1", "k2", "k3"]

ROUNDING = 2.0
"""A sampler in FP8 gives few tokens over this times the policy's probability, or under 1 / this."""


def importance_weights(
    trainer_logprobs: Tensor, sampler_logprobs: Tensor, sample_ids: Tensor, grpo: Grpo
) -> tuple[Tensor, Tensor]:
    """Weight [T], detached, that corrects for a sampler (engine, older weights) that differs from the trainer's policy.

    The ratio is exp(trainer - sampler) of each token, or its product over the sequence for all tokens of a sequence
    (`[grpo] importance_level`). By `importance_correction`, `truncate` clamps it to [importance_min, importance_max]
    (truncated importance sampling, TIS). `mask` keeps a ratio inside the bounds and puts 0 for one outside (IcePop,
    masked importance sampling). Masked tokens stay in the normaliser, so heavy masking makes a smaller step. `none`
    gives ones.

    Returns:
        The weight, and bool [T]: whether the ratio was out of bounds.
    """
    if grpo.importance_correction == "none":
        return torch.ones_like(trainer_logprobs), torch.zeros_like(trainer_logprobs, dtype=torch.bool)
    minimum, maximum = grpo.importance_min, grpo.importance_max
    log_ratio = (trainer_logprobs - sampler_logprobs).detach()
    if grpo.importance_level == "sequence":
        log_ratio = _sequence_sum(log_ratio, sample_ids)[sample_ids]
    ratio = log_ratio.exp()
    inside = (ratio >= minimum) & (ratio <= maximum)
    truncates = grpo.importance_correction == "truncate"
    return ratio.clamp(minimum, maximum) if truncates else ratio.where(inside, 0), ~inside


def past_the_clip(
    logprobs: Tensor, sampler_logprobs: Tensor, advantages: Tensor, ages: Tensor, grpo: Grpo, rounded: bool = False
) -> Tensor:
    """bool [T]: tokens of older weights that are past the clip already, in their advantage's direction.

    That is PPO's clip (arXiv 1707.06347) around the policy that sampled. Without it nothing bounds what several steps
    do with answers that were sampled before the first of them: each pushes the same tokens again, and importance
    weights above 1 push harder.

    With a `rounded` sampler (`[rollout] quantization`) the bounds are at least 1 / ROUNDING and ROUNDING. By rounding
    alone tokens are past narrower ones: gradients that raise probabilities would miss those that the sampler rounded
    down, and gradients that lower them those that it rounded up. More would then be lowered than raised.
    """
    if rounded:
        low, high = max(grpo.ratio_clip_min, 1 - 1 / ROUNDING), max(grpo.ratio_clip_max, ROUNDING - 1)
        grpo = replace(grpo, ratio_clip_min=low, ratio_clip_max=high)
    if grpo.policy_loss != "ppo" or grpo.proximal_logprobs == "sampler":
        return torch.zeros_like(ages, dtype=torch.bool)  # with "sampler", the loss itself clips so
    around = _clipped_surrogate(ratio_of((logprobs - sampler_logprobs).detach()), advantages, grpo)
    return (around.clipped_low | around.clipped_high) & (ages > 0)


def kl_estimate(logprobs: Tensor, reference_logprobs: Tensor, estimator: KLEstimator) -> Tensor:
    """Schulman's estimators [T] of KL(policy || reference) from samples of the policy; differentiable in logprobs.

    k1 = log p/q, unbiased; k2 = (log p/q)^2 / 2, biased, low variance; k3 = q/p - 1 - log q/p, unbiased and never
    negative. As a loss term, k1's own gradient is zero in expectation: it belongs in the reward. k3's gradient is
    1 - q/p; beyond `ratios.LOG_RATIO_BOUND` k3 is constant, and its gradient 0.
    """
    log_ratio = reference_logprobs - logprobs  # log q/p
    if estimator == "k1":
        return -log_ratio
    return log_ratio.square() / 2 if estimator == "k2" else k3(log_ratio)


@dataclass
class TokenLosses:
    """What a policy loss returns: its value per token and, for metrics, the ratio and where it was clipped, all [T].

    Attributes:
        losses: Differentiable in the log-probabilities.
        ratio: New over old probability, of the token or the sequence; detached.
        clipped_low, clipped_high, dual_clipped: bool, whether a bound changed the token's gradient.
    """

    losses: Tensor
    ratio: Tensor
    clipped_low: Tensor
    clipped_high: Tensor
    dual_clipped: Tensor


class PolicyLoss(Protocol):
    """What `[grpo] policy_loss` names: a loss per token of one packed row."""

    def __call__(
        self, logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, sample_ids: Tensor, grpo: Grpo
    ) -> TokenLosses | Tensor:
        """
        Args:
            logprobs: float32 [T], of the row's answer tokens under the policy, with gradient.
            old_logprobs: float32 [T], under the policy that the ratio compares with: of the step's start, or the
                sampler's with `[grpo] proximal_logprobs = "sampler"`.
            advantages: float32 [T], of each token's answer.
            sample_ids: int64 [T], 0, 0, ..., 1, 1, ...: which tokens are one answer. A row has answers as a whole, and
                some rows have none (T = 0).
            grpo: The keys of [grpo], such as `grpo.ratio_clip_max`.

        Returns:
            The loss of each token [T], to be made small, with gradient; or `TokenLosses`, for metrics of clipping. The
            caller averages over tokens (`[grpo] loss_aggregation`) and adds importance weights, KL and entropy.
        """


def ppo_loss(logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, sample_ids: Tensor, grpo: Grpo) -> TokenLosses:
    """PPO's clipped surrogate on token ratios (arXiv 1707.06347), as in GRPO; unequal bounds are DAPO's clip-higher."""
    return _clipped_surrogate(ratio_of(logprobs - old_logprobs), advantages, grpo)


def gspo_loss(
    logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, sample_ids: Tensor, grpo: Grpo
) -> TokenLosses:
    """GSPO (arXiv 2507.18071): one ratio per sequence, exp of the mean log-ratio of its tokens, clipped as in PPO.

    The gradient flows through the mean, so each token's log-probability gets 1 / length of the sequence's gradient. The
    paper weights sequences equally: `[grpo] loss_aggregation = "sequence"`. Its clip range is about 3e-4.
    """
    lengths = _sequence_sum(torch.ones_like(logprobs), sample_ids)
    mean_log_ratio = _sequence_sum(logprobs - old_logprobs, sample_ids) / lengths.clamp(min=1)
    return _clipped_surrogate(ratio_of(mean_log_ratio)[sample_ids], advantages, grpo)


def cispo_loss(
    logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, sample_ids: Tensor, grpo: Grpo
) -> TokenLosses:
    """CISPO (arXiv 2506.13585): REINFORCE weighted by the clipped, detached ratio. No token loses its gradient.

    The paper clips only from above: `[grpo] ratio_clip_min = 1.0` does that, because a ratio is never negative.
    """
    ratio = ratio_of(logprobs - old_logprobs).detach()
    low, high = 1 - grpo.ratio_clip_min, 1 + grpo.ratio_clip_max
    losses = -ratio.clamp(low, high) * advantages * logprobs
    return TokenLosses(losses, ratio, ratio < low, ratio > high, torch.zeros_like(ratio, dtype=torch.bool))


POLICY_LOSSES: dict[str, PolicyLoss] = {"ppo": ppo_loss, "gspo": gspo_loss, "cispo": cispo_loss}
"""By `[grpo] policy_loss`, which may also be the "module:function" of another."""
_LOSS_KEY = "[grpo] policy_loss"


@functools.cache
def named_loss(name: str) -> PolicyLoss:
    """The loss of this name.

    Raises:
        UserError: There is no such function, or it does not take the arguments of `PolicyLoss`.
    """
    arguments = "logprobs", "old_logprobs", "advantages", "sample_ids", "grpo"
    return POLICY_LOSSES.get(name) or load_function(_LOSS_KEY, name, *arguments)


def check_loss(grpo: Grpo, device: torch.device) -> None:
    """Try `[grpo] policy_loss` on two answers of three tokens and one, and on no token, before anything is trained.

    Args:
        device: The trainer's: a loss may have kernels for it alone.

    Raises:
        UserError: There is no such function, it raises, or it does not return what `PolicyLoss` says.
    """
    loss = named_loss(grpo.policy_loss)
    with device:
        logprobs = torch.tensor([-0.1, -0.5, -1.0, -2.0], requires_grad=True)
        advantages, sample_ids = torch.tensor([1.0, 1.0, 1.0, -1.0]), torch.tensor([0, 0, 0, 1])
    old_logprobs = logprobs.detach() - 0.1
    with trial(_LOSS_KEY, grpo.policy_loss):
        for n in (len(logprobs), 0):
            given = logprobs[:n], old_logprobs[:n].clone(), advantages[:n].clone(), sample_ids[:n].clone()
            result = _token_losses(loss(*given, grpo), *given[:2])
            if not all(map(torch.equal, given[1:], (old_logprobs[:n], advantages[:n], sample_ids[:n]))):
                raise ValueError("it changes a tensor that it gets, which others read: change a copy")
            (gradient,) = torch.autograd.grad(result.losses.sum(), logprobs)
            if not (result.losses.isfinite().all() and gradient.isfinite().all()):
                raise ValueError(f"losses {result.losses.tolist()} or gradients {gradient.tolist()} are not finite")


def check_functions(grpo: Grpo, device: torch.device) -> None:
    """Try the functions of the user's own, before anything is trained: `check_loss` and `check_baseline`."""
    check_loss(grpo, device)
    check_baseline(grpo)


def _token_losses(result: TokenLosses | Tensor, logprobs: Tensor, old_logprobs: Tensor) -> TokenLosses:
    """What a loss returned, with nothing clipped if it does not say."""
    if isinstance(result, Tensor):
        unclipped = torch.zeros_like(logprobs, dtype=torch.bool)
        ratio = ratio_of((logprobs - old_logprobs).detach())
        result = TokenLosses(result, ratio, unclipped, unclipped, unclipped)
    if not isinstance(result, TokenLosses):
        raise ValueError(f"it returned a {type(result).__name__}, not a tensor or TokenLosses")
    for name, values in vars(result).items():
        if not isinstance(values, Tensor) or values.shape != logprobs.shape:
            what = f"the shape {list(values.shape)}" if isinstance(values, Tensor) else f"{values!r}"
            raise ValueError(f"its {name} have {what}, not one value for each of {len(logprobs)} tokens")
    return result


def policy_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    weights: Tensor,
    sample_ids: Tensor,
    grpo: Grpo,
    *,
    importance: Tensor | None = None,
    left_out: Tensor | None = None,
    reference_logprobs: Tensor | None = None,
    entropy: Tensor | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """sum_t weights_t * (importance_t * loss_t + kl_coef * kl_t - entropy_coef * entropy_t), and sums for metrics.

    Args (all float32 [T], answer tokens only):
        logprobs: Of the policy in training, with gradient.
        old_logprobs: Denominator of the ratio. With `[grpo] proximal_logprobs = "recompute"` these are the trainer's
            before the step's first optimizer step, and `importance` corrects from the sampler to them (decoupled PPO,
            arXiv 2110.00641). In that first step they are `logprobs.detach()`. With "sampler" they are the sampler's:
            the ratio itself corrects for the sampler, as in plain PPO, so `importance` must not correct again.
        weights: From `token_weights`.
        sample_ids: int64, nondecreasing 0..n-1. All answer tokens of a sequence must be in this call.
        importance: From `importance_weights`. It scales the policy loss, not KL or entropy.
        left_out: bool, tokens without policy loss, from `past_the_clip`.
        reference_logprobs: Required with `kl_coef` and `kl_placement = "loss"`; otherwise only measured.
        entropy: Required, with gradient, if `entropy_coef` is not 0; otherwise only measured.
    Returns:
        The scalar, and detached sums on the device over the tokens that have a weight. Sum them over microbatches and
        ranks and divide by `tokens` for means per token. `clipped_low_tokens`, `clipped_high_tokens` and
        `dual_clipped_tokens` count tokens whose gradient a bound changed. `ratio_sum` sums new / old probability,
        `policy_kl_sum` the k3 estimate of KL(old || new). Where the input was given there are also `kl_sum` (to the
        reference), `entropy_sum`, `importance_sum`, `importance_masked_tokens` (importance 0) and
        `left_out_tokens`.
    """
    given = named_loss(grpo.policy_loss)(logprobs, old_logprobs, advantages, sample_ids, grpo)
    result = _token_losses(given, logprobs, old_logprobs)
    per_token = result.losses if importance is None else importance * result.losses
    if left_out is not None:
        per_token = per_token.where(~left_out, 0)
    kl = None if reference_logprobs is None else kl_estimate(logprobs, reference_logprobs, grpo.kl_estimator)
    if grpo.kl_coef and grpo.kl_placement == "loss":
        if kl is None:
            raise ValueError("[grpo] kl_coef with kl_placement = 'loss' needs reference_logprobs")
        per_token = per_token + grpo.kl_coef * kl
    if grpo.entropy_coef:
        if entropy is None or (logprobs.requires_grad and not entropy.requires_grad):
            raise ValueError("[grpo] entropy_coef needs entropy with gradient: without it the bonus would do nothing")
        per_token = per_token - grpo.entropy_coef * entropy

    trained = weights != 0

    def total(values: Tensor) -> Tensor:
        return values.detach().float().where(trained, 0).sum()

    log_ratio = (logprobs - old_logprobs).detach()
    metrics = {
        "tokens": trained.sum().float(),
        "clipped_low_tokens": total(result.clipped_low),
        "clipped_high_tokens": total(result.clipped_high),
        "dual_clipped_tokens": total(result.dual_clipped),
        "ratio_sum": total(result.ratio),
        "policy_kl_sum": total(k3(log_ratio)),
    }
    if kl is not None:
        metrics["kl_sum"] = total(kl)
    if entropy is not None:
        metrics["entropy_sum"] = total(entropy)
    if importance is not None:
        metrics["importance_sum"] = total(importance)
        metrics["importance_masked_tokens"] = total(importance == 0)
    if left_out is not None:
        metrics["left_out_tokens"] = total(left_out)
    return (weights * per_token).sum(), metrics


def row_loss(
    logprobs: Tensor,
    entropy: Tensor,
    row: Microbatch,
    grpo: Grpo,
    *,
    old_logprobs: Tensor | None = None,
    reference_logprobs: Tensor | None = None,
    max_age: int = 0,
    num_servers: int = 0,
    distill_coef: float = 0.0,
    top_logprobs: Tensor | None = None,
    has_moved: bool = False,
    rounded: bool = False,
) -> tuple[Tensor, dict[str, Tensor]]:
    """One packed row's share of the step's loss, and detached sums for metrics.

    Args:
        logprobs, entropy: Of the row's answer tokens [A], with gradient.
        old_logprobs: The trainer's before the step's first optimizer step [A]; None in that step, or if nothing needs
            them.
        reference_logprobs: Of the reference model [A]; None without one.
        max_age: `[async_grpo] max_trajectory_age_steps`; 0 (synchronous) measures nothing by age.
        num_servers: Of the batch; 0 measures nothing by server.
        distill_coef: `[distill] coef`, the weight of the divergence from the teacher.
        top_logprobs: Of the teacher's or the sampler's tokens `row.top_ids` and of all others together [A, K + 1], with
            gradient; None without `[distill] top_k` and `[grpo] score_centering`.
        has_moved: The step has had an optimizer step. Without `old_logprobs`, nothing is measured of the sampler then:
            the policy's own change would be in it.
        rounded: The sampler rounds, as in `past_the_clip`.
    """
    trainer_logprobs = logprobs.detach() if old_logprobs is None else old_logprobs
    importance, clipped = importance_weights(trainer_logprobs, row.sampler_logprobs, row.sample_ids, grpo)
    past = None
    if max_age:
        past = past_the_clip(logprobs, row.sampler_logprobs, row.advantages, row.ages, grpo, rounded)
    loss, sums = policy_loss(
        logprobs,
        row.sampler_logprobs if grpo.proximal_logprobs == "sampler" else trainer_logprobs,
        row.advantages,
        row.weights,
        row.sample_ids,
        grpo,
        importance=importance,
        left_out=past,
        reference_logprobs=reference_logprobs,
        entropy=entropy,
    )
    if top_logprobs is not None and grpo.score_centering:
        score, sizes = expected_score(partial(_score_weights, grpo=grpo), top_logprobs, row.top_logprobs)
        loss = loss + (row.weights * row.advantages * score).sum()
        sums |= {f"{name}_sum": values.where(row.weights != 0, 0).sum() for name, values in sizes.items()}
    elif top_logprobs is not None:
        divergence = top_k_kl(row.top_logprobs, top_logprobs)
        loss = loss + distill_coef * (row.weights * divergence).sum()
        sums |= teacher_sums(divergence, row.top_logprobs, row.weights)
    tokens = trainer_logprobs, row.sampler_logprobs, row.weights
    sums["loss"] = loss.detach()
    if has_moved and old_logprobs is None:
        return loss, sums
    sums |= mismatch_sums(*tokens)
    if max_age:
        sums |= age_sums(*tokens, row.ages, max_age, clipped)
    if num_servers:
        values = server_values(trainer_logprobs, row.sampler_logprobs)
        if not has_moved:
            values |= surprise_values(logprobs, entropy)
        sums |= by_server(values, row.weights, row.ages, max_age, row.servers, num_servers)
    return loss, sums


def _score_weights(logprobs: Tensor, sampler_logprobs: Tensor, grpo: Grpo) -> Tensor:
    """What a sampled token's gradient is multiplied by, besides its advantage, where the policy's and the sampler's
    log-probabilities are these. For what `config.contradictions` lets through.

    A clip that stops tokens' gradients is left out. It bounds how far the policy goes in an advantage's direction. To
    take its mean away would push on where it has stopped (docs/benchmarks.md).
    """
    if grpo.proximal_logprobs == "sampler":  # CISPO's own weights
        return ratio_of(logprobs - sampler_logprobs).clamp(1 - grpo.ratio_clip_min, 1 + grpo.ratio_clip_max)
    nothing = torch.zeros_like(logprobs, dtype=torch.int64)
    return importance_weights(logprobs, sampler_logprobs, nothing, grpo)[0]


def _clipped_surrogate(ratio: Tensor, advantages: Tensor, grpo: Grpo) -> TokenLosses:
    """-min(r A, clip(r) A); with `ratio_clip_c` (dual clip, arXiv 1912.09729) at most -c A where A < 0."""
    low, high = 1 - grpo.ratio_clip_min, 1 + grpo.ratio_clip_max
    losses = torch.maximum(-ratio * advantages, -ratio.clamp(low, high) * advantages)
    negative = advantages < 0
    dual_clipped = torch.zeros_like(negative)
    if grpo.ratio_clip_c:
        losses = torch.where(negative, torch.minimum(losses, -grpo.ratio_clip_c * advantages), losses)
        dual_clipped = negative & (ratio > grpo.ratio_clip_c)
    clipped_low = negative & (ratio < low)
    clipped_high = (advantages > 0) & (ratio > high)
    return TokenLosses(losses, ratio.detach(), clipped_low, clipped_high, dual_clipped)


def _sequence_sum(values: Tensor, sample_ids: Tensor) -> Tensor:
    """Sum over each sample's tokens, at [sample id]; [T], a bound on the number of samples that needs no host sync."""
    return torch.zeros_like(values).index_add(0, sample_ids, values)
