"""What staleness costs in reward: the quickstart task in several modes and seeds."""

import argparse
import statistics
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from async_bench.modes import Flags
from async_bench.processes import read_lines, train
from bench_common.output import Output, Row

from torchtitan.grpo.errors import UserError

COLUMNS = {
    "variant": "variant",
    "seeds": "seeds",
    "first": "held-out before",
    "reward": "held-out at the end",
    "spread": "+-",
    "seconds": "GRPO, s",
    "ratio": "to sync",
    "age_mean": "age",
    "age_max": "oldest",
}


def variants(ages: list[int]) -> dict[str, Flags]:
    ahead: Flags = {"async_grpo.enabled": True, "weight_sync.async_weight_update": True}
    table: dict[str, Flags] = {"sync": {"async_grpo.enabled": False, "weight_sync.async_weight_update": False}}
    table |= {f"age_{age}": ahead | {"async_grpo.max_trajectory_age_steps": age} for age in ages}
    full = table[f"age_{ages[-1]}"] | {"async_grpo.run_ahead": "full"}
    uncorrected = full | {"grpo.importance_correction": "none"}
    return table | {f"age_{ages[-1]}_full": full, f"age_{ages[-1]}_full_uncorrected": uncorrected}


def curves(args: argparse.Namespace, out: Output) -> int:
    """Every variant with every seed, `--jobs` at a time. Returns the exit status: 1 if a run did not end well."""
    deadline = time.monotonic() + args.time_limit_s
    folder = args.out.resolve()
    table = variants(args.ages)
    if args.variants:
        unknown = [name for name in args.variants if name not in table]
        if unknown:
            raise UserError(f"--variants {' '.join(unknown)}: there are {', '.join(table)}")
        table = {name: table[name] for name in args.variants}
    # By seed first: if time runs out, what is there compares all variants.
    runs = [(variant, seed) for seed in args.seeds for variant in table]
    speaking = threading.Lock()
    errors: list[str] = []

    def say(line: str) -> None:
        with speaking:
            out.say(line)

    def run(variant: str, seed: int) -> Row | None:
        name = f"{variant}_seed{seed}"
        left_s = deadline - time.monotonic()
        if left_s < 30:
            errors.append(f"{name}: left out, {left_s:.0f} s are left of --time-limit-s")
            return None
        (folder / name / "metrics.jsonl").unlink(missing_ok=True)
        base: Flags = {"job.config_file": args.config, "debug.seed": seed, "checkpoint.enable": False}
        base |= {"metrics.enable_tensorboard": False}
        flags = base | table[variant] | dict(args.flags)

        def show(line: Row) -> None:
            if line.get("step", 0) > 0 and "validation/greedy_reward" in line:
                say(f"  {name} step {line['step']}: held-out {line['validation/greedy_reward']:.3f}")

        error = train(name, flags, ["cpu"], folder / name, min(args.run_limit_s, left_s - 5), show)
        if error:
            errors.append(error)
            say(f"FAIL  {error}")
            return None
        row = {"variant": variant, "seed": seed} | outcome(read_lines(folder / name / "metrics.jsonl"))
        say(f"{name}: held-out {row['reward']:.3f}, {row['seconds']:.1f} s, age {row['age_mean']:.2f}")
        with speaking:
            out.record({"table": "run"} | row)
        return row

    with ThreadPoolExecutor(args.jobs) as pool:
        rows = [row for row in pool.map(lambda pair: run(*pair), runs) if row is not None]
    out.table(f"{Path(args.config).name}, held-out greedy reward", COLUMNS, combine(rows, list(table)))
    for error in errors:
        out.say(f"FAIL  {error.splitlines()[0]}")
    return int(bool(errors))


def outcome(lines: list[Row]) -> Row:
    """One run's result. Seconds are the wall clock of its GRPO steps, validation left out."""
    steps = [line for line in lines if line.get("step", 0) > 0]
    held_out = [line["validation/greedy_reward"] for line in lines if "validation/greedy_reward" in line]
    return {
        "steps": len(steps),
        "first": held_out[0],
        "reward": held_out[-1],
        "seconds": sum(line["time/step_s"] - line.get("time/validate_s", 0.0) for line in steps),
        "age_mean": statistics.fmean(line["rollout/age_mean"] for line in steps),
        "age_max": max(line["rollout/age_max"] for line in steps),
    }


def combine(rows: list[Row], order: list[str]) -> list[Row]:
    """One row a variant: means over seeds, the standard deviation of the reward between them, seconds to sync's."""
    by_variant = {variant: [row for row in rows if row["variant"] == variant] for variant in order}
    means: list[Row] = []
    for variant, seeds in by_variant.items():
        if not seeds:
            continue
        mean = {key: statistics.fmean(row[key] for row in seeds) for key in ("first", "reward", "seconds", "age_mean")}
        spread = statistics.stdev(row["reward"] for row in seeds) if len(seeds) > 1 else None
        oldest = max(row["age_max"] for row in seeds)
        means.append({"variant": variant, "seeds": len(seeds), "spread": spread, "age_max": oldest} | mean)
    sync = next((row["seconds"] for row in means if row["variant"] == "sync"), None)
    for row in means:
        row["ratio"] = row["seconds"] / sync if sync else None
    return means
