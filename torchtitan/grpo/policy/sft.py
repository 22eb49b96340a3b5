"""Supervised fine-tuning: the loss of a row, and steps. The warm start of a GRPO run uses them too."""

from collections.abc import Callable, Iterable, Iterator
from functools import reduce

import torch
from torch import Tensor, nn

from torchtitan.grpo.config.job_config import Sft
from torchtitan.grpo.policy.finite import FiniteSteps
from torchtitan.grpo.policy.gradients import accumulate_gradients, added, clip_gradients
from torchtitan.grpo.policy.microbatch import Microbatch


def supervised_loss(model: nn.Module, row: Microbatch) -> tuple[Tensor, dict[str, Tensor]]:
    """The row's share of the batch's mean loss in nats per trained token, and sums for `token_metrics`."""
    logprobs, _, is_likeliest = model(row, temperature=1.0, predictions=True)
    loss = -(row.weights * logprobs).sum()
    return loss, {
        "loss": loss.detach(),
        "tokens": torch.full_like(loss, len(logprobs), requires_grad=False),
        "right": is_likeliest.sum(),
    }


def token_metrics(sums: dict[str, float]) -> dict[str, float]:
    """Loss in nats per trained token, and the share of them that were the likeliest, from sums over all ranks."""
    return {"loss": sums["loss"], "token_accuracy": sums["right"] / max(sums["tokens"], 1.0)}


def summed(parts: Iterable[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Sums by name over several rows."""
    return reduce(added, parts, {})


def supervised_steps(
    model: nn.Module, next_rows: Callable[[], list[Microbatch]], sft: Sft, max_norm: float, device: torch.device
) -> Iterator[Tensor]:
    """`sft.steps` AdamW steps at a constant learning rate, with an optimizer of their own.

    Args:
        model: Takes packed rows, see `model.packed.make_packed`.
        next_rows: This rank's rows of the next batch.

    Yields:
        This rank's part of each step's loss (their sum over data ranks is nats per target token).
    """
    optimizer = torch.optim.AdamW(model.parameters(), lr=sft.lr, weight_decay=0.0, fused=True)
    finite_steps = FiniteSteps([optimizer], device)
    ahead = next_rows() if sft.steps else []
    for left in reversed(range(sft.steps)):
        optimizer.zero_grad()
        sums = accumulate_gradients(model, ahead, lambda _, row: supervised_loss(model, row), reduce_once=False)
        finite_steps.guard(clip_gradients(model, max_norm))
        optimizer.step()
        ahead = next_rows() if left else []  # while the device computes
        finite_steps.check()
        yield sums["loss"]
    optimizer.zero_grad()
