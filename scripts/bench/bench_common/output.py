"""Results as markdown tables for people and JSON lines for programs; medians and growth."""

import json
import math
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

Row = dict[str, Any]


class Output:
    """Prints on rank 0 alone. Every row of a table is also one JSON line, {"table": title, ...row}, if asked for."""

    def __init__(self, speaks: bool, json_file: Path | None = None):
        self._speaks = speaks
        self._file = json_file.open("a", encoding="utf-8") if json_file is not None and speaks else None

    def say(self, line: str = "") -> None:
        if self._speaks:
            print(line, flush=True)

    def table(self, title: str, columns: Mapping[str, str], rows: Sequence[Row]) -> None:
        """Columns are key -> heading. A row's other keys go into the JSON alone; a key that it lacks shows as '-'."""
        self.say(f"\n**{title}**\n")
        self.say(markdown(columns, rows))
        self.say()
        for row in rows:
            self.record({"table": title} | row)

    def record(self, row: Row) -> None:
        if self._file is not None:
            self._file.write(json.dumps(row) + "\n")
            self._file.flush()


def markdown(columns: Mapping[str, str], rows: Sequence[Row]) -> str:
    lines = ["| " + " | ".join(columns.values()) + " |", "| " + " | ".join("---" for _ in columns) + " |"]
    lines += ["| " + " | ".join(cell(row.get(key)) for key in columns) + " |" for row in rows]
    return "\n".join(lines)


def cell(value: Any) -> str:
    """Three digits that mean something; whole numbers as they are."""
    if value is None:
        return "-"
    if not isinstance(value, float):
        return str(value)
    if not math.isfinite(value) or value == 0:
        return f"{value:g}"
    digits = max(0, 2 - math.floor(math.log10(abs(value))))
    return f"{value:.{digits}f}"


def medians(samples: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Median of each key, over the samples that have it."""
    keys = dict.fromkeys(key for sample in samples for key in sample)
    return {key: statistics.median([sample[key] for sample in samples if key in sample]) for key in keys}


def line_through(x: Sequence[float], y: Sequence[float]) -> tuple[float, float]:
    """(offset, slope) of the least-squares line."""
    mean_x, mean_y = statistics.fmean(x), statistics.fmean(y)
    spread = sum((a - mean_x) ** 2 for a in x)
    if spread == 0:
        raise ValueError("a line needs at least two different x")
    slope = sum((a - mean_x) * (b - mean_y) for a, b in zip(x, y, strict=True)) / spread
    return mean_y - slope * mean_x, slope


def growth_exponent(x: Sequence[float], y: Sequence[float]) -> float:
    """b of the power law y = a x^b through the points (least squares of the logarithms)."""
    return line_through([math.log(a) for a in x], [math.log(b) for b in y])[1]
