"""Results as Markdown tables for people and JSON lines for programs. A column is named like its JSON key."""

import json
import math
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

Row = dict[str, Any]


class Output:
    """Prints on rank 0 only. With a file, also appends JSON lines: {"table": name, ...row}."""

    def __init__(self, is_rank0: bool, json_file: Path | None = None):
        self._is_rank0 = is_rank0
        self._file = json_file.open("a", encoding="utf-8") if json_file is not None and is_rank0 else None

    def say(self, line: str = "") -> None:
        if self._is_rank0:
            print(line, flush=True)

    def table(self, title: str, columns: str, rows: Sequence[Row], record: bool = True) -> None:
        """Print the rows' `columns`, keys with spaces between; a column that no row has is left out.

        Args:
            record: Write the rows to the JSON file too, with all their keys.
        """
        if rows:
            shown = [key for key in columns.split() if any(row.get(key) is not None for row in rows)]
            lines = [shown, ["---"] * len(shown), *([cell(row.get(key)) for key in shown] for row in rows)]
            self.say(f"\n**{title}**\n")
            self.say("\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n")
        for row in rows if record else []:
            self.record({"table": title} | row)

    def record(self, row: Row) -> None:
        if self._file is not None:
            self._file.write(json.dumps(row) + "\n")
            self._file.flush()


def cell(value: Any) -> str:
    """Three significant digits; whole numbers in full; None is "-"."""
    if value is None:
        return "-"
    if not isinstance(value, float):
        return str(value)
    if not math.isfinite(value) or value == 0:
        return f"{value:g}"
    digits = max(0, 2 - math.floor(math.log10(abs(value))))
    return f"{value:.{digits}f}"


def medians(samples: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Median of each key over the samples, which have the same keys."""
    return {key: statistics.median([sample[key] for sample in samples]) for key in samples[0]}
