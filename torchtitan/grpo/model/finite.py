"""Weights that are not finite are neither trained nor saved (I9). `weight_sync.packer` does not publish them."""

from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor, nn

from torchtitan.grpo.errors import UserError
from torchtitan.grpo.model.shards import local

_CHUNK = 1 << 27
"""Elements of one reduction, so that offsets in bytes fit 32 bits."""


def is_finite(tensor: Tensor) -> Tensor:
    """Whether no element is infinite or NaN, as a scalar on the device. One pass, no temporary of the tensor's size."""
    extremes = [value for chunk in tensor.flatten().split(_CHUNK) for value in torch.aminmax(chunk)]
    return torch.isfinite(torch.stack(extremes)).all()


@torch.no_grad()
def bad_weights(weights: Mapping[str, Tensor]) -> list[str] | None:
    """Names of this rank's weights that are infinite or NaN; None if all of every rank are finite.

    Collective over the default process group; waits for the device, once.
    """
    shards = {name: local(weight) for name, weight in weights.items()}
    finite = {name: is_finite(shard) for name, shard in shards.items() if shard.numel()}
    device = next(iter(shards.values())).device
    all_finite = torch.stack([torch.ones((), dtype=torch.bool, device=device), *finite.values()]).all().float()
    if dist.is_initialized():
        dist.all_reduce(all_finite, op=dist.ReduceOp.MIN)
    return None if all_finite.item() else [name for name, value in finite.items() if not value.item()]


def check_finite(model: nn.Module, step: int) -> None:
    """Check every weight before it is saved. Collective over the default process group; waits for the device.

    Raises:
        UserError: On every rank, if a weight on any rank is infinite or NaN. A rank that has one names it.
    """
    names = bad_weights(dict(model.named_parameters()))
    if names is not None:
        raise UserError(
            f"the weights of step {step} are not finite, so they are not saved: "
            f"{', '.join(names[:3]) or 'on another rank'}. Resume from the last checkpoint, with a lower [optimizer] lr"
        )
