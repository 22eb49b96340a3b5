"""Rewards of small runs."""

import time

from torchtitan.grpo.data.samples import Prompt


def varied(answer: str, prompt: Prompt) -> float:
    """Differs between nearly all answers, also of a model that has learned nothing: no advantage is zero."""
    return sum(map(ord, answer)) % 97 / 97


def unhurried(answers: list[str], prompt: Prompt) -> list[float]:
    """Nothing, after a while. A run that only has to go on then leaves the cores to what a test waits for."""
    time.sleep(0.1)
    return [0.0] * len(answers)
