"""Where metrics go: TensorBoard, Weights & Biases, `metrics.jsonl`, `samples.jsonl` and a console line.

docs/metrics.md names every metric. A number that is not finite is left out with one warning; it ends no run.
"""

import json
import math
import numbers
import os
import statistics
import time
from collections import deque
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch.utils.tensorboard import SummaryWriter

from torchtitan.config import JobConfig
from torchtitan.grpo.data.samples import Group, Sample
from torchtitan.grpo.errors import UserError
from torchtitan.grpo.reporting.ledger import verdict
from torchtitan.tools.logging import logger
from torchtitan.tools.utils import Color, NoColor

SFT_PREFIX = "sft"
"""Metrics with this prefix count supervised steps, on their own axis (`sft/step`)."""

PROGRESS = (
    # metric, label, format
    ("reward/mean", "reward", "{:.3f}"),
    ("validation/greedy_reward", "held-out", "{:.3f}"),
    ("throughput/answer_tokens_per_s", "tokens/s", "{:,.0f}"),
    ("rollout/answer_tokens_mean", "answer tokens", "{:.1f}"),
    ("server/busy_share", "servers busy", "{:.0%}"),
    ("policy/kl", "kl", "{:.4f}"),
    ("policy/entropy", "entropy", "{:.3f}"),
    ("policy/clip_fraction", "clipped", "{:.2%}"),
    ("policy/mismatch_kl", "mismatch", "{:.1e}"),
    ("train/grad_norm", "grad norm", "{:.3f}"),
)
"""What the console's progress line shows, in order, as far as it is known."""

_RECENT_STEPS = 10
"""The ETA is the median length of this many steps, times the steps left."""


def finite_numbers(metrics: dict[str, Any], warned: set[str]) -> dict[str, float | int]:
    """The metrics that are finite numbers, tensors as floats. Others cause one warning per name, kept in `warned`.

    All tensors of one device are copied at once: one copy each would stop the stream once per metric.
    """
    values = dict(metrics)
    scalars: dict[torch.device, list[str]] = {}
    for name, value in metrics.items():
        if isinstance(value, torch.Tensor) and value.numel() == 1:
            scalars.setdefault(value.device, []).append(name)
    for names in scalars.values():
        on_host = torch.stack([metrics[name].detach().reshape(()).double() for name in names]).tolist()
        values.update(zip(names, on_host, strict=True))

    kept: dict[str, float | int] = {}
    for name, value in values.items():
        if isinstance(value, numbers.Real) and math.isfinite(value):
            kept[name] = int(value) if isinstance(value, numbers.Integral) else float(value)
        elif name not in warned:
            warned.add(name)
            logger.warning(f"metric {name} is {value!r}, not a finite number: left out, and not warned of again")
    return kept


