#!/usr/bin/env python3
"""Measure the training step: this trainer's policy update against torchtitan's pre-training step.

scripts/bench/README.md has contenders, columns and examples. Words after -- are configuration of grpo_train.py.
"""

import argparse
import sys
from pathlib import Path

from bench_common.arguments import parse_with_flags, positive, seconds, share
from bench_common.process import run_program
from bench_common.shapes import SHAPES

CONTENDERS = ["torchtitan", "ours"]


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--what", nargs="+", choices=CONTENDERS, default=CONTENDERS, help="default: all")
    parser.add_argument("--shapes", nargs="+", choices=list(SHAPES), default=["0.6b"], help="default: 0.6b, of a Qwen3")
    parser.add_argument("--layers", type=positive, default=0, metavar="N", help="of each shape, in place of its own")
    parser.add_argument("--tokens", type=positive, default=16384, help="of one microbatch (default 16384)")
    parser.add_argument("--documents", type=positive, default=4096, metavar="TOKENS", help="length (default 4096)")
    parser.add_argument("--microbatches", type=positive, default=1, help="per step and GPU (default 1)")
    parser.add_argument("--prompt-share", type=share, default=0.0, help="of a document, not trained (default 0)")
    parser.add_argument("--group", type=positive, default=1, help="documents with the same prompt (default 1)")
    parser.add_argument(
        "--ac",
        choices=["auto", "none", "matmul", "selective", "full"],
        default="auto",
        help="activation checkpointing (default: none for tiny and 0.6b, else selective, which is by operator); matmul "
        "keeps the output of every matrix multiplication, and torchtitan's contender is then selective",
    )
    parser.add_argument("--compile", action=argparse.BooleanOptionalAction, help="the blocks (default: on CUDA)")
    parser.add_argument("--lora", type=positive, default=0, metavar="RANK", help="ours trains adapters of this rank")
    parser.add_argument("--gpus", type=positive, default=1, help="ranks (default 1)")
    parser.add_argument("--device", choices=["auto", "cpu", "cuda"], default="auto", help="default: CUDA if there is")
    parser.add_argument("--steps", type=positive, default=8, help="measured steps (default 8)")
    parser.add_argument("--warmup", type=positive, default=4, help="steps before them (default 4)")
    parser.add_argument("--peak-tflops", type=seconds, default=989.0, help="of one GPU (default 989: bf16 on H200)")
    parser.add_argument("--run-limit-s", type=seconds, default=240.0, help="of one contender (default 240)")
    parser.add_argument("--time-limit-s", type=seconds, default=1800.0, help="of all; what does not fit is left out")
    parser.add_argument("--json", type=Path, metavar="FILE", help="append rows as JSON lines at once, with more keys")
    return parser


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    """Arguments that fit together. Others end the program with exit status 2 and a line that says what to change."""
    parser = build_parser()
    args, args.flags = parse_with_flags(parser, argv)
    args.what = [name for name in CONTENDERS if name in args.what]  # torchtitan first: the others' ratios need it
    if args.documents < 2:
        parser.error(f"--documents {args.documents}: a document needs a prompt and an answer, so 2 or more")
    if args.tokens % args.documents:
        parser.error(f"--tokens {args.tokens} is not a multiple of --documents {args.documents}")
    if args.microbatches * args.tokens // args.documents % args.group:
        parser.error(f"--group {args.group} does not divide the documents of --microbatches and --tokens")
    if args.lora and "ours" not in args.what:
        parser.error("--lora is for the contender ours: add it to --what")
    return args


def main(argv: list[str] | None = None) -> int:
    args = parse_arguments(argv)
    from bench_common.output import Output
    from step_bench.runs import steps

    out = Output(True, args.json)
    out.record({"table": "arguments", "arguments": sys.argv[1:] if argv is None else argv})
    return run_program(lambda: steps(args, out), args.time_limit_s + 120)


if __name__ == "__main__":
    sys.exit(main())
