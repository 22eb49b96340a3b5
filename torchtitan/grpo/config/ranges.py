"""What a field states of its key, as in `group_size: Annotated[int, Range(at_least=2)] = 8`; `ImportPath` among the
names of functions."""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Range:
    """Interval of a number.

    Attributes:
        at_least, at_most: Closed ends.
        above, below: Open ends.
        why: Reason for the interval, which the error message adds.
    """

    at_least: float | None = None
    above: float | None = None
    at_most: float | None = None
    below: float | None = None
    why: str = ""

    def __contains__(self, value: float) -> bool:
        return (
            (self.at_least is None or value >= self.at_least)
            and (self.above is None or value > self.above)
            and (self.at_most is None or value <= self.at_most)
            and (self.below is None or value < self.below)
        )

    def __str__(self) -> str:
        words = {"at least": self.at_least, "over": self.above, "at most": self.at_most, "under": self.below}
        return " and ".join(f"{word} {end}" for word, end in words.items() if end is not None)


class Needs:
    """Another key, without which this one is not read. Setting it then is an error.

    Attributes:
        key: The other key's path.
        values: What it must be, one of them. Empty: anything but false, 0 and empty.
        why: Reason, which the error message adds.
    """

    def __init__(self, key: str, *values: Any, why: str = "") -> None:
        self.key, self.values, self.why = key, values, why

    def met_by(self, value: Any) -> bool:
        """Whether the other key's value is such a one."""
        return value in self.values if self.values else bool(value)


class ImportPath(str):
    """ "module:function", a function of the user's own. Whether it exists is known when it is imported."""

    @staticmethod
    def is_one(text: str) -> bool:
        """Whether a text looks like one."""
        module, colon, function = text.partition(":")
        return bool(colon) and all(part.isidentifier() for part in [*module.split("."), function])
