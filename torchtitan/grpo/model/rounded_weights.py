"""Linear layers with weights rounded to FP8, as servers round them with `[rollout] quantization`.

So the trained policy has the weights that servers sample with. Gradients pass through the rounding unchanged
(straight-through estimator, arXiv:1308.3432), to the exact weights. The optimizer updates these, and servers get them.
"""

from functools import reduce
from typing import Any

import torch
import torch._inductor.config as inductor
import torch.nn.functional as F
from torch import Tensor, nn

from torchtitan.grpo.model.source import ModelSource

LARGEST = torch.finfo(torch.float8_e4m3fn).max
FUSED = (
    {"wq", "wk", "wv"},
    {"w1", "w3"},
    {"q_proj", "k_proj", "v_proj"},
    {"gate_proj", "up_proj"},
    {"in_proj_qkv", "in_proj_z"},
    {"in_proj_a", "in_proj_b"},
    {"q_a_proj", "kv_a_proj_with_mqa"},
)
"""Neighbours that vLLM fuses into one layer, which has one scale: torchtitan's names, and those of transformers."""


def scale_of(*fused: Tensor) -> Tensor:
    """float32 [1, 1]: vLLM's scale of weights [out, in] that it fuses into one."""
    largest = reduce(torch.maximum, [weight.abs().amax((0, 1), keepdim=True) for weight in fused])
    # In float64: on CUDA a float32 is multiplied by a number's reciprocal, or divided roughly by compiled code.
    return (largest.bfloat16().double() / LARGEST).float().clamp_min(torch.finfo(torch.float32).tiny)


def rounded(weight: Tensor, scale: Tensor) -> Tensor:
    """[out, in], rounded to float8_e4m3fn as vLLM's `fp8_per_tensor` rounds bfloat16. Marlin's scale is in it, too."""
    quantized = (weight.bfloat16() * (1 / scale.double()).float()).to(torch.float8_e4m3fn)
    return quantized.bfloat16().mul_(scale.bfloat16()).to(weight.dtype)


class RoundedLinear(nn.Linear):
    """y = x round(W)^T + b: W [out, in] and b are trained."""

    fused: "list[RoundedLinear]"  # and so is this layer; no list of modules, which would be its children

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            scale = scale_of(*(layer.weight for layer in self.fused))
        out = _StraightThrough.apply(x, self.weight, scale)
        return out if self.bias is None else out + self.bias


class _StraightThrough(torch.autograd.Function):
    """x, W, scale -> x round(W)^T. The backward pass rounds again: rounded weights that are kept would double the
    model."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, scale: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight, scale)
        return F.linear(x, rounded(weight, scale))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight, scale = ctx.saved_tensors
        return grads[0] @ rounded(weight, scale), grads[0].flatten(0, -2).t() @ x.flatten(0, -2), None


def round_weights(model: nn.Module) -> None:
    """Change the linear layers of a model, in place. Experts and the output layer stay exact.

    vLLM rounds routers, too, and what is beside the blocks, as in Gemma 4. Call it after tensor parallelism and before
    everything else that wraps layers.
    """
    inductor.emulate_precision_casts = True  # else compiled code leaves out casts to bfloat16, and the scale is another
    for part in model.modules():
        children = {name: layer for name, layer in part.named_children() if type(layer) is nn.Linear}
        linear = {name: layer for name, layer in children.items() if layer is not model.output}
        for name, layer in linear.items():
            beside = next((names for names in FUSED if name in names), {name})
            layer.__class__ = RoundedLinear
            layer.fused = [linear[other] for other in sorted(beside & linear.keys())]


def round_exported(tensors: dict[str, Tensor], source: ModelSource, dtype: torch.dtype) -> None:
    """Round the weights of a whole model, by Hugging Face name, as they were trained; cast all to `dtype`. In place.

    float16 holds the rounded ones to 3e-8, and servers that round these again have the trained weights.
    """
    with torch.device("meta"):
        model = source.build()
    round_weights(model)
    linear = {layer: f"{name}.weight" for name, layer in model.named_modules() if isinstance(layer, RoundedLinear)}
    names = {layer: next(iter(source.adapter.to_hf({name: layer.weight}))) for layer, name in linear.items()}
    for layer in linear:
        if layer is layer.fused[0]:
            group = {names[other]: tensors[names[other]] for other in layer.fused}
            scale = scale_of(*group.values())
            tensors |= {name: rounded(weight, scale) for name, weight in group.items()}
    for name, weight in tensors.items():
        tensors[name] = weight.to(dtype)
