"""Child processes that end with this one."""

import contextlib
import os
import shlex
import signal
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path

from bench_common import ROOT

LOG_TAIL_CHARS = 3000
GRACE_S = 40.0
"""Longer than torchrun's own for its ranks, 30 s: they are in sessions of their own, and outlive one that is killed."""


class Process:
    """A command in a process group of its own, which `close` ends whole: SIGTERM, after `GRACE_S` SIGKILL."""

    def __init__(self, command: list[str], log: Path, environment: Mapping[str, str]):
        log.parent.mkdir(parents=True, exist_ok=True)
        self.log = log
        with log.open("wb") as file:
            file.write(f"$ {shlex.join(command)}\n".encode())
            file.flush()
            self._process = subprocess.Popen(
                command,
                cwd=ROOT,
                env={**os.environ, **environment},
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                process_group=0,
            )

    def status(self) -> int | None:
        """The exit status, None while it runs."""
        return self._process.poll()

    def said(self) -> str:
        return f"{self.log} ends with:\n{self.log.read_text(errors='replace')[-LOG_TAIL_CHARS:]}"

    def close(self) -> None:
        for number in (signal.SIGTERM, signal.SIGKILL):
            # The group, not the leader: a child that outlives it would keep its GPU.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, number)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(GRACE_S)
                if number == signal.SIGTERM:
                    time.sleep(0.2)
