"""How a step's answers are cut into packed rows."""

import math

from torchtitan.config import JobConfig


def data_ranks(config: JobConfig, world_size: int) -> int:
    """Ranks that each get rows of their own."""
    return world_size // config.parallelism.tensor_parallel_degree


def row_tokens(config: JobConfig) -> int:
    """Tokens of one packed row, the microbatch of one data-parallel rank."""
    return config.training.tokens_per_microbatch or config.training.seq_len


def optimizer_step_rows(config: JobConfig, world_size: int) -> int:
    """Packed rows of each data-parallel rank in one optimizer step, were all answers as long as they may be."""
    samples = config.grpo.prompts_per_step * config.grpo.group_size
    longest = config.data.max_prompt_tokens + config.rollout.max_answer_tokens
    samples_of_rank = math.ceil(samples / config.grpo.minibatches / data_ranks(config, world_size))
    return math.ceil(samples_of_rank / (row_tokens(config) // longest))
