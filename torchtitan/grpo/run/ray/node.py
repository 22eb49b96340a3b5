"""The agent of one node: an actor beside the ranks that are there.

A rank that hangs answers no call of Ray's, and a rank that trains answers none before its step is done. The agent is
another process. It sees theirs in /proc, and reaches them with signals through a descriptor (pidfd), which never means
another process that got the same number.
"""

import os
import select
import signal
import socket
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torchtitan.grpo.run.ray.dispatch import CompiledGraph

_STACKS_S = 1.0
"""How long a rank's threads may take to write their stacks."""
_KILL_S = 10.0


@dataclass
class _Process:
    """A rank as the agent knows it."""

    pid: int
    pidfd: int
    stacks: int
    doing: str = "starting"
    step: int = 0
    detail: str = ""
    outcome: dict[str, Any] | None = None
    beat_at: float = field(default_factory=time.monotonic)
    moved_at: float = field(default_factory=time.monotonic)

    def alive(self) -> bool:
        return not select.select([self.pidfd], [], [], 0)[0]

    def send(self, number: int) -> None:
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(self.pidfd, number)

    def halted(self) -> bool:
        """Whether a signal has stopped it, SIGSTOP for example."""
        with suppress(OSError):
            return Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()[0] in "Tt"
        return False


class NodeAgent:
    def __init__(self) -> None:
        self._ranks: dict[int, _Process] = {}
        self._graph: CompiledGraph | None = None

    # From the ranks

    def register(self, rank: int, pid: int, stacks: int) -> None:
        """A rank has started. `stacks` is its descriptor of the file to which SIGUSR1 writes every thread's stack."""
        self._ranks[rank] = _Process(pid, os.pidfd_open(pid), stacks)

    def beat(self, rank: int, doing: str, step: int, detail: str) -> None:
        process = self._ranks[rank]
        process.beat_at = time.monotonic()
        if (doing, step) != (process.doing, process.step):
            process.moved_at = process.beat_at
        process.doing, process.step, process.detail = doing, step, detail

    def ended(self, rank: int, outcome: dict[str, Any]) -> None:
        self._ranks[rank].outcome = outcome

    # From the driver

    def free_port(self) -> int:
        with socket.socket() as probe:
            probe.bind(("", 0))
            return probe.getsockname()[1]

    def status(self) -> dict[int, dict[str, Any]]:
        """Of each rank here: whether it lives, what it does, seconds since it got on and since it was heard."""
        now = time.monotonic()
        return {
            rank: {
                "alive": each.alive(),
                "halted": each.halted(),
                "doing": each.doing,
                "step": each.step,
                "detail": each.detail,
                "still_s": now - each.moved_at,
                "silent_s": now - each.beat_at,
                "outcome": each.outcome,
                "pid": each.pid,
            }
            for rank, each in list(self._ranks.items())
        }

    def signal(self, number: int) -> None:
        for each in list(self._ranks.values()):
            each.send(number)

    def stacks(self) -> dict[int, str]:
        """Every thread's stack, of each rank that can still write it."""
        asked = {rank: each for rank, each in self._ranks.items() if each.alive() and not each.halted()}
        files = {rank: Path(f"/proc/{each.pid}/fd/{each.stacks}") for rank, each in asked.items()}
        for each in asked.values():
            each.send(signal.SIGUSR1)
        time.sleep(_STACKS_S)
        texts = {}
        for rank, path in files.items():
            with suppress(OSError):
                texts[rank] = path.read_text(errors="replace")
        return texts

    def kill(self, after_s: float = 0.0) -> list[int]:
        """SIGKILL to every rank that is here after a while, also to one that a signal has stopped.

        Returns:
            Processes that are left even then.
        """
        if self._left(after_s):
            self.signal(signal.SIGKILL)
        return self._left(_KILL_S)

    def _left(self, wait_s: float) -> list[int]:
        deadline = time.monotonic() + wait_s
        while (left := [each.pid for each in self._ranks.values() if each.alive()]) and time.monotonic() < deadline:
            time.sleep(0.02)
        return left

    # As the conductor of its ranks, where they are on several nodes

    def compile(self, actors: list[Any], timeout_s: float) -> None:
        self._graph = CompiledGraph(actors, timeout_s)

    def call(self, order: int) -> list[Any]:
        return self._graph.call(order)

    def close_graph(self) -> None:
        if self._graph is not None:
            self._graph.close()
