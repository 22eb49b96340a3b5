"""How many blocks are one FSDP2 group."""

import pytest

from torchtitan.grpo.model.parallelize import TOGETHER_BYTES, blocks_together


@pytest.mark.parametrize(
    ("layers", "parameters", "itemsize", "together"),
    [
        (30, 3_540_000, 2, 15),  # SmolLM2-135M: 18 would fit, and leave 12 for the second group
        (28, 15_730_000, 2, 4),  # Qwen3-0.6B
        (28, 50_000_000, 2, 1),
        (36, 200_000_000, 2, 1),  # one block is over the limit
        (2, 100, 4, 2),
        (1, 100, 4, 1),
    ],
)
def test_small_blocks_are_gathered_together(layers, parameters, itemsize, together):
    assert blocks_together(layers, parameters, itemsize) == together
    assert together == 1 or together * parameters * itemsize <= TOGETHER_BYTES
