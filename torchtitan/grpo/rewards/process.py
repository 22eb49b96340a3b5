"""A reward worker's process as its parent sees it: started, asked, killed with all that it has started, replaced.

It is a program of its own and no child of `multiprocessing`, which lets its children have none: a reward may use that
module. Its environment has no hidden key, from its first moment on.
"""

import contextlib
import logging
import math
import multiprocessing
import os
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path

from torchtitan.grpo.config.job_config import Reward
from torchtitan.grpo.data.samples import Prompt
from torchtitan.grpo.errors import UserError
from torchtitan.grpo.rewards.functions import is_safe
from torchtitan.grpo.rewards.worker import FAILURE_CHARS, Call, Score, too_slow
from torchtitan.grpo.sources.rows import always_json

logger = logging.getLogger(__name__)

START_TIMEOUT_S = 120.0
"""Longest wait for a worker process to import its functions."""
SLOW_START_S = 5.0
"""After this part of it a log line says what is waited for."""
RESTART_PAUSES_S = (1.0, 3.0, 9.0)
"""Before a worker that died while it started is started again."""
GRACE_S = 5.0
"""How much longer than its time limit a coroutine may take to end. Then it blocks the others, and is killed."""
REAP_S = 5.0
"""Longest wait for a killed process."""
LOG_BYTES = 16 << 20
"""Size of the log at which older output is dropped."""
KEPT_BYTES = 1 << 20
"""Newest output that is then left."""
SHOWN_BYTES = 2000
"""Output that the error about a worker which cannot start shows at most."""
LOG_WATCH_S = 1.0

_KEYS = "Of keys and tokens in the environment it sees only those that [reward] secrets names"
_PROGRAM = """
import sys
from multiprocessing.connection import Connection
connection = Connection(int(sys.argv[1]))
life = int(sys.argv[2])
sys.path[:], sys.argv[:], arguments = connection.recv()
import torchtitan_overlay
from torchtitan.grpo.rewards.worker import serve
serve(connection, life, *arguments)
"""
"""What the process runs. It imports nothing of the main script."""


class WorkerLog:
    """What workers, and programs that they start, write to stdout and stderr: a file of bounded size.

    They hold the file itself, so that no write waits for this process. A thread of it drops older output.

    Args:
        path: It is appended to. None leaves the output where this process's goes.
    """

    def __init__(self, path: Path | None) -> None:
        self._path, self._file = path, path.open("ab+", buffering=0) if path else None
        self._closed = threading.Event()
        if self._file:
            threading.Thread(target=self._watch, args=(self.size(),), name="rewards-log", daemon=True).start()

    @property
    def stdout(self) -> int | None:
        """What a process gets as stdout and stderr; None to inherit this process's."""
        return self._file.fileno() if self._file else None

    def size(self) -> int:
        """Bytes until now."""
        return os.fstat(self._file.fileno()).st_size if self._file else 0

    def newest(self, since: int) -> str:
        """The end of what was written behind a former `size`, as a sentence of a message."""
        if not self._file:
            return "Its output says why"
        start = max(since if since <= self.size() else 0, self.size() - SHOWN_BYTES)
        text = os.pread(self._file.fileno(), SHOWN_BYTES, start).decode(errors="replace").strip()
        return f"Its output, in {self._path}, ends in:\n{text}" if text else "It wrote no output"

    def _bound(self) -> None:
        """Drop older output if there is too much."""
        size = self.size()
        if self._file and size > LOG_BYTES:
            newest = os.pread(self._file.fileno(), KEPT_BYTES, size - KEPT_BYTES)
            self._file.truncate(0)
            self._file.write(b"... older output was dropped ...\n" + newest)

    def _watch(self, before: int) -> None:
        said = False
        while not self._closed.wait(LOG_WATCH_S):
            if not said and self.size() > before:
                said = True
                logger.info("Reward functions write to stdout or stderr: see %s", self._path)
            with contextlib.suppress(OSError):  # a full disk
                self._bound()

    def close(self) -> None:
        """Watch it no longer, and remove it if nothing was ever written."""
        self._closed.set()
        if self._path and not self.size():
            self._path.unlink(missing_ok=True)


