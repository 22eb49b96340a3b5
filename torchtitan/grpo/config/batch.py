"""Sizes of a step's batch: ranks, packed rows and tokens."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from torchtitan.grpo.config.job_config import Grpo, Rollout
from torchtitan.grpo.config.jobs import Job

if TYPE_CHECKING:
    from torchtitan.config import JobConfig


def ranks_of_a_row(config: JobConfig) -> int:
    """Ranks that train on the same rows: each has a part of a row's positions, by tensor or context parallelism."""
    return config.parallelism.tensor_parallel_degree * config.parallelism.context_parallel_degree


def data_ranks(config: JobConfig, world_size: int) -> int:
    """Number of ranks that train on different rows."""
    return world_size // ranks_of_a_row(config)


def row_tokens(config: JobConfig) -> int:
    """Tokens of one packed row, which is the microbatch of one data-parallel rank."""
    return config.training.tokens_per_microbatch or config.training.seq_len


def requests_at_once(rollout: Rollout) -> int:
    """Requests in flight per server, at most: `[rollout] max_concurrent_requests`, or its default.

    A request for a group is `group_size` answers at first, and about a third of them on average. That of an
    environment is one answer, whose age counts from the request on, also while it waits in the server.
    """
    return rollout.max_concurrent_requests or (512 if rollout.environment else 256)


def surplus_groups(grpo: Grpo) -> int:
    """Groups of `[grpo] oversampling`, at least one if it is set."""
    return math.ceil(grpo.oversampling * grpo.prompts_per_step - 1e-6)


def step_samples(config: JobConfig, job: Job) -> int:
    """Answers, or rows to learn from, of one optimizer step on all ranks."""
    if job == "sft":
        return config.sft.batch_size
    return config.grpo.prompts_per_step * config.grpo.group_size // config.grpo.minibatches


def optimizer_step_rows(config: JobConfig, world_size: int, job: Job = "grpo") -> int:
    """Packed rows per data-parallel rank and optimizer step, if every prompt and answer has its longest length."""
    longest = (
        config.training.seq_len if job == "sft" else config.data.max_prompt_tokens + config.rollout.max_answer_tokens
    )
    samples_of_rank = math.ceil(step_samples(config, job) / data_ranks(config, world_size))
    return math.ceil(samples_of_rank / (row_tokens(config) // longest))
