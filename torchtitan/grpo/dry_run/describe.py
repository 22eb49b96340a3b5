"""The text of `grpo_train.py --dry_run`: what a run would do, without starting it."""

import os
from collections.abc import Iterator
from operator import attrgetter

from torchtitan.config import JobConfig
from torchtitan.grpo.config.batch import data_ranks, optimizer_step_rows, row_tokens
from torchtitan.grpo.config.keys import toml
from torchtitan.grpo.config.unsupported import honoured_keys
from torchtitan.grpo.dry_run.memory import memory_bytes, sent_bytes

NOT_IN_A_FILE = ("job.config_file",)
"""Keys that a TOML file cannot hold."""


def describe(config: JobConfig, world_size: int | None = None) -> str:
    """The configuration as TOML, then batch and memory arithmetic as TOML comments.

    The whole text is a TOML file. Saved and given as `--job.config_file`, it makes the same run.

    Args:
        world_size: Number of trainer processes. None reads torchrun's WORLD_SIZE, or is 1 without it.

    Raises:
        UserError: The model folder cannot be read.
    """
    world_size = int(os.environ.get("WORLD_SIZE", "1")) if world_size is None else world_size
    comments = ["", *batch_lines(config, world_size), "", *memory_lines(config, world_size)]
    return "\n".join([*toml_lines(config), *(f"# {line}".rstrip() for line in comments)]) + "\n"


def toml_lines(config: JobConfig) -> Iterator[str]:
    """Every key with an effect and its value; `# default` marks values that differ."""
    section = None
    for key in honoured_keys():
        if key.path in NOT_IN_A_FILE:
            continue
        if key.section != section:
            section = key.section
            yield f"\n[{section}]"
        value = attrgetter(key.path)(config)
        mark = f"  # default {toml(key.default)}" if value != key.default else ""
        yield f"# {key.name}: none{mark}" if value is None else f"{key.name} = {toml(value)}{mark}"


def batch_lines(config: JobConfig, world_size: int) -> list[str]:
    """Answers, tokens, optimizer steps and packed rows of a step, and the totals of the run."""
    grpo, training, rollout = config.grpo, config.training, config.rollout
    ranks = data_ranks(config, world_size)
    samples = grpo.prompts_per_step * grpo.group_size
    longest = config.data.max_prompt_tokens + rollout.max_answer_tokens
    lines = [
        "one step",
        f"  answers          {grpo.prompts_per_step} prompts x {grpo.group_size} = {samples:,}",
        f"  tokens           at most {samples:,} x ({config.data.max_prompt_tokens} + {rollout.max_answer_tokens}) "
        f"= {samples * longest:,}",
        f"  optimizer steps  {grpo.minibatches}, each on {samples // grpo.minibatches:,} answers",
        f"  packed rows      of {row_tokens(config):,} tokens on {ranks} data-parallel rank{'s' * (ranks > 1)}; "
        f"{optimizer_step_rows(config, world_size):,} for each rank and optimizer step, were all answers longest",
        "the run",
        f"  steps            {training.steps:,}, {training.steps * grpo.minibatches:,} optimizer steps",
        f"  prompts          {training.steps * grpo.prompts_per_step:,}, {training.steps * samples:,} answers",
    ]
    if config.sft.steps:
        lines.append(f"  warm start       {config.sft.steps:,} supervised steps of {config.sft.batch_size} pairs")
    validation = config.validation
    if validation.enable:
        asked = validation.prompts * (1 + validation.samples_per_prompt)
        lines.append(f"  validation       {asked:,} answers every {validation.freq} steps")
    checkpoint = config.checkpoint
    if checkpoint.enable:
        kept = checkpoint.keep_latest_k or "all"
        lines.append(f"  checkpoints      every {checkpoint.interval} steps and at the end, the newest {kept} kept")
    else:
        lines.append("  checkpoints      OFF: the trained weights are not saved ([checkpoint] enable)")
    if world_size == 1:
        lines.append("  processes        1; for N of them: WORLD_SIZE=N python grpo_train.py --dry_run ...")
    return lines


def memory_lines(config: JobConfig, world_size: int) -> list[str]:
    """`memory_bytes` at its peak as a table with a sum, and the sums at other moments."""
    memory = memory_bytes(config, world_size)
    peak, parameters = memory.peak, memory.parameters
    lines = [f"memory of one rank, for {parameters:,} parameters on {world_size} process{'es' * (world_size > 1)}"]
    lines += [f"  {name:<28}{_mib(size):>14}" for name, size in memory.moments[peak].items() if size]
    lines.append(f"  {'peak':<28}{_mib(memory.total(peak)):>14}  {peak}")
    others = sorted((moment for moment in memory.moments if moment != peak), key=memory.total, reverse=True)
    lines += [f"  {'':<28}{_mib(memory.total(moment)):>14}  {moment}" for moment in others]
    lines.append("  not counted: the allocator's reserve, CUDA and NCCL, a server spawned on the same device")
    rollout = config.rollout
    if config.weight_sync.transport != "disk" and (len(rollout.urls) > 1 or rollout.urls_file):
        copy = _mib(parameters * sent_bytes(config))
        lines.append(f"  in rank 0's host memory: {copy}, a copy for servers that fall behind")
    return lines


def _mib(size: int) -> str:
    return f"{size / 2**20:,.1f} MiB"
