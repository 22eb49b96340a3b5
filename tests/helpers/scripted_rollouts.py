"""A rollout process whose worker does what a test asks of it."""

import contextlib
import ctypes
import os
import re
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from tests.helpers import Unspeakable
from tests.helpers.forked_rollouts import fork
from torchtitan.grpo.config.job_config import Reward, Rollout
from torchtitan.grpo.engines.fleet_view import FleetError
from torchtitan.grpo.engines.protocol import EngineError, Refused
from torchtitan.grpo.errors import PlainError, UserError, UserErrorOfAllRanks
from torchtitan.grpo.process.stopping import StopRequested
from torchtitan.grpo.rewards.runner import RewardRunner
from torchtitan.grpo.run import rollout_process, rollout_service
from torchtitan.grpo.run.rollout_process import RolloutProcess

FAILURES = {
    "stop": StopRequested(),
    "user": UserError("[data] path: no such file"),
    "all ranks": UserErrorOfAllRanks("on all ranks"),
    "engine": EngineError("no server"),
    "refused": Refused("the server refuses"),
    "fleet": FleetError("0 of 1 servers left"),
    "plain": PlainError("half a character: \ud83d"),
    "value": ValueError("no such row"),
    "exit": SystemExit(3),
}


class Fields(Exception):
    """As one of foreign code, with attributes of its own. Python 3.11 asks it for notes, and gets another error."""

    def __getattr__(self, name: str) -> str:
        return {}[name]


class Worker:
    """In place of `RolloutWorker`. Its verbs are what tests call."""

    stream = None
    newest = 0

    def __init__(self, resources: contextlib.ExitStack, event: Callable[..., None]) -> None:
        self.resources, self.event = resources, event
        self.scored = 0
        self.told: list[Any] = []
        self.collector = SimpleNamespace(on_loop=lambda call: call())
        self.fleet = SimpleNamespace(apply=self.told.append, requests_in_flight=lambda serial: 10 * serial)
        self.wrong = False

    def echo(self, *values: Any) -> Any:
        return [self.newest, *map(bytes if values and isinstance(values[0], memoryview) else list, values)]

    def files(self, *parts: bytes) -> tuple[Any, list[list[bytes]]]:
        return len(parts), [[part, part] for part in parts]

    def files_later(self, seconds: float) -> tuple[Any, list[list[bytes]]]:
        time.sleep(seconds)
        return None, [[b"a"], [b"b"]]

    def lacks_memory(self, size: int) -> None:
        raise MemoryError(size)

    def fails(self, name: str) -> None:
        raise FAILURES[name]

    def fails_unspeakably(self) -> None:
        raise Unspeakable

    def fails_with_fields(self) -> None:
        raise UserError("a hook failed") from Fields()

    def unsendable(self) -> object:
        return object()

    def waits(self, seconds: float, scores: bool = False) -> str:
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            time.sleep(0.02)
            self.scored += scores
        return "waited"

    def waits_for(self, path: str) -> None:
        while not os.path.exists(path):
            time.sleep(0.02)

    def servers_told(self) -> list[Any]:
        return self.told

    def describes_wrongly(self) -> None:
        self.wrong = True

    def describe(self) -> str:
        if self.wrong:
            raise RuntimeError("dictionary changed size during iteration")
        return "2 requests wait"

    def touches_when_closed(self, path: str) -> None:
        self.resources.callback(Path(path).touch)

    def starts_rewards(self) -> int:
        runner = RewardRunner(Reward(functions=["tests.helpers.rewards:varied"], workers=1), Rollout())
        (worker,) = runner._workers
        return worker._process.pid

    def closes_slowly(self) -> None:
        self.resources.callback(time.sleep, 60)

    def matches(self, text: str) -> bool:
        return re.match("(a|a)*b", text) is not None

    def dies(self, number: int) -> None:
        os.kill(os.getpid(), number)

    def exits(self, status: int) -> None:
        os._exit(status)

    def leaves_a_child(self) -> int:
        """It holds this process's end of the channel."""
        if pid := os.fork():
            return pid
        time.sleep(60)
        os._exit(0)


def set_up(beat_s: float, close_s: float = rollout_service._CLOSE_S, prepare_s: float = 0.0) -> None:
    """In the process itself, before it serves."""

    def prepare(service: rollout_service.Service) -> None:
        ctypes.PyDLL(None).usleep(int(prepare_s * 1e6))  # it holds the interpreter, as a large library that is loaded
        service.worker = Worker(service.resources, service._event)  # type: ignore[assignment]

    rollout_service.BEAT_S, rollout_service._CLOSE_S = beat_s, close_s
    rollout_service.Service._prepare = prepare  # type: ignore[method-assign]


def train(folder: Path, beat_s: float) -> None:
    """A trainer. It has three rollout processes: one waits, one works, and one holds its interpreter."""
    rollout_process.start = fork  # type: ignore[assignment]
    rollout_service.HELD_S = 2.0
    set_up(beat_s, close_s=1.5)
    processes = [RolloutProcess(lambda *_: None, lambda *_: None, 20.0) for _ in range(3)]
    for process in processes:
        process.call("prepare", 0)
    processes[0].call("touches_when_closed", 0, [str(folder / "closed")])
    pids_of_rewards = [process.call("starts_rewards", 0)[0] for process in processes]
    threading.Thread(target=processes[1].call, args=("waits", 0, [60]), daemon=True).start()
    threading.Thread(target=processes[2].call, args=("matches", 0, ["a" * 64]), daemon=True).start()
    (folder / "pids.new").write_text(" ".join(map(str, [*pids_of_rewards, *(each.pid for each in processes)])))
    (folder / "pids.new").rename(folder / "pids")
    time.sleep(60)
