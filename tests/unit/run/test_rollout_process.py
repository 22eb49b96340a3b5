"""The rollout process as the trainer sees it: a real process, with a worker that does what a test asks of it."""

import errno
import os
import signal
import subprocess
import threading
import time
import traceback
from collections.abc import Iterator
from functools import partial
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

import pytest
from process_group import wait_for

from tests.helpers import scripted_rollouts
from tests.helpers.files import no_files_left
from tests.helpers.forked_rollouts import ForkedBesides
from tests.helpers.ranks import begin_imports
from tests.helpers.scripted_rollouts import FAILURES
from torchtitan.grpo.errors import PlainError, UserError
from torchtitan.grpo.process.stopping import StopRequested
from torchtitan.grpo.run import rollout_process
from torchtitan.grpo.run.kept_process import KeptProcess
from torchtitan.grpo.run.rollout_process import ProcessLost, RolloutError, RolloutProcess

LOOK_S = 0.05


class Heard:
    """What a trainer heard."""

    def __init__(self) -> None:
        self.events: list[tuple[str, list[Any]]] = []
        self.ends: list[str] = []
        self.breaks, self.takes_s = False, 0.0

    def on_event(self, name: str, values: list[Any]) -> None:
        self.events.append((name, values))
        time.sleep(self.takes_s)
        if self.breaks:
            raise KeyError(name)

    def on_end(self, process: RolloutProcess, how: str) -> None:
        self.ends.append(how)


def start(descriptor: int, hides_torch: bool = True, prepare_s: float = 0.0) -> ForkedBesides:
    """In place of `rollout_process.start`."""
    return ForkedBesides(descriptor, setup=partial(scripted_rollouts.set_up, LOOK_S, prepare_s=prepare_s))


@pytest.fixture(autouse=True)
def quick_processes(monkeypatch) -> None:
    begin_imports()
    monkeypatch.setattr(rollout_process, "start", start)
    monkeypatch.setattr(rollout_process, "_LOOK_S", LOOK_S)


@pytest.fixture
def heard() -> Heard:
    return Heard()


@pytest.fixture
def process(heard: Heard) -> Iterator[RolloutProcess]:
    begun = RolloutProcess(heard.on_event, heard.on_end, 20.0)
    begun.call("prepare", 0)
    yield begun
    begun.close()


def is_gone(pid: int) -> bool:
    try:
        return ") Z " in Path(f"/proc/{pid}/stat").read_text()
    except FileNotFoundError:
        return True


def test_calls_have_values_files_and_the_newest_version(process, heard):
    assert process.call("echo", 7, [[1, "é"], [None]])[0] == [7, [1, "é"], [None]]
    large = os.urandom(1 << 20)
    assert process.call("echo", 8, file=[large])[0] == [8, large]
    count, files = process.call("files", 9, [b"a", b"", large])
    assert count == 3 and files == [b"aa", b"", large + large]
    process.tell("servers", "first")
    process.tell_made("servers", lambda: None)
    process.tell_made("servers", lambda: "second")
    assert process.call("servers_told", 9)[0] == ["first", "second"], "a change is seen before a later call"
    assert process.ask("requests_in_flight", 4, limit_s=5) == 40
    assert not wait_for(lambda: heard.events, 5) and heard.events[0] == ("beat", [0])


def test_signals_that_are_the_trainers_do_not_end_it(process, heard):
    answer: list[Any] = []
    thread = threading.Thread(target=lambda: answer.append(process.call("waits", 0, [0.4])[0]))
    thread.start()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        os.kill(process.pid, number)
    thread.join(5)
    assert answer == ["waited"] and not heard.ends


