"""A rollout process that is forked, where it would be started: imports take longer than most test runs.

What is forked has torch, threads of nobody, and the same program.
"""

import contextlib
import gc
import itertools
import os
import posix
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from multiprocessing import forkserver, resource_tracker
from multiprocessing.connection import Connection
from multiprocessing.connection import wait as wait_for_one
from multiprocessing.context import ForkServerProcess

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
    gc.enable()  # a trainer collects by itself
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


class ForkedBesides:
    """In place of `rollout_process.start` too, in a process that has threads: it is forked from the one that `Ranks`
    are forked from. `setup` is called in it first. The part of `subprocess.Popen` that is used of it."""

    def __init__(self, descriptor: int, hides_torch: bool = True, setup: Callable[[], None] = int) -> None:
        _take_the_fork_server_that_runs()
        files = [Connection(os.dup(number), readable=False) for number in (descriptor, 1, 2)]
        self._process = ForkServerProcess(target=_run, args=(files, dict(os.environ), os.getcwd(), own_run(), setup))
        self._process.start()
        self.pid, self._reads = self._process.pid, threading.Lock()
        for file in files:
            file.close()

    def poll(self) -> int | None:
        with self._reads:  # `multiprocessing` would have one of two threads read 255
            return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        wait_for_one([self._process.sentinel], timeout)
        if (status := self.poll()) is None:
            raise subprocess.TimeoutExpired("rollouts", timeout)
        return status

    def kill(self) -> None:
        self._process.kill()


def _take_the_fork_server_that_runs() -> None:
    """In a process that was forked from one itself, Python 3.11 would start another, which imports everything again."""
    server = forkserver._forkserver
    if server._forkserver_address and server._forkserver_pid is None:
        server.ensure_running = resource_tracker.ensure_running


def _run(files, environ, folder, run, setup):
    os.setpgid(0, 0)
    os.environ.clear()
    os.environ.update(environ)
    os.chdir(folder)
    for number in (1, 2):
        os.dup2(files[number].fileno(), number)
    setup()
    main(os.dup(files[0].fileno()), run)
