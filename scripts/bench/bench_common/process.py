"""How a benchmark runs: its exit status, its child processes, its place in a process group. Every wait is bounded."""

import contextlib
import faulthandler
import json
import os
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from bench_common import BENCH, ROOT

LOG_TAIL_CHARS = 3000
GRACE_S = 40.0
"""Longer than the 30 s that torchrun gives its ranks. They have sessions of their own, so they survive its SIGKILL."""


def run_program(run: Callable[[], int], limit_s: float) -> int:
    """`run()` as a whole program: its exit status, or 2 after an error that says what to change.

    SIGTERM ends the children too. After `limit_s` the process ends with a traceback of each thread.
    """
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    faulthandler.dump_traceback_later(limit_s, exit=True, file=sys.__stderr__)
    from torchtitan.grpo.engines.protocol import EngineError
    from torchtitan.grpo.errors import UserError

    try:
        return run()
    except (EngineError, UserError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    finally:
        faulthandler.cancel_dump_traceback_later()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def join_torchrun() -> None:
    """Without torchrun, set its variables for a group of one rank."""
    if "RANK" not in os.environ:
        alone = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
        os.environ.update(alone | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())})


def device_environment(devices: list[str]) -> dict[str, str]:
    """Environment of a child that sees these devices only: GPU indices, or "cpu" alone."""
    return nvls_environment() | {"CUDA_VISIBLE_DEVICES": "" if devices == ["cpu"] else ",".join(devices)}


def nvls_environment() -> dict[str, str]:
    """Many containers have no NVLink multicast, and NCCL fails where it expects it."""
    return {"NCCL_NVLS_ENABLE": os.environ.get("NCCL_NVLS_ENABLE", "0")}


def import_environment() -> dict[str, str]:
    """Environment of a child that imports this tree and the benchmarks' packages."""
    paths = [str(BENCH), str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {"PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}


def read_lines(path: Path) -> list[dict]:
    """The complete lines of a JSONL file that may still be written; none if it does not exist."""
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]


class Process:
    """A command in a process group of its own. `close` ends the whole group: SIGTERM, after `GRACE_S` SIGKILL."""

    def __init__(self, command: list[str], log: Path, environment: Mapping[str, str]):
        log.parent.mkdir(parents=True, exist_ok=True)
        self.log = log
        with log.open("wb") as file:
            file.write(f"$ {shlex.join(command)}\n".encode())
            file.flush()
            self._process = subprocess.Popen(
                command,
                cwd=ROOT,
                env={**os.environ, **environment},
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                process_group=0,
            )

    def status(self) -> int | None:
        """The exit status, None while it runs."""
        return self._process.poll()

    def said(self) -> str:
        return f"{self.log} ends with:\n{self.log.read_text(errors='replace')[-LOG_TAIL_CHARS:]}"

    def close(self) -> None:
        for number in (signal.SIGTERM, signal.SIGKILL):
            # The group, not the leader: a child that outlives the leader would keep its GPU.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, number)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(GRACE_S)
                if number == signal.SIGTERM:
                    time.sleep(0.2)