def test_an_error_is_raised_as_what_it_was_there(process):
    kinds = {"all ranks": UserError, "refused": UserError}
    for name, failure in FAILURES.items():
        kind = kinds.get(name, type(failure)) if isinstance(failure, PlainError | StopRequested) else RolloutError
        with pytest.raises(kind) as raised:
            process.call("fails", 0, [name])
        assert type(raised.value) is kind
        words = str(failure).encode(errors="replace").decode()
        assert str(raised.value) == words if kind is not RolloutError else words in str(raised.value)
    raised_there = {"unsendable": "TypeError", "fails_unspeakably": "Unspeakable"}
    for verb, arguments, kind in [("fails", ["exit"], "SystemExit"), *((v, [], k) for v, k in raised_there.items())]:
        with pytest.raises(RolloutError, match=kind) as raised:
            process.call(verb, 0, arguments)
        said = "".join(traceback.format_exception(raised.value))
        assert "In the rollout process:\nTraceback" in said and "rollout_service.py" in said and kind in said
    with pytest.raises(UserError, match="a hook failed"):
        process.call("fails_with_fields", 0)
    assert process.call("echo", 1)[0] == [1], "it goes on"


def test_what_it_does_is_described_while_it_does_it(process, tmp_path):
    thread = threading.Thread(target=process.call, args=("waits_for", 0, [str(tmp_path / "described")]))
    thread.start()
    assert not wait_for(lambda: ", in waits_for\n" in process.describe(), 5)
    said = process.describe()
    (tmp_path / "described").touch()
    assert said.startswith("2 requests wait\nin the rollout process:\nThread ") and "Thread MainThread:" in said
    thread.join(5)
    process.call("describes_wrongly", 0)
    assert process.describe() == "RuntimeError: dictionary changed size during iteration"
    assert process.call("echo", 1)[0] == [1], "it goes on"


def test_a_call_without_progress_ends_the_process_and_says_where_it_was(heard):
    process = RolloutProcess(heard.on_event, heard.on_end, 1.0)
    process.call("prepare", 0)
    assert process.call("waits", 0, [1.6, True])[0] == "waited", "answers are scored meanwhile"
    with pytest.raises(TimeoutError) as raised:
        process.call("waits", 0, [60])
    said = str(raised.value)
    assert "has scored no answer for 1 s in 'waits': 2 requests wait" in said and ", in waits\n" in said
    assert not wait_for(lambda: heard.ends, 5)
    assert heard.ends == [process.lost] and process.lost.endswith("was ended, because it did not get on in 'waits'")
    with pytest.raises(TimeoutError, match="has not answered 'describe' in 0 s"):
        begun = RolloutProcess(heard.on_event, heard.on_end, 0.4)
        try:
            begun.ask("describe", limit_s=0)
        finally:
            begun.close()


ENDS = {
    ("dies", signal.SIGKILL): r"was ended by SIGKILL \(nobody sends it but a person, or the kernel when memory is shor",
    ("dies", signal.SIGSEGV): "was ended by SIGSEGV$",
    ("dies", 40): "was ended by signal 40$",  # it has no name
    ("exits", 3): "ended with status 3$",
    ("lacks_memory", 1): "has no memory left$",
}


@pytest.mark.parametrize(("verb", "number"), ENDS)
def test_a_process_that_ends_says_how_to_all_who_ask(verb, number, process, heard):
    how = rf"the rollout process \(pid {process.pid}\) {ENDS[verb, number]}"
    with pytest.raises(ProcessLost, match=how):
        process.call(verb, 0, [number])
    assert not wait_for(lambda: heard.ends, 5)
    for ask in (lambda: process.call("echo", 0), lambda: process.ask("describe", limit_s=1)):
        with pytest.raises(ProcessLost, match=how):
            ask()
    process.tell("servers", 1)
    process.tell_made("servers", lambda: pytest.fail("nobody is there"))
    assert process.describe() == process.lost and heard.ends == [process.lost]
    assert is_gone(process.pid)


