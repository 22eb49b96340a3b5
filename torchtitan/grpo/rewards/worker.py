"""The process of a reward worker. It imports what the reward functions need, and no torch, so it starts quickly.

process.RewardWorker  --- calls by number ----------------->  serve
                      <-- scores by number ----------------------

Plain functions run one after another. Coroutines then run all at the same time, each with its own time limit. Scores
of safe functions (`functions.is_safe`) go back in one message, since a message takes longer than such a score.
"""

import contextlib
import fcntl
import functools
import hashlib
import importlib
import io
import os
import random
import re
import signal
import sys
import threading
import traceback
from collections import deque
from collections.abc import Coroutine
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

from torchtitan.grpo.data.samples import Prompt
from torchtitan.grpo.errors import UserError, said
from torchtitan.grpo.process.import_path import is_async, source
from torchtitan.grpo.rewards.functions import (
    BUILT_IN,
    PACKAGES,
    checked,
    checked_group,
    is_safe,
    resolve,
    takes_group,
)


class Call(NamedTuple):
    """One call of a reward function.

    Attributes:
        function: Its index.
        texts: The answer; all of a group's answers if the function takes a group.
        prompt: Their prompt.
        is_final: The texts are final answers: `[reward] answer_pattern` is not applied to them.
    """

    function: int
    texts: list[str]
    prompt: Prompt
    is_final: bool = False


class Score(NamedTuple):
    """A score, or 0 and why it failed.

    Attributes:
        final: Of `FinalAnswer`.
    """

    value: float
    failure: str = ""
    final: str | None = None


SECRET = re.compile(r"(?:KEY|TOKEN|SECRET|PASSWORD|PASSWD|PASSPHRASE|CREDENTIAL)S?(?:_|$)", re.IGNORECASE)
"""Names of environment variables with secrets: HF_TOKEN, AWS_ACCESS_KEY_ID, PGPASSWORD; not TOKENIZERS_PARALLELISM."""
FAILURE_CHARS = 500
"""Longest text of why a score failed."""


def serve(connection: Connection, life: int, names: list[str], pattern: str, timeout_s: float) -> None:
    """Run a worker process: say "", or why it cannot begin; then receive calls and send their scores, until the pipe
    ends.

    Args:
        life: A pipe that ends with the parent process.
    """
    _end_with(life)
    _survive_full_disk()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the trainer handles Ctrl-C
    # Slurm sends SIGTERM to every process. Not SIG_IGN: programs that a function starts would inherit it.
    signal.signal(signal.SIGTERM, lambda *_: None)
    os.set_inheritable(connection.fileno(), False)
    # A SIGTERM in the middle of a fork waits until the child takes it: Python forgets those that it has noted by then.
    mask = functools.partial(signal.pthread_sigmask, signal.SIG_BLOCK, {signal.SIGTERM})
    os.register_at_fork(
        before=mask, after_in_parent=_take_sigterm, after_in_child=functools.partial(_forget_trainer, connection)
    )
    try:
        functions: list[Function | FinalAnswer] = [Function(name, pattern, timeout_s) for name in names]
    except UserError as error:
        connection.send(str(error))
        return
    functions.append(FinalAnswer(pattern))
    if any(function.is_async for function in functions):
        _loop()
    with contextlib.suppress(EOFError, ConnectionError):
        connection.send("")
        while True:
            calls: dict[int, Call] = connection.recv()
            awaited, computed = [], {}
            for number, call in calls.items():
                function = functions[call.function]
                if function.is_async:
                    awaited.append(_then_send(connection, number, function.scores_async(call)))
                elif function.is_safe:
                    computed[number] = function.scores(call)
                else:
                    _seed_generators(call)
                    connection.send({number: function.scores(call)})
            if computed:
                connection.send(computed)
            if awaited:
                _loop().run(_all(awaited))


def _end_with(life: int) -> None:
    """Have the kernel kill this process, and its group, when the pipe ends.

    A parent that is killed kills no worker. One that scores sees no end of a pipe, and no thread of it runs while a
    function, such as a regular expression, holds the interpreter.
    """
    os.set_inheritable(life, False)
    if not hasattr(fcntl, "F_SETSIG"):  # not Linux: a thread must do
        threading.Thread(target=_wait_for_end, args=(life,), name="parent-watch", daemon=True).start()
        return
    fcntl.fcntl(life, fcntl.F_SETOWN, -os.getpgrp())
    fcntl.fcntl(life, fcntl.F_SETSIG, signal.SIGKILL)
    fcntl.fcntl(life, fcntl.F_SETFL, os.O_ASYNC)


def _wait_for_end(life: int) -> None:
    os.read(life, 1)
    os.killpg(0, signal.SIGKILL)


