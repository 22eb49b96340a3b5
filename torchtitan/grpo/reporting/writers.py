"""Where metrics go: `metrics.jsonl`, TensorBoard, Weights & Biases, Prometheus, and the console (`console.py`).

docs/metrics.md names every metric. A number that is not finite is left out with one warning; it ends no run.
"""

import json
import math
import numbers
import os
import re
from collections import deque
from pathlib import Path
from typing import Any, TextIO

import torch
from torch.utils.tensorboard import SummaryWriter

from torchtitan.config import JobConfig
from torchtitan.grpo.config.resolved import FILE as CONFIG_FILE
from torchtitan.grpo.config.resolved import toml_lines
from torchtitan.grpo.reporting.console import SFT_PREFIX, Console, Field, Stage
from torchtitan.grpo.reporting.prometheus import PrometheusEndpoint
from torchtitan.grpo.reporting.wandb_run import WandbRun
from torchtitan.tools.logging import logger

_ONE_SERVER = re.compile(r"^server/[^/]+/")


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
        self.begin(record[axis], axis)
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
        with _readable(self.path) as old, kept_path.open("w", encoding="utf-8") as kept:
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

    def last(self, name: str) -> float:
        """The newest number under a name in the whole file, 0 if there is none. A torn last line is passed over."""
        with _readable(self.path) as lines:
            newest = deque((line for line in lines if line.endswith("\n") and f'"{name}":' in line), maxlen=1)
        return json.loads(newest[0])[name] if newest else 0.0

    def begin(self, step: int, axis: str = "step") -> None:
        """The first call, or the first record, drops what an earlier run wrote from that step on."""
        if axis not in self._started:
            self._started.add(axis)
            self._drop_from(axis, step)

    def close(self) -> None:
        self._file.close()


def _readable(path: Path) -> TextIO:
    """A torn last line may end inside a character."""
    return path.open(encoding="utf-8", errors="replace")


class MetricsLogger:
    """Writes a step's metrics everywhere. On ranks other than 0 every method does nothing.

    `metrics.jsonl`, the console and Prometheus get every step. TensorBoard and Weights & Biases get every
    `metrics.log_freq`-th step, as in torchtitan, and every step with validation. `config.toml` gets the whole
    configuration.

    Args:
        config: The run's configuration ([metrics], [rollout], and what `Console` uses).
        dump_folder: The run's folder.
        rank0: Whether this rank reports.
        total_steps: GRPO steps of the whole run, for progress and ETA.
    """

    def __init__(self, config: JobConfig, dump_folder: str | Path, rank0: bool, total_steps: int) -> None:
        self.enabled = rank0
        if not rank0:
            return
        self._config = config.metrics
        self._folder = Path(dump_folder)
        rollout = config.rollout
        others = rollout.urls or rollout.urls_file or rollout.replicas
        self._starts_server = rollout.engine == "embedded" and not others
        self._warned: set[str] = set()
        self._lines = StepLines(self._folder / "metrics.jsonl")
        self._tensorboard: SummaryWriter | None = None
        text = "\n".join(toml_lines(config)).lstrip() + "\n"
        (self._folder / CONFIG_FILE).write_text(text, encoding="utf-8", errors="backslashreplace")
        port = config.metrics.prometheus_port
        self._prometheus = PrometheusEndpoint(port) if port else None
        axes = {"*": "step", f"{SFT_PREFIX}/*": f"{SFT_PREFIX}/step"}
        self._wandb = WandbRun(config, self._folder, axes) if config.metrics.enable_wandb else None
        self._console = Console(config, total_steps)

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
        if self._starts_server:  # at a port that differs in each run
            values = {_ONE_SERVER.sub("server/embedded/", name): value for name, value in values.items()}
        axis = f"{SFT_PREFIX}/step" if prefix == SFT_PREFIX else "step"
        self._lines.merge({axis: step, **values}, axis)
        held_out = any(name.startswith("validation/") for name in values)
        if held_out or step <= 1 or step % self._config.log_freq == 0:
            self._to_dashboards(step, axis, values)
        if self._prometheus is not None:
            self._prometheus.update({axis: step, **values})
        self._console.log(step, values, prefix)

    def show_stage(self, stage: Stage, fields: tuple[Field, ...] = ()) -> None:
        """Show on a terminal what the trainer does now, as `Ledger.now` says it; with `fields`, these of a step."""
        if self.enabled:
            self._console.stage = stage
            self._console.fields = fields or self._console.fields

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
            self._wandb.log({axis: step, **values})

    def last(self, name: str) -> float:
        """A metric's newest value in `metrics.jsonl`, of this run or the one that it continues; 0 if there is none."""
        return self._lines.last(name) if self.enabled else 0.0

    def table(self, name: str, step: int, records: list[dict[str, Any]]) -> None:
        """Show answers at Weights & Biases, if it is on."""
        if self.enabled and self._wandb is not None and records:
            self._wandb.table(name, step, records)

    def close(self) -> None:
        if not self.enabled:
            return
        self._console.close()
        self._lines.close()
        for part in (self._tensorboard, self._wandb, self._prometheus):
            if part is not None:
                part.close()
