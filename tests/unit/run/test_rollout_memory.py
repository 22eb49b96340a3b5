"""A rollout process that gets no memory ends, whatever noticed it: the trainer starts another one."""

import asyncio
import errno
import os
import subprocess
import sys
import threading
from types import SimpleNamespace

import pytest
from aiohttp import ClientPayloadError

from torchtitan.grpo.data.samples import Prompt
from torchtitan.grpo.engines.protocol import SamplingParams, raise_if_local
from torchtitan.grpo.rollouts.environment import RolloutClient, single_turn
from torchtitan.grpo.rollouts.group_call import GroupCall
from torchtitan.grpo.rollouts.guarded_environment import GuardedEnvironment
from torchtitan.grpo.run import rollout_process, rollout_service
from torchtitan.grpo.run.rollout_service import NO_MEMORY, Service, _on_loop_error, lacks_memory

LACKING = [MemoryError(), OSError(errno.ENOMEM, "fork"), RuntimeError("can't start new thread")]


class Ended(BaseException):
    """In place of the end of this process."""


@pytest.fixture
def ends(monkeypatch) -> None:
    def end(status: int) -> None:
        raise Ended(status)

    monkeypatch.setattr(os, "_exit", end)


@pytest.mark.parametrize("error", LACKING, ids=repr)
def test_a_verb_that_gets_no_memory_ends_the_process_and_is_no_error_of_the_run(error, ends, monkeypatch) -> None:
    def take(step: int) -> None:
        raise error

    monkeypatch.setattr(Service, "_read", lambda service: None)
    monkeypatch.setattr(Service, "_beat", lambda service: None)
    service = Service(SimpleNamespace())
    service.worker = SimpleNamespace(take=take, newest=0)
    service._calls.put((1, "take", 0, [1], []))
    with pytest.raises(Ended, match=str(NO_MEMORY)):
        service.run()


def test_a_process_that_gets_no_thread_for_its_last_resort_goes_on_saying_that_it_lives(monkeypatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise RuntimeError("unable to start watchdog thread")

    def send(message: list) -> None:
        said.append(message[1])
        if len(said) == 2:
            raise Ended

    said: list[str] = []
    monkeypatch.setattr(rollout_service, "BEAT_S", 0.01)
    monkeypatch.setattr(rollout_service.faulthandler, "dump_traceback_later", refuse)
    with pytest.raises(Ended):
        Service(SimpleNamespace(send=send))._beat()
    assert said == ["beat", "beat"]


def test_any_error_may_tell_that_no_memory_is_left(monkeypatch) -> None:
    def refuse(*_: int) -> None:
        raise OSError(errno.ENOMEM, "Cannot allocate memory")

    error = ImportError("failed to map segment from shared object")
    assert not lacks_memory(error)
    monkeypatch.setattr(rollout_service.mmap, "mmap", refuse)
    assert lacks_memory(error)


def test_other_errors_are_told_to_the_trainer() -> None:
    assert not any(map(lacks_memory, [ValueError("memory"), OSError(errno.ENOSPC, "full"), RuntimeError("a thread")]))


def test_the_trainer_says_that_there_was_no_memory(monkeypatch) -> None:
    program = [sys.executable, "-c", f"import os; os._exit({NO_MEMORY})"]
    monkeypatch.setattr(rollout_process, "start", lambda *_: subprocess.Popen(program))
    said, ended = [], threading.Event()

    def on_end(process: rollout_process.RolloutProcess, how: str) -> None:
        said.append(how)
        ended.set()

    process = rollout_process.RolloutProcess(lambda *_: None, on_end, 1.0)
    assert ended.wait(10)
    assert said == [f"the rollout process (pid {process.pid}) has no memory left"]
    process.close()


def test_no_memory_for_a_plain_request_is_no_failed_sample() -> None:
    async def ask(*_: object) -> list:
        raise MemoryError

    async def group() -> None:
        prompt, params = Prompt(7, [3, 4, 5], "a prompt"), SamplingParams(n=2, temperature=1.0, max_tokens=4)
        client = RolloutClient(None, params, prompt, ask)
        await GuardedEnvironment(single_turn, "").group(lambda *_: client, prompt, params, GroupCall(lambda: -1))

    with pytest.raises(MemoryError):
        asyncio.run(group())


def test_no_memory_for_a_reply_is_no_failed_server(ends) -> None:
    error = ClientPayloadError("Response payload is not completed")
    error.__cause__ = MemoryError()
    with pytest.raises(MemoryError):
        raise_if_local(error)
    loop = asyncio.new_event_loop()
    try:
        _on_loop_error(loop, {"message": "Fatal read error", "transport": None, "exception": ConnectionError()})
        _on_loop_error(loop, {"message": "Task exception was never retrieved", "exception": MemoryError()})
        with pytest.raises(Ended):
            _on_loop_error(loop, {"message": "Fatal read error", "transport": None, "exception": MemoryError()})
    finally:
        loop.close()
