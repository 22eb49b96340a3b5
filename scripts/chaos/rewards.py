"""Rewards of the campaign's runs."""

import time

from torchtitan.grpo.data.samples import Prompt

PACE_S = 0.03
"""16 scores on two workers make a step of 0.25 s, which leaves time to the servers."""


def paced(answer: str, prompt: Prompt) -> float:
    """Takes time."""
    time.sleep(PACE_S)
    return 0.0
