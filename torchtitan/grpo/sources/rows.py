"""The rows of a dataset. A row is a dict of columns."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

DatasetRow = dict[str, Any]
"""Column name -> value."""
Key = Callable[[DatasetRow], str]
"""What a row is compared by."""


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
