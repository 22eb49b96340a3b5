"""Has a trainer fork its first rollout process. One that takes the place of another is started as users' are.

With STARTED_ROLLOUTS in the environment, only the one of this number is, and 0 is none. The others are forked from the
process that all ranks are forked from: a trainer that trains has threads, and a fork of it has their locks.
"""

import os
import subprocess
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerProcess

from tests.helpers.forked_rollouts import fork
from torchtitan.grpo.run import rollout_process
from torchtitan.grpo.run.rollout_service import main
from torchtitan.grpo.weight_wire.version_names import own_run

_start = rollout_process.start


def start(descriptor, *how):
    start.count += 1
    if start.count == 1:
        return fork(descriptor, *how)
    if os.environ.get("STARTED_ROLLOUTS", str(start.count)) == str(start.count):
        return _start(descriptor, *how)
    return ForkedBesides(descriptor)


start.count = 0
rollout_process.start = start


class ForkedBesides:
    """The part of `subprocess.Popen` that is used of it."""

    def __init__(self, descriptor: int) -> None:
        files = [Connection(os.dup(number), readable=False) for number in (descriptor, 1, 2)]
        self._process = ForkServerProcess(target=_run, args=(files, dict(os.environ), os.getcwd(), own_run()))
        self._process.start()
        self.pid = self._process.pid
        for file in files:
            file.close()

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired("rollouts", timeout)
        return self._process.exitcode

    def kill(self) -> None:
        self._process.kill()


def _run(files, environ, folder, run):
    os.setpgid(0, 0)
    os.environ.clear()
    os.environ.update(environ)
    os.chdir(folder)
    for number in (1, 2):
        os.dup2(files[number].fileno(), number)
    main(os.dup(files[0].fileno()), run)
