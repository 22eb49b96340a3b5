"""Where metrics go: `metrics.jsonl`, TensorBoard, Weights & Biases, Prometheus, and the console (`console.py`).

docs/metrics.md names every metric. A number that is not finite is left out with one warning. Neither that nor a file or
dashboard that cannot be written ends a run.
"""

import contextlib
import math
import numbers
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch.utils.tensorboard import SummaryWriter

from torchtitan.config import JobConfig
from torchtitan.grpo.config.resolved import write_config
from torchtitan.grpo.errors import in_words
from torchtitan.grpo.reporting.console import Console, Field
from torchtitan.grpo.reporting.prometheus import PrometheusEndpoint
from torchtitan.grpo.reporting.step_lines import WARM_START, StepLines
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


class MetricsLogger:
    """Writes a step's metrics everywhere. On ranks other than 0 every method does nothing.

    `config.toml` gets the whole configuration.

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
        self._one_server = f"server/{rollout.engine}/" if rollout.replicas == 1 else ""
        self._warned: set[str] = set()
        self._lines = StepLines(self._folder / "metrics.jsonl")
        self._tensorboard: SummaryWriter | None = None
        write_config(config, self._folder)
        port = config.metrics.prometheus_port
        self._prometheus = PrometheusEndpoint(port) if port else None
        axes = {"*": "step", "sft/*": WARM_START}
        self._wandb = WandbRun(config, self._folder, axes) if config.metrics.enable_wandb else None
        self._console = Console(config, total_steps)

    def log(self, step: int, metrics: dict[str, float | torch.Tensor], axis: str = "step") -> None:
        """Report the metrics of a step. Several calls for one step make one line of `metrics.jsonl`.

        Args:
            step: Counted from 1 (0: before the first).
            metrics: Numbers and scalar tensors by flat name ("reward/mean").
            axis: What counts the step: `WARM_START` for metrics named `sft/...`.
        """
        if not self.enabled:
            return
        values = finite_numbers(metrics, self._warned)
        if self._one_server:  # at a port that differs in each run
            values = {_ONE_SERVER.sub(self._one_server, name): value for name, value in values.items()}
        self._lines.merge({axis: step, **values}, axis)
        self._to_tensorboard(step, values)
        if self._wandb is not None:
            with self._goes_on("Weights & Biases"):
                self._wandb.log({axis: step, **values})
        if self._prometheus is not None:
            with self._goes_on("Prometheus"):
                self._prometheus.update({axis: step, **values})
        self._console.log(step, values, axis)

    def show_fields(self, fields: tuple[Field, ...]) -> None:
        """Show these of a step."""
        if self.enabled:
            self._console.fields = fields

    def _to_tensorboard(self, step: int, values: dict[str, float]) -> None:
        # On a disk that took no line just now, TensorBoard's thread would die with a traceback.
        if not (self._config.enable_tensorboard and self._lines.is_writable):
            return
        writer, self._tensorboard = self._tensorboard, None  # one that has failed can write no more
        with self._goes_on("TensorBoard"):
            if writer is None:
                # Resumed runs share a folder; points of an earlier run from this step on are hidden.
                writer = SummaryWriter(str(self._folder / "tb"), purge_step=step)
            for name, value in values.items():
                writer.add_scalar(name, value, step)
            writer.flush()
            self._tensorboard = writer

    @contextlib.contextmanager
    def _goes_on(self, what: str) -> Iterator[None]:
        """Around code of others: an error costs one warning, and not the run."""
        try:
            yield
        except Exception as error:
            if what not in self._warned:
                self._warned.add(what)
                logger.warning(f"{what} lacks step metrics ({in_words(error)}); not warned of again")

    def last(self, name: str) -> float:
        """A metric's newest value in `metrics.jsonl`, of this run or the one that it continues; 0 if there is none."""
        return self._lines.last(name) if self.enabled else 0.0

    def table(self, name: str, step: int, records: list[dict[str, Any]]) -> None:
        """Show answers at Weights & Biases, if it is on."""
        if self.enabled and self._wandb is not None and records:
            with self._goes_on("Weights & Biases"):
                self._wandb.table(name, step, records)

    def close(self) -> None:
        if not self.enabled:
            return
        self._lines.close()
        for part in (self._tensorboard, self._wandb, self._prometheus):
            if part is not None:
                with self._goes_on(type(part).__name__):
                    part.close()