def _forget_trainer(connection: Connection) -> None:
    """In a child that a function forks: `multiprocessing` ends it by SIGTERM, and its scores are nobody's."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    _take_sigterm()
    connection.close()


def _take_sigterm() -> None:
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})


class _Surviving(io.FileIO):
    """Loses what cannot be written, on a full disk for example: a line of output costs no score."""

    def write(self, data: Any, /) -> int:
        try:
            return super().write(data)
        except OSError:
            return memoryview(data).nbytes


def _survive_full_disk() -> None:
    for name, number in (("stdout", 1), ("stderr", 2)):
        if getattr(sys, name) is not None:  # it was closed
            raw = io.BufferedWriter(_Surviving(number, "wb", closefd=False))
            # What a model wrote may hold anything, and a worker that is killed flushes nothing.
            setattr(sys, name, io.TextIOWrapper(raw, "utf-8", "backslashreplace", line_buffering=True))


@functools.cache
def _loop() -> Any:
    """The same for all calls: clients of web services belong to the loop of their first use.

    A worker without coroutines does not import asyncio, which is a third of its start.
    """
    import asyncio

    return asyncio.Runner()


async def _all(coroutines: list[Coroutine[Any, Any, None]]) -> None:
    import asyncio

    await asyncio.gather(*coroutines)


async def _then_send(connection: Connection, number: int, scores: Coroutine[Any, Any, list[Score]]) -> None:
    connection.send({number: await scores})


def too_slow(timeout_s: float, answers: int) -> str:
    """Why a call with so many answers failed."""
    each = f" for each of {answers} answers" if answers > 1 else ""
    return f"took longer than [reward] timeout_seconds = {timeout_s}{each}"


class Function:
    """One of `[reward] functions` in its process. Whatever it does, a call gives one score per answer."""

    def __init__(self, name: str, pattern: str, timeout_s: float) -> None:
        self._function = resolve(name)
        self._takes_group = takes_group(self._function)
        self.is_async = is_async(self._function)
        self.is_safe = is_safe(name, pattern)
        self._timeout_s = timeout_s
        self._regex = re.compile(pattern) if pattern and name in BUILT_IN else None
        self._file = "" if name in BUILT_IN else source(self._function).rpartition(":")[0]
        if name in PACKAGES:
            importlib.import_module(name)  # outside the time limit of the first score

    def scores(self, call: Call) -> list[Score]:
        text = call.texts[0]
        if self._regex is not None and not call.is_final:
            found = found_last(self._regex, text)
            if found is None:
                return [Score(0.0)]  # no final answer
            text = found
        try:
            value = self._function(call.texts if self._takes_group else text, call.prompt)
            return self._checked(value, call)
        except BaseException as error:  # SystemExit and the timeouts of libraries are failures too
            return self._failed(error, call)

    async def scores_async(self, call: Call) -> list[Score]:
        import asyncio

        limit = asyncio.timeout(self._timeout_s * len(call.texts))
        try:
            async with limit:
                value = await self._function(call.texts if self._takes_group else call.texts[0], call.prompt)
            return self._checked(value, call)
        except BaseException as error:
            if limit.expired():
                return [Score(0.0, too_slow(self._timeout_s, len(call.texts)))] * len(call.texts)
            return self._failed(error, call)

    def _checked(self, value: Any, call: Call) -> list[Score]:
        if not self._takes_group:
            return [_score(value)]
        try:
            return [LEFT_OUT if each is None else _score(each) for each in checked_group(value, len(call.texts))]
        except ValueError as error:
            return [Score(0.0, said(error)[:FAILURE_CHARS])] * len(call.texts)

    def _failed(self, error: BaseException, call: Call) -> list[Score]:
        """What the function raised, and where: the last line of its own file, or of another one that it called."""
        frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename != __file__]
        where = ""
        if self._file and frames:
            at = ([frame for frame in frames if frame.filename == self._file] or frames)[-1]
            where = f" ({at.filename}:{at.lineno})"
        return [Score(0.0, f"raised {type(error).__name__}: {said(error)}"[:FAILURE_CHARS] + where)] * len(call.texts)


class FinalAnswer:
    """Behind the functions, in place of one: what `[reward] answer_pattern` finds last in an answer, stripped."""

    is_async = is_safe = False

    def __init__(self, pattern: str) -> None:
        self._regex = re.compile(pattern)

    def scores(self, call: Call) -> list[Score]:
        found = found_last(self._regex, call.texts[0])
        return [Score(0.0, final=found if found is None else found.strip())]


def found_last(regex: re.Pattern[str], text: str) -> str | None:
    """The group of the pattern's last match; None if there is none."""
    last = deque(regex.finditer(text), maxlen=1)
    return (last[0].group(1) or "") if last else None


def _seed_generators(call: Call) -> None:
    """Random numbers that a function draws depend on the call alone, not on the worker or on the calls before it."""
    content = repr((call.function, call.prompt.index, call.texts)).encode(errors="backslashreplace")
    seed = int.from_bytes(hashlib.sha256(content).digest()[:4], "big")
    random.seed(seed)
    if "numpy" in sys.modules:  # a function's: importing it here would slow the start
        sys.modules["numpy"].random.seed(seed)


LEFT_OUT = Score(0.0, "returned None for this answer of a group, which leaves it out")
"""A function of a group's answers has no score for one of them, and says so."""


def _score(value: Any) -> Score:
    try:
        return Score(checked(value))
    except Exception as error:  # a value may fail to become a float, or to be shown
        return Score(0.0, said(error)[:FAILURE_CHARS])
