"""The learning rate of each step, also behind the end of the schedule."""

from types import SimpleNamespace

import pytest
import torch

from torchtitan.components.lr_scheduler import build_lr_schedulers
from torchtitan.grpo.run.policy import schedulers


def rates(shape: str, ratio: float, floor: float, held: bool, steps: int) -> list[float]:
    optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.ones(1))], lr=1.0)
    config = SimpleNamespace(total_steps=10, warmup_steps=2, decay_ratio=ratio, decay_type=shape, min_lr_factor=floor)
    built = (schedulers if held else build_lr_schedulers)([optimizer], config, 10)
    found = []
    for _ in range(steps):
        found.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        built.step()
    return found


@pytest.mark.parametrize("shape", ["linear", "sqrt", "cosine"])
@pytest.mark.parametrize(("ratio", "floor"), [(0.0, 0.0), (0.5, 0.0), (0.5, 0.1), (0.1, 0.0)])
def test_steps_behind_the_schedule_have_its_last_rate(shape, ratio, floor):
    """Torchtitan's formulas would give a rate under 0, the full one again, or an assertion that fails."""
    found = rates(shape, ratio, floor, held=True, steps=25)
    assert found[:9] == rates(shape, ratio, floor, held=False, steps=9)
    assert found[9:] == [found[9]] * 16 and 0 < found[9] <= 1
    assert found[9] == pytest.approx(1.0) if ratio < 0.2 else floor < found[9] < found[5]
