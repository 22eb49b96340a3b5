"""Errors that the user can correct."""

import difflib
from collections.abc import Iterable


class UserError(ValueError):
    """Bad input. The message names the key, file or server and says what to change."""


def nearest(word: str, known: Iterable[str]) -> str | None:
    """The most similar known word, None if none is similar."""
    found = difflib.get_close_matches(word[:100], list(known), n=1, cutoff=0.6)
    return found[0] if found else None


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """` (did you mean "x"?)` with the most similar known word, "" if none is similar."""
    near = nearest(word, known)
    return f' (did you mean "{near}"?)' if near else ""
