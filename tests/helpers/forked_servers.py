"""Embedded servers that a run starts itself, forked: their imports take most of their start.

A process with FORKED_SERVERS in its environment forks so many of itself before its script begins. Each waits to become
a server's guard, and the guard's child then runs what it would be replaced by. All have the parents, groups and command
lines that they have for users, so whoever looks for them by these finds them. Once none is left, servers are started as
users' are.
"""

import ctypes
import json
import os
import signal
import subprocess
import sys
import tempfile
import traceback
from pathlib import Path
from typing import Any, NoReturn

from tests.helpers.forked_rollouts import Forked
from torchtitan.grpo.servers import guard, kept_server

_waiting: list[tuple[Forked, int]] = []
"""Processes, and the pipe on which each waits for its command."""


class Guard(Forked):
    """The part of `subprocess.Popen` that is used of it."""

    @property
    def returncode(self) -> int | None:
        return self._status

    def terminate(self) -> None:
        os.kill(self.pid, signal.SIGTERM)


class _Subprocess:
    """The module, as far as the supervisor uses it."""

    def __getattr__(self, name: str) -> Any:
        return getattr(subprocess, name)

    def Popen(self, words: list[str], env: dict[str, str], stdout: Any, **how: Any) -> Any:
        if not _waiting or not any("torchtitan.grpo.engines.embedded" in word for word in words):
            return subprocess.Popen(words, env=env, stdout=stdout, **how)
        process, pipe = _waiting.pop()
        os.setpgid(process.pid, process.pid)
        with open(pipe, "w", encoding="utf-8") as file:
            file.write(json.dumps([words, env, stdout.name]) + "\n")
        return process


def prepare(count: int) -> None:
    """Fork `count` of this process, which has no threads that hold a lock."""
    parent = os.getpid()
    for _ in range(count):
        heard, told = os.pipe()
        pid = os.fork()
        if pid == 0:
            os.close(told)
            for _, pipe in _waiting:
                os.close(pipe)
            _wait(heard, parent)
        os.close(heard)
        _waiting.append((Guard(pid), told))
    if count:
        kept_server.subprocess = _Subprocess()  # type: ignore[assignment]


def _wait(heard: int, parent: int) -> NoReturn:
    status = 1
    try:
        with open(heard, encoding="utf-8") as file:
            text = file.readline()  # its end may come late: rollout processes hold the pipe too
        if not text:  # nobody wants it: the parent has ended
            return
        words, environ, log = json.loads(text)
        _begin(words, environ, log)
        script = words.index(kept_server._GUARD)
        _, grace_s, folder, left, *command = words[script + 1 :]
        os.execvp = _run
        status = guard.main(parent, float(grace_s), folder, left, command)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(status)


def _begin(words: list[str], environ: dict[str, str], log: str) -> None:
    os.environ.clear()
    os.environ.update(environ)
    tempfile.tempdir = None
    files = os.open(os.devnull, os.O_RDONLY), *(os.open(log, os.O_WRONLY | os.O_APPEND) for _ in "oe")
    for number, file in enumerate(files):
        os.dup2(file, number)
    rename(words)


def _run(file: str, words: list[str]) -> NoReturn:
    """In place of `os.execvp`: `python -c PROGRAM ARGUMENTS`."""
    signal.set_wakeup_fd(-1)
    rename(words)
    status: Any = 0
    at = words.index("-c")
    sys.argv = words[at : at + 1] + words[at + 2 :]
    try:
        exec(words[at + 1], {"__name__": "__main__"})
    except SystemExit as ended:
        status = ended.code or 0
        if isinstance(status, str):
            print(status, file=sys.stderr)
            status = 1
    except BaseException:
        traceback.print_exc()
        status = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def rename(words: list[str]) -> None:
    """Make these words this process's command line, in place of its own and of the environment that it began with."""
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    arguments, variables_end = int(fields[45]), int(fields[48])
    text = " ".join(words).encode()
    assert len(text) < variables_end - arguments
    ctypes.memset(arguments, 0, variables_end - arguments)
    ctypes.memmove(arguments, text, len(text))
