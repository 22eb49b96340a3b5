#!/usr/bin/env python3
"""Measure what arriving tokens cost the trainer. scripts/bench/README.md has columns and examples.

notice      a loop of small torch calls in the trainer's process, with and without tokens that arrive
growth      CPU time and memory of steps of different sizes, and how many tokens/s arrive at most

The servers generate nothing (arrivals_bench/server.py) and are processes of their own. No GPU is used.
"""

import argparse
import itertools
import json
import os
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from bench_common.arguments import as_flags, positive, seconds
from bench_common.output import Output, Row
from bench_common.process import device_environment, import_environment, limited, run_program
from process_group import ProcessGroup, free_port, wait_for

VOCABULARY = 32_000
SERVER_START_S = 60.0
SERVER_GPU_TOKENS_PER_S = 25_000
AHEAD = {"async_grpo.enabled": True, "async_grpo.run_ahead": "full", "async_grpo.max_trajectory_age_steps": 4}
NOTICE = """tokens tokens_per_s lost_s lost_cpu_s ready_s take_s metrics_s gap_ms held_ms held_ms_alone late late_alone
    own_cpu_s child_cpu_s own_mib child_mib error"""
GROWTH = """mode processes answers tokens step_s tokens_per_s server_gpus own_us child_us busiest_us own_busy child_busy
    own_bytes child_bytes own_mib child_mib error"""


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    """Bad arguments end the program with exit status 2 and a line that says what to change."""
    own = sorted(os.sched_getaffinity(0))
    common = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    common.add_argument("--json", type=Path, metavar="FILE", help="append the tables' rows as JSON lines")
    common.add_argument("--servers", type=positive, default=2, help="processes (default 2)")
    common.add_argument("--group", type=positive, default=16, help="answers to a prompt (default 16)")
    common.add_argument(
        "--trainer-cpus", type=int, nargs="+", default=own[:1], metavar="CPU", help="default: the first"
    )
    common.add_argument("--other-cpus", type=int, nargs="+", default=own[-1:], metavar="CPU", help="default: the last")
    common.add_argument("--run-limit-s", type=seconds, default=300.0, help="of one measurement (default 300)")
    common.add_argument("--time-limit-s", type=seconds, default=1800.0, help="of all; what does not fit is left out")
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="SUBCOMMAND")

    notice = commands.add_parser("notice", parents=[common], allow_abbrev=False)
    notice.add_argument("--tokens", type=positive, nargs="+", default=[1024, 32768], help="of an answer")
    notice.add_argument("--step-tokens", type=positive, default=1 << 19, help="of a step (default 2^19)")
    notice.add_argument("--tokens-per-s", type=seconds, default=400e3, help="of all servers (default 400,000)")
    notice.add_argument("--seconds", type=seconds, default=3.0, help="of the loop, alone and beside each (default 3)")
    notice.add_argument("--rounds", type=positive, default=6, help="of both (default 6)")

    growth = commands.add_parser("growth", parents=[common], allow_abbrev=False)
    growth.add_argument("--answers", type=positive, nargs="+", default=[512, 4096, 16384], help="of a step")
    growth.add_argument("--tokens", type=positive, nargs="+", default=[16, 1024, 8192, 32768], help="of an answer")
    growth.add_argument("--max-tokens", type=positive, default=1 << 24, help="of a step; larger ones are left out")
    growth.add_argument("--modes", nargs="+", choices=["sync", "ahead"], default=["sync"], help="default sync")
    growth.add_argument("--processes", type=positive, nargs="+", default=[1], help="[rollout] processes (default 1)")
    growth.add_argument("--seconds", type=seconds, default=2.0, help="that steps are repeated (default 2)")
    return parser.parse_args(argv)


