#!/usr/bin/env python3
"""The fault campaign: break things at random while training goes on, and check that every promise holds.

    python scripts/chaos.py resume --points 200 --ranks 2     killed and resumed is not killed, to the last bit
    python scripts/chaos.py rollouts --faults 30              the rollout process dies, freezes, has no memory
    python scripts/chaos.py fleet --servers 4 --seconds 600   servers die, hang and lie while a trainer trains
    python scripts/chaos.py garbage --rounds 10               one server answers nonsense
    python scripts/chaos.py data --faults 200                 models, tools, clients and disks do what they like
    python scripts/chaos.py soak                              an hour of faults, and nothing grows
    python scripts/chaos.py ray                               ranks, servers, supervisors and nodes of Ray die

docs/reliability.md says what is promised. Each part ends with exit status 0 and a table, or 1 and what did not hold.
The faults are drawn from --seed. Needs the test packages: pip install -e '.[test]'. Linux only.
"""

import argparse
import importlib
import inspect
import os
import signal
import sys
import tempfile
from pathlib import Path
from typing import Any

RANKS = ("rank 0", "rank 1")


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument("--seed", type=int, default=0, help="of all draws (default 0)")
    common.add_argument("--keep", type=Path, metavar="FOLDER", help="work in this new folder, and keep everything")
    common.add_argument("--docs", action="store_true", help="write the rows into the docs' table")
    common.add_argument("--limit-s", type=int, default=7200, help="longest time of all (default 7200)")
    jobs = argparse.ArgumentParser(add_help=False)
    jobs.add_argument("--jobs", type=int, default=1, help="processes that share the work; each needs two cores")
    parts = parser.add_subparsers(dest="part", required=True, metavar="PART")

    resume = parts.add_parser("resume", parents=[common, jobs], help="kill and resume")
    resume.add_argument("--points", type=int, default=20, help="faults that must fall (default 20)")
    resume.add_argument("--ranks", type=int, default=1)
    resume.add_argument("--mode", choices=["sync", "async"], default="sync")
    resume.add_argument(
        "--async-saves",
        dest="async_mode",
        action="store_const",
        const="async",
        default="disabled",
        help='[checkpoint] async_mode = "async"',
    )
    resume.add_argument("--launcher", choices=["agent", "torchrun"], default="agent", help="where torchrun is hit")
    resume.add_argument("--device", choices=["cpu", "cuda"], default="cpu", help="where ranks train (default cpu)")
    resume.add_argument("--engine", choices=["embedded", "vllm"], default="embedded", help="vllm: with --mode async")
    resume.add_argument("--gpu", default="", metavar="I", help="where vLLM serves (default: the CPU)")
    names = [*RANKS, "torchrun", "server"]
    resume.add_argument("--targets", nargs="+", choices=names, default=[], help="processes to hit (default: all)")
    resume.add_argument("--signals", nargs="+", choices=["SIGKILL", "SIGTERM"], help="default: both")
    resume.add_argument("--when", choices=["any", "save", "steps"], default="any", help="where faults fall")
    resume.add_argument("--restarts", type=int, default=0, help="torchrun's --max-restarts: the run goes on by itself")

    rollouts = parts.add_parser("rollouts", parents=[common], help="break the rollout process")
    rollouts.add_argument("--faults", type=int, default=9, help="that must fall in the run (default 9)")
    rollouts.add_argument("--mode", choices=["sync", "async"], default="sync", help="async: in flight")
    rollouts.add_argument("--only", nargs="+", default=[], metavar="NAME", help="faults whose names begin so")
    rollouts.add_argument("--frozen-s", type=int, default=10, help="after which a frozen one is killed; of runs: 30")

    servers = argparse.ArgumentParser(add_help=False)
    servers.add_argument("--engine", choices=["embedded", "vllm", "sglang"], default="embedded")
    servers.add_argument("--servers", type=int, choices=[2, 3, 4], default=3)
    fleet = parts.add_parser("fleet", parents=[common, servers], help="break servers")
    fleet.add_argument("--seconds", type=float, default=40.0, help="in which faults begin (default 40)")
    fleet.add_argument("--only", nargs="+", default=[], metavar="NAME", help="faults whose names begin so")
    fleet.add_argument("--gpu", default="", metavar="I", help="where vLLM or SGLang serves (default: the CPU)")
    fleet.add_argument("--transport", default="auto", help="with one GPU for all: gloo")

    soak = parts.add_parser("soak", parents=[common, servers], help="an hour of the same, and nothing grows")
    soak.add_argument("--seconds", type=float, default=3600.0, help="in which faults begin (default 3600)")

    ray = parts.add_parser("ray", parents=[common], help="kill what a run under Ray is made of")
    ray.add_argument("--rounds", type=int, default=1, help="how often each kind (default 1)")

    data = parts.add_parser("data", parents=[common], help="foreign data, outages, a full disk, a closed terminal")
    data.add_argument("--faults", type=int, default=50, help="that must fall (default 50)")
    data.add_argument("--mode", choices=["sync", "async"], default="sync", help="async: in flight")

    garbage = parts.add_parser("garbage", parents=[common], help="spoil replies")
    garbage.add_argument("--rounds", type=int, default=1, help="how often each kind (default 1)")
    return parser


