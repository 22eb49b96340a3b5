"""Starting contenders one after another, and what they found as tables."""

import argparse
import json
import os
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from bench_common import BENCH, ROOT
from bench_common.output import Output, Row, cell, markdown
from bench_common.process import Process
from bench_common.shapes import hf_config

POLL_S = 0.2
LEAST_S = 20.0
"""A contender is not started with less time left."""

COLUMNS = {
    "shape": "shape",
    "contender": "contender",
    "gpus": "GPUs",
    "work": "microbatches x tokens",
    "ac": "AC",
    "compile": "compile",
    "tokens_per_s_gpu": "tokens/s/GPU",
    "to_torchtitan": "ratio to torchtitan",
    "mfu_percent": "MFU %",
    "forward_backward_ms": "forward + backward ms",
    "optimizer_ms": "clip + optimizer ms",
    "peak_gib": "peak GiB",
    "estimate_gib": "--dry_run's GiB",
    "error": "error",
}
LOGPROB_COLUMNS = {
    "shape": "shape",
    "way": "way",
    "pass": "pass",
    "compile": "compile",
    "tokens": "tokens",
    "vocabulary": "vocabulary",
    "ms": "ms",
    "peak_gib": "peak GiB",
    "error": "error",
}
OFFLOAD_COLUMNS = {
    "shape": "shape",
    "way": "way",
    "step_ms": "log-probabilities + step ms",
    "exposed_ms": "exposed ms",
    "state_gib": "state GiB",
    "freed_gib": "freed GiB",
    "window_gib": "most in the window, GiB",
    "peak_gib": "most in the step, GiB",
    "error": "error",
}
PLAN_COLUMNS = {
    "shape": "shape",
    "parameters": "parameters",
    "gpus": "GPUs",
    "work": "microbatches x tokens",
    "documents": "documents",
    "trained_tokens": "trained tokens",
    "ac": "AC",
    "step_tflop": "TFLOP/step/GPU",
    "step_at_peak_ms": "ms at peak",
    "estimate_gib": "--dry_run's GiB",
}
SHARE_COLUMNS = {"name": "class", "ms": "ms", "percent": "%"}
KERNEL_COLUMNS = {"name": "kernel", "class": "class", "count": "count", "ms": "ms", "percent": "%"}
NAME_CHARS = 90
ALONE = ("plan", "logprobs")
"""What runs in one process, whatever --gpus says."""

JOB_KEYS = [
    "tokens",
    "documents",
    "microbatches",
    "prompt_share",
    "compile",
    "steps",
    "warmup",
    "device",
    "gpus",
    "seed",
    "flags",
    "dry",
    "peak_tflops",
]
"""Arguments that contenders read."""


class Refused(Exception):
    """The arguments cannot work for any contender."""


def steps(args: argparse.Namespace, out: Output) -> int:
    """Every contender on every shape. Returns 0 if one of them could be measured, else 1."""
    deadline = time.monotonic() + args.time_limit_s
    rows: list[Row] = []
    apart: dict[str, list[Row]] = {"logprobs": [], "offload": []}
    with ExitStack() as resources:
        scratch = args.out or resources.enter_context(tempfile.TemporaryDirectory(prefix="bench_step_"))
        for shape in args.shapes:
            for name in ["plan"] if args.dry else args.what:
                limit_s = min(args.run_limit_s, deadline - time.monotonic())
                if limit_s < LEAST_S:
                    out.say(f"{shape} {name}: left out, --time-limit-s {args.time_limit_s:g} is over")
                    continue
                started = time.monotonic()
                found = run_child(args, shape, name, limit_s, Path(scratch) / f"{shape}_{name}")
                took_s = time.monotonic() - started
                if "left_out" in found:
                    out.say(f"{shape} {name}: left out, {found['left_out']}")
                    continue
                error = [{"error": found["error"]}] if "error" in found else []
                for row in found.get("rows", []) + error:
                    row = {"shape": shape, "contender": name} | row
                    apart.get(name, rows).append(row)
                    set_ratio(rows)
                    out.record({"table": name if name in ("plan", *apart) else "steps"} | row)
                    out.say(f"{shape} {name}: {headline(row)} ({took_s:.0f} s)")
                if "kernels" in found:
                    show_profile(shape, name, args, found, out)
    if args.plot:
        from step_bench.picture import draw_shares

        out.say(f"{args.plot}: {draw_shares(args.json, args.plot)} step(s)")
    if args.dry:
        show("Plan", PLAN_COLUMNS, rows, out)
        return 0
    show("Training steps", COLUMNS, rows, out)
    show("Log-probabilities alone", LOGPROB_COLUMNS, apart["logprobs"], out)
    show("Optimizer state on the host", OFFLOAD_COLUMNS, apart["offload"], out)
    return 0 if any("error" not in row for row in [*rows, *apart["logprobs"], *apart["offload"]]) else 1


