"""One run at a time in a dump folder: two would delete each other's checkpoints and mix their metrics."""

import contextlib
import fcntl
import json
import logging
import os
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from torchtitan.grpo.errors import UserError

logger = logging.getLogger(__name__)

LOCK = "run.lock"
_POLL_S = 0.1


@contextlib.contextmanager
def only_run_in(
    dump_folder: str | Path, wait_s: float = 0.0, key: str = "[job] dump_folder", file_name: str = ""
) -> Iterator[None]:
    """Hold the folder's lock. The kernel releases it when the process ends, however that happens.

    Args:
        wait_s: How long to wait for a run that holds it.
        key: What names the folder, in messages.
        file_name: Hold only this file, and not the whole folder.

    Raises:
        UserError: Another run holds it, or the folder cannot be written.
    """
    folder = Path(dump_folder)
    held, lock = folder / file_name, f"{file_name}.lock" if file_name else LOCK
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file = (folder / lock).open("ab+", buffering=0)  # what a full disk does not take must not be left for its end
    except OSError as error:
        raise UserError(f"{held} cannot be written ({error}): change {key}") from error
    with file:  # no program that this one starts inherits it
        os.register_at_fork(after_in_child=file.close)  # nor does a fork, which may outlive this process
        _lock(file, held, wait_s, key)
        with contextlib.suppress(OSError):  # a full disk: only the holder's name is lost
            file.truncate(0)
            since = time.strftime("%Y-%m-%d %H:%M:%S %z")
            file.write(json.dumps({"host": socket.gethostname(), "pid": os.getpid(), "since": since}).encode())
        yield


def _lock(file: BinaryIO, held: Path, wait_s: float, key: str) -> None:
    deadline = time.monotonic() + wait_s
    warned = False
    while True:
        try:
            return fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            file.seek(0)
            holder = _holder(file.read())
            if time.monotonic() > deadline:
                waited = f" and has not ended within {wait_s:g} s" if wait_s else ""
                raise UserError(f"another run uses {held} ({holder}){waited}: stop it, or set another {key}") from error
            if not warned:
                logger.warning(f"Another run uses {held} ({holder}): waiting up to {wait_s:g} s for its end")
                warned = True
            time.sleep(_POLL_S)
        except OSError as error:  # a network file system without locks
            return logger.warning(f"{held} cannot be locked ({error}): see to it that no second run uses it")


def _holder(text: bytes) -> str:
    try:
        holder = json.loads(text)
        return f"host {holder['host']}, process {holder['pid']}, since {holder['since']}"
    except (ValueError, KeyError, TypeError):
        return "which has not written its name yet"