class RewardWorker:
    """One process that computes scores. It is replaced when it hangs or dies. Only one thread uses it at a time.

    Args:
        is_async: Of each of `[reward] functions`.
        hidden: Environment variables that it does not get.
    """

    def __init__(self, reward: Reward, is_async: list[bool], hidden: list[str], log: WorkerLog) -> None:
        names, pattern = list(reward.functions), reward.answer_pattern
        self._names, self._pattern, self._timeout_s = names, pattern, reward.timeout_seconds
        self._hidden = hidden
        self._is_async, self._log = [*is_async, False], log  # the last one is `FinalAnswer`
        self._together = [*(a or is_safe(name, pattern) for a, name in zip(is_async, names, strict=True)), False]
        self._ready = False
        self._closed = threading.Event()
        self._lock = threading.Lock()  # start and stop come from different threads
        self._process: subprocess.Popen[bytes] | None = None
        self._start()

    def require(self) -> None:
        """Wait until the process has imported its functions.

        Raises:
            UserError: It ended, or took longer than START_TIMEOUT_S.
        """
        if failure := self._wait_ready():
            raise UserError(failure)

    def run(self, calls: Sequence[Call]) -> list[list[Score]]:
        """The scores of each call, in order. A call that hangs or ends the process fails; the others are scored.

        All that are left fail if the process cannot be started again.

        Raises:
            RuntimeError: The worker was stopped.
        """
        if self._ready and self._connection.poll():  # killed while it was idle, for example by the OOM killer
            self._kill()
        scores: dict[int, list[Score]] = {}
        one_by_one = False
        while len(scores) < len(calls):
            left = {number: call for number, call in enumerate(calls) if number not in scores}
            if failure := self._restart():
                cannot = Score(0.0, f"could not be called: {failure}"[:FAILURE_CHARS])
                scores |= {number: [cannot] * len(call.texts) for number, call in left.items()}
                break
            failure = self._exchange(dict([next(iter(left.items()))]) if one_by_one else left, scores)
            if not failure:
                continue
            suspects = self._under_way(left, scores)
            if one_by_one or len(suspects) == 1:
                scores[suspects[0]] = [Score(0.0, failure)] * len(calls[suspects[0]].texts)
            one_by_one = one_by_one or len(suspects) > 1
            with contextlib.suppress(OSError):  # it is tried again when the process is needed
                self._start()
        return [scores[number] for number in range(len(calls))]

    def _exchange(self, calls: dict[int, Call], scores: dict[int, list[Score]]) -> str:
        """Add scores as they arrive. Returns why the next ones will not arrive, or "" after the last."""
        try:
            try:
                self._connection.send(calls)
            except OSError:
                raise
            except Exception:  # nothing is written: a prompt has columns that cannot be pickled
                self._connection.send({n: call._replace(prompt=_plain(call.prompt)) for n, call in calls.items()})
            while suspects := self._under_way(calls, scores):
                answers = max(len(calls[number].texts) for number in suspects)
                grace_s = GRACE_S if self._is_async[calls[suspects[0]].function] else 0.0
                if not self._connection.poll(self._timeout_s * answers + grace_s):
                    self._kill()
                    blocks = ", and did not await" if grace_s else ""
                    return too_slow(self._timeout_s, answers) + blocks
                scores |= self._connection.recv()
        except (EOFError, OSError):  # also amid a message, and of `_bound_messages`
            return f"ended its process with exit code {self._kill()}"
        return ""

    def _under_way(self, calls: dict[int, Call], scores: dict[int, list[Score]]) -> list[int]:
        """The calls that run now: a plain function's next one, or all of those whose order is not known."""
        left = [number for number in calls if number not in scores]
        plain = [number for number in left if not self._together[calls[number].function]]
        return plain[:1] or left

    def _wait_ready(self) -> str:
        """Wait until the process has imported its functions. Returns why it did not, and kills it then."""
        if self._ready:
            return ""
        what = f"the reward worker that imports [reward] functions = {self._names}"
        if not self._connection.poll(SLOW_START_S):
            logger.info("Waiting for %s", what)
            if not self._connection.poll(START_TIMEOUT_S - SLOW_START_S):
                self._kill()
                return f"Waited {START_TIMEOUT_S} s for {what}: it must import faster"
        try:
            why = self._connection.recv()
            self._ready = not why
        except (EOFError, OSError):
            why = ""
        if self._ready:
            return ""
        status = self._kill()
        if why:
            return f"Cannot start {what}: {why}. {_KEYS}"
        return f"Exit code {status} of {what}. {_KEYS}. {self._log.newest(self._since)}"

    def _restart(self) -> str:
        """Start the process if there is none, some times. Returns why that failed."""
        failure, began = "", time.monotonic()
        for pause_s in (0.0, *RESTART_PAUSES_S):
            if failure and not self._closed.is_set():
                logger.warning("%s. Trying again in %g s", failure, pause_s)
                self._closed.wait(pause_s)
            try:
                if self._process is None:
                    self._start()
                failure = self._wait_ready()
            except OSError as error:  # no memory, processes or descriptors are left
                failure = f"Cannot start a reward worker: {error}"
            if not failure or time.monotonic() - began > START_TIMEOUT_S:
                break
        return failure

    def stop(self) -> None:
        """Kill the process for good."""
        self._closed.set()
        self._kill()

    def _kill(self) -> int | None:
        """Kill the process and the programs that its functions have started, which may outlive it.

        Returns:
            The exit code; None if there was no process.
        """
        with self._lock:
            process, self._process, self._ready = self._process, None, False
            if process is None:
                return None
            self._life.close()
            with contextlib.suppress(ProcessLookupError):  # its number is its own: nobody has waited for it yet
                os.killpg(process.pid, signal.SIGKILL)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(REAP_S)
            return process.returncode

    def _start(self) -> None:
        """Start a new interpreter. A fork would inherit threads' locks and sockets."""
        with self._lock, contextlib.ExitStack() as theirs:
            if self._closed.is_set():
                raise RuntimeError("The reward runner was closed while it scored")
            self._connection, connection = multiprocessing.Pipe()
            _bound_messages(self._connection, self._timeout_s + GRACE_S)
            theirs.callback(connection.close)  # so that the pipe ends with the process
            life, ours = os.pipe()
            theirs.callback(os.close, life)
            self._life = open(ours, "wb", buffering=0)  # noqa: SIM115  ends with this process, or by _kill
            self._since = self._log.size()
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-c", _PROGRAM, str(connection.fileno()), str(life)],
                env={name: value for name, value in os.environ.items() if name not in self._hidden},
                pass_fds=[connection.fileno(), life],
                stdin=subprocess.DEVNULL,
                stdout=self._log.stdout,
                stderr=self._log.stdout,
                process_group=0,  # of programs that a function starts too: they end together
            )
        arguments = (self._names, self._pattern, self._timeout_s)
        with contextlib.suppress(ConnectionError):  # it has ended, which `_wait_ready` finds
            self._connection.send((sys.path, sys.argv, arguments))


def _plain(prompt: Prompt) -> Prompt:
    """With objects that an environment keeps in its columns as texts, as a resumed run has them."""
    return replace(prompt, columns=always_json(prompt.columns))


def _bound_messages(connection: Connection, seconds: float) -> None:
    """Let a message raise BlockingIOError if it is not read in time, or does not come to its end: an earlier call may
    have left a worker frozen.

    The kernel keeps the time, so a message costs nothing more. It may be two writes: one that fills the pipe, and one
    that finds it full.
    """
    with socket.socket(fileno=os.dup(connection.fileno())) as end:
        for option in (socket.SO_SNDTIMEO, socket.SO_RCVTIMEO):
            end.setsockopt(socket.SOL_SOCKET, option, struct.pack("ll", math.ceil(seconds / 2), 0))
