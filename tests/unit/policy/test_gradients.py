"""Which models reduce their gradients once a step."""

import pytest
import torch
from torch import nn

from torchtitan.grpo.policy.gradients import SMALL_MODEL, reduces_once


@pytest.mark.parametrize(
    ("choice", "parameters", "once"),
    [
        ("auto", SMALL_MODEL, True),
        ("auto", SMALL_MODEL + 1, False),
        ("microbatch", SMALL_MODEL, False),
        ("step", SMALL_MODEL + 1, True),
    ],
)
def test_small_models_do_unless_told_otherwise(choice, parameters, once):
    with torch.device("meta"):
        model = nn.Linear(parameters, 1, bias=False)
    assert reduces_once(choice, model) is once
