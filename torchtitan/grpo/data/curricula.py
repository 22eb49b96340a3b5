"""Ready-made hooks for `[data] curriculum`; see `prompts.PromptSource` for what a hook is."""

from torchtitan.grpo.data.samples import Prompt


def unsolved(prompt: Prompt, pass_rate: float | None) -> bool:
    """Skip a prompt for good once all of its answers were right (a mean reward of 1 or more).

    Such groups carry no signal, and their share grows as a run goes on. A run whose every prompt is solved stops.
    """
    return pass_rate is None or pass_rate < 1.0
