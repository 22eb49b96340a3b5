"""Trainers and servers of the campaign: started, hit, and gone at the end. Every wait is bounded."""

import contextlib
import dataclasses
import json
import os
import secrets
import shutil
import signal
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from process_group import ProcessGroup, free_port, wait_for

from chaos import ROOT
from chaos.aimed import Aim, name_process, named_process
from tests.helpers.ranks import Ranks
from tests.helpers.servers import command_of, plugin_path
from tests.helpers.trainer_runs import environment
from torchtitan.grpo.engines.protocol import EngineError
from torchtitan.grpo.engines.registry import ENGINES
from torchtitan.grpo.reporting.step_lines import read_lines

Flags = dict[str, str | None]
"""Keys and values of grpo_train.py's command line; None is a switch."""

HERE = Path(__file__).resolve().parent
AGENT = ROOT / "tests" / "helpers" / "forked_torchrun.py"
EMBEDDED = ROOT / "torchtitan" / "grpo" / "engines" / "embedded" / "__main__.py"
TINY = ROOT / "train_configs" / "tiny_qwen3"
MARK = "CHAOS_MARK"
"""Environment variable with which every process of a run can be found."""
GONE_S = 60.0
"""Longest time in which a run that was hit must have ended altogether."""
ON_GPU = {
    "vllm": "--dtype float32 --enforce-eager --skip-tokenizer-init --max-model-len 64 --gpu-memory-utilization 0.2 "
    "--kv-cache-memory-bytes 500000000",
    "sglang": "--dtype float32 --skip-tokenizer-init --disable-cuda-graph --mem-fraction-static 0.2",
}
"""Flags of small servers, several of which share a GPU."""
START_S = {"embedded": 120.0, "vllm": 600.0, "sglang": 600.0}


class Broken(AssertionError):
    """Something that the campaign promises did not hold. The message says what, with the end of the log."""


def until(what: str, ready: Callable[[], object], limit_s: float, run: Any = None) -> None:
    """Wait, while `run` goes on, if one is given: a `Trainer`, `Ranks` or a `ProcessGroup`.

    Raises:
        Broken: It ended, or `limit_s` have passed.
    """
    if why := wait_for(ready, limit_s, run.poll if run else lambda: None, 0.02):
        raise Broken(f"{what}: {why}" + (f"\n{run.log[-6000:]}" if run else ""))


