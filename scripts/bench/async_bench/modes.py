"""The same job in several modes, one after another, against the same servers, and the table that compares them."""

import argparse
import asyncio
import json
import random
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from async_bench.generation import Ask, generation_rate, under_way
from async_bench.long_tail import LENGTHS, draw_lengths
from async_bench.measured import MEASURED, compare, in_order, summarise
from async_bench.processes import healthy, train
from bench_common.output import Output, Row

from torchtitan.grpo.data.tokenizer import end_token_ids, load_tokenizer
from torchtitan.grpo.errors import UserError
from torchtitan.grpo.reporting.step_lines import read_lines

Flags = dict[str, Any]

LEAST_S = 30.0
"""A mode is not started with less time left."""
MEASURED_FILE = "measured.json"
"""In a run's folder: which of its steps are measured."""
LETTERS = "abcdefghijklmnopqrstuvwxyz0123456789 "


def mode_flags(mode: str, age: int) -> Flags:
    """What a mode sets; the rest of the job is the same for all."""
    if mode == "sync":
        return {"async_grpo.enabled": False, "weight_sync.async_weight_update": False}
    return {
        "async_grpo.enabled": True,
        "weight_sync.async_weight_update": True,
        "async_grpo.max_trajectory_age_steps": max_age(mode, age),
        "async_grpo.run_ahead": "full",  # from the first step; `auto` gets there when servers are the bottleneck
        "async_grpo.in_flight_weight_updates": mode != "async",
        "async_grpo.recompute_kv_cache_after_weight_updates": mode == "in_flight",
    }


def max_age(mode: str, age: int) -> int:
    return {"sync": 0, "async": 1}.get(mode, age)


def measured_steps(age: int, args: argparse.Namespace) -> range:
    """Those after the warm-up, since the servers' first answers all start together."""
    warmup = args.warmup or max(4, age + 1)
    return range(warmup + 1, warmup + args.steps + 1)


def run_name(mode: str, age: int) -> str:
    return f"{mode}_age{age}" if mode.startswith("in_flight") else mode


def job_flags(args: argparse.Namespace, folder: Path) -> Flags:
    """The job as grpo_train.py's configuration."""
    prompt_tokens = args.prompt_tokens + 1  # and the begin token
    longest = prompt_tokens + args.max_answer
    flags: Flags = {
        "model.hf_assets_path": folder / "model",
        "data.source": "jsonl",
        "data.path": folder / "prompts.jsonl",
        "data.answer_column": "",
        "data.chat_template": False,
        "data.max_prompt_tokens": prompt_tokens,
        "training.seq_len": longest,
        "training.tokens_per_microbatch": max(args.microbatch_tokens, longest),
        "training.mixed_precision_param": "float32" if args.trainers == ["cpu"] else "bfloat16",
        "activation_checkpoint.mode": "none",
        "optimizer.lr": 1e-6,
        "grpo.prompts_per_step": args.prompts,
        "grpo.group_size": args.samples,
        "rollout.engine": args.engine,
        "rollout.max_answer_tokens": args.max_answer,
        "rollout.max_concurrent_requests": args.sequences,
        "rollout.request_timeout_seconds": args.run_limit_s,
        "rollout.group_timeout_seconds": args.run_limit_s,
        "rollout.start_timeout_seconds": 60 if args.urls else 300,
        "rollout.seeded_requests": "never",  # in every mode: vLLM draws slower with seeds
        "rollout.environment": "async_bench.long_tail:rollout",
        "reward.functions": "async_bench.long_tail:coin",
        "weight_sync.timeout_seconds": 60,
        "validation.enable": False,
        "checkpoint.enable": False,
        "metrics.enable_tensorboard": False,
        "metrics.samples_per_step": 0,
        "debug.seed": 0,
    }
    if args.urls:
        flags["rollout.urls"] = args.urls
    if args.compile:
        flags["compile.enable"] = True
    return flags


def modes(args: argparse.Namespace, out: Output) -> int:
    """Prepare, measure, compare. Returns the exit status: 1 if a mode did not end well."""
    deadline = time.monotonic() + args.time_limit_s
    folder = args.out.resolve()
    _same_job(folder, args)
    write_prompts(folder, args)
    if args.bound_s and not (folder / "bound.jsonl").exists():
        measure_bound(folder, args, out)
    flags = job_flags(args, folder)
    failed = False
    for mode in args.modes:
        left_s = deadline - time.monotonic()
        if left_s < LEAST_S:
            out.say(f"{mode}: left out, {left_s:.0f} s are left of --time-limit-s; call again with the same --out")
            failed = True
            continue
        error = run_mode(mode, args, flags, folder, min(args.run_limit_s, left_s - 5), out)
        lost = [url for url in args.urls if not healthy(args.engine, url)]
        if error:
            out.say(f"FAIL  {error}")
        if lost:
            out.say(f"FAIL  not answering any more: {', '.join(lost)}")
        failed |= bool(error or lost)
        if lost:
            break
    report(folder, args, out)
    return int(failed)


