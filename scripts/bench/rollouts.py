#!/usr/bin/env python3
"""Measure async GRPO by runs of grpo_train.py: what it gains, and what it costs in reward.

    modes     the same job sync, async, in-flight with and without recomputed KV, against the same servers
    curves    the quickstart task on CPU, sync and with growing age of the answers, over several seeds
    model     the random-weight model folder that `modes` makes, to start servers for by hand

`SUBCOMMAND --help` says what each measures and how to run it. Results are markdown on stdout, and with --json FILE one
JSON object a line, appended. Words after `--` go to grpo_train.py as they are (`-- --training.max_norm 0.5`) and win.
Every wait has a limit; processes that it starts end with it.
"""

import argparse
import faulthandler
import os
import signal
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from bench_common.arguments import address, device, positive, seconds, trainer_flags
from bench_common.shapes import SHAPES

MODES = ["sync", "async", "in_flight", "in_flight_keep_kv"]
H200: dict[str, Any] = {
    "shape": "0.6b",
    "max_answer": 2048,
    "prompts": 32,
    "samples": 16,
    "prompt_tokens": 140,
    "age": 24,
    "lr": 1e-6,
    "microbatch_tokens": 16384,
}
PRESETS: dict[str, dict[str, Any]] = {
    "trl": H200 | {"lengths": "geometric", "mean": 300.0, "sequences": 1536},
    "lognormal": H200 | {"lengths": "lognormal", "mean": 256.0, "sigma": 1.0, "sequences": 1024},
    "cpu": {
        "shape": "tiny",
        "lengths": "geometric",
        "mean": 24.0,
        "max_answer": 160,
        "prompts": 8,
        "samples": 4,
        "prompt_tokens": 12,
        "age": 2,
        "lr": 1e-6,
        "microbatch_tokens": 2048,
        "sequences": 64,
        "servers": ["cpu"],
        "trainers": ["cpu"],
        "engine": "embedded",
        "bound_s": 5.0,
    },
}

MODES_HELP = """The same job in several modes, one after another, against the same servers.

  sync               rollouts, training and weight sync take turns
  async              rollouts one step ahead, weights sent in the background; servers finish answers before an update
  in_flight          rollouts at most --age steps ahead; servers take weights in the midst of answers, KV recomputed
  in_flight_keep_kv  the same, KV of old weights kept

Model, data, seeds, number of steps and the limits on requests are the same for all. Answer lengths have a long tail:

  geometric   random weights whose end token has a chance of 1/MEAN at each token: median 0.69 MEAN, the longest of n
              about ln(n) MEAN; at most --max-answer. One request asks for a prompt's whole group.
  lognormal   a model that never ends; sample k of prompt i is cut after max(1, round(exp(mu + SIGMA z))) tokens, or
              --max-answer; z is standard normal, drawn from (--seed, i, k), and mu = ln(MEAN) - SIGMA^2 / 2. Each
              sample is a request of its own, sent by a rollout environment (scripts/bench/async_bench/long_tail.py).

Rewards are a coin flipped by the answer's bytes, so that every group has a gradient and nothing is learned.

Columns, over --steps steps after --warmup (validation and checkpoints are off). Async runs ask as far ahead as their
age allows from the start (`run_ahead = "full"`), and are ended at the last measured step, long before servers would run
empty because nothing more is to be asked:

  tokens/s      all answer tokens of these steps over all their wall clock, whatever happened in it; `a GPU`: over
                trainer and server devices (--devices); `median`: of the steps' own rates
  generated     tokens/s by the servers' own counter meanwhile: as many, unless answers piled up before or after (SGLang
                counts at an answer's end, and with --enable-metrics)
  of the bound  of the slower of generation alone and training alone, measured in the same call: generation with the
                job's prompts and lengths and no trainer, at the best of one step's answers and --sequences at a time
                (--bound-s each); training by the seconds of `train` in the mode that needs fewest a token. Requests
                have no seeds, in any mode; what seeds cost is measured beside
  step, rollout (waiting for answers), train, sync (what a publish kept the trainer)   medians; `most`: the longest sync
  servers busy  share of the time that servers had requests under way, server/busy_share
  age, oldest   mean and greatest age of the trained tokens, in versions

--out keeps everything: model, prompts, logs, one folder a mode. A later call with the same --out takes model and bound
from there, adds its modes, and prints the table of all: so modes can be measured in several short calls.

Both presets allow 24 versions: with so many sequences an answer of 2,048 tokens is under way for about that many steps,
and with fewer the trainer waits for it. Steps come in bursts then: let --steps be a few times the age's share of them.
A prompt's whole group is one request, of whose answers a third is running on average until the longest has ended: in
`trl` as many are asked as keep --sequences running, and what is too much for a moment waits in vLLM's queue.

Two H200s, the work of TRL's AsyncGRPOTrainer measurement (docs/benchmarks.md), and a heavier tail:

  python scripts/bench/rollouts.py modes --preset trl --trainers 0 --servers 1 --out /tmp/trl
  python scripts/bench/rollouts.py modes --preset lognormal --trainers 0 --servers 1 --out /tmp/lognormal

Four, 2 + 2: --trainers 0 1 --servers 2 3. Servers that run already: --urls; they must serve OUT/model, made before by
`rollouts.py model`. Two servers on one GPU, for a model so small that vLLM's own threads and not the GPU are the
limit: --servers 1 1 --server-flags "--gpu-memory-utilization 0.44 --kv-cache-memory-bytes 56G". A trial on a CPU:
modes --preset cpu --out /tmp/cpu.
"""

