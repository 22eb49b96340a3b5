"""Answers to held-out prompts, for a run's validation and for `torchtitan-grpo evaluate`."""

from copy import deepcopy
from dataclasses import replace

from torchtitan.grpo.data.held_out import HeldOut, HeldOutAnswers
from torchtitan.grpo.engines.protocol import SamplingParams
from torchtitan.grpo.rollouts.collector import Ask, Collector


def answer_held_out(
    collector: Collector, sets: list[HeldOut], params: SamplingParams, min_version: int = -1, alone: bool = True
) -> list[HeldOutAnswers]:
    """Answer every prompt of every set by its environment, greedily and sampled. Blocks, see `Collector.collect_all`.

    Groups for training that are under way end. Those that have not begun wait for these.

    Args:
        params: Stop tokens and seed. Number of answers, sampling and length are the set's.
        min_version: The oldest weight version that may answer: it waits for servers that do not have it yet.
        alone: See `Collector.collect_all`.
    """
    asks = []
    for each in sets:
        of_set = f"-{each.name}" if each.name else ""
        greedy = replace(params, n=1, temperature=0.0, max_tokens=each.max_answer_tokens, first=True)
        sampled = replace(greedy, n=each.samples, temperature=each.temperature, top_p=each.top_p)
        for how, tag in ((greedy, "greedy"), (sampled, "validation")):
            # What an environment writes into a row's columns is for one group, and not for the next validation.
            prompts = [replace(prompt, columns=deepcopy(prompt.columns)) for prompt in each.prompts]
            asks.append(Ask(prompts, how, f"{tag}{of_set}", min_version, each.name))
    answered = iter(collector.collect_all(asks, alone))
    answers = [HeldOutAnswers(each, next(answered), next(answered)) for each in sets]
    collector.rewards.find_finals([sample for each in answers for group in each.groups for sample in group])
    return answers
