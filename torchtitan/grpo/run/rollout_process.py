"""The rollout process as the trainer sees it: started, asked, heard, ended. It runs `run/rollout_service.py`."""

import concurrent.futures
import contextlib
import errno
import itertools
import json
import logging
import math
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

from torchtitan.grpo.engines.fleet_view import FleetError
from torchtitan.grpo.engines.protocol import EngineError
from torchtitan.grpo.errors import PlainError, UserError, in_words
from torchtitan.grpo.process.channel import Buffer, Channel, ChannelClosed
from torchtitan.grpo.process.stopping import StopRequested, signal_name
from torchtitan.grpo.weight_wire.version_names import own_run

logger = logging.getLogger(__name__)

FROZEN_S = 30
"""Seconds without a word after which a process is taken for frozen, and killed. It says something each second."""
START_S = 300
"""The same until its first word, and while it is prepared: it may read modules from a slow disk, and some of the user's
hold the interpreter meanwhile."""
SAY_WHERE = signal.SIGUSR1
"""Has a process print where its threads are, though one holds the interpreter."""
SAY_S = 0.5
"""How long it has for that before it is killed."""
CLOSE_S = 12.0
"""How long it may take to release everything."""
STOP_S = 12.0
"""How long a call may take in a run that is to stop: the rest of `stopping.SAVING_SHARE` is for saving. A validation
has `stream.VALIDATION_S`."""
DESCRIBE_S = 2.0
_LOOK_S = 1.0
_ERRORS = {kind.__name__: kind for kind in (StopRequested, UserError, EngineError, FleetError, PlainError)}
"""Errors that are raised here as what they were there."""
_PROGRAM = """
import json, os, sys
descriptor, run = int(sys.argv[1]), sys.argv[2]
sys.path[:], sys.argv[:], hides_torch = json.loads(sys.argv[3])
import torchtitan_overlay
if hides_torch:
    sys.modules["torch"] = None  # it takes seconds, and tokenizers do without: transformers need not say so
said = os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "yes")
from torchtitan.grpo.run.rollout_service import main
if said == "yes":
    del os.environ["TRANSFORMERS_NO_ADVISORY_WARNINGS"]
main(descriptor, run)
"""

Reply = tuple[Any, list[memoryview]]


class ProcessLost(RuntimeError):
    """The rollout process has ended. The message says how."""


class RolloutError(RuntimeError):
    """What was raised in the rollout process, if it is no error that says all in its message."""


