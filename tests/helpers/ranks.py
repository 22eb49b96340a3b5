"""Python processes, forked from one that has imported everything: imports take longer than most of what tests run.
With CUDA they import for themselves.

Otherwise they are as torchrun or a shell starts them: a script with arguments, environment, folder and log of its own.
"""

import atexit
import contextlib
import faulthandler
import importlib
import multiprocessing
import os
import runpy
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping
from multiprocessing import forkserver
from multiprocessing.connection import wait
from pathlib import Path
from typing import NoReturn
from unittest.mock import patch

import pytest
import torch
from process_group import free_port, wait_for

from tests.helpers import ROOT

STOP_S = 20.0
WAIT_S = 180.0
"""For what takes a few seconds on an idle machine, and much longer where all cores import."""
_PRELOADED = [
    "tests.helpers.unwatched",  # the first one
    "grpo_train",
    "torch._dynamo",
    "torch.distributed.fsdp",
    "transformers.models.llama.modeling_llama",
    "transformers.models.qwen3.modeling_qwen3",
    "torchtitan.grpo.model.qwen2",
    "torchtitan.grpo.model.qwen3",
    "torchtitan.grpo.engines.embedded.__main__",
    "tests.helpers.forked_first",
    "tests.helpers.forked_servers",
    "tests.helpers.ranks",  # with pytest
    "tests.helpers.frozen",  # the last one
]
forkserver.set_forkserver_preload(_PRELOADED)
# A process forked after CUDA was initialised, which imports may do, cannot use it.
_starts = multiprocessing.get_context("spawn" if torch.cuda.is_available() else "forkserver")


def _environment_of_imports() -> contextlib.AbstractContextManager[object]:
    """For the first start, which is that of the process that imports."""
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    return patch.dict(os.environ, {"OMP_NUM_THREADS": "1", "PYTHONPATH": path})


def import_everything() -> None:
    """In this process, which then forks others itself."""
    for name in _PRELOADED:
        importlib.import_module(name)


def begin_imports() -> None:
    """Start the process that others are forked from, unless it runs; `ForkedBesides` needs it."""
    with _environment_of_imports():
        forkserver.ensure_running()


class Ranks:
    """A script in `ranks` processes that find one another as under torchrun. One that fails ends the others.

    Args:
        script: A file, or the name of a module as after `python -m`.
        log: Takes what all of them print.
        found: False leaves out the variables by which ranks find one another: one process, as without torchrun.
    """

    def __init__(
        self,
        ranks: int,
        script: Path | str,
        *arguments: object,
        log: Path,
        cwd: Path = ROOT,
        environment: Mapping[str, str] = os.environ,
        found: bool = True,
    ) -> None:
        self.log_path = log
        log.write_bytes(b"")
        port = free_port()
        self.processes = []
        for rank in range(ranks):
            own = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks}
            own |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
            own = (own if found else {}) | {"OMP_NUM_THREADS": 1}
            environ = dict(environment) | {name: str(value) for name, value in own.items()}
            args = (script, [str(argument) for argument in arguments], environ, cwd, log)
            self.processes.append(_starts.Process(target=_run, args=args))
        atexit.register(self.kill)  # a test that fails may leave them, and multiprocessing waits for their end
        with _environment_of_imports():
            for process in self.processes:
                process.start()

    @property
    def pid(self) -> int:
        """Of rank 0."""
        return self.processes[0].pid

    @property
    def returncode(self) -> int | None:
        return self.poll()

    def send_signal(self, number: int) -> None:
        for pid in self.running():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    signal = send_signal  # as a `ProcessGroup` has it: to all of them

    def running(self) -> list[int]:
        return [process.pid for process in self.processes if process.exitcode is None]

    @property
    def log(self) -> str:
        return self.log_path.read_text(errors="replace")

    def poll(self) -> int | None:
        """The first exit status that is not 0; 0 if all have ended; None while they run."""
        statuses = [process.exitcode for process in self.processes]
        return next((status for status in statuses if status), None if None in statuses else 0)

    def wait(self, timeout_s: float) -> int:
        """Until all have ended well or one has failed, which ends the others; fails the test after `timeout_s`."""
        deadline = time.monotonic() + timeout_s
        while (status := self.poll()) is None:
            running = [process.sentinel for process in self.processes if process.exitcode is None]
            if not running:  # they ended after `poll` looked: to wait for none of them takes all the time
                continue
            if not wait(running, max(0.0, deadline - time.monotonic())):
                self._fail(f"still running after {timeout_s:g} s")
        if status:
            for process in self.processes:
                process.terminate()
            for process in self.processes:
                process.join(STOP_S)
            self.kill()
        return status

    def check(self, timeout_s: float = WAIT_S) -> None:
        """Wait, and fail the test if a rank failed."""
        status = self.wait(timeout_s)
        log = self.log
        shown = [log[-6000:]]
        # Of a crash: the frames of C++, those of the thread that crashed, and each thread's of Python.
        for mark in ("Fatal Python error", "FatalSignalHandler::fatalSignalHandler"):
            if (crash := log.find(mark)) >= 0:
                shown.insert(0, log[max(0, crash - 1000) : crash + 5000])
        assert status == 0, "\n".join(shown)

    def wait_until(self, what: str, ready: Callable[[], object], timeout_s: float = WAIT_S) -> None:
        """Until `ready`, while all of them run; fails the test if one ends before, or after `timeout_s`."""
        if why := wait_for(ready, timeout_s, self.poll):
            self._fail(f"{what}: {why}")

    def _fail(self, why: str) -> NoReturn:
        before = self.log
        self._log_stacks()
        self.kill()
        pytest.fail(f"{why}\n{before[-6000:]}\n{self.log[len(before) :][-12000:]}")

    def _log_stacks(self) -> None:
        """Where each rank is, in every thread. It ends them."""
        for process in self.processes:
            if process.exitcode is None:
                os.kill(process.pid, signal.SIGABRT)  # faulthandler prints them, rank by rank
                process.join(STOP_S)

    def kill(self) -> None:
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.join(STOP_S)


def _run(script: Path | str, arguments: list[str], environ: dict[str, str], cwd: Path, log: Path) -> None:
    threading.Thread(target=_end_with_the_tests, daemon=True).start()
    os.environ.clear()
    os.environ.update(environ)
    os.chdir(cwd)
    with log.open("ab") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    # Whole lines, since the ranks share the log. With PYTHONUNBUFFERED `print` writes a text and its newline apart.
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(line_buffering=True, write_through=False)
    faulthandler.enable()
    torch._C._set_print_stack_traces_on_fatal_signal(True)  # frames of C++, too
    torch.set_num_threads(int(environ["OMP_NUM_THREADS"]))
    if count := int(environ.get("FORKED_SERVERS", 0)):
        from tests.helpers import forked_servers  # it imports the package under test, as the script does

        forked_servers.prepare(count)
    sys.argv = [str(script), *arguments]
    sys.path[:0] = filter(None, environ.get("PYTHONPATH", "").split(os.pathsep))
    if isinstance(script, str):
        runpy.run_module(script, run_name="__main__", alter_sys=True)
        return
    sys.path.insert(0, str(script.parent))
    runpy.run_path(str(script), run_name="__main__")


def _end_with_the_tests() -> None:
    """If they were killed, nobody else ends this process; the one it was forked from lives on with it."""
    multiprocessing.parent_process().join()
    os._exit(1)
