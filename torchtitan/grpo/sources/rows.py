"""The rows of a dataset. A row is a dict of columns."""

import contextlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torchtitan.grpo.errors import UserError, in_words, shown

DatasetRow = dict[str, Any]
"""Column name -> value."""
Key = Callable[[DatasetRow], str]
"""What a row is compared by."""

NESTING_MAX = 100
"""Lists and dicts in each other. At some 500 pickle ends, at 1000 JSON, and both earlier within deep calls."""


@dataclass
class DatasetRows:
    """The training or the held-out rows of one dataset.

    Attributes:
        rows: The whole dataset. Lazy, if its source can read lazily.
        positions: Which of `rows` are selected.
        name: The dataset's file, folder or source, for messages.
        lines: Line number of each of `rows` in a JSONL file, else None.
        key: What tells a row from others, see `data.rows.key_of`. None if nothing does.
    """

    rows: Sequence[DatasetRow]
    positions: Sequence[int]
    name: str
    lines: Sequence[int] | None = None
    key: Key | None = None

    def place(self, position: int) -> str:
        """A row's name in messages."""
        return f"{self.name}:{self.lines[position]}" if self.lines else f"{self.name}, row {position}"


def whole(rows: Sequence[DatasetRow], name: str, lines: Sequence[int] | None = None) -> DatasetRows:
    """All of these rows."""
    return DatasetRows(rows, range(len(rows)), name, lines)


def as_json(row: DatasetRow, place: str) -> DatasetRow:
    """The row with its columns as JSON values, and objects as texts.

    Raises:
        UserError: A column cannot be written so. The message names it, and `place`.
    """
    with contextlib.suppress(Exception):  # all columns at once take a quarter of the time
        return _read_back(row)
    columns: DatasetRow = {}
    for name, value in row.items():
        try:
            columns |= _read_back({name: value})
        except Exception as error:  # an environment's rows may hold any objects
            what = f"{place}: column {shown(name)} cannot be written as JSON ({in_words(error)})"
            raise UserError(f"{what}: change it, or leave it out") from error
    return columns


def always_json(row: DatasetRow) -> DatasetRow:
    """The same of a row that cannot be refused any more, as an environment may write into it: what cannot be written
    is the text that messages show of it."""
    with contextlib.suppress(Exception):
        return _read_back(row, skipkeys=True)
    columns: DatasetRow = {}
    for name, value in row.items():
        try:
            columns |= _read_back({name: value}, skipkeys=True)
        except Exception:
            columns[name] = shown(value)
    return columns


def _read_back(row: DatasetRow, skipkeys: bool = False) -> DatasetRow:
    text = json.dumps(row, default=str, skipkeys=skipkeys)
    read: DatasetRow = json.loads(text)
    if text.count("[") + text.count("{") > NESTING_MAX and _nesting(read) > NESTING_MAX:
        raise ValueError(f"over {NESTING_MAX} lists or dicts in each other")
    return read


def _nesting(value: Any) -> int:
    levels, inner = 0, [value]
    while inner := [each for one in inner for each in (one.values() if isinstance(one, dict) else one)]:
        levels, inner = levels + 1, [each for each in inner if isinstance(each, dict | list)]
    return levels
