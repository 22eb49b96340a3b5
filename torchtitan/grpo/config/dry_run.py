"""What a run would do, without starting it: `grpo_train.py --dry_run`."""

import inspect
import math
import os
from collections.abc import Iterator
from operator import attrgetter

import torch

from torchtitan.config import TORCH_DTYPE_MAP, JobConfig
from torchtitan.grpo.config.keys import show
from torchtitan.grpo.config.unsupported import honoured_keys

NOT_IN_A_FILE = ("job.config_file",)
"""Keys that a TOML file cannot hold."""


def describe(config: JobConfig, world_size: int | None = None) -> str:
    """The resolved configuration as TOML, then batch and memory arithmetic as TOML comments.

    The whole text is a TOML file: kept and given as `--job.config_file`, it makes the same run.

    Args:
        world_size: Number of trainer processes; None reads torchrun's WORLD_SIZE, 1 without it.

    Raises:
        UserError: The model folder cannot be read.
    """
    world_size = int(os.environ.get("WORLD_SIZE", "1")) if world_size is None else world_size
    comments = ["", *batch_lines(config, world_size), "", *memory_lines(config, world_size)]
    return "\n".join([*toml_lines(config), *(f"# {line}".rstrip() for line in comments)]) + "\n"


def toml_lines(config: JobConfig) -> Iterator[str]:
    """Every honoured key with its value; `# default` marks one that differs."""
    section = None
    for key in honoured_keys():
        if key.path in NOT_IN_A_FILE:
            continue
        if key.section != section:
            section = key.section
            yield f"\n[{section}]"
        value = attrgetter(key.path)(config)
        mark = f"  # default {show(key.default)}" if value != key.default else ""
        yield f"# {key.name}: none{mark}" if value is None else f"{key.name} = {show(value)}{mark}"


def data_ranks(config: JobConfig, world_size: int) -> int:
    """Ranks that each get rows of their own."""
    return world_size // config.parallelism.tensor_parallel_degree


def batch_lines(config: JobConfig, world_size: int) -> list[str]:
    """Samples, tokens, optimizer steps and packed rows of a step, and what the whole run asks."""
    grpo, training, rollout = config.grpo, config.training, config.rollout
    ranks = data_ranks(config, world_size)
    samples = grpo.prompts_per_step * grpo.group_size
    longest = config.data.max_prompt_tokens + rollout.max_answer_tokens
    row_tokens = training.tokens_per_microbatch or training.seq_len
    rows = math.ceil(math.ceil(samples / grpo.minibatches / ranks) / (row_tokens // longest))
    lines = [
        "one step",
        f"  answers          {grpo.prompts_per_step} prompts x {grpo.group_size} = {samples:,}",
        f"  tokens           at most {samples:,} x ({config.data.max_prompt_tokens} + {rollout.max_answer_tokens}) "
        f"= {samples * longest:,}",
        f"  optimizer steps  {grpo.minibatches}, each on {samples // grpo.minibatches:,} answers",
        f"  packed rows      of {row_tokens:,} tokens on {ranks} data-parallel rank{'s' * (ranks > 1)}; "
        f"{rows:,} for each rank and optimizer step, were all answers longest",
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


def memory_bytes(config: JobConfig, world_size: int) -> dict[str, int]:
    """Bytes on one rank of what is known before a run, by what holds them.

    Sharded tensors are taken to divide evenly. Activations, the allocator and a server on the same device come on top.
    """
    from torchtitan.grpo.models import resolve_model  # imports torchtitan's models, which takes seconds

    source = resolve_model(config.model, config.training.seq_len)
    with torch.device("meta"):
        model = source.build()
    parameters = sum(parameter.numel() for parameter in model.parameters())

    ranks, tensor = data_ranks(config, world_size), config.parallelism.tensor_parallel_degree
    local = math.ceil(parameters / (ranks // config.parallelism.data_parallel_replicate_degree * tensor))
    held = TORCH_DTYPE_MAP[config.training.dtype].itemsize
    computed = TORCH_DTYPE_MAP[config.training.mixed_precision_param].itemsize
    sent = _sent_bytes(config)
    block = sum(parameter.numel() for parameter in next(iter(model.layers.values())).parameters())
    outside = parameters - block * len(model.layers)
    gathered = parameters if config.parallelism.fsdp_reshard_after_forward == "never" else outside + 2 * block
    uses_fsdp = ranks > 1 or held != computed
    return {
        "parameters, all ranks": parameters * held,
        "weights": local * held,
        "gradients": local * held,
        "AdamW state": 2 * local * held,
        "reference model": local * held if config.grpo.kl_coef else 0,
        "gathered for computing": math.ceil(gathered / tensor) * computed if uses_fsdp else 0,
        "snapshots": local * sent * (2 if config.weight_sync.async_weight_update else 1),
        "buckets, at most": min(_bucket_share(config), parameters * sent),
        "largest logits chunk": _chunk_tokens() * math.ceil(source.model_args.vocab_size / tensor) * (4 + computed),
    }


def memory_lines(config: JobConfig, world_size: int) -> list[str]:
    """`memory_bytes` as a table with its sum."""
    table = memory_bytes(config, world_size)
    total = table.pop("parameters, all ranks")
    parameters = total // TORCH_DTYPE_MAP[config.training.dtype].itemsize
    lines = [f"memory of one rank, for {parameters:,} parameters on {world_size} process{'es' * (world_size > 1)}"]
    lines += [f"  {name:<24}{_mib(size):>14}" for name, size in table.items() if size]
    lines.append(f"  {'sum':<24}{_mib(sum(table.values())):>14}")
    lines.append("  not counted: activations, the allocator's reserve, a server spawned on the same device")
    rollout = config.rollout
    if config.weight_sync.transport != "disk" and (len(rollout.urls) > 1 or rollout.urls_file):
        copy = _mib(parameters * _sent_bytes(config))
        lines.append(f"  in rank 0's host memory: {copy}, a copy for servers that fall behind")
    return lines


def _sent_bytes(config: JobConfig) -> int:
    """Bytes of one parameter on its way to a server."""
    return {"float32": 4, "bfloat16": 2, "auto": 2 if torch.cuda.is_available() else 4}[config.weight_sync.dtype]


def _bucket_share(config: JobConfig) -> int:
    """Bytes that all buckets in flight may take."""
    from torchtitan.grpo.weight_sync.buckets import bucket_bytes
    from torchtitan.grpo.weight_sync.sync import device_memory_bytes

    sync = config.weight_sync
    memory = device_memory_bytes(torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu"))
    return sync.num_buffers * bucket_bytes(memory, sync.buffer_memory_ratio, sync.num_buffers, sync.bucket_mib_max)


def _chunk_tokens() -> int:
    from torchtitan.grpo.logprobs import token_logprobs

    return inspect.signature(token_logprobs).parameters["chunk_tokens"].default


def _mib(size: int) -> str:
    return f"{size / 2**20:,.1f} MiB"
