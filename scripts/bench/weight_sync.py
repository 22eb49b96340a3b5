#!/usr/bin/env python3
"""Measure weight sync. scripts/bench/README.md has columns and examples.

    refit       whole blocking publishes from FSDP2 shards, phase by phase, and raw broadcasts of as many bytes
    vllm-nccl   the same bytes by vLLM's own NCCL weight transfer (vLLM 0.25 in this Python), for comparison
    load        what a vLLM worker needs to load a version that is on its GPU (vLLM in this Python)
    exposed     a training loop without weight sync, with blocking and background weight sync, and with faults
    scale       what a publish and a push cost against 1 to 256 servers, on a CPU

Every wait is at most --timeout-s. After --time-limit-s the process ends with a traceback.
"""

import argparse
import os
import sys
from contextlib import ExitStack
from importlib.metadata import version
from pathlib import Path

from bench_common.arguments import address, device, positive, seconds
from bench_common.process import run_program
from bench_common.shapes import SHAPES


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="SUBCOMMAND")

    common = argparse.ArgumentParser(add_help=False)
    common.add_argument("--json", type=Path, metavar="FILE", help="append the tables' rows as JSON lines")
    common.add_argument("--timeout-s", type=seconds, default=60.0, help="longest wait for one thing (default 60)")
    common.add_argument("--time-limit-s", type=seconds, default=1800.0, help="longest run of all (default 1800)")
    common.add_argument("--warmup", type=positive, default=2, help="versions or steps before measuring (default 2)")
    shape = argparse.ArgumentParser(add_help=False)
    shape.add_argument("--shape", choices=SHAPES, default="0.6b", help="of a Qwen3 (default 0.6b); tiny: for a CPU")
    trainer = argparse.ArgumentParser(add_help=False)
    trainer.add_argument("--device", choices=["auto", "cpu", "cuda"], default="auto", help="of the trainer")
    trainer.add_argument(
        "--transport", choices=["auto", "nccl", "gloo", "ipc"], default="auto", help="[weight_sync] transport"
    )
    trainer.add_argument("--urls", nargs="+", type=address, default=[], metavar="URL", help="servers that are running")
    trainer.add_argument(
        "--receivers",
        nargs="+",
        type=device,
        default=[],
        metavar="GPU",
        help="start one receiver process on each of these devices: indices of GPUs (as nvidia-smi has them), or cpu",
    )

    refit = commands.add_parser("refit", parents=[common, shape, trainer])
    refit.add_argument("--num-buffers", nargs="+", type=positive, default=[2, 1, 4], help="default 2 1 4")
    refit.add_argument("--bucket-mib", nargs="+", type=positive, default=[1024], help="cap on a bucket (default 1024)")
    refit.add_argument("--servers", nargs="+", type=positive, help="time with this many (default: 1, and all)")
    refit.add_argument("--repeats", type=positive, default=5, help="default 5")
    refit.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32", help="of the trainer's weights")
    refit.add_argument("--lora", type=positive, default=0, metavar="RANK", help="adapters of this rank, all layers")
    refit.add_argument("--background", action="store_true", help="publish in the background, and time the pause too")
    refit.add_argument(
        "--snapshots", type=int, choices=[1, 2], default=2, help="with --background, [weight_sync] num_snapshots"
    )
    refit.add_argument("--layers", type=positive, default=0, metavar="N", help="of the shape, in place of its own")
    refit.add_argument("--raw-gpu", type=device, metavar="I", help="GPU of the raw broadcasts' receiver, or cpu")

    vllm = commands.add_parser("vllm-nccl", parents=[common, shape])
    vllm.add_argument("--url", required=True, type=address, help="the server, on this machine")
    vllm.add_argument("--num-buffers", type=positive, default=2, help="packed_num_buffers (default 2)")
    vllm.add_argument("--bucket-mib", type=positive, default=1024, help="one buffer (default 1024)")
    vllm.add_argument("--repeats", type=positive, default=5, help="default 5")

    load = commands.add_parser("load", parents=[common, shape])
    load.add_argument("--bucket-mib", type=positive, default=1024, help="cap on a bucket (default 1024)")
    load.add_argument("--repeats", type=positive, default=5, help="default 5")

    exposed = commands.add_parser("exposed", parents=[common, shape, trainer])
    exposed.add_argument("--steps", type=positive, default=20, help="of each run (default 20)")
    exposed.add_argument("--tokens", type=positive, default=16384, help="of one rank's row (default 16384)")
    exposed.add_argument("--document-tokens", type=positive, default=2048, help="default 2048")
    exposed.add_argument("--sleep-s", type=float, default=10.0, help="of the slow server; 0: leave it out (default 10)")
    exposed.add_argument("--kill", action="store_true", help="also end the first of --receivers by SIGKILL")

    scale = commands.add_parser("scale", parents=[common])
    counts = [1, 2, 4, 8, 16, 32, 64, 128, 256]
    scale.add_argument("--counts", nargs="+", type=positive, default=counts, help="of servers")
    scale.add_argument("--repeats", type=positive, default=10, help="default 10")
    scale.set_defaults(device="cpu")
    return parser


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    """Arguments that fit together. Others end the program with exit status 2 and a line that says what to change."""
    parser = build_parser()
    args = parser.parse_args(argv)
    if args.command in ("refit", "exposed"):
        servers = len(args.urls) + len(args.receivers)
        if not servers:
            parser.error(f"{args.command} needs servers: --urls of running ones, or --receivers to start some")
        if args.command == "refit" and args.servers and max(args.servers) > servers:
            parser.error(f"--servers {max(args.servers)}: --urls and --receivers give {servers}")
    if args.command == "exposed":
        if not 2 <= args.document_tokens <= 4096:
            parser.error(f"--document-tokens {args.document_tokens}: 2 to 4096, the longest sequence of these models")
        if args.tokens < args.document_tokens:
            parser.error(f"--tokens {args.tokens} is under --document-tokens {args.document_tokens}")
        if args.kill and not (args.receivers and servers > 1):
            parser.error("--kill ends the first of --receivers: start at least one, and have a second server")
        if args.sleep_s < 0:
            parser.error(f"--sleep-s {args.sleep_s:g} is negative")
    return args


def run(args: argparse.Namespace) -> int:
    """Import what the subcommand needs, which takes seconds, and run it."""
    from bench_common.output import Output

    if args.command == "vllm-nccl":
        from weight_sync_bench.vllm_nccl import vllm_nccl

        vllm_nccl(args, Output(True, args.json))
        return 0
    if args.command == "load":
        from weight_sync_bench.load import load

        load(args, Output(True, args.json))
        return 0
    if args.device == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # torchtitan would take a GPU that it sees
    from weight_sync_bench.trainer import Ranks

    with ExitStack() as resources:
        ranks = Ranks(args.device, timeout_s=args.time_limit_s)
        resources.callback(ranks.close)
        out = Output(ranks.rank == 0, args.json)
        versions = {"ranks": ranks.describe(), "torchtitan": version("torchtitan")}
        out.record({"table": "run", "arguments": sys.argv[1:]} | versions)
        if args.command == "refit":
            from weight_sync_bench.refit import refit as measure
        elif args.command == "exposed":
            from weight_sync_bench.exposed import exposed as measure
        else:
            from weight_sync_bench.scale import scale as measure
        measure(args, ranks, out, resources)
    return 0


if __name__ == "__main__":
    arguments = parse_arguments()
    sys.exit(run_program(lambda: run(arguments), arguments.time_limit_s))
