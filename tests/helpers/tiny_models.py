"""Tiny random models of transformers that tests compare with."""

import torch
from transformers import PreTrainedModel


@torch.no_grad()
def with_biases(model: PreTrainedModel) -> PreTrainedModel:
    """Draw the biases, which transformers starts at zero: a test could not tell whether they are there."""
    for name, parameter in model.named_parameters():
        if name.endswith(".bias"):
            parameter.normal_(std=0.3)
    return model
