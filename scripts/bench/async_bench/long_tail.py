"""Plug-ins of the trainer: an environment with prescribed answer lengths, and a reward that teaches nothing.

`[rollout] environment = "async_bench.long_tail:rollout"` and `[reward] functions = ["async_bench.long_tail:coin"]`,
with scripts/bench on PYTHONPATH.
"""

import asyncio
import math
import random
import zlib
from typing import TYPE_CHECKING

from torchtitan.grpo.data.samples import Prompt, Sample

if TYPE_CHECKING:  # reward workers import this module too, and need no HTTP client
    from torchtitan.grpo.rollouts.environment import RolloutClient

LENGTHS = "answer_tokens"
"""The data's column with the length of each of a prompt's answers."""


def draw_lengths(index: int, samples: int, mean: float, sigma: float, longest: int) -> list[int]:
    """Log-normal answer lengths of one prompt, in tokens, cut to 1 .. `longest`.

    Sample k of prompt `index` has its own generator, so a longer list starts like a shorter one. `mean` is the mean
    before the cut.
    """
    mu = math.log(mean) - sigma**2 / 2
    draws = (random.Random(f"0/{index}/{k}").lognormvariate(mu, sigma) for k in range(samples))
    return [min(longest, max(1, round(draw))) for draw in draws]


async def rollout(client: "RolloutClient", prompt: Prompt) -> list[Sample]:
    """One group. Each answer is a request of its own, cut at the length that the data gives it.

    The model must never end an answer by itself (`rollouts.py model --end never`).
    """
    from torchtitan.grpo.rollouts.environment import Turns

    async def answer(tokens: int) -> Sample:
        turns = Turns(prompt)
        turns.sampled((await client.generate(turns.token_ids, max_tokens=tokens))[0])
        return turns.sample()

    return list(await asyncio.gather(*(answer(tokens) for tokens in prompt.columns[LENGTHS][: client.params.n])))


def coin(answer: str, prompt: Prompt) -> float:
    """1 for half of all answers, by their bytes: weights move, and nothing is learned that changes the lengths."""
    return float(zlib.crc32(answer.encode()) & 1)
