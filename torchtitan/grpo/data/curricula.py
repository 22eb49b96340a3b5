"""Ready-made hooks for `[data] curriculum`. `prompts.PromptSource` says what a hook is."""

from torchtitan.grpo.data.samples import Prompt


def unsolved(prompt: Prompt, pass_rate: float | None) -> bool:
    """Skip a prompt for good once all its answers were right (a mean reward of 1 or more).

    Such groups have no gradient, and they become more frequent during a run. A run stops when all prompts are solved.
    """
    return pass_rate is None or pass_rate < 1.0
