"""Samples as the model takes them, without a trainer."""

from torchtitan.grpo.policy.packing import pack
from torchtitan.grpo.policy.rows import Microbatch, PackedSample


def microbatches(samples: list[PackedSample], *args: float, **kwargs: float) -> list[list[Microbatch]]:
    """`pack`'s rows on the CPU, by rank, ready for a model. Arguments are those of `pack`."""
    return [[row.to("cpu") for row in rows] for rows in pack(samples, *args, **kwargs)]