def write_model(folder: Path) -> None:
    """A tiny model's folder. Its tokenizer has mostly tokens of four characters, and decodes as byte-level BPE."""
    import make_tiny_model  # imports transformers, which takes seconds
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    make_tiny_model.main([str(folder), "--vocab-size", str(VOCABULARY), "--max-tokens", str(1 << 20)])
    special = make_tiny_model.SPECIAL_TOKENS
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    names = [*special, *letters, *(f"{i:x}" for i in range(256, VOCABULARY))][:VOCABULARY]
    tokenizer = Tokenizer(models.BPE(vocab={name: i for i, name in enumerate(names)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(special)
    tokenizer.save(str(folder / "tokenizer.json"))


def job_flags(
    args: argparse.Namespace, folder: Path, answers: int, tokens: int, processes: int, ahead: bool
) -> dict[str, Any]:
    """The job as grpo_train.py's configuration. `ahead`: as with `[async_grpo]`."""
    longest = tokens + 64
    flags: dict[str, Any] = {
        "model.hf_assets_path": folder / "model",
        "model.weights": "random",
        "data.source": "arithmetic",
        "data.chat_template": False,
        "data.max_prompt_tokens": 32,
        "training.steps": 1_000_000,
        "training.seq_len": longest,
        "training.tokens_per_microbatch": max(16384, longest),
        "training.mixed_precision_param": "float32",
        "grpo.prompts_per_step": max(1, answers // args.group),
        "grpo.group_size": args.group,
        "rollout.engine": "vllm",
        "rollout.max_answer_tokens": tokens,
        "rollout.processes": processes,
        "rollout.start_timeout_seconds": SERVER_START_S,
        "reward.functions": ["exact_match"],
        "validation.enable": False,
        "checkpoint.enable": False,
        "metrics.enable_tensorboard": False,
        "metrics.samples_per_step": 0,
        "debug.seed": 0,
    }
    return flags | (AHEAD if ahead else {})


def measure(args: argparse.Namespace, folder: Path, mode: str, answers: int, tokens: int, processes: int = 1) -> Row:
    """The row of one measurement, in processes of its own, or the error that ended it."""
    is_notice, own = args.command == "notice", folder / f"{mode}_{answers}_{tokens}_{processes}"
    own.mkdir()
    pace, urls = args.tokens_per_s / args.servers if is_notice else 0.0, []
    environment = import_environment() | device_environment(["cpu"])
    environment |= {"TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}
    with ExitStack() as resources:
        for i in range(args.servers):
            port = free_port()
            words = ["--port", port, "--model", folder / "model", "--vocab-size", VOCABULARY, "--tokens-per-s", pace]
            command = [sys.executable, "-m", "arrivals_bench.server", *words, "--cpus", *args.other_cpus]
            resources.enter_context(ProcessGroup(command, own / f"server{i}.log", environment))
            urls.append(f"http://127.0.0.1:{port}")
        flags = job_flags(args, folder, answers, tokens, processes, mode == "ahead") | {"rollout.urls": urls}
        flags["job.dump_folder"] = own / "run"
        job = vars(args) | {"answers": answers, "tokens": tokens, "urls": urls, "words": as_flags(flags)}
        job["rollout_cpus"] = args.other_cpus if is_notice else args.trainer_cpus
        (own / "job.json").write_text(json.dumps(job, default=str))
        command = [sys.executable, "-m", "arrivals_bench.trainer", own]
        trainer = resources.enter_context(ProcessGroup(command, own / "trainer.log", environment))
        why = wait_for(lambda: trainer.poll() == 0, args.run_limit_s, trainer.poll, 0.2)
        if why:
            print(f"{mode} {answers} x {tokens}: {limited(why)}; {trainer.said()}", file=sys.stderr)
    found = {"error": limited(why)} if why else json.loads((own / "row.json").read_text())
    if not is_notice and not why:
        found["server_gpus"] = 1e6 / found["busiest_us"] / SERVER_GPU_TOKENS_PER_S
    about = {"mode": mode, "answers": answers, "tokens": tokens, "processes": processes, "group": args.group}
    return about | found


def run(args: argparse.Namespace) -> int:
    """Measure all that fits into the time limit. Returns 1 if a measurement failed."""
    deadline, out = time.monotonic() + args.time_limit_s, Output(True, args.json)
    if args.command == "notice":
        title, columns = "Seconds for each million tokens that arrive", NOTICE
        sizes = [("ahead", max(args.group, args.step_tokens // tokens), tokens, 1) for tokens in args.tokens]
    else:
        title, columns = "CPU time and memory of the rollouts for each token", GROWTH
        kinds = itertools.product(args.modes, args.tokens, args.answers, args.processes)
        sizes = [(mode, n, tokens, processes) for mode, tokens, n, processes in kinds]
        sizes = [size for size in sizes if size[1] * size[2] <= args.max_tokens]
    rows = []
    with tempfile.TemporaryDirectory(prefix="bench_arrivals_") as scratch:
        write_model(Path(scratch) / "model")
        for mode, answers, tokens, processes in sizes:
            if time.monotonic() > deadline:
                out.say(f"{mode} {answers} x {tokens}: left out, --time-limit-s {args.time_limit_s:g} is over")
                continue
            rows.append(measure(args, Path(scratch), mode, answers, tokens, processes))
            out.record({"table": args.command} | rows[-1])
    out.table(title, columns, rows, record=False)
    return int(any("error" in row for row in rows))


if __name__ == "__main__":
    arguments = parse_arguments()
    sys.exit(run_program(lambda: run(arguments), arguments.time_limit_s + arguments.run_limit_s))