def run_child(args: argparse.Namespace, shape: str, name: str, limit_s: float, folder: Path) -> dict[str, Any]:
    """One contender in a process of its own: its rows, and {"error": ...} if it fails, whatever the way.

    Raises:
        Refused: The configuration is wrong.
    """
    if name == "torchtitan" and args.device == "cpu":
        return {"left_out": "its varlen attention needs CUDA"}
    folder.mkdir(parents=True, exist_ok=True)
    for stale in folder.glob("rank*.json"):
        stale.unlink()
    (folder / "config.json").write_text(json.dumps(hf_config(shape, args.documents)))
    job = {key: getattr(args, key) for key in JOB_KEYS} | {
        "contender": name,
        "shape": shape,
        "ac": ac_of(args.ac, shape),
        "folder": str(folder),
        "profile": str(args.profile.resolve()) if args.profile else "",
        "limit_s": limit_s + 60,
    }
    (folder / "job.json").write_text(json.dumps(job))
    command = [sys.executable, "-m", "step_bench.child", str(folder)]
    ranks = 1 if name in ALONE else args.gpus
    if ranks > 1:
        start = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks), "--no-python"]
        command = [sys.executable, *start, *command]
    child = Process(command, folder / "log.txt", environment(args, name))
    try:
        deadline = time.monotonic() + limit_s
        while child.status() is None and time.monotonic() < deadline:
            time.sleep(POLL_S)
        ended = child.status()
        said = child.said()
    finally:
        child.close()
    results = [json.loads(path.read_text()) for path in sorted(folder.glob("rank*.json"))]
    for result in results:
        if "refused" in result:
            raise Refused(result["refused"])
    failed = [result for result in results if "error" in result]
    if failed:
        if not failed[0]["error"].startswith("out of memory") and not failed[0]["error"].endswith("not installed"):
            print(said, file=sys.stderr)
        return failed[0]
    if len(results) == ranks and not results[0].get("unfinished"):
        return results[0]
    error = f"not done after {limit_s:.0f} s (--run-limit-s); {last_line(said)}"
    if ended is not None:
        print(said, file=sys.stderr)
        error = f"exit status {ended}; {last_line(said)}"
    return {"rows": [row for result in results[:1] for row in result.get("rows", [])], "error": error}


def ac_of(ac: str, shape: str) -> str:
    """`auto` is what torchtitan's own numbers were measured with: none for small models."""
    return ac if ac != "auto" else "none" if shape in ("tiny", "0.6b") else "selective"


def environment(args: argparse.Namespace, name: str) -> dict[str, str]:
    """Of a child; what the user has set stays."""
    paths = [str(BENCH), str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    # NVLink multicast is not to be had in every container, and NCCL fails where it expects it.
    defaults = {"NCCL_NVLS_ENABLE": "0", "OMP_NUM_THREADS": "1", "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
    found = {key: os.environ.get(key, value) for key, value in defaults.items()}
    found |= {"PYTHONPATH": os.pathsep.join(paths), "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}
    if name in ALONE:
        found["WORLD_SIZE"] = str(args.gpus)
    if args.device == "cpu":
        found["CUDA_VISIBLE_DEVICES"] = ""
    return found


def set_ratio(rows: list[Row]) -> None:
    """Each row's tokens/s over torchtitan's of the same shape, where that was measured before."""
    speeds = {row["shape"]: row.get("tokens_per_s_gpu") for row in rows if row["contender"] == "torchtitan"}
    for row in rows:
        speed = speeds.get(row["shape"])
        if speed and "tokens_per_s_gpu" in row:
            row["to_torchtitan"] = row["tokens_per_s_gpu"] / speed


def headline(row: Row) -> str:
    if row.get("error"):
        return row["error"]
    if "tokens_per_s_gpu" in row:
        ratio = f", {row['to_torchtitan']:.3f} of torchtitan's" if "to_torchtitan" in row else ""
        peak = f", {row['peak_gib']:.1f} GiB" if "peak_gib" in row else ""
        return f"{row['tokens_per_s_gpu']:,.0f} tokens/s/GPU{ratio}, MFU {cell(row['mfu_percent'])} %{peak}"
    if "exposed_ms" in row:
        return (
            f"{row['way']}: {row['step_ms']:.0f} ms, {row['exposed_ms']:.0f} exposed, {row['freed_gib']:.2f} GiB freed"
        )
    if "way" in row:
        peak = f", {row['peak_gib']:.2f} GiB" if "peak_gib" in row else ""
        compiled = ", compiled" if row["compile"] == "yes" else ""
        return f"{row['way']}, {row['pass']}{compiled}: {row['ms']:.1f} ms{peak}"
    return f"{row['parameters']:,} parameters"


def show(title: str, columns: dict[str, str], rows: list[Row], out: Output) -> None:
    """A table of rows that are in the JSON file already; columns that no row has are left out."""
    if rows:
        kept = {key: heading for key, heading in columns.items() if any(row.get(key) is not None for row in rows)}
        out.say(f"\n**{title}**\n\n{markdown(kept, rows)}\n")


def show_profile(shape: str, contender: str, args: argparse.Namespace, found: dict[str, Any], out: Output) -> None:
    kernels = [row | {"name": row["name"].replace("|", "/")[:NAME_CHARS]} for row in found["kernels"]]
    show(f"{shape} {contender}: device time of one step by class", SHARE_COLUMNS, found["shares"], out)
    show(f"{shape} {contender}: kernels that take most", KERNEL_COLUMNS, kernels, out)
    out.say(f"Chrome trace: {found['trace']}")
    for table in ("shares", "kernels"):
        for row in found[table]:
            changed = (f"{key.partition('.')[2]}={value}" for key, value in args.flags.items())
            label = " ".join([shape, contender, *changed])
            out.record({"table": table, "shape": shape, "contender": contender, "label": label} | row)


def last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1][:300] if lines else "no output"
