"""Inference servers and runs of grpo_train.py as child processes. Every wait is bounded."""

import os
import shlex
import sys
import time
from collections.abc import Callable
from pathlib import Path

from bench_common.arguments import as_flags
from bench_common.process import Process, device_environment, free_port, import_environment, read_lines

from torchtitan.grpo.engines.protocol import EngineError
from torchtitan.grpo.engines.registry import ENGINES
from torchtitan.grpo.errors import UserError

POLL_S = 0.5
START_LIMIT_S = 300.0
_FLAGS = {
    "embedded": ["--max-sequences", "--max-model-len"],
    "vllm": ["--max-num-seqs", "--max-model-len"],
    "sglang": ["--max-running-requests", "--context-length", "--enable-metrics"],
}
"""Each engine's flags for the limits on sequences and on tokens, and flags without a value."""


class Server(Process):
    """One server of a model folder on one device. `url` answers once `wait` has returned."""

    def __init__(
        self, engine: str, model: Path, device: str, log: Path, max_tokens: int, max_sequences: int, flags: str
    ):
        port = str(free_port())
        self.url = f"http://127.0.0.1:{port}"
        self._engine = engine
        cpu = device == "cpu"
        if engine == "embedded":
            command = [sys.executable, "-m", "torchtitan.grpo.engines.embedded", "--model", str(model)]
            command += ["--device", "cpu" if cpu else "cuda:0", "--dtype", "float32" if cpu else "bfloat16"]
            command += ["--parent-pid", str(os.getpid())]
        else:
            command = ["bash", f"scripts/serve_{engine}.sh", str(model), *(["--cpu"] if cpu else ["--gpu", "0"])]
        sequences, length, *more = _FLAGS[engine]
        command += ["--port", port, sequences, str(max_sequences), length, str(max_tokens), *more, *shlex.split(flags)]
        super().__init__(command, log, device_environment([device]))

    def wait(self, limit_s: float = START_LIMIT_S) -> None:
        """Until it answers.

        Raises:
            UserError: It ended, or does not answer within `limit_s`; with the end of its log.
        """
        deadline = time.monotonic() + limit_s
        while not healthy(self._engine, self.url):
            if self.status() is not None:
                raise UserError(f"{self.url} ended with exit status {self.status()}; {self.said()}")
            if time.monotonic() > deadline:
                raise UserError(f"{self.url} does not answer after {limit_s:g} s; {self.said()}")
            time.sleep(POLL_S)


def healthy(engine: str, url: str) -> bool:
    try:
        return ENGINES[engine].control(url).is_healthy()
    except EngineError:
        return False


def train(
    name: str,
    flags: dict[str, object],
    devices: list[str],
    folder: Path,
    limit_s: float,
    show: Callable[[dict], bool],
    ranks: int | None = None,
) -> str:
    """One run of grpo_train.py in `folder`, under torchrun as a user starts it.

    Args:
        flags: Configuration keys and values; `job.dump_folder` is added.
        devices: Those that it sees.
        ranks: Trainer processes, on the first of them; None: one each.
        limit_s, show: As in `follow`.

    Returns:
        As `follow`.
    """
    ranks = len(devices) if ranks is None else ranks
    words = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    words += ["grpo_train.py", *as_flags(flags), "--job.dump_folder", str(folder)]
    environment = device_environment(devices) | import_environment()
    return follow(Process(words, folder.parent / f"{folder.name}.log", environment), name, folder, limit_s, show)


def follow(run: Process, name: str, folder: Path, limit_s: float, show: Callable[[dict], bool]) -> str:
    """Wait for a run that writes `folder`/metrics.jsonl, and end it.

    Args:
        limit_s: Longest time for all of it; then it is ended.
        show: Gets each record of metrics.jsonl. Once it returns True the run is ended.

    Returns:
        "" if it ended well or `show` had seen enough, else what went wrong.
    """
    deadline = time.monotonic() + limit_s
    try:
        seen = 0
        while True:
            ended = run.status()  # before the last look at the file
            lines = read_lines(folder / "metrics.jsonl")
            if any([show(line) for line in lines[seen:]]):  # a list: every line is shown
                return ""
            seen = len(lines)
            if ended is not None:
                return f"{name}: exit status {ended}; {run.said()}" if ended else ""
            if time.monotonic() > deadline:
                return f"{name}: ended after {limit_s:.0f} s (--run-limit-s) with {seen} lines; {run.said()}"
            time.sleep(POLL_S)
    finally:
        run.close()
