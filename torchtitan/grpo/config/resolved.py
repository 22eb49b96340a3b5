"""A run's whole configuration, defaults filled in: as TOML that makes the same run, and as values by key.

It holds no secret: keys name the environment variables that do.
"""

from __future__ import annotations

from collections.abc import Iterator
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torchtitan.grpo.config.hub import HUB_KEYS, named
from torchtitan.grpo.config.keys import TABLES, toml
from torchtitan.grpo.config.unsupported import honoured_keys

if TYPE_CHECKING:
    from torchtitan.config import JobConfig

NOT_IN_A_FILE = ("job.config_file",)
"""Keys that a TOML file cannot hold."""
FILE = "config.toml"
"""In the folder of a run or an evaluation: the configuration of the newest one there."""


def resolved(config: JobConfig) -> dict[str, Any]:
    """Value of every key with an effect, by path (`grpo.group_size`), as JSON values. Ids of the hub have commits."""
    values = {key.path: attrgetter(key.path)(config) for key in honoured_keys() if key.path not in NOT_IN_A_FILE}
    values |= {path: named(values[path]) for path in HUB_KEYS if path in values}
    if config.rollout.colocate:
        values["rollout.replicas"] = 0  # as many as the run that reads it has trainer processes
    return values | {path: [table.given for table in values[path]] for path in TABLES}


def toml_lines(config: JobConfig, full: bool = True) -> Iterator[str]:
    """Every key with an effect and its value; `# default` marks values that differ. Lists of tables come last.

    Args:
        full: False leaves out keys that have their defaults.
    """
    section = None
    values = resolved(config)
    for key in honoured_keys():
        if key.path not in values or key.path in TABLES:
            continue
        value = values[key.path]
        if value == key.default and not full:
            continue
        if key.section != section:
            section = key.section
            yield f"\n[{section}]"
        mark = f"  # default {toml(key.default)}" if value != key.default else ""
        yield f"# {key.name}: none{mark}" if value is None else f"{key.name} = {toml(value)}{mark}"
    for path in TABLES:
        for given in values[path]:
            yield f"\n[[{path}]]"
            yield from (f"{name} = {toml(value)}" for name, value in given.items())


def write_config(config: JobConfig, folder: Path) -> None:
    """Write FILE."""
    (folder / FILE).write_text("\n".join(toml_lines(config)).strip() + "\n", encoding="utf-8")
