"""What /proc says of this process and its descendants (Linux)."""

import contextlib
import os
from collections.abc import Iterable
from pathlib import Path

MIB = 1 << 20


def descendants(pid: int) -> list[int]:
    """Children, their children and so on, that run now."""
    children: dict[int, list[int]] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            parent = int(path.read_text().rpartition(")")[2].split()[1])
            children.setdefault(parent, []).append(int(path.parent.name))
    found = [pid]
    for each in found:
        found += children.get(each, [])
    return found[1:]


def pin(pids: Iterable[int], cpus: list[int]) -> None:
    """Let all threads of these processes run on `cpus` only; on any if there are none. Later threads do so too."""
    for pid in pids if cpus else ():
        for thread in os.listdir(f"/proc/{pid}/task"):
            with contextlib.suppress(ProcessLookupError):
                os.sched_setaffinity(int(thread), cpus)


def cpu_s(pids: Iterable[int]) -> float:
    """CPU seconds of processes since their start."""
    ticks = 0
    for pid in pids:
        with contextlib.suppress(OSError):
            user, system = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:13]
            ticks += int(user) + int(system)
    return ticks / os.sysconf("SC_CLK_TCK")


def forget_peaks(pids: Iterable[int]) -> None:
    """`peak_mib` begins anew, at the memory of now."""
    for pid in pids:
        with contextlib.suppress(OSError):
            Path(f"/proc/{pid}/clear_refs").write_text("5")


def peak_mib(pids: Iterable[int]) -> float:
    """Highest resident memory of each, in sum. Memory that processes share counts in each of them."""
    total = 0
    for pid in pids:
        with contextlib.suppress(OSError):
            lines = Path(f"/proc/{pid}/status").read_text().splitlines()
            total += sum(int(line.split()[1]) << 10 for line in lines if line.startswith("VmHWM:"))
    return total / MIB
