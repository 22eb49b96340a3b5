"""Supervised warm start: a few steps on pairs of prompt and answer, so that GRPO starts with some reward."""

from collections.abc import Callable, Iterator

import torch
from torch import nn

from torchtitan.distributed import utils as dist_utils
from torchtitan.grpo.config.job_config import Sft
from torchtitan.grpo.policy.finite import FiniteSteps
from torchtitan.grpo.policy.gradients import accumulate_gradients
from torchtitan.grpo.policy.rows import Microbatch, PackedRow, PackedSample


def as_packed_samples(pairs: list[tuple[list[int], list[int]]]) -> list[PackedSample]:
    """Pairs of prompt and target token ids as samples whose weighted sum is the mean loss per target token."""
    weight = 1 / max(1, sum(len(target) for _, target in pairs))
    return [PackedSample(prompt, target, 1.0, weight, [0.0] * len(target)) for prompt, target in pairs]


def supervised_steps(
    model: nn.Module, next_rows: Callable[[], list[PackedRow]], sft: Sft, max_norm: float, device: torch.device
) -> Iterator[torch.Tensor]:
    """Take `sft.steps` AdamW steps at a constant learning rate.

    Args:
        model: Takes packed rows, see `model.packed.make_packed`.
        next_rows: This rank's rows of the next batch, with the global normaliser in their weights.

    Yields:
        This rank's part of each step's loss (their sum over data ranks is nats per target token).
    """

    def loss_of(index: int, row: Microbatch) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        logprobs, _ = model(row, temperature=1.0)
        loss = -(row.weights * logprobs).sum()
        return loss, {"loss": loss.detach()}

    optimizer = torch.optim.AdamW(model.parameters(), lr=sft.lr, weight_decay=0.0)
    finite_steps = FiniteSteps([optimizer], device)
    for _ in range(sft.steps):
        optimizer.zero_grad()
        step_loss = accumulate_gradients(model, [row.to(device) for row in next_rows()], loss_of, False)["loss"]
        norm = dist_utils.clip_grad_norm_(list(model.parameters()), max_norm, foreach=True)
        if finite_steps.allow(norm):
            optimizer.step()
        finite_steps.metrics()
        yield step_loss
    optimizer.zero_grad()
