"""What a run has written into its folder."""

import itertools
import re
import tomllib
from collections import defaultdict
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from torchtitan.grpo.reporting.step_lines import WARM_START, read_lines

Points = list[tuple[float, float]]
"""(step, value), steps rising."""

_CONFIG_LINE = re.compile(r"(?:# )?(?P<name>\w+)(?: = |: none)(?P<value>.*?)(?:  # default (?P<default>.*))?")


@dataclass(frozen=True)
class Setting:
    """A configuration key. `default` is None if the value is the default. Both are written as in TOML."""

    key: str
    value: str
    default: str | None


@dataclass(frozen=True)
class Run:
    """A run's files; what is missing is empty.

    Attributes:
        lines: Of metrics.jsonl that belong to GRPO steps, from step 0.
        warm_start: Of metrics.jsonl that belong to supervised steps.
        samples, held_out: Of samples.jsonl and validation_samples.jsonl.
        settings: Every key of config.toml.
        values: The same as values by key: `grpo.group_size`.
    """

    folder: Path
    lines: list[dict[str, Any]]
    warm_start: list[dict[str, Any]]
    samples: list[dict[str, Any]]
    held_out: list[dict[str, Any]]
    settings: list[Setting]
    values: dict[str, Any]

    @property
    def steps(self) -> list[dict[str, Any]]:
        """Lines of trained steps."""
        return [line for line in self.lines if line["step"] > 0]

    def points(self, name: str) -> Points:
        """A metric's values by step; a supervised one's by its own step."""
        axis = WARM_START if name.startswith("sft/") else "step"
        return [(line[axis], line[name]) for line in (*self.warm_start, *self.lines) if name in line]

    def last(self, name: str) -> float:
        points = self.points(name)
        return points[-1][1] if points else 0.0

    def total(self, name: str) -> float:
        """Of a count that each process of the run begins anew: 0, 2, and after a resume 0, 1 are 3."""
        values = [value for _, value in self.points(name)]
        return sum(value for value, after in itertools.pairwise([*values, 0.0]) if after < value)

    def names(self, pattern: str) -> list[str]:
        """Metrics whose whole name matches, in the order of their first line."""
        return [name for name in self._all_names if re.fullmatch(pattern, name)]

    @cached_property
    def _all_names(self) -> list[str]:
        return list(dict.fromkeys(name for line in (*self.warm_start, *self.lines) for name in line))

    def servers(self) -> dict[str, dict[str, Points]]:
        """Points by server and metric (`busy_share`)."""
        servers: defaultdict[str, dict[str, Points]] = defaultdict(dict)
        for name in self.names("server/[^/]+/.+"):
            _, server, metric = name.split("/", 2)
            servers[server][metric] = self.points(name)
        return dict(servers)


def read_run(folder: Path) -> Run:
    """Read a run's folder. A line that is still being written is left out."""
    lines = read_lines(folder / "metrics.jsonl")
    config = folder / "config.toml"
    text = config.read_text(encoding="utf-8") if config.is_file() else ""
    return Run(
        folder,
        [line for line in lines if "step" in line],
        [line for line in lines if WARM_START in line],
        read_lines(folder / "samples.jsonl"),
        read_lines(folder / "validation_samples.jsonl"),
        _settings(text),
        dict(_flat(tomllib.loads(text))),
    )


def _settings(text: str) -> list[Setting]:
    """Each key of a config.toml, whose comments say what differs from the defaults."""
    settings, section = [], ""
    for line in text.split("\n"):  # values may have what Unicode calls a line's end
        header = re.fullmatch(r"\[+([\w.]+)\]+", line)
        found = _CONFIG_LINE.fullmatch(line)
        if header:
            section = header[1]
        elif found:
            settings.append(Setting(f"{section}.{found['name']}", found["value"] or "none", found["default"]))
    return settings


def _flat(table: dict[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    flat = []
    for name, value in table.items():
        flat += _flat(value, f"{prefix}{name}.") if isinstance(value, dict) else [(prefix + name, value)]
    return flat