class RolloutProcess:
    """One process. It ends with the trainer, however that ends: its end of the channel is closed then.

    Args:
        on_event: Called with (name, values) in the reader's thread. It must not wait.
        on_end: Called once in the reader's thread if the process ends and `close` has not been called.
        limit_s: Longest time that a call may go without an answer being scored.
        hides_torch: Its own modules are loaded without torch, in a fraction of the time. `transformers` has no models
            there then.

    Raises:
        ProcessLost: The system has no process, threads or memory for it.
    """

    def __init__(
        self,
        on_event: Callable[[str, list[Any]], None],
        on_end: Callable[["RolloutProcess", str], None],
        limit_s: float,
        hides_torch: bool = True,
    ) -> None:
        self.scored = 0
        """It grows as long as answers get rewards, see `RolloutWorker.scored`."""
        self.lost = ""
        """How it has ended; "" while it is there."""
        self._killed_for, self._stops_at = "", math.inf
        self._on_event, self._on_end, self._limit_s = on_event, on_end, limit_s
        self._numbers = itertools.count(1)
        self._asked: dict[int, Future[Reply]] = {}
        self._lock = threading.Lock()
        self._messages = 0
        self._is_heard = self._closing = self._is_loading = False
        own, its = socket.socketpair()
        with its:
            try:
                self._process = start(its.fileno(), hides_torch)
            except OSError as error:
                raise ProcessLost(f"no rollout process can be started: {error}") from error
        self.pid = self._process.pid
        try:
            self._channel = Channel(own, "rollouts")
            threading.Thread(target=self._read, name="rollouts-reader", daemon=True).start()
            threading.Thread(target=self._watch, name="rollouts-watch", daemon=True).start()
        except RuntimeError as error:
            self._process.kill()
            self._process.wait()
            raise ProcessLost(f"no rollout process can be watched: {error}") from error

    def call(self, verb: str, newest: int, arguments: Sequence[Any] = (), file: Sequence[Buffer] = ()) -> Reply:
        """What the process answers: a value, and files with large bytes. It gets a file of these parts, if any.

        Raises:
            ProcessLost: It has ended.
            StopRequested, UserError, EngineError, FleetError, PlainError: As it raised it.
            RolloutError: It raised something else.
            TimeoutError: No answer was scored for `limit_s`, nor did the call return. The message says where its
                threads are. It is ended: another one can say what this one did not come to.
        """
        self._is_loading = verb == "prepare"
        future = self._send(verb, newest, arguments, file)
        scored, since = self.scored, (began := time.monotonic())
        while not concurrent.futures.wait([future], _LOOK_S).done:
            if time.monotonic() > max(began, self._stops_at) + STOP_S:
                self.kill(f"it did not stop in {verb!r}")
            elif scored != self.scored:
                scored, since = self.scored, time.monotonic()
            elif time.monotonic() - since > self._limit_s:
                where = self.describe()
                self.kill(f"it did not get on in {verb!r}")
                raise TimeoutError(
                    f"the rollout process has scored no answer for {self._limit_s:g} s in {verb!r}: {where}"
                )
        return future.result()

    def ask(self, question: str, *arguments: Any, limit_s: float) -> Any:
        """A value that the process tells at once, whatever it does.

        Raises:
            ProcessLost: It has ended.
            TimeoutError: It did not, in `limit_s`.
        """
        try:
            return self._send(question, 0, arguments).result(limit_s)[0]
        except TimeoutError as error:
            raise TimeoutError(f"the rollout process has not answered {question!r} in {limit_s:g} s") from error

    def tell(self, what: str, *arguments: Any) -> None:
        """What wants no answer."""
        self._channel.send([0, what, 0, list(arguments)])

    def tell_made(self, what: str, make: Callable[[], Any]) -> None:
        """The same, made when all before it is sent. Nothing for None."""

        def message() -> list[Any] | None:
            return None if self.lost or (made := make()) is None else [0, what, 0, [made]]

        self._channel.send_made(message)

    def stop(self) -> None:
        """No step takes groups from now on. A process that does not hear it, frozen or blocked, is ended by `call`."""
        self._stops_at = time.monotonic()
        self.tell("stop")

    def describe(self) -> str:
        """What it waits for, and where its threads are."""
        try:
            return self.ask("describe", limit_s=DESCRIBE_S)
        except (ProcessLost, TimeoutError, RolloutError, PlainError) as error:
            return str(error)

    def kill(self, why: str) -> None:
        """End it at once."""
        self._killed_for = self._killed_for or why
        self._process.kill()

    def close(self) -> None:
        """Have it release everything, bounded, and end it."""
        self._closing = True
        self._channel.send([0, "close", 0, []])
        try:
            if self._messages:  # else it has opened nothing yet
                self._process.wait(CLOSE_S)
        except subprocess.TimeoutExpired:
            pass
        finally:
            self._process.kill()
            with contextlib.suppress(OSError):  # what an environment has started
                os.killpg(self.pid, signal.SIGKILL)
            self._process.wait()
            self._channel.close()

    def _send(self, verb: str, newest: int, arguments: Sequence[Any], file: Sequence[Buffer] = ()) -> Future[Reply]:
        future: Future[Reply] = Future()
        with self._lock:
            if self.lost:
                raise ProcessLost(self.lost)
            number = next(self._numbers)
            self._asked[number] = future
        self._channel.send([number, verb, newest, list(arguments)], *([file] if file else []))
        return future

    def _read(self) -> None:
        try:
            while True:
                (number, kind, *rest), files = self._channel.receive()
                self._messages, self._is_heard = self._messages + 1, True
                if kind == "ok":
                    self._asked.pop(number).set_result((rest[0], files))
                elif kind == "error":
                    error = _error(*rest)
                    if number == 0:  # one of its threads has failed
                        self.kill("".join(traceback.format_exception_only(error)).strip())
                    else:
                        self._asked.pop(number).set_exception(error)
                else:
                    if kind == "beat":
                        (self.scored,) = rest[0]
                    self._on_event(kind, rest[0])
                self._is_heard = False
        except ChannelClosed:
            pass
        except Exception as error:
            logger.exception("a message of the rollout process cannot be read")
            self.kill(in_words(error))
        finally:
            self._end()

    def _end(self) -> None:
        """The channel is closed: no answer will come."""
        try:
            status = self._process.wait(CLOSE_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            status = self._process.wait()
        how = f"ended with status {status}" if status >= 0 else f"was ended by {_signal(-status)}"
        if status == -signal.SIGKILL and self._killed_for:
            how = f"was ended, because {self._killed_for}"
        elif status == errno.ENOMEM:
            how = "has no memory left"
        with self._lock:
            self.lost = f"the rollout process (pid {self.pid}) {how}"
            asked, self._asked = self._asked, {}
        for future in asked.values():
            future.set_exception(ProcessLost(self.lost))
        if not self._closing:
            with contextlib.suppress(OSError):  # what an environment has started would hold its ports
                os.killpg(self.pid, signal.SIGKILL)
            self._channel.close()
            self._on_end(self, self.lost)

    def _watch(self) -> None:
        """Kill a frozen process. Seconds count only while this one runs. And notice the end of one whose children hold
        its end of the channel."""
        seen = quiet_s = 0
        while not self.lost and not self._closing:
            time.sleep(_LOOK_S)
            limit_s = FROZEN_S if self._messages and not self._is_loading else START_S  # first: a reply ends loading
            is_quiet = seen == self._messages and not self._is_heard
            seen, quiet_s = self._messages, quiet_s + 1 if is_quiet else 0
            if self._process.poll() is not None:
                self._channel.close()
                return
            if quiet_s > limit_s:
                if self._messages:
                    with contextlib.suppress(ProcessLookupError):  # it has ended meanwhile
                        os.kill(self.pid, SAY_WHERE)
                    time.sleep(SAY_S)
                self.kill(f"it has said nothing for {limit_s:g} s")
                return


def start(descriptor: int, hides_torch: bool = True) -> "subprocess.Popen[bytes]":
    """Start a process that has this end of a channel. For `hides_torch` see `RolloutProcess`."""
    arguments = str(descriptor), own_run(), json.dumps([sys.path, sys.argv, hides_torch])
    # A group of its own: a terminal's Ctrl-C goes to the trainer, which ends it.
    command = [sys.executable, "-P", "-c", _PROGRAM, *arguments]  # -P: no module of this folder before the program's
    return subprocess.Popen(command, stdin=subprocess.DEVNULL, pass_fds=[descriptor], process_group=0)


def _error(kinds: list[str], words: str, trace: str) -> Exception:
    kind = next((_ERRORS[kind] for kind in kinds if kind in _ERRORS), None)
    if kind is StopRequested:
        return StopRequested()
    if kind is not None:
        return kind(words)
    error = RolloutError(words)
    error.add_note(f"In the rollout process:\n{trace}")
    return error


def _signal(number: int) -> str:
    who = " (nobody sends it but a person, or the kernel when memory is short)" if number == signal.SIGKILL else ""
    return f"{signal_name(number)}{who}"
