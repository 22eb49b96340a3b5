"""The runs of a comparison, one after another, each in a folder of its own. A run that is complete is not repeated."""

import argparse
import json
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from async_bench.modes import max_age, mode_flags, run_name
from async_bench.processes import follow, train
from bench_common import BENCH
from bench_common.arguments import as_flags
from bench_common.output import Output
from bench_common.process import device_environment, import_environment
from learning_bench.reached import REWARD
from process_group import ProcessGroup

from torchtitan.grpo.config.load import load_config
from torchtitan.grpo.config.resolved import resolved
from torchtitan.grpo.errors import UserError
from torchtitan.grpo.reporting.step_lines import read_lines

Flags = dict[str, Any]

RUN_FILE = "run.json"
"""In a run's folder: contender, age, learning rate, seed, steps, and answers of a step."""
LEAST_S = 30.0
"""A run is not started with less time left."""
OWN_KEYS = ("optimizer.lr", "debug.seed", "job.dump_folder", "async_grpo.", "weight_sync.async_weight_update")
"""Keys that the comparison sets."""
SERVER_KEYS = ("rollout.engine", "rollout.replicas", "rollout.urls", "rollout.gpus_per_server", "rollout.server_")
SERVER_KEYS += ("rollout.colocate", "rollout.memory_share")
"""Keys that may differ between calls for one folder: TRL has no servers of ours."""
TASK_KEYS = ("model.", "data.", "reward.", "validation.", "rollout.max_answer_tokens", "rollout.environment")
"""All that a variant shares with the runs that it is compared with: what is learned, and how it is examined."""
RUN_AHEAD = "auto"
"""The default: answers are no older than necessary."""


def complete(folder: Path) -> dict[str, Any] | None:
    """What a folder's run is, if its last step was validated; else None."""
    path = folder / RUN_FILE
    if not path.exists():
        return None
    run = json.loads(path.read_text())
    lines = read_lines(folder / "metrics.jsonl")
    ended = any(line.get("step") == run["steps"] and REWARD in line for line in lines)
    return run if ended else None


def job_flags(args: argparse.Namespace) -> Flags:
    """What all runs share. Checked before the first starts.

    Raises:
        UserError: The configuration is wrong, or has no validation.
    """
    for name in args.flags:
        if name.startswith(OWN_KEYS):
            raise UserError(f"--{name} is set by this benchmark: see --lrs, --seeds, --modes and --ages")
    flags: Flags = {"job.config_file": args.config, "checkpoint.enable": False}
    flags |= {"metrics.enable_tensorboard": False, "metrics.samples_per_step": 0, **args.flags}
    config = load_config([*as_flags(flags), "--job.dump_folder", str(args.out / "run")])
    if not config.validation.enable:
        raise UserError(f"{args.config} has no [validation] enable: learning is measured by held-out rewards")
    args.lrs = args.lrs or [config.optimizer.lr / 2, config.optimizer.lr]
    args.steps, args.answers = config.training.steps, config.grpo.prompts_per_step * config.grpo.group_size
    _same_job(args.out, resolved(config), getattr(args, "variant", None))
    return flags


def _same_job(folder: Path, config: Mapping[str, Any], variant: str | None) -> None:
    """A folder holds runs of one configuration, and variants of it. Refuse to compare different work."""
    path = folder / "job.json"
    job = {name: value for name, value in config.items() if not name.startswith((*OWN_KEYS, *SERVER_KEYS))}
    job = json.loads(json.dumps(job | {"async_grpo.run_ahead": RUN_AHEAD}, default=str))
    before = json.loads(path.read_text()) if path.exists() else None
    if variant and before is None:
        raise UserError(f"--variant {variant}: --out {folder} holds no runs to compare it with; first call without it")
    compared = [name for name in job if name.startswith(TASK_KEYS)] if variant else list(job)
    different = [name for name in compared if before is not None and before.get(name) != job[name]]
    if different:
        raise UserError(
            f"--out {folder} holds runs of another configuration ({', '.join(different[:3])}): name another folder"
            + ("" if variant else ", or a --variant, which may differ in all but its task")
        )
    if not variant:
        path.write_text(json.dumps(job))


