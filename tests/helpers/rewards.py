"""Rewards of small runs."""

from torchtitan.grpo.data.samples import Prompt


def varied(answer: str, prompt: Prompt) -> float:
    """Differs between nearly all answers, also of a model that has learned nothing: no advantage is zero."""
    return sum(map(ord, answer)) % 97 / 97