def test_a_process_that_does_not_start_is_lost(heard, monkeypatch):
    monkeypatch.setattr(rollout_process, "start", lambda *_: subprocess.Popen(["false"]))
    process = RolloutProcess(heard.on_event, heard.on_end, 20.0)
    with pytest.raises(ProcessLost, match="ended with status 1"):
        process.call("prepare", 0)
    assert not wait_for(lambda: heard.ends == [process.lost], 5)


def test_a_machine_without_room_for_threads_is_asked_again(heard, monkeypatch, caplog):
    kept = KeptProcess(lambda *heard: RolloutProcess(*heard, 20.0), heard.on_event)
    failing, begin = ["rollouts-watch"], threading.Thread.start

    def fails_once(thread: threading.Thread) -> None:
        if thread.name in failing:
            failing.remove(thread.name)
            raise RuntimeError("can't start new thread")
        begin(thread)

    kept.introduce("prepare")
    monkeypatch.setattr(threading.Thread, "start", fails_once)
    os.kill(kept._process.pid, signal.SIGKILL)
    assert kept.call("echo")[0] == [0] and kept.losses == 2
    assert "no rollout process can be watched: can't start new thread" in caplog.text
    kept.close()


def test_a_machine_without_room_for_another_process_is_asked_again(heard, monkeypatch, caplog):
    kept = KeptProcess(lambda *heard: RolloutProcess(*heard, 20.0), heard.on_event)
    failing, begin = [BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")], threading.Thread.start

    def fails_once(*how: Any) -> ForkedBesides:
        if failing:
            raise failing.pop()
        return start(*how)

    kept.introduce("prepare")
    limit = threading.Timer(20, kept.close)
    limit.start()
    monkeypatch.setattr(rollout_process, "start", fails_once)
    monkeypatch.setattr(threading.Thread, "start", lambda thread: None if failing else begin(thread))
    os.kill(kept._process.pid, signal.SIGKILL)
    assert kept.call("echo")[0] == [0] and kept.losses == 2
    assert "no rollout process can be started: [Errno 11] Resource temporarily unavailable" in caplog.text
    limit.cancel()
    kept.close()


def test_an_end_is_noticed_though_its_child_holds_the_channel_and_the_child_ends_too(process):
    child, _ = process.call("leaves_a_child", 0)
    with pytest.raises(ProcessLost, match="status 1"):
        process.call("exits", 0, [1])
    assert not wait_for(lambda: is_gone(child), 5)


def test_a_call_that_does_not_end_when_the_run_stops_ends_the_process(process, monkeypatch):
    monkeypatch.setattr(rollout_process, "STOP_S", 0.5)
    assert process.call("waits", 0, [1.0])[0] == "waited"
    process.stop()
    monkeypatch.setattr(rollout_process, "STOP_S", 10.0)  # the process may stand still for a while
    assert process.call("waits", 0, [0.1])[0] == "waited"
    monkeypatch.setattr(rollout_process, "STOP_S", 0.5)
    with pytest.raises(ProcessLost, match="was ended, because it did not stop in 'waits'"):
        process.call("waits", 0, [60])


def test_a_frozen_process_is_ended(process, heard, monkeypatch):
    monkeypatch.setattr(rollout_process, "FROZEN_S", 6)
    heard.takes_s = 10 * LOOK_S  # the trainer is slow to hear it
    assert process.call("echo", 1)[0] == [1]
    heard.takes_s = 0.0
    os.kill(process.pid, signal.SIGSTOP)
    with pytest.raises(ProcessLost, match="was ended, because it has said nothing for 6 s"):
        process.call("echo", 0)


def test_a_process_may_take_longer_until_its_first_word(heard, monkeypatch):
    def frozen_start(descriptor: int, hides_torch: bool):
        begun = start(descriptor)
        os.kill(begun.pid, signal.SIGSTOP)  # as one that reads its modules from a slow disk
        return begun

    monkeypatch.setattr(rollout_process, "start", frozen_start)
    monkeypatch.setattr(rollout_process, "FROZEN_S", 1)
    monkeypatch.setattr(rollout_process, "START_S", 8)
    process = RolloutProcess(heard.on_event, heard.on_end, 20.0)
    with pytest.raises(ProcessLost, match="was ended, because it has said nothing for 8 s"):
        process.call("prepare", 0)


def test_a_thread_that_fails_on_either_side_ends_it(process, heard):
    process.tell("servers")  # without the change
    with pytest.raises(ProcessLost, match=r"was ended, because .*TypeError: .* one argument \(0 given\)"):
        process.call("waits", 0, [60])
    assert not wait_for(lambda: heard.ends, 5)

    other = RolloutProcess(heard.on_event, heard.on_end, 20.0)
    heard.breaks = True
    began = time.monotonic()
    with pytest.raises(ProcessLost, match="was ended, because KeyError: 'beat'"):
        other.call("waits", 0, [60])
    assert time.monotonic() - began < 5


def test_a_trainer_without_room_for_the_files_of_a_message_says_so(process, heard):
    with no_files_left(), pytest.raises(ProcessLost, match=rf"process {os.getpid()} has no room for 2 more open files"):
        process.call("files_later", 0, [0.2])


def test_it_is_closed_in_order_and_nothing_of_it_is_left(process, heard, tmp_path):
    process.call("touches_when_closed", 0, [str(tmp_path / "closed")])
    threads = threading.active_count()
    process.close()
    assert (tmp_path / "closed").exists() and is_gone(process.pid) and not heard.ends
    assert not wait_for(lambda: threading.active_count() <= threads - 3, 5), threading.enumerate()
    with pytest.raises(ProcessLost, match="ended with status 0"):
        process.call("echo", 0)
    process.close()


def test_a_close_is_bounded(process, heard, monkeypatch):
    monkeypatch.setattr(rollout_process, "CLOSE_S", 0.3)
    process.call("closes_slowly", 0)
    began = time.monotonic()
    process.close()
    assert time.monotonic() - began < 3 and is_gone(process.pid) and not heard.ends


def test_it_ends_with_a_trainer_that_is_killed(tmp_path):
    """Whatever it does, with its reward workers. `_CLOSE_S` and `HELD_S` of `rollout_service` bound it."""
    trainer = ForkServerProcess(target=scripted_rollouts.train, args=(tmp_path, LOOK_S))
    trainer.start()
    assert not wait_for((tmp_path / "pids").exists, 20)
    trainer.kill()
    trainer.join()
    children = [int(pid) for pid in (tmp_path / "pids").read_text().split()]
    assert len(children) == 6
    assert not wait_for(lambda: all(map(is_gone, children)), 10)
    assert (tmp_path / "closed").exists(), "what it has opened is released"


def test_a_process_that_holds_the_interpreter_says_where_before_it_is_ended(heard, monkeypatch, tmp_path):
    monkeypatch.setattr(rollout_process, "FROZEN_S", 6)
    said = tmp_path / "stderr"
    own = os.dup(2)
    with said.open("w") as file:
        os.dup2(file.fileno(), 2)
    try:
        process = RolloutProcess(heard.on_event, heard.on_end, 20.0)
    finally:
        os.dup2(own, 2)
        os.close(own)
    process.call("prepare", 0)
    with pytest.raises(ProcessLost, match="was ended, because it has said nothing for 6 s"):
        process.call("matches", 0, ["a" * 64])
    assert "in matches" in said.read_text()


def test_a_users_module_may_hold_the_interpreter_while_it_is_imported(heard, monkeypatch):
    monkeypatch.setattr(rollout_process, "start", partial(start, prepare_s=1.0))
    monkeypatch.setattr(rollout_process, "FROZEN_S", 6)  # looks, of LOOK_S each
    process = RolloutProcess(heard.on_event, heard.on_end, 20.0)
    process.call("prepare", 0)
    assert process.call("echo", 1)[0] == [1] and not heard.ends
    process.close()
