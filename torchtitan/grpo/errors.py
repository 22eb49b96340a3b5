"""Errors that say all in one message, most of which the user can correct."""

import contextlib
import difflib
import json
import os
import signal
import sys
import time
from collections.abc import Iterable, Iterator

REFUSED = 2
"""Exit status of a run with bad input."""
SHOWN_CHARS = 200
"""Characters of a value that messages repeat."""
_OTHERS_S = 10.0
"""How long torchrun may take to stop the other ranks after rank 0 has ended."""


class PlainError(Exception):
    """What ends a run and says why in its message: a traceback would only hide that.

    Attributes:
        status: The exit status of a run that ends by it.
    """

    status = 1

    def __init__(self, *args: object) -> None:
        super().__init__(*args)
        self.raised_at = time.time()


class UserError(PlainError, ValueError):
    """Bad input. The message names the key, file or server and says what to change."""

    status = REFUSED


class UserErrorOfAllRanks(UserError):
    """A UserError that every rank raises with the same words."""


def text_of(error: BaseException) -> str:
    """What an error says, whole. That of foreign code may fail to say it."""
    try:
        return str(error)
    except Exception:
        return f"(what {type(error).__name__} says cannot be read)"


def said(error: BaseException, most: int = 500) -> str:
    """What an error of foreign code says, cut, with control characters written out: it may hold anything."""
    return written_out(text_of(error)[:most], "\n")


def written_out(text: str, kept: str = "") -> str:
    """A text with its control characters written out, but for those in `kept`."""
    return "".join(c if c.isprintable() or c in kept else repr(c)[1:-1] for c in text)


def shown(value: object) -> str:
    """A value in a message, as Python writes it: the end of a long one is left out."""
    try:
        return shortened(repr(value))
    except Exception:  # of foreign code
        return f"(a {type(value).__name__} that cannot be shown)"


def shortened(text: str, limit: int = SHOWN_CHARS) -> str:
    """At most `limit` characters of a text that a user wrote."""
    return text if len(text) <= limit else f"{text[:limit]}... ({len(text):,} characters)"


def in_words(error: BaseException) -> str:
    """An error in one line: a PlainError's words, and the kind before those of others."""
    words = " ".join(text_of(error).split())
    return words if isinstance(error, PlainError) else f"{type(error).__name__}: {words}"


@contextlib.contextmanager
def renamed(old: str, new: str) -> Iterator[None]:
    """Say `new` for `old` in a UserError: a table has keys of a section, which messages name."""
    try:
        yield
    except UserError as error:
        if old == new or old not in str(error):
            raise
        raise UserError(str(error).replace(old, new)) from error


def refuse(error: PlainError) -> int:
    """Print the error, once for all ranks of a machine, and return the exit status.

    torchrun prints some 30 lines after a rank that failed. They end in what the first rank that failed has left in
    TORCHELASTIC_ERROR_FILE: this error. Other ranks usually find the same one. They wait until torchrun stops them,
    and end with status 0, because torchrun has a paragraph for every rank with another one. A rank that is not stopped
    has an error of its own and prints it.
    """
    rank = os.environ.get("RANK", "0")
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if path and os.environ.get("LOCAL_RANK", "0") != "0":
        signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
        time.sleep(_OTHERS_S)
    where = "" if rank == "0" or isinstance(error, UserErrorOfAllRanks) else f" on rank {rank}"
    said = f"error{where}: {error}"
    print(said, file=sys.stderr, flush=True)
    if path:
        left = {"message": said, "extraInfo": {"timestamp": str(int(error.raised_at))}}
        with open(path, "w", encoding="utf-8") as file:
            json.dump({"message": left}, file)
    return error.status


def nearest(word: str, known: Iterable[str], cutoff: float = 0.6) -> str | None:
    """The most similar known word, None if none is similar by `cutoff`, between 0 and 1 for the same."""
    found = difflib.get_close_matches(word[:100], list(known), n=1, cutoff=cutoff)
    return found[0] if found else None


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """` (did you mean "x"?)` with the most similar known word, "" if none is similar."""
    near = nearest(word, known)
    return f' (did you mean "{near}"?)' if near else ""