def _same_job(folder: Path, args: argparse.Namespace) -> None:
    """A folder holds the modes of one job. Refuse to compare different work."""
    names = ("shape", "mean", "sigma", "max_answer", "prompts", "samples", "prompt_tokens")
    job = {name: getattr(args, name) for name in names} | {"devices": args.devices}
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "job.json"
    before = json.loads(path.read_text()) if path.exists() else job
    different = [name for name in job if before.get(name) != job[name]]
    if different:
        raise UserError(f"--out {folder} holds another job ({', '.join(different)} differ): name another folder")
    path.write_text(json.dumps(job))


def write_prompts(folder: Path, args: argparse.Namespace) -> None:
    if not (folder / "model" / "config.json").exists():
        raise UserError(f"{folder / 'model'} has no model: make it by rollouts.py model, and start servers of it")
    rows = prompt_rows(args, count=args.prompts * (measured_steps(args.age, args)[-1] + 2 * args.age))
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def prompt_rows(args: argparse.Namespace, count: int) -> list[Row]:
    """Different prompts of `prompt_tokens` characters, one token each, with drawn answer lengths."""
    rows = []
    for index in range(count):
        letters = random.Random(f"0/{index}").choices(LETTERS, k=args.prompt_tokens)
        lengths = draw_lengths(index, args.samples, args.mean, args.sigma, args.max_answer)
        rows.append({"question": "".join(letters), LENGTHS: lengths})
    return rows


def measure_bound(folder: Path, args: argparse.Namespace, out: Output) -> None:
    """Generation alone, with the job's own prompts and lengths: at one step's concurrency and at the limit."""
    tokenizer = load_tokenizer(str(folder / "model"))
    stop = tuple(end_token_ids(tokenizer, str(folder / "model")))
    asks = []
    for row in read_lines(folder / "prompts.jsonl"):
        prompt_ids = tokenizer(row["question"])["input_ids"]
        asks += [Ask(prompt_ids, tokens, stop) for tokens in row[LENGTHS]]
    of_a_step = max(1, args.prompts * args.samples // len(args.urls))
    rows = []
    for sequences in sorted({of_a_step, args.sequences}):
        times = args.bound_s / 3, args.bound_s, args.run_limit_s  # to settle, to count, at most
        first = under_way(asks, sequences * len(args.urls))
        rate = asyncio.run(generation_rate(args.engine, args.urls, asks, sequences, *times, first))
        rows.append({"sequences": sequences, "tokens_per_s": rate})
        out.say(f"generation alone, {sequences} sequences a server: {rate:,.0f} tokens/s")
    (folder / "bound.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def run_mode(mode: str, args: argparse.Namespace, flags: Flags, folder: Path, limit_s: float, out: Output) -> str:
    """One run; its metrics stay in a folder of its name. Returns what went wrong."""
    # The run has more steps than are measured and is ended early: in its last steps servers get no new requests and run
    # empty.
    age = max_age(mode, args.age)
    measured = measured_steps(age, args)
    flags = flags | {"training.steps": measured[-1] + age + 1} | mode_flags(mode, args.age) | args.flags
    name = run_name(mode, args.age)
    run = folder / name
    for file in ("metrics.jsonl", MEASURED_FILE):
        (run / file).unlink(missing_ok=True)
    out.say(name)
    start = time.monotonic()

    def show(line: Mapping[str, float]) -> bool:
        if line.get("step", 0) > 0 and "time/step_s" in line:
            out.say(
                f"  {time.monotonic() - start:4.0f} s  step {line['step']}: "
                f"{line['rollout/answer_tokens'] / line['time/step_s']:,.0f} tokens/s, "
                f"{line['time/step_s']:.2f} s (rollout {line.get('time/rollout_s', 0):.2f}, train "
                f"{line.get('time/train_s', 0):.2f}, sync {line.get('time/sync_s', 0):.3f}), age "
                f"{line.get('rollout/age_mean', 0):.2f} to {line.get('rollout/age_max', 0):g}"
            )
        return line.get("step") == measured[-1]

    error = train(name, flags, args.trainers, run, limit_s, show, args.ranks)
    (run / MEASURED_FILE).write_text(json.dumps({"first": measured[0], "last": measured[-1]}) + "\n")
    return error


def report(folder: Path, args: argparse.Namespace, out: Output) -> None:
    """The table of every mode in the folder, and the hardware's bound."""
    bounds = read_lines(folder / "bound.jsonl")
    rows = []
    for name in in_order(path.parent.name for path in folder.glob(f"*/{MEASURED_FILE}")):
        found = json.loads((folder / name / MEASURED_FILE).read_text())
        steps = range(found["first"], found["last"] + 1)
        row = summarise(read_lines(folder / name / "metrics.jsonl"), steps, args.devices)
        if row is not None:
            rows.append({"mode": name} | row)
    lines = compare(rows, bounds)
    out.table("Generation alone, all servers", "sequences tokens_per_s", bounds)
    out.say(f"Lengths: log-normal, mean {args.mean:g}, sigma {args.sigma:g}, at most {args.max_answer} tokens")
    ranks, servers = args.ranks or len(args.trainers), len(args.urls) or "their own"
    title = f"Modes: {args.shape}, {args.prompts} x {args.samples} answers a step; {ranks} rank(s) and {servers} "
    title += f"server(s) on {args.devices} devices"
    out.table(title, MEASURED, rows)
    for line in lines:
        out.say(line)
