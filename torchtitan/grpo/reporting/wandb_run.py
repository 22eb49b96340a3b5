"""A run at Weights & Biases: metrics, configuration, tables of answers."""

import os
import secrets
from pathlib import Path
from typing import Any

from torchtitan.config import JobConfig
from torchtitan.grpo.config.resolved import resolved

_ID_FILE = "wandb_run_id"


class WandbRun:
    """Sends to one W&B run, which a resumed run in the same folder continues. W&B's own variables win.

    Args:
        config: Goes to the run's configuration. The name of its file is that of the run's group.
        folder: The run's folder. W&B's files and the run's id go there.
        axes: Metric names that others are drawn over: `{"*": "step"}`.
    """

    def __init__(self, config: JobConfig, folder: Path, axes: dict[str, str]) -> None:
        import wandb  # `config/machine.py` has checked that it is there

        self._wandb = wandb
        recipe = config.job.config_file
        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", "torchtitan-grpo"),
            name=os.environ.get("WANDB_NAME") or folder.resolve().name,
            group=os.environ.get("WANDB_RUN_GROUP") or (Path(recipe).stem if recipe else None),
            notes=os.environ.get("WANDB_NOTES") or config.job.description,
            id=_run_id(folder),
            dir=str(folder),
            config=resolved(config),
            resume="allow",
        )
        for metric, axis in axes.items():
            self._run.define_metric(metric, step_metric=axis)

    def log(self, values: dict[str, Any]) -> None:
        """Send values. The step is one of them: W&B's own step may not go back, and there are two axes."""
        self._run.log(values)

    def table(self, name: str, step: int, records: list[dict[str, Any]]) -> None:
        """Send records with the same keys as a table."""
        columns = list(records[0])
        rows = [[_cell(record[column]) for column in columns] for record in records]
        self._run.log({name: self._wandb.Table(columns=columns, data=rows), "step": step})

    def close(self) -> None:
        self._run.finish()


def _run_id(folder: Path) -> str:
    """WANDB_RUN_ID, or the id of the run that was in the folder before, or a new one."""
    file = folder / _ID_FILE
    known = os.environ.get("WANDB_RUN_ID") or (file.read_text().strip() if file.is_file() else "")
    run_id = known or secrets.token_hex(4)
    file.write_text(run_id + "\n")
    return run_id


def _cell(value: Any) -> Any:
    """W&B's columns have one type each, and rewards by function differ in their keys."""
    return value if isinstance(value, (str, int, float)) or value is None else str(value)
