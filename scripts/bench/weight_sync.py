#!/usr/bin/env python3
"""Measure weight sync: publishes from FSDP2 shards to running servers, phase by phase.

scripts/bench/README.md has columns and examples. Every wait is at most --timeout-s. After --time-limit-s the process
ends with a traceback.
"""

import argparse
import os
import sys
from contextlib import ExitStack
from importlib.metadata import version
from pathlib import Path

from bench_common.arguments import address, positive, seconds
from bench_common.process import run_program
from bench_common.shapes import SHAPES


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    """Bad arguments end the program with exit status 2 and a line that says what to change."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--urls", nargs="+", type=address, required=True, metavar="URL", help="running servers")
    parser.add_argument("--shape", choices=SHAPES, default="0.6b", help="of a Qwen3 (default 0.6b); tiny: for a CPU")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32", help="of the trainer's weights")
    parser.add_argument("--lora", type=positive, default=0, metavar="RANK", help="adapters of this rank, all layers")
    parser.add_argument("--background", action="store_true", help="publish in the background, and time the pause too")
    parser.add_argument("--device", choices=["auto", "cpu", "cuda"], default="auto", help="of the trainer")
    parser.add_argument(
        "--transport", choices=["auto", "nccl", "gloo", "ipc"], default="auto", help="[weight_sync] transport"
    )
    parser.add_argument("--repeats", type=positive, default=5, help="measured versions (default 5)")
    parser.add_argument("--warmup", type=positive, default=2, help="versions before them (default 2)")
    parser.add_argument("--timeout-s", type=seconds, default=60.0, help="longest wait for one thing (default 60)")
    parser.add_argument("--time-limit-s", type=seconds, default=1800.0, help="longest run of all (default 1800)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="append the table's row as a JSON line")
    return parser.parse_args(argv)


def run(args: argparse.Namespace) -> int:
    """Import what it needs, which takes seconds, and measure."""
    if args.device == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # torchtitan would take a GPU that it sees
    from bench_common.output import Output
    from weight_sync_bench.refit import refit
    from weight_sync_bench.trainer import Ranks

    with ExitStack() as resources:
        ranks = Ranks(args.device, timeout_s=args.time_limit_s)
        resources.callback(ranks.close)
        out = Output(ranks.rank == 0, args.json)
        versions = {"ranks": ranks.describe(), "torchtitan": version("torchtitan")}
        out.record({"table": "run", "arguments": sys.argv[1:]} | versions)
        refit(args, ranks, out)
    return 0


if __name__ == "__main__":
    arguments = parse_arguments()
    sys.exit(run_program(lambda: run(arguments), arguments.time_limit_s))
