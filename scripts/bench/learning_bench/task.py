"""The task of a configuration of grpo_train.py, for other trainers: its prompts, held-out questions and reward."""

import re
from typing import Any

from torchtitan.grpo.data.load import load_held_out, load_training
from torchtitan.grpo.data.samples import Prompt
from torchtitan.grpo.data.tokenizer import load_tokenizer
from torchtitan.grpo.errors import UserError
from torchtitan.grpo.rewards.functions import BUILT_IN
from torchtitan.grpo.rewards.worker import found_last


def score(function: str, pattern: str, text: str, prompt: Prompt) -> float:
    """The reward of an answer: by a built-in function, of the pattern's last match if there is a pattern."""
    if pattern:
        text = found_last(re.compile(pattern), text) or ""
    return BUILT_IN[function](text, prompt)


class Task:
    """The configuration's prompts and rewards.

    Attributes:
        training: The prompts of all steps, in order.
        function: The name of the reward function.
    """

    def __init__(self, config: Any) -> None:
        self.tokenizer = load_tokenizer(config.model.hf_assets_path, config.data.chat_template_file)
        (self.held_out,) = load_held_out(config, self.tokenizer)
        needed = config.training.steps * config.grpo.prompts_per_step
        self.training = load_training(config, self.tokenizer, [self.held_out]).next(needed)
        functions, self.pattern = config.reward.functions, config.reward.answer_pattern
        if len(functions) != 1 or functions[0] not in BUILT_IN:
            raise UserError(f"[reward] functions = {functions}: other trainers' runs take one of {list(BUILT_IN)}")
        (self.function,) = functions

    def score(self, text: str, prompt: Prompt) -> float:
        return score(self.function, self.pattern, text, prompt)
