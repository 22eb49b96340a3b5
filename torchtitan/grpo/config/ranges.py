"""What a key's annotation may hold: the range of a number, as in `group_size: Annotated[int, Range(at_least=2)] = 8`;
`ImportPath` among the names of functions."""

from dataclasses import dataclass


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


class ImportPath(str):
    """ "module:function", a function of the user's own. Whether it exists is known when it is imported."""

    @staticmethod
    def is_one(text: str) -> bool:
        """Whether a text looks like one."""
        module, colon, function = text.partition(":")
        return bool(colon) and all(part.isidentifier() for part in [*module.split("."), function])
