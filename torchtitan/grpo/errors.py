"""Errors that are the user's to mend."""

import difflib
from collections.abc import Iterable


class UserError(ValueError):
    """Bad input: the message names the key, file or server and says what to change."""


def nearest(word: str, known: Iterable[str]) -> str | None:
    """The known word most like this one, None if none is."""
    found = difflib.get_close_matches(word, list(known), n=1, cutoff=0.6)
    return found[0] if found else None


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """` (did you mean "x"?)` for the known word closest to this one, or "" if none is close."""
    near = nearest(word, known)
    return f' (did you mean "{near}"?)' if near else ""
