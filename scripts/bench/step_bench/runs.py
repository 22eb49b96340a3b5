"""Starts contenders one after another and shows what they found as tables."""

import argparse
import json
import os
import sys
import tempfile
import time
from pathlib import Path

from bench_common.output import Output, Row, cell
from bench_common.process import device_environment, import_environment, limited, nvls_environment
from bench_common.shapes import write_model
from process_group import ProcessGroup, wait_for

from torchtitan.grpo.reporting.step_lines import read_lines

POLL_S = 0.2
LEAST_S = 20.0
"""A contender is not started with less time left."""

STEPS = """shape contender lora gpus work ac compile tokens_per_s_gpu to_torchtitan mfu_percent
    forward_backward_ms optimizer_ms peak_gib estimate_gib error"""
SHORT = "compile lora tokens_per_s_gpu to_torchtitan mfu_percent step_ms peak_gib error"
"""What the line about a row says at once."""


def steps(args: argparse.Namespace, out: Output) -> int:
    """Every contender on every shape. Returns 0 if one of them could be measured, else 1."""
    deadline = time.monotonic() + args.time_limit_s
    rows: list[Row] = []
    with tempfile.TemporaryDirectory(prefix="bench_step_") as scratch:
        for shape in args.shapes:
            for name in args.what:
                limit_s = min(args.run_limit_s, deadline - time.monotonic())
                if limit_s < LEAST_S:
                    out.say(f"{shape} {name}: left out, --time-limit-s {args.time_limit_s:g} is over")
                    continue
                for row in run_child(args, shape, name, limit_s, Path(scratch) / f"{shape}_{name}"):
                    row = {"shape": shape, "contender": name, "lora": args.lora if name == "ours" else 0} | row
                    rows.append(row)
                    set_ratio(rows)
                    out.record({"table": "steps"} | row)
                    out.say(f"{shape} {name}: " + ", ".join(f"{k} {cell(row[k])}" for k in SHORT.split() if k in row))
    out.table("Training steps", STEPS, rows, record=False)
    return 0 if any("error" not in row for row in rows) else 1


def run_child(args: argparse.Namespace, shape: str, name: str, limit_s: float, folder: Path) -> list[Row]:
    """The rows of one contender, which runs in a process or torchrun ranks of its own. The last may be an error."""
    folder.mkdir(parents=True, exist_ok=True)
    write_model(folder, shape, args.documents, args.layers)
    job = {key: value for key, value in vars(args).items() if key not in ("json", "shapes", "what")}
    job |= {"contender": name, "shape": shape, "ac": ac_of(args.ac, shape), "folder": str(folder)}
    job |= {"lora": args.lora if name == "ours" else 0, "limit_s": limit_s + 60}
    (folder / "job.json").write_text(json.dumps(job))
    environment = import_environment() | (device_environment(["cpu"]) if args.device == "cpu" else nvls_environment())
    environment |= {"TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}
    environment["PYTORCH_CUDA_ALLOC_CONF"] = os.environ.get("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    command = [sys.executable, "-m", "step_bench.child", str(folder)]
    if args.gpus > 1:
        start = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(args.gpus), "--no-python"]
        command = [sys.executable, *start, *command]
    with ProcessGroup(command, folder / "log.txt", environment) as child:
        why = wait_for(lambda: child.poll() == 0, limit_s, child.poll, POLL_S)
    rows = read_lines(folder / "rows.jsonl")
    errors = [row for row in rows if "error" in row] or [{"error": limited(why)}] * bool(why)
    if errors:
        print(f"{shape} {name}: {errors[0]['error']}; {child.said()}", file=sys.stderr)
    return [row for row in rows if row not in errors] + errors[:1]


def ac_of(ac: str, shape: str) -> str:
    """`auto` is what torchtitan's own numbers were measured with: none for small models."""
    return ac if ac != "auto" else "none" if shape in ("tiny", "tiny-moe", "0.6b") else "selective"


def set_ratio(rows: list[Row]) -> None:
    """Each row's tokens/s over torchtitan's of the same shape, where that was measured before."""
    speeds = {row["shape"]: row.get("tokens_per_s_gpu") for row in rows if row["contender"] == "torchtitan"}
    for row in rows:
        if speeds.get(row["shape"]) and "tokens_per_s_gpu" in row:
            row["to_torchtitan"] = row["tokens_per_s_gpu"] / speeds[row["shape"]]
