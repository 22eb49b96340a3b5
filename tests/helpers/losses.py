"""A loss and a baseline of a user's own, as built-in ones."""

import torch

from torchtitan.grpo.config.job_config import Grpo


def clipped(
    logprobs: torch.Tensor,
    old_logprobs: torch.Tensor,
    advantages: torch.Tensor,
    sample_ids: torch.Tensor,
    grpo: Grpo,
) -> torch.Tensor:
    """`policy_loss = "ppo"`."""
    ratio = (logprobs - old_logprobs).exp()
    held = ratio.clamp(1 - grpo.ratio_clip_min, 1 + grpo.ratio_clip_max)
    return torch.maximum(-ratio * advantages, -held * advantages)


def less_mean(rewards: torch.Tensor) -> torch.Tensor:
    """`advantage_baseline = "mean"`."""
    return rewards - rewards.mean()
