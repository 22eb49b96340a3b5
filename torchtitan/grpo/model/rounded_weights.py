"""Linear layers with weights rounded to FP8, as servers round them with `[rollout] quantization`.

So the trained policy has the weights that servers sample with. Gradients pass through the rounding unchanged
(straight-through estimator, arXiv:1308.3432), to the exact weights. The optimizer updates these, and checkpoints and
servers get them. Servers round the inputs of these layers, too. That is not done here: kernels that differ in the last
bit round many inputs differently, so it would add to the difference between trainer and sampler.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

LARGEST = torch.finfo(torch.float8_e4m3fn).max
LEAST_SCALE = 1 / (LARGEST * 512)  # vLLM's


def rounded(weight: Tensor) -> Tensor:
    """[out, in], rounded to float8_e4m3fn with a scale for each output, as vLLM's `fp8_per_channel` does."""
    scale = (weight.abs().amax(-1, keepdim=True).float() / LARGEST).clamp_min(LEAST_SCALE)
    return (weight / scale).to(torch.float8_e4m3fn).to(weight.dtype).mul_(scale)  # in place: one float32 copy, not two


class RoundedLinear(nn.Linear):
    """y = x round(W)^T + b: W [out, in] and b are trained."""

    def forward(self, x: Tensor) -> Tensor:
        out = _StraightThrough.apply(x, self.weight)
        return out if self.bias is None else out + self.bias


class _StraightThrough(torch.autograd.Function):
    """x, W -> x round(W)^T. The backward pass rounds again: rounded weights that are kept would double the model."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return F.linear(x, rounded(weight))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        return grads[0] @ rounded(weight), grads[0].flatten(0, -2).t() @ x.flatten(0, -2)


def round_weights(model: nn.Module) -> None:
    """Change the linear layers of a model's blocks, in place. Experts, routers and the output layer stay exact.

    Call it after tensor parallelism and before everything else that wraps layers.
    """
    for block in model.layers.children():
        for name, layer in block.named_modules():
            if type(layer) is nn.Linear and not name.startswith("moe."):
                layer.__class__ = RoundedLinear
