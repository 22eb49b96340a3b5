"""A full disk in one line, instead of the many that the libraries above it write about torn files."""

import contextlib
import errno
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

from torchtitan.grpo.errors import UserError

_FULL = (errno.ENOSPC, errno.EDQUOT)
_SAID = re.compile(r"no space left|disk quota exceeded|unexpected pos \d+ vs \d+|PytorchStreamWriter", re.IGNORECASE)
"""What is left of it in texts: torch's writer of files says only that a file is shorter than it wrote."""


def is_disk_full(error: BaseException) -> bool:
    """Whether it comes from a write that found no room."""
    cause: BaseException | None = error
    while cause is not None:
        if (isinstance(cause, OSError) and cause.errno in _FULL) or _SAID.search(str(cause)):
            return True
        cause = cause.__cause__ or cause.__context__
    return False


@contextlib.contextmanager
def disk_full_in_one_line(folder: str | Path, saved_steps: Callable[[], list[int]] = list) -> Iterator[None]:
    """Around a run that writes into `folder`.

    Args:
        saved_steps: Of the complete checkpoints, the newest last.

    Raises:
        UserError: In place of an error that is a full disk's.
    """
    try:
        yield
    except Exception as error:
        if isinstance(error, UserError) or not is_disk_full(error):
            raise
        path, saved = Path(folder).absolute(), saved_steps()
        free = shutil.disk_usage(next(each for each in (path, *path.parents) if each.exists())).free
        if saved:
            then = f"make room: --checkpoint.resume then goes on from the newest checkpoint, step {saved[-1]}"
        else:
            then = "nothing was saved: make room, or choose a folder on another disk ([job] dump_folder)"
        raise UserError(
            f"the disk of {folder} is full ({_first_line(error)}); {free / 2**20:,.0f} MiB are free now; {then}"
        ) from error


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [""])[0][:300]