def contenders(args: argparse.Namespace) -> Iterator[tuple[str, int]]:
    """Each mode, with its ages."""
    for mode in args.modes:
        for age in args.ages if mode.startswith("in_flight") else [1]:
            yield mode, age


def run_ours(args: argparse.Namespace, out: Output) -> bool:
    """Every mode, age, learning rate and seed. Seeds are outermost, so that a comparison is whole as early as possible.

    Returns:
        Whether a run failed or was left out.
    """
    flags = job_flags(args)
    suffix = f"_{args.variant}" if args.variant else ""

    def start(folder: Path, name: str, mode: str, age: int, lr: float, seed: int, limit_s: float) -> str:
        own = {"optimizer.lr": lr, "debug.seed": seed} | mode_flags(mode, age)
        own["async_grpo.run_ahead"] = RUN_AHEAD
        return train(name, flags | own, args.gpus, folder, limit_s, _show(out), args.ranks)

    wanted = [
        (
            {"contender": run_name(mode, age) + suffix, "age": max_age(mode, age), "lr": lr, "seed": seed},
            (mode, age, lr, seed),
        )
        for seed in args.seeds
        for lr in args.lrs
        for mode, age in contenders(args)
    ]
    return _all(args, out, wanted, start)


def run_trl(args: argparse.Namespace, out: Output) -> bool:
    """TRL's trainer at every learning rate and seed."""
    name = "trl_async" if args.trainer == "async" else "trl_colocate" if args.colocate else "trl_grpo"
    return _other(args, out, name, "trl_run.py", args.trainer, "colocate" if args.colocate else args.url or "-")


def run_verl(args: argparse.Namespace, out: Output) -> bool:
    """verl at every learning rate and seed."""
    return _other(args, out, "verl", "verl_run.py")


def _other(args: argparse.Namespace, out: Output, name: str, program: str, *words: str) -> bool:
    """Another trainer. Its program writes the metrics that ours writes, as far as it has them."""
    flags = job_flags(args)

    def start(folder: Path, title: str, lr: float, seed: int, limit_s: float) -> str:
        own = flags | {"optimizer.lr": lr, "debug.seed": seed, "job.dump_folder": folder}
        command = [args.python, str(BENCH / "learning_bench" / program), *words, *as_flags(own)]
        environment = device_environment(args.gpus) | import_environment()
        process = ProcessGroup(command, folder.parent / f"{folder.name}.log", environment)
        return follow(process, title, folder, limit_s, _show(out))

    wanted = [
        ({"contender": name, "age": None, "lr": lr, "seed": seed}, (lr, seed)) for seed in args.seeds for lr in args.lrs
    ]
    return _all(args, out, wanted, start)


def _all(
    args: argparse.Namespace, out: Output, wanted: list[tuple[dict[str, Any], tuple]], start: Callable[..., str]
) -> bool:
    deadline = time.monotonic() + args.time_limit_s
    failed = False
    for number, (run, arguments) in enumerate(wanted, start=1):
        name = f"{run['contender']}_lr{run['lr']:g}_seed{run['seed']}"
        folder = args.out.resolve() / name
        if complete(folder) is not None:
            continue
        left_s = deadline - time.monotonic()
        if left_s < LEAST_S:
            out.say(f"{name}: left out, {left_s:.0f} s are left of --time-limit-s; call again with the same --out")
            failed = True
            continue
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        (folder / RUN_FILE).write_text(json.dumps(run | {"steps": args.steps, "answers": args.answers}))
        out.say(f"{name} ({number} of {len(wanted)})")
        error = start(folder, name, *arguments, min(args.run_limit_s, left_s - 5))
        if not error and complete(folder) is None:
            error = f"{name}: ended without a validation of step {args.steps}"
        if error:
            out.say(f"FAIL  {error}")
        failed |= bool(error)
    return failed


def _show(out: Output) -> Callable[[Mapping[str, float]], bool]:
    """Prints each validation. The run is never ended early: its last line is the measurement."""

    def show(line: Mapping[str, float]) -> bool:
        if REWARD in line:
            out.say(f"  step {line['step']:g}: held-out reward {line[REWARD]:.3f}")
        return False

    return show
