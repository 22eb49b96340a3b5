"""`[checkpoint] keep_best`: which checkpoint has the highest value of a validation metric."""

import json
from pathlib import Path

VALIDATION = "validation.json"
"""In a checkpoint: the metrics of the validation after its step. Without a validation there is no file."""


def best_of(paths: list[Path], metric: str) -> tuple[Path, float] | None:
    """The checkpoint with the highest value of `metric`, of equal ones the last, and the value. None if none has one.

    What is best is read from the checkpoints themselves, so a resumed run knows it, also by another metric.
    """
    values = [(path, value) for path in paths if (value := _value(path, metric)) is not None]
    return max(reversed(values), key=lambda pair: pair[1], default=None)


def _value(path: Path, metric: str) -> float | None:
    try:
        value = json.loads((path / VALIDATION).read_text(encoding="utf-8")).get(metric)
    except (OSError, ValueError, AttributeError):
        return None
    return value if isinstance(value, int | float) else None