class StepLines:
    """A JSONL file of step records that a resumed run continues.

    The first record on an axis drops what an earlier run wrote from that step on, so the file always tells one history.
    Every write is flushed.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("a", encoding="utf-8", errors="backslashreplace")
        self._started: set[str] = set()
        self._last: dict[str, Any] = {}
        self._last_offset = 0

    def append(self, record: dict[str, Any], axis: str = "step") -> None:
        """Write one record. `record[axis]` is its step."""
        if axis not in self._started:
            self._started.add(axis)
            self._drop_from(axis, record[axis])
        self._last, self._last_offset = record, self._file.tell()
        self._file.write(json.dumps(record, ensure_ascii=False) + "\n")
        self._file.flush()

    def merge(self, record: dict[str, Any], axis: str = "step") -> None:
        """Write one record; if the last line is of the same step, merge into it. So each step has one line."""
        if axis in self._started and self._last.get(axis) == record[axis]:
            record = self._last | record
            self._file.seek(self._last_offset)
            self._file.truncate()
        self.append(record, axis)

    def _drop_from(self, axis: str, step: int) -> None:
        """Rewrite the file without records whose `axis` is `step` or later, and without a torn last line."""
        kept_path = self.path.with_name(self.path.name + ".tmp")
        dropped = 0
        with self.path.open(encoding="utf-8") as old, kept_path.open("w", encoding="utf-8") as kept:
            for line in old:
                if line.endswith("\n") and json.loads(line).get(axis, step - 1) < step:
                    kept.write(line)
                else:
                    dropped += 1
        if dropped == 0:
            kept_path.unlink()
            return
        logger.info(f"{self.path}: dropped {dropped} lines of {axis} {step} and later, written before this run")
        self._file.close()
        os.replace(kept_path, self.path)
        self._file = self.path.open("a", encoding="utf-8", errors="backslashreplace")

    def close(self) -> None:
        self._file.close()


class MetricsLogger:
    """Writes a step's metrics everywhere. On ranks other than 0 every method does nothing.

    `metrics.jsonl` and the console get every step. TensorBoard and Weights & Biases get every `metrics.log_freq`-th
    step, as in torchtitan, and every step with validation.

    Args:
        config: The run's configuration ([metrics], [sft] steps).
        dump_folder: The run's folder.
        rank0: Whether this rank reports.
        total_steps: GRPO steps of the whole run, for progress and ETA.

    Raises:
        UserError: `metrics.enable_wandb` without the wandb package.
    """

    def __init__(self, config: JobConfig, dump_folder: str | Path, rank0: bool, total_steps: int) -> None:
        self.enabled = rank0
        if not rank0:
            return
        self._config = config.metrics
        self._folder = Path(dump_folder)
        self._total_steps = total_steps
        self._sft_steps = config.sft.steps
        self._color = NoColor() if config.metrics.disable_color_printing else Color()
        self._warned: set[str] = set()
        self._lines = StepLines(self._folder / "metrics.jsonl")
        self._tensorboard: SummaryWriter | None = None
        self._wandb = _start_wandb(config, self._folder) if config.metrics.enable_wandb else None
        self._held_out: dict[str, float] = {}
        self._step_seconds: deque[float] = deque(maxlen=_RECENT_STEPS)
        self._last_line_at: float | None = None

    def log(self, step: int, metrics: dict[str, float | torch.Tensor], *, prefix: str = "") -> None:
        """Report the metrics of a step. Several calls for one step make one line of `metrics.jsonl`.

        Args:
            step: GRPO step, counted from 1 (0: before the first). With the prefix `sft`, the supervised step.
            metrics: Numbers and scalar tensors by flat name ("reward/mean").
            prefix: Put before every name with a slash: "validation", "sft".
        """
        if not self.enabled:
            return
        values = finite_numbers({f"{prefix}/{k}" if prefix else k: v for k, v in metrics.items()}, self._warned)
        axis = f"{SFT_PREFIX}/step" if prefix == SFT_PREFIX else "step"
        self._lines.merge({axis: step, **values}, axis)
        held_out = {name: value for name, value in values.items() if name.startswith("validation/")}
        self._held_out |= held_out
        if held_out or step <= 1 or step % self._config.log_freq == 0:
            self._to_dashboards(step, axis, values)
        if prefix == "":
            logger.info(self._progress(step, values))
        else:
            total = f"/{self._sft_steps}" if prefix == SFT_PREFIX else ""
            shown = "  ".join(f"{name.removeprefix(prefix + '/')} {value:.4g}" for name, value in values.items())
            logger.info(f"{self._color.yellow}{prefix} step {step}{total}{self._color.reset}  {shown}")

    def _to_dashboards(self, step: int, axis: str, values: dict[str, float]) -> None:
        if self._config.enable_tensorboard:
            if self._tensorboard is None:
                # Resumed runs share a folder; points of an earlier run from this step on are hidden.
                folder = self._folder / self._config.save_tb_folder
                self._tensorboard = SummaryWriter(str(folder), purge_step=step)
            for name, value in values.items():
                self._tensorboard.add_scalar(name, value, step)
            self._tensorboard.flush()
        if self._wandb is not None:
            # The step is a metric: W&B's own step may not go back, and there are two axes.
            self._wandb.log({axis: step, **values})

    def _progress(self, step: int, values: dict[str, float]) -> str:
        now = time.perf_counter()
        # The time between lines includes validation and checkpoints. Step 0 includes the warm start, so it is left out.
        seconds = values.get("time/step_s") if self._last_line_at is None else now - self._last_line_at
        self._last_line_at = now
        if seconds is not None and step > 0:
            self._step_seconds.append(seconds)
        eta = "-"
        if self._step_seconds:
            left_s = (self._total_steps - step) * statistics.median(self._step_seconds)
            eta = str(timedelta(seconds=round(left_s)))

        color = self._color
        known = self._held_out | values
        parts = [f"{color.red}step {step}/{self._total_steps}{color.reset}  eta {eta}"]
        parts += [f"{label} {form.format(known[name])}" for name, label, form in PROGRESS if name in known]
        stages = {
            name.removeprefix("time/").removesuffix("_s"): value
            for name, value in values.items()
            if name.startswith("time/") and not name.endswith(("_host_s", "_hidden_s"))
        }
        ages = {
            name.split("_")[1]: share
            for name, share in values.items()
            if name.startswith("rollout/age_") and name.endswith("_fraction")
        }
        if ages:
            parts.append("ages " + " ".join(f"{age}:{share:.0%}" for age, share in ages.items() if share >= 0.005))
            parts.append(
                f"groups {values['rollout/groups_in_flight']} in flight, {values['rollout/groups_ready']} ready"
            )
        step_s = stages.pop("step", None)
        if stages:
            listed = ", ".join(f"{name} {value:.2f}" for name, value in stages.items() if value >= 0.005)
            hidden_s = values.get("time/sync_hidden_s", 0.0)
            listed += f"; sync {hidden_s:.2f} hidden" if hidden_s >= 0.005 else ""
            parts.append(f"{color.blue}{step_s or sum(stages.values()):.2f} s ({listed}){color.reset}")
        parts.append(f"{color.green}{verdict(values)}{color.reset}")
        return "  ".join(part for part in parts if part)

    def close(self) -> None:
        if not self.enabled:
            return
        self._lines.close()
        if self._tensorboard is not None:
            self._tensorboard.close()
        if self._wandb is not None:
            self._wandb.finish()


def _start_wandb(config: JobConfig, folder: Path) -> Any:
    """Start a Weights & Biases run. Its own variables apply: WANDB_PROJECT, WANDB_RUN_ID and others."""
    try:
        import wandb
    except ImportError as error:
        raise UserError(
            "[metrics] enable_wandb: the wandb package is missing; "
            "pip install 'torchtitan-grpo[wandb]' (in a checkout: '.[wandb]'), or set it to false"
        ) from error
    project = os.environ.get("WANDB_PROJECT", "torchtitan-grpo")
    run = wandb.init(project=project, dir=str(folder), config=config.to_dict(), resume="allow")
    run.define_metric("*", step_metric="step")
    run.define_metric(f"{SFT_PREFIX}/*", step_metric=f"{SFT_PREFIX}/step")
    return run


class SampleLog:
    """Writes some answers of each step to `samples.jsonl`, which scripts/show_samples.py reads. Rank 0 only.

    Args:
        config: The run's configuration ([metrics] samples_per_step; 0: none).
    """

    def __init__(self, config: JobConfig, dump_folder: str | Path, rank0: bool) -> None:
        self._count = config.metrics.samples_per_step if rank0 else 0
        self._lines = StepLines(Path(dump_folder) / "samples.jsonl") if self._count > 0 else None

    def log(self, step: int, groups: list[Group], advantages: list[list[float]]) -> None:
        """Write `samples_per_step` answers, spread over the step's groups and over their samples.

        Args:
            advantages: One per sample, in the groups' order.
        """
        if self._lines is None:
            return
        answers = [
            pair
            for group, group_advantages in zip(groups, advantages, strict=True)
            for pair in zip(group, group_advantages, strict=True)
        ]
        count = min(self._count, len(answers))
        for k in range(count):
            # Shifted by the step, so that it is not always the first answer of a group.
            sample, advantage = answers[(k * len(answers) // count + step) % len(answers)]
            self._lines.append(_sample_record(step, sample, advantage))

    def close(self) -> None:
        if self._lines is not None:
            self._lines.close()


def _sample_record(step: int, sample: Sample, advantage: float) -> dict[str, Any]:
    """One line of `samples.jsonl`. `versions` are the oldest and newest weight versions that sampled its tokens."""
    versions = sample.sampled_versions
    return {
        "step": step,
        "prompt_index": sample.prompt.index,
        "prompt": sample.prompt.text,
        "answer": sample.text,
        "reference": sample.prompt.answer,
        "reward": sample.reward,
        "rewards": sample.rewards,
        "reward_failures": sample.reward_failures,
        "advantage": advantage,
        "finish_reason": sample.finish_reason,
        "answer_tokens": len(sample.token_ids),
        "versions": [min(versions), max(versions)] if versions else [],
    }
