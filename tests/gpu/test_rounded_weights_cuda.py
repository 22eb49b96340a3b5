"""Weights in FP8 on CUDA: to the bit those of a CPU, which divides as vLLM's kernels do."""

import pytest
import torch

from torchtitan.grpo.model.rounded_weights import round_weights, rounded, scale_of


def as_served(weight: torch.Tensor) -> torch.Tensor:
    return rounded(weight, scale_of(weight))


@pytest.mark.parametrize("compiled", [False, True])
def test_a_gpu_rounds_as_a_cpu_does(compiled):
    """Also where a weight divided by its scale is midway between two values: all scales that bfloat16 has are tried."""
    round_weights(torch.nn.ModuleDict({"output": torch.nn.Linear(1, 1)}))
    on_gpu = torch.compile(as_served, fullgraph=True) if compiled else as_served
    values = torch.arange(128, 256) * torch.logspace(-8, 0, 9, base=2)[:, None]
    for largest in values[-1]:
        weight = values.where(values <= largest, 0).bfloat16()
        assert torch.equal(on_gpu(weight.cuda()).cpu(), as_served(weight)), f"{largest}"
