"""A rollout process that is forked, where it would be started: imports take longer than most test runs.

What is forked has torch, threads of nobody, and the same program.
"""

import contextlib
import itertools
import os
import posix
import signal
import subprocess
import sys
import threading
import time

from torchtitan.grpo.run.rollout_service import main
from torchtitan.grpo.weight_wire.version_names import own_run

_LOOK_S = 0.01


class Forked:
    """The part of `subprocess.Popen` that is used of it."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._status: int | None = None
        self._lock = threading.Lock()

    def poll(self) -> int | None:
        with self._lock:
            if self._status is None:
                pid, status = os.waitpid(self.pid, os.WNOHANG)
                self._status = os.waitstatus_to_exitcode(status) if pid else None
            return self._status

    def wait(self, timeout: float | None = None) -> int:
        for looks in itertools.count():
            if (status := self.poll()) is not None:
                return status
            if timeout is not None and looks * _LOOK_S > timeout:
                raise subprocess.TimeoutExpired("rollouts", timeout)
            time.sleep(_LOOK_S)
        raise AssertionError

    def kill(self) -> None:
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)


def fork(descriptor: int, hides_torch: bool = True) -> Forked:
    """In place of `rollout_process.start`."""
    run, trainer = own_run(), os.getpid()
    if pid := os.fork():
        return Forked(pid)
    os._exit = posix._exit  # `forked_torchrun` has another: the trainer's own code would go on in this process
    try:
        os.setpgid(0, 0)
        frame = sys._getframe(1)
        while "own" not in frame.f_locals:
            frame = frame.f_back
        frame.f_locals["own"].close()  # the trainer's end, or nobody would hear that it is closed
        main(os.dup(descriptor), run)
    finally:
        assert os.getpid() != trainer
        os._exit(1)
