"""What is asked of the rollout process about a server, and what it is told, without the process itself."""

import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from torchtitan.grpo.run.kept_process import KeptProcess
from torchtitan.grpo.run.kept_processes import KeptProcesses
from torchtitan.grpo.run.rollout_process import ProcessLost

SERVER = SimpleNamespace(serial=1, version=7, in_traffic=True)


class Process:
    """Answers as it is told to, and sends nothing by itself."""

    scored, pid, lost = 0, 0, ""

    def __init__(self) -> None:
        self.answer: Any = [5, 7]
        self.unsent: list[Callable[[], Any]] = []

    def ask(self, question: str, serial: int, limit_s: float) -> Any:
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer

    def tell_made(self, what: str, make: Callable[[], Any]) -> None:
        self.unsent.append(make)


@pytest.fixture
def process() -> Process:
    return Process()


@pytest.fixture
def kept(process: Process) -> KeptProcess:
    return KeptProcess(lambda *_: process, lambda *_: None)


def test_versions_in_use_are_unknown_while_the_process_is_blocked(kept, process):
    """Else an adapter that answers run under would be unloaded."""
    assert kept.versions_in_use(SERVER) == {5, 7}
    process.answer = TimeoutError()
    assert kept.versions_in_use(SERVER) is None
    process.answer = ProcessLost("it is gone")
    assert kept.versions_in_use(SERVER) == {7}, "servers end the requests of one that is gone"


def test_changes_are_told_together_and_none_is_left_out(kept, process):
    state = SimpleNamespace(now=0)
    kept.follow(SimpleNamespace(whole=lambda: state.now, change=lambda: state.now))
    process.unsent.clear()
    kept._is_told = None
    for state.now in (1, 2, 3):
        kept.tell_of_servers()
    assert [make() for make in process.unsent] == [3], "one message with the newest state"
    state.now = 4
    kept.tell_of_servers()
    assert [make() for make in process.unsent[1:]] == [4], "what changes after it was made is told too"


def test_a_process_that_takes_a_place_when_servers_become_known_is_told_all_of_them():
    class Lost(Process):
        def tell_made(self, what: str, make: Callable[[], Any]) -> None:
            kept._on_end(self, "it has ended")

    later = [Process(), Lost()]
    kept = KeptProcess(lambda *_: later.pop(), lambda *_: None)
    (new,) = later
    kept.follow(SimpleNamespace(whole=lambda: "all", change=lambda: None))
    assert next(make() for make in new.unsent) == "all"


def test_a_close_does_not_wait_until_another_process_is_tried(monkeypatch):
    def lacks_room(*_: Any) -> Process:
        tried.set()
        raise ProcessLost("no rollout process can be started")

    tried, kept = threading.Event(), KeptProcess(lambda *_: Process(), lambda *_: None)
    monkeypatch.setattr("torchtitan.grpo.run.kept_process.LOSSES_MAX", 100)
    kept.losses_in_a_row = 50  # the next try comes after so many seconds
    monkeypatch.setattr(kept, "_start", lacks_room)
    replaces = threading.Thread(target=kept._replace, args=("it has ended",), daemon=True)
    replaces.start()
    assert tried.wait(5)
    monkeypatch.setattr(kept, "_process", None)
    kept.close()
    replaces.join(5)
    assert not replaces.is_alive()


def test_processes_that_take_long_to_close_do_so_at_the_same_time():
    """Or several would pass the time that a run has to close."""
    both = threading.Barrier(2)

    class Slow(Process):
        def close(self) -> None:
            both.wait(5)

    KeptProcesses(lambda: KeptProcess(lambda *_: Slow(), lambda *_: None), 2).close()


def test_one_process_is_closed_where_the_machine_has_no_thread(monkeypatch):
    closed = []

    class Closable(Process):
        def close(self) -> None:
            closed.append(self)

    def has_none(*_: Any) -> None:
        raise RuntimeError("can't start new thread")

    processes = KeptProcesses(lambda: KeptProcess(lambda *_: Closable(), lambda *_: None), 1)
    monkeypatch.setattr(threading.Thread, "start", has_none)
    processes.close()
    assert closed
