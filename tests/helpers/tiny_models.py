"""Tiny random models of transformers that tests compare with."""

import torch
from transformers import PreTrainedModel

LLAMA3_ROPE = dict(
    rope_type="llama3",
    rope_theta=500000.0,
    factor=8.0,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
    original_max_position_embeddings=64,
)
"""`rope_parameters` of a small Llama 3: scaled beyond 64 positions."""


@torch.no_grad()
def with_biases(model: PreTrainedModel) -> PreTrainedModel:
    """Draw the biases, which transformers starts at zero: a test could not tell whether they are there."""
    for name, parameter in model.named_parameters():
        if name.endswith(".bias"):
            parameter.normal_(std=0.3)
    return model


def as_in_files(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """By the names of safetensors files, which hold single experts. In memory transformers stacks them."""
    found = {}
    for name, value in tensors.items():
        layer, _, stack = name.rpartition(".experts.")
        if not layer:
            found[name] = value
            continue
        for expert, weight in enumerate(value):
            parts = weight.chunk(2) if stack == "gate_up_proj" else [weight]
            for kind, part in zip(("gate", "up") if len(parts) == 2 else ("down",), parts, strict=True):
                found[f"{layer}.experts.{expert}.{kind}_proj.weight"] = part
    return found
