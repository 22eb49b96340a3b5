"""Which models reduce their gradients once a step, and sums over rows."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from torchtitan.grpo.policy.gradients import SMALL_MODEL, accumulate_gradients, reduces_once
from torchtitan.grpo.policy.sft import summed


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


def test_sums_that_only_some_rows_have_are_kept():
    """As those of a teacher, where the last row packs no answer."""
    model, row = nn.Linear(1, 1), SimpleNamespace(routes=None)
    own = [{"tokens": 1.0}, {"tokens": 2.0, "teacher": 5.0}, {"tokens": 4.0}]

    def loss_of(index, row):
        return model(torch.ones(1)).sum(), {name: torch.tensor(value) for name, value in own[index].items()}

    assert accumulate_gradients(model, [row] * 3, loss_of, False) == {"tokens": 7.0, "teacher": 5.0}
    assert summed({name: torch.tensor(value) for name, value in each.items()} for each in own) == {
        "tokens": 7.0,
        "teacher": 5.0,
    }
