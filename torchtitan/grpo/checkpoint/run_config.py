"""The configuration in a checkpoint, and what a resume makes of a changed one."""

import json
from pathlib import Path
from typing import Any

from torchtitan.grpo.config.jobs import covering
from torchtitan.grpo.config.keys import label, show

RUN_CONFIG = "run_config.json"
"""In a checkpoint: `config.resolved.resolved`."""

OF_ONE_START = ("job", "ray", "checkpoint.resume", "checkpoint.load_step")
"""Sections and keys that say how a run is started, and nothing of what it does."""

FROM_CHECKPOINT = {
    "sft": "the warm start is done",
    "model.hf_assets_path": "weights come from the checkpoint, tokenizer and shape from the new folder",
    "model.weights": "weights come from the checkpoint",
    "debug.seed": "order of the data and random states come from the checkpoint, answers are sampled by the new seed",
}
"""Keys whose old value stays in force, in whole or in part, and why. docs/checkpoints.md lists them, too."""


def read_run_config(step: Path) -> dict[str, Any]:
    """The value of every key in a checkpoint, by path."""
    return json.loads((step / RUN_CONFIG).read_text(encoding="utf-8"))


def changes(old: dict[str, Any], new: dict[str, Any]) -> list[str]:
    """One line for each key that differs: both values, and which of them holds.

    Args:
        old, new: Of `config.resolved.resolved`. A key that only one of them has is of another version of the program.
    """
    lines = []
    changed = [path for path in new if path in old and old[path] != new[path]]
    for path in [path for path in changed if not covering(path, OF_ONE_START)]:
        why = FROM_CHECKPOINT.get(covering(path, FROM_CHECKPOINT), "the new value is used")
        if path.startswith("sft.") and not (old.get("sft.steps") or new.get("sft.steps")):  # no warm start
            why = "the new value is used"
        lines.append(f"{label(path)} = {show(new[path])}, in the checkpoint {show(old[path])}: {why}")
    return lines
