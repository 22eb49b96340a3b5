"""Linear layers from weights that are rounded to FP8, as servers round them with `[rollout] quantization`.

The policy that is trained then has the weights that it is sampled with. Gradients pass the rounding as if it were not
there (straight-through estimator, arXiv:1308.3432), to the exact weights that the optimizer, checkpoints and servers
get. What servers round besides, the inputs of these layers, is left as it is: kernels that differ in a last bit round
many of them to a neighbour, so rounding here would add to the difference.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

LARGEST = torch.finfo(torch.float8_e4m3fn).max
LEAST_SCALE = 1 / (LARGEST * 512)  # vLLM's


def rounded(weight: Tensor) -> Tensor:
    """[out, in], what float8_e4m3fn can tell of it with a scale for each output, as of vLLM's `fp8_per_channel`."""
    scale = (weight.abs().amax(-1, keepdim=True).float() / LARGEST).clamp_min(LEAST_SCALE)
    return (weight / scale).to(torch.float8_e4m3fn).to(weight.dtype).mul_(scale)  # in place: one float32 copy, not two


class RoundedLinear(nn.Linear):
    """y = x round(W)^T + b: W [out, in] and b are trained. `lm_head` and embeddings are none of these."""

    def forward(self, x: Tensor) -> Tensor:
        out = _OfRounded.apply(x, self.weight)
        return out if self.bias is None else out + self.bias


class _OfRounded(torch.autograd.Function):
    """x, W -> x round(W)^T. Autograd would keep the rounded weights until the backward pass, which rounds again."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return F.linear(x, rounded(weight))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        return grads[0] @ rounded(weight), grads[0].flatten(0, -2).t() @ x.flatten(0, -2)


def round_weights(model: nn.Module) -> None:
    """Have the linear layers of a model's blocks compute so, in place. Experts and what chooses them are left out.

    Call it after tensor parallelism and before everything else that wraps layers.
    """
    for block in model.layers.children():
        for name, layer in block.named_modules():
            if type(layer) is nn.Linear and not name.startswith("moe."):
                layer.__class__ = RoundedLinear
