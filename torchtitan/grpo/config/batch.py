"""Sizes of a step's batch: ranks, packed rows and tokens."""

import math

from torchtitan.config import JobConfig


def data_ranks(config: JobConfig, world_size: int) -> int:
    """Number of ranks that train on different rows."""
    return world_size // config.parallelism.tensor_parallel_degree


def row_tokens(config: JobConfig) -> int:
    """Tokens of one packed row, which is the microbatch of one data-parallel rank."""
    return config.training.tokens_per_microbatch or config.training.seq_len


def optimizer_step_rows(config: JobConfig, world_size: int) -> int:
    """Packed rows per data-parallel rank and optimizer step, if every prompt and answer has its longest length."""
    samples = config.grpo.prompts_per_step * config.grpo.group_size
    longest = config.data.max_prompt_tokens + config.rollout.max_answer_tokens
    samples_of_rank = math.ceil(samples / config.grpo.minibatches / data_ranks(config, world_size))
    return math.ceil(samples_of_rank / (row_tokens(config) // longest))