class Trainer:
    """One run of grpo_train.py.

    Args:
        folder: The run's `[job] dump_folder`.
        scratch: Where the campaign keeps its own files of this run; emptied first.
        launcher: "ranks" forks them from a process that has imported everything; one that fails ends the others.
            "agent" does the same under torchrun's agent. "torchrun" is the real command, ten seconds slower.
        aim: The fault that hits it, if any.
        servers: Processes that the fault may hit besides, by name.
        restarts: With "torchrun", its `--max-restarts`.
        log: Where it prints; None for a file in `scratch`.
        variables: Of its environment, besides this process's.
    """

    def __init__(
        self,
        folder: Path,
        flags: Flags,
        scratch: Path,
        ranks: int = 1,
        launcher: str = "ranks",
        aim: Aim | None = None,
        servers: dict[str, "Server"] | None = None,
        restarts: int = 0,
        log: Path | None = None,
        variables: Mapping[str, str] | None = None,
    ) -> None:
        self.folder, self.scratch, self.aim = folder, scratch, aim
        self.mark = secrets.token_hex(8)
        self.log_path = log or scratch / "log.txt"
        self.started = time.time()
        shutil.rmtree(scratch, ignore_errors=True)
        scratch.mkdir(parents=True)
        if aim:
            (scratch / "aim.json").write_text(json.dumps(dataclasses.asdict(aim)))
        for name, server in (servers or {}).items():
            name_process(scratch / f"pid-{name}", server.pid)
        words = [part for pair in (flags | {"--job.dump_folder": str(folder)}).items() for part in pair if part]
        environ = environment() | dict(variables or {})
        environ |= {"CHAOS_AIM": str(scratch), "CHAOS_WATCHED": str(folder), MARK: self.mark}
        paths = [str(ROOT), str(HERE.parent), environ.get("PYTHONPATH")]
        environ["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
        script = HERE / "aimed.py"
        self._process: Ranks | ProcessGroup
        if launcher == "torchrun":
            command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", ranks]
            command += ["--max-restarts", restarts, script, *words]
            self._process = ProcessGroup(command, self.log_path, environ)
        elif launcher == "agent":
            arguments = ["--nproc-per-node", ranks, script, *words]
            self._process = Ranks(1, AGENT, *arguments, log=self.log_path, environment=environ)
        else:
            self._process = Ranks(ranks, script, *words, log=self.log_path, environment=environ)

    @property
    def log(self) -> str:
        return self.log_path.read_text(errors="replace")

    @property
    def pid(self) -> int:
        """Of rank 0; 0 if it does not run."""
        return named_process(self.scratch / "pid-rank 0") or 0

    def poll(self) -> int | None:
        """The exit status; None while it runs. A rank that has failed ends the others."""
        status = self._process.poll()
        if status and isinstance(self._process, Ranks):
            self._process.signal(signal.SIGTERM)
        return status

    def wait(self, limit_s: float, ready: Callable[[], object] = lambda: False) -> int | None:
        """Until it has ended altogether, or `ready`.

        Returns:
            The exit status, None if it was `ready` first.

        Raises:
            Broken: It took longer than `limit_s`.
        """
        is_ready = False

        def over() -> bool:
            nonlocal is_ready
            has_ended = self.poll() is not None and not self.left()
            is_ready = not has_ended and bool(ready())
            return has_ended or is_ready

        if wait_for(over, limit_s, pause_s=0.02):
            raise Broken(self._stuck(limit_s))
        return None if is_ready else self.poll()

    def _stuck(self, limit_s: float) -> str:
        """What is left of it after its time, its fault, and where each thread of each process was. It ends them."""
        left = {pid: command_of(pid).replace("\0", " ")[:200] or "gone" for pid in self.left()}
        said = self.log
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGABRT)  # faulthandler prints the stacks
        time.sleep(1.0)
        self.close()
        witness = "it fell" if (self.scratch / "witness.json").exists() else "it did not fall"
        fault = f"{self.aim.describe()}: {witness}" if self.aim else "no fault"
        stacks = self.log[len(said) :][:12000]
        return f"processes {left} are there after {limit_s:g} s ({fault})\n{said[-6000:]}\n{stacks}"

    def left(self) -> list[int]:
        """Its processes that still run: those that it forked, and those that it started."""
        own = {named_process(path) for path in self.scratch.glob("pid-*") if path.name != "pid-server"} - {None}
        return sorted({*own, *self._process.running(), *marked(self.mark)})

    def stop(self) -> None:
        """SIGTERM, as a user or a scheduler stops it."""
        if self.pid:
            os.kill(self.pid, signal.SIGTERM)

    def close(self) -> None:
        """kill -9 to what is left of it."""
        self._process.kill()
        for pid in self.left():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def __enter__(self) -> "Trainer":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Server:
    """An inference server that can be killed, frozen, and started again at its address.

    Args:
        folder: For its log.
        model: The Hugging Face folder that it serves, with or without weights.
        gpu: Where vLLM or SGLang serves; "" for the CPU.
    """

    def __init__(self, engine: str, folder: Path, name: str, model: Path = TINY, gpu: str = "") -> None:
        self.engine, self.name, self.model, self._gpu = engine, name, model, gpu
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self._folder = folder / name
        self._folder.mkdir(parents=True, exist_ok=True)
        self._control = ENGINES[engine].control(self.url)
        self._process: Ranks | ProcessGroup
        self.start()

    @property
    def pid(self) -> int:
        return self._process.pid

    def start(self, model: Path | None = None) -> None:
        """Start it, with another model if one is given; it may not be running."""
        model, log = model or self.model, self._folder / "server.log"
        if self.engine == "embedded":
            arguments = ["--model", model, "--port", self.port, "--max-sequences", 64]
            self._process = Ranks(1, EMBEDDED, *arguments, log=log, environment=environment())
            return
        command = [sys.executable, "-m", "torchtitan.grpo.commands", "serve", self.engine, model]
        command += ["--port", self.port, "--load-format", "dummy"]
        command += ["--gpu", self._gpu, *ON_GPU[self.engine].split()] if self._gpu else ["--cpu"]
        paths = [str(ROOT)]
        if self.engine == "vllm":
            plugin = self._folder / "plugin"
            paths.append(str(plugin if plugin.exists() else plugin_path(plugin)))
        paths.append(os.environ.get("PYTHONPATH", ""))
        variables = {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(filter(None, paths))}
        self._process = ProcessGroup(command, log, variables)

    def signal(self, number: int) -> None:
        """To the server, with all processes that belong to it."""
        self._process.signal(number)

    def kill(self) -> None:
        """kill -9, and until it is gone: its address is free then."""
        self.signal(signal.SIGKILL)
        self.wait_gone(20.0)

    def wait_gone(self, limit_s: float) -> None:
        until(f"{self.name} at {self.url} is gone", lambda: not self._process.running(), limit_s)

    def is_healthy(self) -> bool:
        try:
            return self._control.is_healthy()
        except EngineError:
            return False

    def wait_healthy(self) -> float:
        """Until it answers; the time at which it did."""
        until(f"{self.name} at {self.url} serves", self.is_healthy, START_S[self.engine], self._process)
        return time.time()

    def close(self) -> None:
        self.signal(signal.SIGCONT)
        self.kill()

    def __enter__(self) -> "Server":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def marked(mark: str) -> list[int]:
    """Processes that were started, not forked, with this mark in their environment."""
    found, wanted = [], f"{MARK}={mark}".encode()
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                if wanted in (entry / "environ").read_bytes():  # a zombie's is empty
                    found.append(int(entry.name))
    return found


def metric_lines(folder: Path) -> list[dict]:
    """The complete lines of a run's metrics.jsonl that belong to steps of training."""
    return [line for line in read_lines(folder / "metrics.jsonl") if line.get("step", 0) > 0]


def last_step(folder: Path) -> int:
    """Of a run's metrics.jsonl; 0 before the first."""
    return max((line["step"] for line in metric_lines(folder)), default=0)


def saved_step(folder: Path) -> int:
    """The newest complete checkpoint of a run, as far as its name says; 0 without any."""
    markers = (folder / "checkpoint").glob("step-*/complete.json")
    return max((int(path.parent.name[5:]) for path in markers if path.parent.name[5:].isdigit()), default=0)


def steps_of(lines: list[str]) -> list[dict]:
    """Those of metrics.jsonl that belong to steps of training."""
    read = []
    for line in lines:
        with contextlib.suppress(json.JSONDecodeError):  # it is being merged into
            read.append(json.loads(line))
    return [line for line in read if line.get("step", 0) > 0]
