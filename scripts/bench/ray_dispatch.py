#!/usr/bin/env python3
"""Measure what the driver needs to call one step of every rank: `[ray] dispatch = "remote"` against `"compiled"`.

Ranks are real actors with the code of a real run; their trainer's step is empty. First come plain remote
calls, then the Compiled Graph, with the same actors. The last call of each takes a second: which part of a core does
the driver keep from the ranks meanwhile? After --time-limit-s the process ends with a traceback.
"""

import argparse
import faulthandler
import os
import statistics
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Self

from bench_common import ROOT
from bench_common.arguments import positive, seconds
from bench_common.output import Output

import torchtitan_overlay  # noqa: F401  before torchtitan
from torchtitan.grpo.config.load import load_config

COLUMNS = "ranks dispatch median_us p95_us ratio driver_cores"
WARMUP = 100
LONG_STEP_S = 1.0


class EmptyTrainer:
    """What `Rank` needs of a trainer, without anything to train."""

    def __init__(self, config: Any) -> None:
        self.step, self.is_rank0 = 0, False
        self.long_step = config.training.steps
        self.broadcast = self.weight_sync = self.rollouts = SimpleNamespace()
        self.checkpointer = SimpleNamespace(cfg=SimpleNamespace(enable=False))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def begin(self) -> None:
        pass

    def train_step(self) -> None:
        self.step += 1
        if self.step % self.long_step == 0:
            time.sleep(LONG_STEP_S)


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--ranks", nargs="+", type=positive, default=[1, 2, 4], help="actors (default 1 2 4)")
    parser.add_argument("--steps", type=positive, default=1000, help="measured calls of each way (default 1000)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="append the rows as JSON lines")
    parser.add_argument("--time-limit-s", type=seconds, default=600.0, help="longest run of all (default 600)")
    return parser


def measure(ranks: int, steps: int) -> list[dict[str, Any]]:
    import ray

    from torchtitan.grpo.run.ray.attempts import import_path
    from torchtitan.grpo.run.ray.cluster import Cluster
    from torchtitan.grpo.run.ray.dispatch import RemoteCalls, compiled_or_remote
    from torchtitan.grpo.run.ray.rank import BEGIN

    argv = ["--job.config_file", str(ROOT / "train_configs" / "quickstart.toml")]
    argv += ["--ray.enable", "--ray.ranks", str(ranks), "--grpo.prompts_per_step", "128"]
    argv += ["--training.steps", str(WARMUP + steps + 1)]
    taken: dict[str, list[float]] = {}
    cores: dict[str, float] = {}
    with Cluster(load_config(argv)) as cluster:
        group = cluster.start_ranks(argv, import_path(EmptyTrainer), "grpo")
        try:
            ray.get(group.started, timeout=120)

            def time_calls(name: str, dispatch: Any) -> None:
                step = dispatch.call(BEGIN)[0]
                for _ in range(WARMUP + steps):
                    start = time.perf_counter()
                    [step, *_] = dispatch.call(step + 1)
                    taken.setdefault(name, []).append(time.perf_counter() - start)
                worked = time.process_time()
                dispatch.call(step + 1)
                cores[name] = (time.process_time() - worked) / LONG_STEP_S

            time_calls("remote", RemoteCalls(group.actors, 60))
            compiled = compiled_or_remote(group.actors, group.nodes, group.agents, 60)
            if isinstance(compiled, RemoteCalls):
                raise SystemExit("Ray cannot compile the graph; see the warning above")
            time_calls("compiled", compiled)
            compiled.close()
            ray.get([actor.close.remote() for actor in group.actors], timeout=60)
        finally:
            group.release()
    medians = {name: statistics.median(times[WARMUP:]) for name, times in taken.items()}
    return [
        {
            "ranks": ranks,
            "dispatch": name,
            "median_us": round(medians[name] * 1e6),
            "p95_us": round(statistics.quantiles(times[WARMUP:], n=20)[-1] * 1e6),
            "ratio": round(medians["remote"] / medians[name], 1),
            "driver_cores": round(cores[name], 2),
        }
        for name, times in taken.items()
    ]


def main() -> None:
    args = build_parser().parse_args()
    faulthandler.dump_traceback_later(args.time_limit_s, exit=True)
    os.environ |= {"RAY_USAGE_STATS_ENABLED": "0", "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}
    rows = [row for ranks in args.ranks for row in measure(ranks, args.steps)]
    Output(True, args.json).table(f"one step's call, {args.steps} calls, {os.cpu_count()} cores", COLUMNS, rows)


if __name__ == "__main__":
    main()
