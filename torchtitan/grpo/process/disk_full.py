"""A full disk, or a limit of a file's size, in one line, instead of the many that libraries write about torn files."""

import contextlib
import errno
import os
import re
import resource
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

from torchtitan.grpo.errors import PlainError, UserError, text_of

_FULL = {errno.ENOSPC, errno.EDQUOT}
_SAID = re.compile(r"no space left|disk quota exceeded", re.IGNORECASE)
"""What is left of it in texts."""
_TORN = re.compile(r"unexpected pos \d+ vs \d+|PytorchStreamWriter")
"""torch's writer of files says only that a file is shorter than it wrote."""
_TOO_LARGE = os.strerror(errno.EFBIG)


def no_room(error: BaseException) -> int:
    """What the write lacked that it comes from: room on the disk (ENOSPC), a higher limit of a file's size (EFBIG) or
    neither (0). torch says the same of both. The system's error is behind it, unless DCP has sent it to other ranks: a
    limit that is set is then what it was.
    """
    causes: list[BaseException] = []
    cause: BaseException | None = error
    while cause is not None:
        causes.append(cause)
        cause = cause.__cause__ or cause.__context__
    numbers = {each.errno for each in causes if isinstance(each, OSError)}
    if errno.EFBIG in numbers or any(_TOO_LARGE in text_of(each) for each in causes):
        return errno.EFBIG
    if numbers & _FULL or any(_SAID.search(text_of(each)) for each in causes):
        return errno.ENOSPC
    limited = resource.getrlimit(resource.RLIMIT_FSIZE)[0] != resource.RLIM_INFINITY
    torn = any(_TORN.search(text_of(each)) for each in causes)
    return (errno.EFBIG if limited else errno.ENOSPC) if torn else 0


def is_disk_full(error: BaseException) -> bool:
    """Whether it comes from a write that found no room on the disk."""
    return no_room(error) == errno.ENOSPC


@contextlib.contextmanager
def disk_full_in_one_line(folder: str | Path, saved_steps: Callable[[], list[int]] = list) -> Iterator[None]:
    """Around a run that writes into `folder`.

    Args:
        saved_steps: Of the complete checkpoints, the newest last.

    Raises:
        UserError: In place of an error that is a full disk's, or a limit's.
    """
    try:
        yield
    except Exception as error:
        number = no_room(error)
        if isinstance(error, PlainError) or not number:  # its words say all, perhaps of a server's disk
            raise
        path, saved = Path(folder).absolute(), saved_steps()
        free = shutil.disk_usage(next(each for each in (path, *path.parents) if each.exists())).free
        what, mend = f"the disk of {folder} is full", "make room"
        if number == errno.EFBIG:
            what, mend = f"a file in {folder} is over `ulimit -f`, or what its file system takes", "raise the limit"
        if saved:
            then = f"{mend}: --checkpoint.resume then goes on from the newest checkpoint, step {saved[-1]}"
        else:
            then = f"nothing was saved: {mend}, or choose a folder on another disk ([job] dump_folder)"
        raise UserError(f"{what} ({_first_line(error)}); {free / 2**20:,.0f} MiB are free now; {then}") from error


def _first_line(error: BaseException) -> str:
    return (text_of(error).splitlines() or [""])[0][:300]
