"""The text of `--dry_run`: what a run would do, without starting it."""

from collections.abc import Sequence

from torchtitan.config import JobConfig
from torchtitan.grpo.checkpoint.disk import disk_lines, mib
from torchtitan.grpo.config.batch import data_ranks, optimizer_step_rows, row_tokens
from torchtitan.grpo.config.frozen import changed
from torchtitan.grpo.config.jobs import Job
from torchtitan.grpo.config.machine import planned_ranks
from torchtitan.grpo.config.resolved import toml_lines
from torchtitan.grpo.config.tables import held_out_sets, training_sources
from torchtitan.grpo.config.target import NAMES, Target, find_target, node_gpus_of, this_machine
from torchtitan.grpo.dry_run.copies import TIGHT, choose_copies, node_count, ranks_of_node
from torchtitan.grpo.dry_run.memory import memory_bytes
from torchtitan.grpo.dry_run.nodes import gpu_lines, host_lines
from torchtitan.grpo.dry_run.shared_gpu import shared_gpu_lines
from torchtitan.grpo.dry_run.under_way import under_way_lines
from torchtitan.grpo.servers.plan import plan_lines


def describe(
    config: JobConfig,
    world_size: int | None = None,
    dry_run: str = "",
    job: Job = "grpo",
    full: bool = False,
    task: Sequence[str] = (),
) -> str:
    """The configuration as TOML, then batch, memory, GPUs and disk, and the task, as TOML comments.

    The whole text is a TOML file. Saved and given as `--job.config_file`, it makes the same run.

    Args:
        world_size: Number of trainer processes. None: see `machine.planned_ranks`.
        dry_run: The machine, as `--dry_run` names it; see `target.find_target`.
        job: What runs on this configuration.
        full: All keys, not only those that differ from their defaults.
        task: From `run.check.read_task`.

    Raises:
        UserError: The model folder cannot be read.
    """
    world_size = planned_ranks(config, dry_run=True) if world_size is None else world_size
    target, nodes = find_target(dry_run, config), node_count(world_size)
    copies = choose_copies(config, world_size, nodes, target, job=job)
    given, config = config, changed(config, {"parallelism.data_parallel_replicate_degree": copies.degree})
    batch = batch_lines(config, world_size) if job == "grpo" else sft_batch_lines(config, world_size)
    ranks_here = ranks_of_node(world_size)
    comments = ["", *batch, "", *memory_lines(config, world_size, target, job, ranks_here), ""]
    if nodes > 1:
        comments[:0] = ["", f"{world_size} ranks on {nodes} nodes", f"  {copies.describe(world_size)}"]
    node_gpus = node_gpus_of(target)
    comments += gpu_lines(config, world_size, ranks_here, target, node_gpus)
    comments += plan_lines(config, node_gpus, ranks_here)
    also = "the task and " if task else ""
    comments += ["", *task, f"Read: {also}config.json of the model. No weights and no server were looked at"]
    keys = toml_lines(config) if full else toml_lines(given, full=False)
    lines = (line for comment in comments for line in comment.splitlines() or [""])
    return "\n".join([*keys, *(f"# {line}".rstrip() for line in lines)]) + "\n"


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
        *under_way_lines(config),
        "the run",
        f"  steps            {training.steps:,}, {training.steps * grpo.minibatches:,} optimizer steps",
        f"  prompts          {training.steps * grpo.prompts_per_step:,}, {training.steps * samples:,} answers",
    ]
    if config.sft.steps:
        lines.append(f"  warm start       {config.sft.steps:,} supervised steps of {config.sft.batch_size} pairs")
    lines += _mixture_lines(config) + _teacher_lines(config)
    if config.validation.enable:
        asked = sum(each.prompts * (1 + each.samples_per_prompt) for each in held_out_sets(config))
        lines.append(f"  validation       {asked:,} answers every {config.validation.freq} steps")
    return lines + _checkpoint_lines(config, world_size)


