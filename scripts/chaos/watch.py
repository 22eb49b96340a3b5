"""What a run says and logs, with the time at which it came."""

import re
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from chaos.aimed import named_process
from chaos.processes import Trainer, steps_of, until

_OUT = re.compile(r"(http://\S+) is (lost|out of traffic): (.*)")
_ROLLOUTS = re.compile(r"rollout process \(pid \d+\)|Rollouts go on")
_IN = re.compile(r"(http://\S+) is in traffic, with weights of version (\d+)")


@dataclass
class Change:
    """A server entered or left traffic."""

    time: float
    url: str
    is_in: bool
    line: str


class Tail:
    """Reads a text file as it grows."""

    def __init__(self, path: Path) -> None:
        self._path, self._offset, self._rest = path, 0, ""

    def new_lines(self) -> list[str]:
        """The lines that were completed since the last call; none while there is no file."""
        try:
            with self._path.open("rb") as file:
                file.seek(self._offset)
                read = file.read()
        except FileNotFoundError:
            return []
        self._offset += len(read)
        *lines, self._rest = (self._rest + read.decode(errors="replace")).split("\n")
        return lines


class Watch(threading.Thread):
    """Reads along while a run trains.

    Attributes:
        changes: Servers that entered or left traffic, in order.
        rollouts: (time, line) of what was said of rollout processes that ended.
        steps: (time, line of metrics.jsonl) of each step.
        usage: (time, file descriptors, threads, resident MiB) of rank 0 and its rollout process together, about once a
            second.
    """

    def __init__(self, trainer: Trainer) -> None:
        super().__init__(name="watch", daemon=True)
        self._trainer = trainer
        self._ended = threading.Event()
        self.changes: list[Change] = []
        self.rollouts: list[tuple[float, str]] = []
        self.steps: list[tuple[float, dict]] = []
        self.usage: list[tuple[float, int, int, float]] = []
        self.start()

    def run(self) -> None:
        log, metrics, next_usage = Tail(self._trainer.log_path), Tail(self._trainer.folder / "metrics.jsonl"), 0.0
        while not self._ended.wait(0.02):
            now = time.time()
            for line in log.new_lines():
                if found := _OUT.search(line) or _IN.search(line):
                    self.changes.append(Change(now, found[1], found.re is _IN, line))
                if _ROLLOUTS.search(line):
                    self.rollouts.append((now, line))
            self.steps += [(now, line) for line in steps_of(metrics.new_lines())]
            if now >= next_usage and self.steps:
                next_usage = now + 1.0
                self._measure(now)

    def end(self) -> None:
        self._ended.set()
        self.join(10)

    def first(self, url: str, is_in: bool, since: float) -> Change | None:
        """The first change of this server to this state at or after a time."""
        return next((c for c in self.changes if c.url == url and c.is_in == is_in and c.time >= since), None)

    def is_in(self, url: str) -> bool:
        return next((change.is_in for change in reversed(self.changes) if change.url == url), False)

    def wait_for(self, what: str, ready: Callable[[], object], limit_s: float) -> None:
        """Wait while the run goes on.

        Raises:
            Broken: It ended, or `limit_s` have passed.
        """
        until(what, ready, limit_s, self._trainer)

    def _measure(self, now: float) -> None:
        rollouts = named_process(self._trainer.scratch / "pid-rollouts")
        try:
            used = [_usage(pid) for pid in (self._trainer.pid, rollouts) if pid]
        except (OSError, KeyError):  # one has ended; a zombie has no memory
            return
        descriptors, threads, resident_mib = map(sum, zip(*used, strict=True))
        self.usage.append((now, int(descriptors), int(threads), resident_mib))


def _usage(pid: int) -> tuple[int, int, float]:
    """File descriptors, threads and resident MiB of a process."""
    process = Path(f"/proc/{pid}")
    status = dict(line.split(":", 1) for line in (process / "status").read_text().splitlines() if ":" in line)
    return len(list((process / "fd").iterdir())), int(status["Threads"]), int(status["VmRSS"].split()[0]) / 1024
