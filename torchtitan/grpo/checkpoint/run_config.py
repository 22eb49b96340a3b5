"""The configuration in a checkpoint, and what a resume makes of a changed one."""

import json
from pathlib import Path
from typing import Any

from torchtitan.grpo.config.keys import TABLES, label, show
from torchtitan.grpo.sources.table import SOURCES

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
"""Keys whose old value stays in force, in whole or in part, and why. docs/checkpoints.md has them as a table."""
_ARGUMENTS = {
    "size": "size",
    "tasks": "tasks",
    "arithmetic_max": "max",
    "arithmetic_operators": "operators",
    "arithmetic_question": "question",
}
"""Keys of [data] in earlier versions, and their names in `[data] source_args`."""


def read_run_config(step: Path) -> dict[str, Any]:
    """The value of every key in a checkpoint, by path. Those of earlier versions are as today's keys have them."""
    run = json.loads((step / RUN_CONFIG).read_text(encoding="utf-8"))
    tables = [(path, table) for path in TABLES for table in run.get(path, [])]
    for values, key in [(run, "data.chat_template_kwargs"), *((table, "chat_template_kwargs") for _, table in tables)]:
        if isinstance(words := values.get(key), list):  # as in ["enable_thinking=false"]
            values[key] = {name: json.loads(value) for name, _, value in (word.partition("=") for word in words)}
    if "data.size" not in run:
        return run
    data = {name: run.pop(key) for name in _ARGUMENTS if (key := f"data.{name}") in run}
    data["source"] = run["data.source"]
    run["data.source_args"] = _arguments(data)
    of_source: dict[str, dict[str, Any]] = {}  # of the mixture, whose tables come first
    for path, table in tables:
        base = of_source.get(table["name"], data)
        other = table.get("source", base["source"]) != base["source"]
        own = {name: table.pop(name) for name in _ARGUMENTS if name in table}
        rows = base | ({"tasks": []} if other else {}) | own | {"source": table.get("source", base["source"])}
        if own or other:
            table["source_args"] = _arguments(rows)
        if path == "data.mixture":
            of_source[table["name"]] = rows
    return run


def _arguments(data: dict[str, Any]) -> dict[str, Any]:
    """`[data] source_args` for keys of an earlier version, without those that have the source's defaults."""
    known = SOURCES[data["source"]].arguments
    named = {name: data[old] for old, name in _ARGUMENTS.items() if name in known and old in data}
    return {name: value for name, value in named.items() if value != known[name].default}


def changes(old: dict[str, Any], new: dict[str, Any]) -> list[str]:
    """One line for each key that differs: both values, and which of them holds.

    Args:
        old, new: Of `config.resolved.resolved`. A key that only one of them has is of another version of the program.
    """
    lines = []
    changed = [path for path in new if path in old and old[path] != new[path]]
    for path in [path for path in changed if not _covers(OF_ONE_START, path)]:
        why = next((why for entry, why in FROM_CHECKPOINT.items() if _covers((entry,), path)), "the new value is used")
        if path.startswith("sft.") and not (old.get("sft.steps") or new.get("sft.steps")):  # no warm start
            why = "the new value is used"
        lines.append(f"{label(path)} = {show(new[path])}, in the checkpoint {show(old[path])}: {why}")
    return lines


def _covers(entries: tuple[str, ...], path: str) -> bool:
    return any(path == entry or path.startswith(f"{entry}.") for entry in entries)
