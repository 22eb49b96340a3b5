"""Inference servers and runs of grpo_train.py as child processes. Every wait is bounded."""

import json
import os
import shlex
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path

from bench_common import BENCH
from bench_common.arguments import as_flags
from bench_common.process import Process

from torchtitan.grpo.engines.protocol import EngineError
from torchtitan.grpo.engines.registry import ENGINES
from torchtitan.grpo.errors import UserError

POLL_S = 0.5
_FLAGS = {
    "embedded": ["--max-sequences", "--max-model-len"],
    "vllm": ["--max-num-seqs", "--max-model-len"],
    "sglang": ["--max-running-requests", "--context-length", "--enable-metrics"],
}
"""What each engine calls the limits on sequences and on tokens, and flags without a value."""

Say = Callable[[str], None]


def device_environment(devices: list[str]) -> dict[str, str]:
    """Devices are GPU indices, or `cpu` alone."""
    # NVLink multicast is not to be had in every container, and NCCL fails where it expects it.
    return {"CUDA_VISIBLE_DEVICES": "" if devices == ["cpu"] else ",".join(devices), "NCCL_NVLS_ENABLE": "0"}


class Server(Process):
    """One server of a model folder on one device; `url` once `wait` has returned."""

    def __init__(
        self, engine: str, model: Path, device: str, log: Path, max_tokens: int, max_sequences: int, flags: str
    ):
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = str(probe.getsockname()[1])
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

    def wait(self, limit_s: float, say: Say) -> None:
        """Until it answers.

        Raises:
            UserError: It ended, or does not answer within `limit_s`; with the end of its log.
        """
        start = said = time.monotonic()
        while not healthy(self._engine, self.url):
            waited_s = time.monotonic() - start
            if self.status() is not None:
                raise UserError(f"{self.url} ended with exit status {self.status()}; {self.said()}")
            if waited_s > limit_s:
                raise UserError(f"{self.url} does not answer after {limit_s:g} s (--server-start-s); {self.said()}")
            if time.monotonic() - said > 15:
                said = time.monotonic()
                say(f"  {self.url}: starting, {waited_s:.0f} s")
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
    show: Callable[[dict], bool | None],
) -> str:
    """One run of grpo_train.py in `folder`, under torchrun as a user starts it.

    Args:
        flags: Configuration keys and values; `job.dump_folder` is added.
        devices: One trainer rank each.
        limit_s: Longest time for all of it; then it is ended.
        show: Gets each step's record of metrics.jsonl when it is written; once it returns True the run is ended.

    Returns:
        "" if it ended well or `show` had seen enough, else what went wrong.
    """
    words = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(len(devices))]
    words += ["grpo_train.py", *as_flags(flags), "--job.dump_folder", str(folder)]
    paths = [str(BENCH), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = device_environment(devices) | {"PYTHONPATH": os.pathsep.join(paths)}
    environment["OMP_NUM_THREADS"] = os.environ.get("OMP_NUM_THREADS", "1")
    deadline = time.monotonic() + limit_s
    run = Process(words, folder.parent / f"{folder.name}.log", environment)
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


def read_lines(path: Path) -> list[dict]:
    """The whole lines of a JSONL file that may be being written; none if it is not there yet."""
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]
