"""Commands as child processes of scripts and tests: a process group, a log, bounded waits, nothing left at the end."""

import contextlib
import os
import secrets
import shlex
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
GRACE_S = 40.0
"""Longer than the 30 s that torchrun gives its ranks. They have sessions of their own, so they survive its SIGKILL."""
GONE_S = 20.0
LOG_TAIL_CHARS = 3000


def wait_for(
    ready: Callable[[], object], limit_s: float, poll: Callable[[], int | None] = lambda: None, pause_s: float = 0.05
) -> str:
    """Wait until `ready`.

    Args:
        poll: The exit status of what it waits for; None while that runs.

    Returns:
        "" once it is ready, else why it will not be: "ended with exit status 1", "not within 60 s".
    """
    deadline = time.monotonic() + limit_s
    while True:
        status = poll()  # before the last look
        if ready():
            return ""
        if status is not None:
            return f"ended with exit status {status}"
        if time.monotonic() > deadline:
            return f"not within {limit_s:g} s"
        time.sleep(pause_s)


class ProcessGroup:
    """A command in a process group of its own, not in a session of its own: Linux first divides the cores among those.

    Args:
        log: Gets the command, and then what it prints. A second start goes on with it.
        environment: Variables in addition to this process's, or in place of them.
    """

    def __init__(self, command: Sequence[object], log: Path, environment: Mapping[str, str] | None = None) -> None:
        words = [str(word) for word in command]
        log.parent.mkdir(parents=True, exist_ok=True)
        self.log_path = log
        with log.open("ab") as file:
            file.write(f"$ {shlex.join(words)}\n".encode())
            file.flush()
            self._process = subprocess.Popen(
                words,
                cwd=ROOT,
                env={**os.environ, **(environment or {})},
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                process_group=0,
            )
        self.pid = self._process.pid

    @property
    def log(self) -> str:
        return self.log_path.read_text(errors="replace")

    def said(self) -> str:
        """The end of its log, for a message."""
        return f"{self.log_path} ends with:\n{self.log[-LOG_TAIL_CHARS:]}"

    def poll(self) -> int | None:
        """The exit status of the command; None while it runs."""
        return self._process.poll()

    @property
    def returncode(self) -> int | None:
        return self.poll()

    def wait(self, limit_s: float) -> int:
        """Its exit status.

        Raises:
            subprocess.TimeoutExpired: It runs for longer.
        """
        return self._process.wait(limit_s)

    def send_signal(self, number: int) -> None:
        """To the command alone."""
        self._process.send_signal(number)

    def signal(self, number: int) -> None:
        """To the whole group, which may outlive the command: an engine's workers would keep their GPU."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, number)

    def running(self) -> list[int]:
        """Processes of the group that run."""
        self.poll()  # or the command stayed as a zombie
        return group_members(self.pid)

    def kill(self) -> None:
        """kill -9 to the whole group.

        Raises:
            RuntimeError: Some are there after `GONE_S`.
        """
        self.signal(signal.SIGKILL)
        if wait_for(lambda: not self.running(), GONE_S, pause_s=0.02):
            raise RuntimeError(f"processes {self.running()} are there {GONE_S:g} s after they were killed")
        self.wait(GONE_S)

    def close(self, grace_s: float = GRACE_S) -> None:
        """SIGTERM to the whole group, and after `grace_s` `kill`."""
        self.signal(signal.SIGTERM)
        wait_for(lambda: not self.running(), grace_s)
        self.kill()

    def __enter__(self) -> "ProcessGroup":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def group_members(group: int) -> list[int]:
    """Processes of a process group that run (Linux); zombies that nobody has waited for yet do not count."""
    members = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            # After the name, in parentheses and with any character in it: state, parent, group.
            state, _, its_group = path.read_text().rpartition(")")[2].split()[:3]
            if int(its_group) == group and state != "Z":
                members.append(int(path.parent.name))
    return members


def free_port() -> int:
    """A port that nobody listens at. Not one of those that the system gives to outgoing connections, which may take it
    before the server that it is for.
    """
    while True:
        port = 10_000 + secrets.randbelow(22_768)
        with socket.socket() as listener, contextlib.suppress(OSError):
            listener.bind(("127.0.0.1", port))
            return port