PARTS = {
    "resume": ("resume", "Campaign"),
    "rollouts": ("rollouts", "RolloutFaults"),
    "fleet": ("fleet", "Fleet"),
    "soak": ("soak", "Soak"),
    "ray": ("ray_faults", "RayFaults"),
    "data": ("foreign", "Foreign"),
    "garbage": ("garbage", "Garbage"),
}


def make(args: argparse.Namespace, folder: Path) -> Any:
    """The part of the campaign. `run` makes rows of the table; afterwards `wrong` lists what did not hold."""
    module, name = PARTS[args.part]
    part = getattr(importlib.import_module(f"chaos.{module}"), name)
    own = inspect.signature(part).parameters
    return part(folder, **{key: value for key, value in vars(args).items() if key in own})


def main() -> int:
    parser = build_parser()
    args = parser.parse_args()
    if args.keep and args.keep.exists() and any(args.keep.iterdir()):
        parser.error(f"--keep {args.keep} is not empty: name a new folder")
    if args.part == "resume":
        args.targets = args.targets or ["rank 0"] * bool(args.restarts)
        args.signals = [signal.Signals[name] for name in args.signals or ("SIGKILL", "SIGTERM")]
        if args.engine == "vllm" and args.mode == "sync":
            parser.error("--engine vllm needs --mode async: its answers are not the same bits in every run")
        if args.restarts and not set(args.targets) <= set(RANKS):
            parser.error("--restarts: torchrun starts ranks again, so --targets may name ranks only")
        if "rank 1" in args.targets and args.ranks < 2:
            parser.error("--targets 'rank 1' needs --ranks 2")
        if args.device == "cuda":
            import torch

            if torch.cuda.device_count() < args.ranks:
                parser.error(f"--device cuda: {torch.cuda.device_count()} GPUs for {args.ranks} ranks")
        elif args.gpu:
            parser.error("--gpu is where vLLM serves a trainer with --device cuda")
        else:
            os.environ["CUDA_VISIBLE_DEVICES"] = ""
    # Both raise in the main thread, so that what runs is ended too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    signal.signal(signal.SIGALRM, lambda *_: sys.exit(f"not done within --limit-s = {args.limit_s}"))
    signal.alarm(args.limit_s)
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    from chaos.processes import Broken
    from chaos.report import show, write

    with tempfile.TemporaryDirectory() as temporary:
        folder = args.keep or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        part = make(args, folder)
        try:
            rows = part.run()
        except Broken as error:  # it could not even begin, or not go on
            print(f"FAIL  {error}", file=sys.stderr)
            return 1
        for line in part.details():
            print(line)
    print(show(rows))
    for line in part.wrong:
        print(f"FAIL  {line}", file=sys.stderr)
    if args.docs:
        write(rows)
    return 1 if part.wrong else 0


if __name__ == "__main__":
    sys.exit(main())
