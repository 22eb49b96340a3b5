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
