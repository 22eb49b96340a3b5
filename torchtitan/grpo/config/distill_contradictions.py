"""What the keys of distillation must satisfy together, and with those that it changes the meaning of."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING

from torchtitan.grpo.config.keys import show
from torchtitan.grpo.config.tables import training_sources
from torchtitan.grpo.config.urls import teachers_by_source, url_problem
from torchtitan.grpo.errors import did_you_mean
from torchtitan.grpo.process.server_commands.table import COMMANDS

if TYPE_CHECKING:
    from torchtitan.config import JobConfig


def check_distill(config: JobConfig) -> Iterator[str]:
    distill, grpo, rollout = config.distill, config.grpo, config.rollout
    if not distill.teacher_urls:
        return
    yield from _check_urls(config)
    if rollout.temperature != 1 and not COMMANDS[distill.engine].scores_at_any_temperature:
        yield (
            f"[rollout] temperature = {rollout.temperature:g} with [distill] engine = {show(distill.engine)}: these "
            "servers give log-probabilities of given tokens at temperature 1 only, which cannot be compared with the "
            'model\'s; set temperature = 1, or engine = "embedded"'
        )
    if rollout.top_k:
        yield (
            f"[rollout] top_k = {rollout.top_k} with [distill]: a teacher's probabilities are among all tokens, and "
            "the model's would be among the kept ones; leave one of them out"
        )
    if grpo.policy_loss == "gspo" and not distill.top_k:
        yield (
            '[grpo] policy_loss = "gspo" with [distill]: its gradient gives each token the mean advantage of its '
            'answer, and a teacher judges each token; use "ppo" or "cispo", or set top_k'
        )
    if grpo.kl_coef and grpo.kl_placement == "reward" and not (distill.top_k and distill.mode == "add"):
        yield (
            '[grpo] kl_placement = "reward" with [distill]: it makes advantages again from rewards, without the '
            'teacher\'s term; use kl_placement = "loss", or mode = "add" with top_k'
        )
    if distill.mode == "only" and not config.reward.functions and config.validation.enable:
        yield (
            "[validation] enable = true needs [reward] functions: a validation is the reward of held-out answers; name "
            "some, or set enable = false"
        )


def _check_urls(config: JobConfig) -> Iterator[str]:
    teachers = teachers_by_source(config.distill.teacher_urls)
    for url in dict.fromkeys(url for urls in teachers.values() for url in urls):
        if problem := url_problem(url):
            yield f"[distill] teacher_urls: {problem.replace('[rollout]', '[distill]')}"
        if url in config.rollout.urls:
            yield f"[distill] teacher_urls has {url}, which is in [rollout] urls: it gets the trained weights"
    for source, urls in teachers.items():
        if repeated := [url for url, times in Counter(urls).items() if times > 1]:
            yield f"[distill] teacher_urls has {repeated[0]} twice" + f" for {show(source)}" * bool(source)
    names = source_names(config)
    if unknown := sorted(teachers.keys() - {"", *names}):
        yield (
            f"[distill] teacher_urls names {show(unknown[0])}, which is no [[data.mixture]] source"
            f"{did_you_mean(unknown[0], names)}: write name=http://host:port with the name of one, or the address alone"
        )
    without = [name for name in names or [""] if name not in teachers and "" not in teachers]
    if without:
        whose = f"the prompts of {show(without[0])}" if without[0] else "prompts without a source"
        yield f"[distill] teacher_urls has no teacher for {whose}: add one, or one without a name for all others"


def source_names(config: JobConfig) -> list[str]:
    """The values that `Prompt.source` has in training; none if all prompts have one source."""
    return [source.name for source in training_sources(config) if source.name] or config.data.tasks
