#!/usr/bin/env python3
"""Measure what checkpoints take from training, by `[checkpoint] async_mode`. scripts/bench/README.md has the columns.

A device that is busy with matrix products and AdamW steps stands for training. Weights are random, AdamW's state is
whole. After --time-limit-s the process ends with a traceback.
"""

import argparse
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from bench_common import ROOT
from bench_common.arguments import positive, seconds
from bench_common.process import run_program
from bench_common.shapes import SHAPES

MODES = ["disabled", "async", "async_with_pinned_mem"]
COLUMNS = "async_mode save exposed_s ratio save_s write_s slowed_s gib"


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--shape", choices=SHAPES, default="0.6b", help="of a Qwen3 (default 0.6b); tiny: for a CPU")
    parser.add_argument("--out", required=True, type=Path, metavar="FOLDER", help="checkpoints go to a new folder here")
    parser.add_argument("--modes", nargs="+", choices=MODES, default=MODES, help="default: all")
    parser.add_argument(
        "--saves",
        nargs="+",
        type=positive,
        default=[2],
        help="in each mode, or a number for each; the first allocates (default 2)",
    )
    parser.add_argument("--step-s", type=seconds, default=1.0, help="of one training step (default 1)")
    parser.add_argument("--no-export", action="store_true", help="without the Hugging Face folder")
    parser.add_argument("--device", choices=["auto", "cpu", "cuda"], default="auto")
    parser.add_argument("--json", type=Path, metavar="FILE", help="append the rows as JSON lines")
    parser.add_argument("--time-limit-s", type=seconds, default=1800.0, help="longest run of all (default 1800)")
    return parser


class Training:
    """What stands for it: `step` keeps the device busy for about `step_s` seconds and changes every weight."""

    def __init__(self, args: argparse.Namespace, ranks: Any) -> None:
        import torch
        from weight_sync_bench.trainer import build, shape_source

        from torchtitan.components.lr_scheduler import build_lr_schedulers
        from torchtitan.components.optimizer import build_optimizers
        from torchtitan.config import JobConfig

        self.ranks, self.source = ranks, shape_source(args.shape)
        self.model = build(self.source, ranks, "float32")
        self.optimizers = build_optimizers([self.model], JobConfig().optimizer, None)
        self.lr_schedulers = build_lr_schedulers(self.optimizers, JobConfig().lr_scheduler, 10**6)
        for parameter in self.model.parameters():
            parameter.grad = torch.full_like(parameter, 1e-3)
        width = 8192 if ranks.device.type == "cuda" else 256
        self._factor = torch.randn(width, width, device=ranks.device)
        self._products = 1
        self.step()  # makes the state
        while self.step() < args.step_s:
            self._products *= 2

    def step(self) -> float:
        """Seconds."""
        import torch

        started = time.perf_counter()
        for _ in range(self._products):
            self._factor @ self._factor
        self.optimizers.step()
        if self.ranks.device.type == "cuda":
            torch.cuda.current_stream().synchronize()  # as a trainer does that logs its gradient norm
        return time.perf_counter() - started

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        raise NotImplementedError


def measure(
    args: argparse.Namespace, training: Training, async_mode: str, saves: int, folder: Path
) -> Iterator[dict[str, Any]]:
    """One row for each save. Each checkpoint is deleted before the next, so that one fits on the disk."""
    from torchtitan.grpo.checkpoint.checkpointer import Checkpointer
    from torchtitan.grpo.config import job_config
    from torchtitan.grpo.data.prompts import load_tokenizer

    keys = vars(job_config.Checkpoint()) | {"async_mode": async_mode, "export_hf": not args.no_export}
    checkpointer = Checkpointer(
        SimpleNamespace(**keys, export_dtype="bfloat16"),
        str(folder),
        training.model,
        training.optimizers,
        training.lr_schedulers,
        training,
        source=training.source,
        tokenizer=load_tokenizer(str(ROOT / "train_configs" / "tiny_qwen3")),
    )
    step_s = statistics.median(training.step() for _ in range(5))
    for number in range(1, saves + 1):
        training.ranks.synchronize()
        started = time.perf_counter()
        checkpointer.save(number)
        save_s, steps, metrics = time.perf_counter() - started, 0, checkpointer.metrics()
        while "checkpoint/write_s" not in metrics:  # a save that fails leaves the loop too
            if metrics["checkpoint/failed"]:
                raise RuntimeError("the save failed: see above")
            training.step()
            steps, metrics = steps + 1, checkpointer.metrics()
        slowed_s = time.perf_counter() - started - steps * step_s
        written = folder / "checkpoint" / f"step-{number}"
        gib = sum(path.stat().st_size for path in written.rglob("*") if path.is_file()) / 2**30
        training.ranks.synchronize()
        shutil.rmtree(written, ignore_errors=True)
        row = {name: metrics[f"checkpoint/{name}"] for name in ("exposed_s", "write_s")}
        yield {"async_mode": async_mode, "save": number, **row, "save_s": save_s, "slowed_s": slowed_s, "gib": gib}


def run(args: argparse.Namespace) -> int:
    if args.device == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # torchtitan would take a GPU that it sees
    from bench_common.output import Output, cell
    from weight_sync_bench.trainer import Ranks

    with ExitStack() as resources:
        ranks = Ranks(args.device, timeout_s=args.time_limit_s)
        resources.callback(ranks.close)
        out = Output(ranks.rank == 0, args.json)
        args.out.mkdir(parents=True, exist_ok=True)
        folder = Path(resources.enter_context(tempfile.TemporaryDirectory(dir=args.out)))
        training = Training(args, ranks)
        rows: list[dict[str, Any]] = []
        for mode, saves in zip(args.modes, args.saves * (len(args.modes) // len(args.saves)), strict=True):
            for row in measure(args, training, mode, saves, folder):
                rows.append(row)
                out.say(", ".join(f"{name} {cell(value)}" for name, value in row.items()))
        blocking = [row["exposed_s"] for row in rows if row["async_mode"] == "disabled"]
        for row in rows:
            row["ratio"] = row["exposed_s"] / blocking[-1] if blocking else None
        out.table(f"checkpoints of {args.shape}, {ranks.describe()}", COLUMNS, rows)
    return 0


if __name__ == "__main__":
    parser = build_parser()
    arguments = parser.parse_args()
    if len(arguments.saves) not in (1, len(arguments.modes)):
        parser.error(f"--saves has {len(arguments.saves)} numbers for {len(arguments.modes)} modes")
    sys.exit(run_program(lambda: run(arguments), arguments.time_limit_s))