CURVES_HELP = """What staleness costs in reward: the quickstart task, sync and with growing age, over seeds; CPU only.

Variants: sync; async with in-flight updates and each of --ages; the last age with `run_ahead = "full"`, so that answers
are as old as they may be, and then without importance correction too. Held-out greedy reward before the first and
after the last step, mean and standard deviation over seeds; seconds are the wall clock of the GRPO steps without
validation, which mean something only if --jobs leaves each run cores of its own (a run has two busy processes). Runs
have OMP_NUM_THREADS=1 unless it is set. One JSON line a run with --json. --variants picks some of these by name.

  CUDA_VISIBLE_DEVICES="" python scripts/bench/rollouts.py curves --out /tmp/curves --json /tmp/curves.jsonl --jobs 5

A quick look: curves --out /tmp/c --seeds 0 -- --training.steps 30 --validation.freq 30
"""

MODEL_HELP = """A model folder with random weights that end an answer with a chosen probability at each token."""


def end(text: str) -> float | None:
    return None if text == "never" else seconds(text)


def build_parser() -> argparse.ArgumentParser:
    formatter = {"formatter_class": argparse.RawDescriptionHelpFormatter}
    parser = argparse.ArgumentParser(description=__doc__, **formatter)
    commands = parser.add_subparsers(dest="command", required=True, metavar="SUBCOMMAND")
    formatter["allow_abbrev"] = False  # a preset gives way to the flags that are there, by their names
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument("--out", type=Path, required=True, metavar="FOLDER", help="for everything that is made")
    common.add_argument("--json", type=Path, metavar="FILE", help="append the tables' rows as JSON lines")
    common.add_argument("--time-limit-s", type=seconds, default=1800.0, help="of all; what does not fit is left out")
    common.add_argument("--run-limit-s", type=seconds, default=300.0, help="of one run (default 300)")

    modes = commands.add_parser("modes", parents=[common], description=MODES_HELP, **formatter)
    modes.add_argument("--preset", choices=list(PRESETS), default="trl", help="defaults of what follows (default trl)")
    modes.add_argument("--modes", nargs="+", choices=MODES, default=MODES, metavar="MODE", help="default: all")
    modes.add_argument("--shape", choices=SHAPES, help="of a Qwen3")
    modes.add_argument("--lengths", choices=["geometric", "lognormal"])
    modes.add_argument("--mean", type=seconds, help="answer tokens on average")
    modes.add_argument("--sigma", type=seconds, default=0.8, help="of lognormal (default 0.8)")
    modes.add_argument("--max-answer", type=positive, metavar="TOKENS")
    modes.add_argument("--prompts", type=positive, help="a step")
    modes.add_argument("--samples", type=positive, help="answers to each prompt")
    modes.add_argument("--prompt-tokens", type=positive)
    modes.add_argument("--age", type=positive, help="max_trajectory_age_steps of the in-flight modes")
    modes.add_argument("--label", default="", help="part of the runs' names, for runs with other words after --")
    modes.add_argument("--steps", type=positive, default=6, help="that are measured (default 6)")
    modes.add_argument("--warmup", type=positive, help="steps before them (default: the mode's age + 1, at least 4)")
    modes.add_argument("--lr", type=seconds)
    modes.add_argument("--seed", type=int, default=0)
    modes.add_argument("--microbatch-tokens", type=positive, help="[training] tokens_per_microbatch")
    modes.add_argument(
        "--activation-checkpoint", choices=["none", "selective", "full"], default="none", help="default none"
    )
    modes.add_argument("--compile", action="store_true", help="[compile] enable: its first steps take a minute")
    modes.add_argument("--trainers", nargs="+", type=device, default=["0"], metavar="GPU", help="a rank each; or cpu")
    modes.add_argument("--servers", nargs="+", type=device, default=["1"], metavar="GPU", help="a server each; or cpu")
    modes.add_argument("--urls", nargs="+", type=address, default=[], help="running servers, in place of --servers")
    modes.add_argument("--devices", type=positive, help="GPUs in all, if servers of --urls share one")
    modes.add_argument("--engine", choices=["vllm", "sglang", "embedded"], default="vllm", help="default vllm")
    modes.add_argument("--sequences", type=positive, help="answers under way at one server, at most")
    modes.add_argument("--server-flags", default="", help="more flags of the server, in one word")
    modes.add_argument("--server-start-s", type=seconds, default=300.0, help="longest start of the servers (300)")
    modes.add_argument("--bound-s", type=float, default=12.0, help="each measurement of generation alone; 0: none")

    curves = commands.add_parser("curves", parents=[common], description=CURVES_HELP, **formatter)
    curves.add_argument("--config", default="train_configs/quickstart.toml", help="default: the quickstart")
    curves.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    curves.add_argument("--ages", nargs="+", type=positive, default=[1, 2, 4])
    curves.add_argument("--variants", nargs="+", metavar="NAME", help="of these, such as sync or age_4; default: all")
    curves.add_argument("--jobs", type=positive, default=1, help="runs at the same time (default 1)")
    curves.set_defaults(time_limit_s=14400.0, run_limit_s=1800.0)

    model = commands.add_parser("model", description=MODEL_HELP, **formatter)
    model.add_argument("folder", type=Path)
    model.add_argument("--shape", choices=SHAPES, default="0.6b")
    model.add_argument("--end", type=end, required=True, metavar="MEAN", help="mean length in tokens, or never")
    model.add_argument("--max-tokens", type=positive, default=4352, help="longest sequence (default 4352)")
    model.add_argument("--seed", type=int, default=0)
    return parser


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    """Arguments that fit together; what does not ends the program with exit status 2 and says what to change."""
    words = list(sys.argv[1:] if argv is None else argv)
    cut = words.index("--") if "--" in words else len(words)
    own, rest = words[:cut], words[cut + 1 :]
    parser = build_parser()
    args = parser.parse_args(own)
    args.flags = trainer_flags(rest, parser)
    if args.command == "modes":
        given = {word.partition("=")[0] for word in own}
        for name, value in PRESETS[args.preset].items():
            if f"--{name.replace('_', '-')}" not in given:
                setattr(args, name, value)
        if args.bound_s < 0:
            parser.error(f"--bound-s {args.bound_s:g} is negative")
        for name in ("trainers", "servers"):
            devices = getattr(args, name)
            if "cpu" in devices and name == "trainers" and len(devices) > 1:
                parser.error("--trainers cpu is one rank")
        both = (set(args.trainers) & set(args.servers)) - {"cpu"}
        if both and not args.urls:
            parser.error(f"GPU {', '.join(sorted(both))} is in --trainers and in --servers: give each its own")
    return args


def main(argv: list[str] | None = None) -> int:
    args = parse_arguments(argv)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # let the children be ended
    from torchtitan.grpo.engines.protocol import EngineError
    from torchtitan.grpo.errors import UserError

    try:
        return run(args)
    except (EngineError, UserError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


def run(args: argparse.Namespace) -> int:
    if args.command == "model":
        from async_bench.model import make_model

        found = make_model(args.folder, args.shape, args.end, args.max_tokens, args.seed)
        print(f"{args.folder}: answers of {found:.4g} tokens on average")
        return 0

    faulthandler.dump_traceback_later(args.time_limit_s + 120, exit=True)
    from bench_common.output import Output

    args.out.mkdir(parents=True, exist_ok=True)
    out = Output(True, args.json)
    out.record({"table": "arguments", "arguments": sys.argv[1:]})
    with ExitStack() as resources:
        if args.command == "curves":
            from async_bench.curves import curves

            os.environ.setdefault("OMP_NUM_THREADS", "1")
            return curves(args, out)
        from async_bench.modes import modes

        return modes(args, out, resources)


if __name__ == "__main__":
    sys.exit(main())
