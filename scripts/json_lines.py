"""Files with a line of JSON per step or sample."""

import json
from pathlib import Path
from typing import Any


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The complete lines of a file that may still be written; none if it does not exist."""
    if not path.exists():
        return []
    with path.open(encoding="utf-8", errors="replace") as lines:  # a torn last line may end inside a character
        return [json.loads(line) for line in lines if line.endswith("\n")]
