#!/usr/bin/env python3
"""Seconds and tokens until a model reaches a reward, by whole runs. scripts/bench/README.md has columns and examples.

runs      one configuration as sync, async and in-flight, at several ages and learning rates, with several seeds
trl       TRL's GRPOTrainer or AsyncGRPOTrainer on the same model, prompts, rewards and held-out questions
verl      verl's trainer on the same, with vLLM on the trainer's GPU
report    tables of a folder's runs; the others write them too
"""

import argparse
import re
import sys
from pathlib import Path

from async_bench.measured import MODES
from bench_common.arguments import address, device, parse_with_flags, positive, seconds
from bench_common.process import run_program

CONFIG = Path("train_configs/smollm2_sums_1gpu.toml")


def learning_rate(text: str) -> float:
    value = float(text)
    if not 0 < value <= 1:
        raise argparse.ArgumentTypeError(f"{value:g} is not in (0, 1]")
    return value


def seed(text: str) -> int:
    value = int(text)
    if value < 0:
        raise argparse.ArgumentTypeError(f"{value} is negative")
    return value


def variant(text: str) -> str:
    if not re.fullmatch("[A-Za-z0-9]+", text):
        raise argparse.ArgumentTypeError(f"{text!r} is to be letters and digits: it is part of a folder's name")
    return text


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="SUBCOMMAND")
    report = argparse.ArgumentParser(add_help=False)
    report.add_argument("--out", type=Path, required=True, metavar="FOLDER", help="for a folder of each run")
    report.add_argument("--json", type=Path, metavar="FILE", help="append the tables' rows as JSON lines")
    report.add_argument(
        "--thresholds", nargs=3, type=float, metavar="REWARD", help="default: 50, 75 and 90 %% of what sync gains"
    )
    job = argparse.ArgumentParser(add_help=False)
    job.add_argument("--config", type=Path, default=CONFIG, help=f"TOML file with [validation] (default {CONFIG})")
    job.add_argument("--seeds", nargs="+", type=seed, default=[0, 1, 2], help="[debug] seed (default 0 1 2)")
    job.add_argument(
        "--lrs", nargs="+", type=learning_rate, metavar="LR", help="default: the configuration's, and half"
    )
    job.add_argument("--gpus", nargs="+", type=device, default=["0"], metavar="GPU", help="visible ones; or cpu")
    job.add_argument("--run-limit-s", type=seconds, default=900.0, help="of one run (default 900)")
    job.add_argument("--time-limit-s", type=seconds, default=6 * 3600.0, help="of all; what does not fit is left out")

    runs = commands.add_parser("runs", parents=[report, job], allow_abbrev=False)
    runs.add_argument("--modes", nargs="+", choices=MODES, default=list(MODES), metavar="MODE", help="default: all")
    runs.add_argument("--ages", nargs="+", type=positive, default=[1, 2, 4, 8], help="of in-flight (default 1 2 4 8)")
    runs.add_argument("--variant", type=variant, metavar="NAME", help="of the folder's job: same task, any other keys")
    runs.add_argument("--ranks", type=positive, default=1, help="trainer ranks: they have the first GPUs (default 1)")

    trl = commands.add_parser("trl", parents=[report, job], allow_abbrev=False)
    trl.add_argument("--trainer", choices=["grpo", "async"], default="grpo", help="GRPOTrainer or AsyncGRPOTrainer")
    trl.add_argument(
        "--url", type=address, help="vLLM server with TRL's weight transfer (default: generate in process)"
    )
    trl.add_argument(
        "--colocate", action="store_true", help="GRPOTrainer's vLLM in its own process, on its GPU (default: no vLLM)"
    )
    trl.add_argument("--python", default=sys.executable, help="Python that has TRL 1.16 (default: this one)")

    verl = commands.add_parser("verl", parents=[report, job], allow_abbrev=False)
    verl.add_argument("--python", default=sys.executable, help="Python that has verl 0.9.1 (default: this one)")

    commands.add_parser("report", parents=[report], allow_abbrev=False).set_defaults(time_limit_s=600.0)
    return parser


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    """Arguments that fit together. Others end the program with exit status 2 and a line that says what to change."""
    parser = build_parser()
    args, args.flags = parse_with_flags(parser, argv)
    if args.thresholds and sorted(set(args.thresholds)) != args.thresholds:
        parser.error(f"--thresholds {args.thresholds} must rise")
    if args.command == "trl" and args.trainer == "async" and not args.url:
        parser.error("--trainer async needs --url, the address of a vLLM server")
    if args.command == "trl" and args.colocate and (args.url or args.trainer == "async" or args.gpus == ["cpu"]):
        parser.error("--colocate is for --trainer grpo on a GPU, without --url")
    if args.command == "verl" and (len(args.gpus) > 1 or args.gpus == ["cpu"]):
        parser.error("verl runs on one GPU")
    if args.command == "runs" and "cpu" in args.gpus and args.ranks > 1:
        parser.error("--gpus cpu has one rank")
    return args


def main(args: argparse.Namespace) -> int:
    """Import what the subcommand needs, which takes seconds, and run it."""
    from bench_common.output import Output
    from learning_bench.report import report
    from learning_bench.runs import run_ours, run_trl, run_verl

    args.out.mkdir(parents=True, exist_ok=True)
    out = Output(True, args.json)
    out.record({"table": "arguments", "arguments": sys.argv[1:]})
    failed = {"runs": run_ours, "trl": run_trl, "verl": run_verl, "report": lambda *_: False}[args.command](args, out)
    report(args.out, args.thresholds, out)
    return int(failed)


if __name__ == "__main__":
    arguments = parse_arguments()
    sys.exit(run_program(lambda: main(arguments), arguments.time_limit_s + 120))
