"""Nothing that is not finite is stepped on or saved (I9). `weight_sync.packer` sees to it that nothing is published."""

from collections.abc import Iterable, Mapping

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from torchtitan.grpo.errors import UserError
from torchtitan.grpo.host_memory.pinned import local_tensor

SKIPPED_IN_A_ROW_MAX = 5
"""Optimizer steps without a finite gradient after which a run ends: by then it is not one bad batch."""
_CHUNK = 1 << 27
"""Elements of one reduction, so that offsets in bytes fit 32 bits."""


class FiniteSteps:
    """Skips optimizer steps whose gradient norm is not finite. Parameters, moments and step counters stay as they are.

    torch's fused Adam and AdamW take a flag on the device for that (`found_inf`), so the host does not wait.

    All ranks agree without a message, because the norm is the whole model's.

    Args:
        optimizers: All of them take every step together.
        device: Where the norm is computed.
    """

    def __init__(self, optimizers: Iterable[Optimizer], device: torch.device):
        self._optimizers = list(optimizers)
        self._skipped = torch.zeros((), device=device)
        self._in_a_row = torch.zeros((), device=device)
        self._norm = torch.zeros((), device=device)

    def guard(self, norm: Tensor) -> None:
        """Call before the optimizer's step, which with a bad norm then changes nothing.

        Args:
            norm: Scalar, of all gradients of all ranks.
        """
        bad = (~torch.isfinite(norm)).float()
        self._skipped += bad
        self._in_a_row = (self._in_a_row + 1) * bad
        self._norm = norm
        for optimizer in self._optimizers:
            optimizer.found_inf = bad

    def metrics(self) -> dict[str, float]:
        """`train/skipped_steps`: optimizer steps left out since the start of the process. Waits for the device."""
        return {"train/skipped_steps": self._skipped.item()}

    def check(self) -> None:
        """Waits for the device.

        Raises:
            UserError: The last SKIPPED_IN_A_ROW_MAX steps were left out. On every rank.
        """
        in_a_row, norm = torch.stack([self._in_a_row, self._norm.float()]).tolist()
        if in_a_row >= SKIPPED_IN_A_ROW_MAX:
            raise UserError(
                f"the gradient was not finite (norm {norm}) in {in_a_row:.0f} optimizer steps in a row, which were "
                "left out: the weights are those before them. Look for huge values in [reward] functions and "
                "weights, a diverged policy (lower [optimizer] lr), and server log-probabilities that are not the "
                "model's (policy/mismatch_abs)"
            )


def is_finite(tensor: Tensor) -> Tensor:
    """Whether no element is infinite or NaN, as a scalar on the device. One pass, no temporary of the tensor's size."""
    extremes = [value for chunk in tensor.flatten().split(_CHUNK) for value in torch.aminmax(chunk)]
    return torch.isfinite(torch.stack(extremes)).all()


@torch.no_grad()
def bad_weights(weights: Mapping[str, Tensor]) -> list[str] | None:
    """Names of this rank's weights that are infinite or NaN; None if all of every rank are finite.

    Collective over the default process group; waits for the device, once.
    """
    shards = {name: local_tensor(weight) for name, weight in weights.items()}
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
