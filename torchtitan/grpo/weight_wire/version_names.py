"""Names of weight versions: "7@gpu01-4711-5f3a2c" is version 7 of the run whose rank 0 is process 4711 on host gpu01.

Servers report these names: which weights they serve, and which sampled each token. So a restarted server, or one that
another trainer feeds, never passes for one that has our weights. Standard library only, since servers import it too.
"""

import functools
import os
import re
import socket
from pathlib import Path

_HOST_CHARS_MAX = 40
_DIGITS_MAX = 18

MEMORY = Path("/dev/shm")
"""A file system in memory."""
FOLDER_PREFIX = "torchtitan-grpo-"
"""How the folder with a run's versions begins, of `weight_sync/disk.py`; then comes the run, and a random part."""

OWNED = "this server gets its weights from"
"""How a server's refusal begins; see `owned_by`."""

_joined = ""


def own_run() -> str:
    """The name of the run that this process belongs to. A resumed run has a new one: its version 7 may differ."""
    return _joined or _run_of_process(os.getpid())


def join_run(run: str) -> None:
    """This process belongs to another one's run."""
    global _joined
    _joined = run


def version_name(version: int, run: str = "") -> str:
    """What servers call this version of a run; of our own by default."""
    return f"{version}@{run or own_run()}"


def version_of(name: str) -> int | None:
    """The version with this name; None if it is not one of our run's."""
    return _version_of(name, own_run())


def other_run(name: str | None) -> str:
    """The run, if it is not ours, that has a version with this name. "" for a server's own names."""
    number, run = _parts(name or "")
    return run if number and run != own_run() else ""


def origin(name: str) -> str:
    """Where weights with this name, which is not the expected one, come from, as the end of a sentence."""
    run = other_run(name)
    if run:
        return f"{describe_run(run)} feeds the server too: give each run servers of its own"
    return "the server was restarted and serves other weights"


def describe_run(run: str) -> str:
    host, pid, _ = _process(run)
    return f"run {run} (process {pid} on {host})" if pid else f"run {run}"


def owned_by(run: str) -> str:
    """Why a server refuses another trainer than this one."""
    return f"{OWNED} {describe_run(run)}: end that run, or give each run servers of its own"


def lives(run: str) -> bool | None:
    """Whether the run's process is there; None if it cannot be looked up, since it is on another host."""
    host, pid, started = _process(run)
    return _start_of(pid) == started if host == _host() and started else None


@functools.lru_cache(1024)  # each answer names a few again: this takes interpreter time from the trainer
def _version_of(name: str, run: str) -> int | None:
    number, named = _parts(name)
    return int(number) if number and named == run else None


def _parts(name: str) -> tuple[str, str]:
    """(digits of the version, run); no digits if it is not the name of a version."""
    number, _, run = name.partition("@")
    return (number if number.isdecimal() and len(number) <= _DIGITS_MAX else ""), run


def _process(run: str) -> tuple[str, str, str]:
    """(host, process id, start)."""
    host, _, started = run.rpartition("-")
    host, _, pid = host.rpartition("-")
    return host, pid, started


@functools.cache
def _run_of_process(pid: int) -> str:
    return f"{_host()}-{pid}-{_start_of(str(pid))}"


def _host() -> str:
    return re.sub(r"[^A-Za-z0-9]+", "-", socket.gethostname())[:_HOST_CHARS_MAX]


def _start_of(pid: str) -> str:
    """When a process of this host started, in the kernel's ticks; "" if it has ended. Pids are used again."""
    try:
        fields = Path(f"/proc/{int(pid)}/stat").read_text().rpartition(")")[2].split()
    except (OSError, ValueError):
        return ""
    return "" if fields[0] == "Z" else f"{int(fields[19]):x}"
