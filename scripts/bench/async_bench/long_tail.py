"""Answers of prescribed lengths, and a reward that teaches nothing: what rollouts.py plugs into the trainer.

`[rollout] environment = "async_bench.long_tail:rollout"` and `[reward] functions = ["async_bench.long_tail:coin"]`,
with this file's parent folder on PYTHONPATH.
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


def draw_lengths(index: int, samples: int, mean: float, sigma: float, longest: int, seed: int = 0) -> list[int]:
    """Log-normal answer lengths of one prompt, tokens.

    Sample k of prompt `index` has length min(longest, max(1, round(exp(mu + sigma * z)))), where z is the standard
    normal number that `random.Random(f"{seed}/{index}/{k}")` gives, and mu = ln(mean) - sigma^2 / 2, so that `mean` is
    the mean before the limits.
    """
    mu = math.log(mean) - sigma**2 / 2
    draws = (random.Random(f"{seed}/{index}/{k}").lognormvariate(mu, sigma) for k in range(samples))
    return [min(longest, max(1, round(draw))) for draw in draws]


async def rollout(client: "RolloutClient", prompt: Prompt) -> list[Sample]:
    """One group: every answer is a request of its own, cut at the length that the data gives it. The model must never
    end an answer by itself (`rollouts.py model --end never`)."""
    from torchtitan.grpo.rollouts.environment import Turns

    async def answer(tokens: int) -> Sample:
        turns = Turns(prompt)
        turns.sampled((await client.generate(turns.token_ids, max_tokens=tokens))[0])
        return turns.sample()

    return list(await asyncio.gather(*(answer(tokens) for tokens in prompt.columns[LENGTHS][: client.params.n])))


def coin(answer: str, prompt: Prompt) -> float:
    """1 for half of all answers, told by their bytes: each group has a signal, so weights move, and it teaches nothing
    that would change the lengths."""
    return float(zlib.crc32(answer.encode()) & 1)
