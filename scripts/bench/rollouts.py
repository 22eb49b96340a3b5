#!/usr/bin/env python3
"""Measure async GRPO by whole runs of grpo_train.py. scripts/bench/README.md has columns and examples.

modes       the same job as sync, async and in-flight, with KV recomputed and kept, against the same servers;
            and the servers' generation alone, which bounds them all
model       a folder with random weights that never end an answer
"""

import argparse
import sys
from pathlib import Path
from typing import Any

from async_bench.measured import MODES
from bench_common.arguments import address, device, parse_with_flags, positive, seconds
from bench_common.process import run_program
from bench_common.shapes import SHAPES

PRESETS: dict[str, dict[str, Any]] = {
    "lognormal": {"shape": "0.6b", "mean": 256.0, "max_answer": 2048, "prompts": 32, "samples": 16}
    | {"prompt_tokens": 140, "age": 24, "microbatch_tokens": 16384, "sequences": 1024},
    "cpu": {"shape": "tiny", "mean": 24.0, "max_answer": 160, "prompts": 8, "samples": 4}
    | {"prompt_tokens": 12, "age": 2, "microbatch_tokens": 2048, "sequences": 64, "bound_s": 5.0}
    | {"trainers": ["cpu"], "engine": "embedded"},
}


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="SUBCOMMAND")

    # No abbreviations: a preset gives way to the flags that are on the command line, by their full names.
    modes = commands.add_parser("modes", allow_abbrev=False)
    modes.add_argument("--out", type=Path, required=True, metavar="FOLDER", help="for everything that is made")
    modes.add_argument("--json", type=Path, metavar="FILE", help="append the tables' rows as JSON lines")
    modes.add_argument("--time-limit-s", type=seconds, default=1800.0, help="of all; what does not fit is left out")
    modes.add_argument("--run-limit-s", type=seconds, default=900.0, help="of one mode (default 900)")
    modes.add_argument(
        "--preset", choices=list(PRESETS), default="lognormal", help="defaults of what follows (default lognormal)"
    )
    modes_help = "default: all; none of them: generation alone"
    modes.add_argument("--modes", nargs="*", choices=MODES, default=list(MODES), metavar="MODE", help=modes_help)
    modes.add_argument("--shape", choices=SHAPES, help="of a Qwen3")
    modes.add_argument("--mean", type=seconds, help="answer tokens on average")
    modes.add_argument("--sigma", type=seconds, default=1.0, help="of their logarithm (default 1)")
    modes.add_argument("--max-answer", type=positive, metavar="TOKENS")
    modes.add_argument("--prompts", type=positive, help="per step")
    modes.add_argument("--samples", type=positive, help="answers to each prompt")
    modes.add_argument("--age", type=positive, help="max_trajectory_age_steps of the in-flight modes")
    modes.add_argument("--steps", type=positive, default=6, help="measured steps (default 6)")
    modes.add_argument("--warmup", type=positive, help="steps before them (default: the mode's age + 1, at least 4)")
    modes.add_argument("--compile", action="store_true", help="[compile] enable: its first steps take a minute")
    modes.add_argument("--trainers", nargs="+", type=device, default=["0"], metavar="GPU", help="a rank each; or cpu")
    modes.add_argument("--ranks", type=positive, help="on the first of these GPUs (default: one on each)")
    urls_help = "running servers of OUT/model; without, what follows -- says how the run starts its own"
    modes.add_argument("--urls", nargs="+", type=address, default=[], help=urls_help)
    modes.add_argument("--devices", type=positive, help="GPUs in all, if servers share one")
    modes.add_argument("--engine", choices=["vllm", "sglang", "embedded"], default="vllm", help="default vllm")
    modes.add_argument("--sequences", type=positive, help="most answers under way at one server")
    modes.add_argument("--bound-s", type=float, default=12.0, help="each measurement of generation alone; 0: none")

    model = commands.add_parser("model")
    model.add_argument("folder", type=Path)
    model.add_argument("--shape", choices=SHAPES, default="0.6b")
    model.add_argument("--max-tokens", type=positive, default=4352, help="longest sequence (default 4352)")
    model.set_defaults(time_limit_s=600.0)
    return parser


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    """Arguments that fit together. Others end the program with exit status 2 and a line that says what to change."""
    own = sys.argv[1:] if argv is None else argv
    parser = build_parser()
    args, args.flags = parse_with_flags(parser, own)
    if args.command != "modes":
        return args
    given = {word.partition("=")[0] for word in own}
    for name, value in PRESETS[args.preset].items():
        if f"--{name.replace('_', '-')}" not in given:
            setattr(args, name, value)
    if args.bound_s < 0:
        parser.error(f"--bound-s {args.bound_s:g} is negative")
    if "cpu" in args.trainers and len(args.trainers) > 1:
        parser.error("--trainers cpu is one rank")
    if not args.urls and args.bound_s:
        parser.error("--bound-s measures the servers of --urls: name them, or set --bound-s 0")
    if args.ranks and args.trainers != ["cpu"] and args.ranks > len(args.trainers):
        parser.error(f"--ranks {args.ranks} needs a GPU each, and --trainers names {len(args.trainers)}")
    args.devices = args.devices or len(args.trainers) + len(args.urls)
    return args


def run(args: argparse.Namespace) -> int:
    """Import what the subcommand needs, which takes seconds, and run it."""
    if args.command == "model":
        from async_bench.model import make_model

        make_model(args.folder, args.shape, args.max_tokens)
        return 0
    from async_bench.modes import modes
    from bench_common.output import Output

    args.out.mkdir(parents=True, exist_ok=True)
    out = Output(True, args.json)
    out.record({"table": "arguments", "arguments": sys.argv[1:]})
    return modes(args, out)


if __name__ == "__main__":
    arguments = parse_arguments()
    sys.exit(run_program(lambda: run(arguments), arguments.time_limit_s + 120))