def sft_batch_lines(config: JobConfig, world_size: int) -> list[str]:
    """Rows, tokens and packed rows of a step of `sft_train.py`, and the totals of the run."""
    sft, training, ranks = config.sft, config.training, data_ranks(config, world_size)
    pairs = any(not source.data.messages_column for source in training_sources(config))
    learned = {"all": "all turns of the assistant", "last": "the assistant's last turn"}[sft.train_on]
    lines = [
        "one step",
        f"  rows             {sft.batch_size:,}, of which it learns {'the answer' if pairs else learned}",
        f"  tokens           at most {sft.batch_size:,} x {training.seq_len} = {sft.batch_size * training.seq_len:,}",
        f"  packed rows      of {row_tokens(config):,} tokens on {ranks} data-parallel rank{'s' * (ranks > 1)}; "
        f"{optimizer_step_rows(config, world_size, 'sft'):,} for each rank, were all documents longest",
        "the run",
        f"  steps            {training.steps:,}, {training.steps * sft.batch_size:,} rows",
        *_mixture_lines(config),
    ]
    if config.validation.enable:
        rows = sum(each.prompts for each in held_out_sets(config))
        lines.append(f"  validation       {rows:,} held-out rows every {config.validation.freq} steps")
    return lines + _checkpoint_lines(config, world_size)


def _mixture_lines(config: JobConfig) -> list[str]:
    if not config.data.mixture:
        return []
    weights = sum(source.weight for source in config.data.mixture)
    shares = ", ".join(f"{source.name} {source.weight / weights:.0%}" for source in config.data.mixture)
    return [f"  mixture          {shares}"]


def _teacher_lines(config: JobConfig) -> list[str]:
    distill = config.distill
    if not distill.teacher_urls:
        return []
    longest = config.data.max_prompt_tokens + config.rollout.max_answer_tokens + 1
    servers = f"{len(distill.teacher_urls)} ({distill.engine})"
    return [f"  teachers         {servers}: each scores its answers, and must take {longest:,} tokens"]


def _checkpoint_lines(config: JobConfig, world_size: int) -> list[str]:
    checkpoint, lines = config.checkpoint, []
    if checkpoint.enable:
        kept = checkpoint.keep_latest_k or "all"
        lines.append(f"  checkpoints      every {checkpoint.interval} steps and at the end, the newest {kept} kept")
    else:
        lines.append("  checkpoints      OFF: the trained weights are not saved ([checkpoint] enable)")
    if config.ray.enable and not config.ray.ranks:
        lines.append(f"  processes        one for each GPU of the cluster, shown for {world_size}: set [ray] ranks")
    elif world_size == 1:
        lines.append(
            "  processes        1; N: --parallelism.ranks N; on nodes of L each: WORLD_SIZE=N LOCAL_WORLD_SIZE=L"
        )
    return lines


def memory_lines(
    config: JobConfig, world_size: int, target: Target | None = None, job: Job = "grpo", ranks_here: int = 0
) -> list[str]:
    """`memory_bytes` at its peak as a table with a sum, and the sums at other moments; host memory, and the disk for
    checkpoints.

    Args:
        ranks_here: Of a node; 0 for all.
    """
    target = target or this_machine()
    memory = memory_bytes(config, world_size, target, job)
    peak, parameters = memory.peak, memory.parameters
    processes = f"{world_size} process{'es' * (world_size > 1)}"
    active = f" ({memory.active:,} active)" if memory.active < parameters else ""
    lines = [f"memory of one rank on {target.name}, for {parameters:,} parameters{active} on {processes}"]
    if config.lora.enable:
        lines.append(f"  adapters of {memory.trained:,} parameters are trained, {memory.trained / parameters:.2%}")
    if target.why:
        lines.append(f"  assumed for {target.why}: name another by --dry_run {' or '.join(NAMES)}")
    lines += [f"  {name:<28}{mib(size):>14}" for name, size in memory.moments[peak].items() if size]
    lines.append(f"  {'peak':<28}{mib(memory.total(peak)):>14}  {peak}")
    others = sorted((moment for moment in memory.moments if moment != peak), key=memory.total, reverse=True)
    lines += [f"  {'':<28}{mib(memory.total(moment)):>14}  {moment}" for moment in others]
    share = memory.total(peak) / target.memory_bytes
    verdict = "does NOT fit" if share > 1 else "is tight" if share > TIGHT else "fits"
    lines.append(f"  {'of the device':<28}{mib(target.memory_bytes):>14}  {share:.0%}: it {verdict}")
    if config.rollout.colocate and job == "grpo" and target.cuda:
        lines += shared_gpu_lines(config, memory, target)
        lines.append("  not counted: the allocator's reserve")
    else:
        lines.append("  not counted: the allocator's reserve, CUDA and NCCL, a server on the same device")
    lines += host_lines(config, ranks_here or world_size, target, memory, job == "grpo")
    return lines + disk_lines(config, memory.parameters, memory.trained, target.here)
