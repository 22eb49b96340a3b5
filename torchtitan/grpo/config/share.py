"""How many processes rollouts have, and what each one's share of the work is."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torchtitan.grpo.config.batch import requests_at_once
from torchtitan.grpo.config.frozen import changed
from torchtitan.grpo.config.tables import training_sources

if TYPE_CHECKING:
    from torchtitan.config import JobConfig

SERVERS_OF_A_PROCESS = 32
"""A process of one core takes the tokens of 28 to 68 GPUs at 25,000 tokens/s each (docs/benchmarks.md, section 21)."""


def rollout_processes(config: JobConfig) -> int:
    """`[rollout] processes`, or how many the servers need: as many as divide the prompts of each minibatch, and
    `[async_grpo] order_window`. Servers of a `urls_file`, which may change, do not count."""
    rollout, prompts = config.rollout, config.grpo.prompts_per_step // config.grpo.minibatches
    if rollout.processes:
        return rollout.processes
    if any(needs_one_process(config)):
        return 1
    wanted = -(-max(rollout.replicas, len(rollout.urls)) // SERVERS_OF_A_PROCESS)
    shared = math.gcd(prompts, config.async_grpo.order_window)
    return next(n for n in range(max(1, min(wanted, shared)), 0, -1) if shared % n == 0)


def needs_one_process(config: JobConfig) -> Iterator[str]:
    """Keys that do not go with several, and why."""
    if config.rollout.serve_port:
        yield "[rollout] serve_port is one process' endpoint"
    if config.rollout.record_gib:
        yield "[rollout] record_gib writes the groups of one process"
    if any(each.data.curriculum for each in training_sources(config)):
        yield "[data] curriculum goes by the rewards of all prompts"
    if config.grpo.kl_coef and config.grpo.kl_placement == "reward":
        yield '[grpo] kl_placement = "reward" goes through the answers of all prompts'


@dataclass(frozen=True)
class Share:
    """Every `of`-th prompt, from the `number`-th on."""

    number: int
    of: int

    def next(self, prompts: Any, n: int) -> list[Any]:
        """The next `n` of this share. All of them are taken, so that every share has the same order."""
        return prompts.next(n * self.of)[self.number :: self.of]


def of_each(config: JobConfig, processes: int) -> JobConfig:
    """The configuration of one of several processes: sizes that all have together are divided."""
    if processes == 1:
        return config
    rollout = config.rollout
    sizes = {
        "grpo.prompts_per_step": config.grpo.prompts_per_step,
        "async_grpo.order_window": config.async_grpo.order_window,
        "reward.workers": config.reward.workers,
        "metrics.samples_per_step": config.metrics.samples_per_step,
        "rollout.max_concurrent_requests": requests_at_once(rollout),
        "rollout.environment_concurrency": rollout.environment_concurrency,
    }
    return changed(config, {path: -(-size // processes) for path, size in sizes.items()})


ALL = Share(0, 1)
