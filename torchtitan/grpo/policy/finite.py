"""Nothing that is not finite is stepped on (I9). `model/finite.py` is about the weights themselves."""

from collections.abc import Iterable

import torch
from torch import Tensor
from torch.optim import Optimizer

from torchtitan.grpo.errors import UserError

SKIPPED_IN_A_ROW_MAX = 5
"""Optimizer steps without a finite gradient after which a run ends: by then it is not one bad batch."""


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
