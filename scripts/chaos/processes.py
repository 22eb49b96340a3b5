"""Trainers and servers of the campaign: started, hit, and gone at the end. Every wait is bounded."""

import contextlib
import dataclasses
import json
import os
import secrets
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from chaos import ROOT
from chaos.aimed import Aim, name_process, named_process
from tests.helpers.ranks import Ranks, free_port
from tests.helpers.servers import group_members, plugin_path
from tests.helpers.trainer_runs import environment
from torchtitan.grpo.engines.protocol import EngineError
from torchtitan.grpo.engines.registry import ENGINES

Flags = dict[str, str | None]
"""Keys and values of grpo_train.py's command line; None is a switch."""

HERE = Path(__file__).resolve().parent
EMBEDDED = ROOT / "torchtitan" / "grpo" / "engines" / "embedded" / "__main__.py"
TINY = ROOT / "train_configs" / "tiny_qwen3"
MARK = "CHAOS_MARK"
"""Environment variable with which every process of a run can be found."""
GONE_S = 60.0
"""Longest time in which a run that was hit must have ended altogether."""
ON_GPU = {
    "vllm": [
        "--dtype",
        "float32",
        "--enforce-eager",
        "--skip-tokenizer-init",
        "--max-model-len",
        "64",
        "--gpu-memory-utilization",
        "0.2",
        "--kv-cache-memory-bytes",
        "500000000",
    ],
    "sglang": ["--dtype", "float32", "--skip-tokenizer-init", "--disable-cuda-graph", "--mem-fraction-static", "0.2"],
}
"""Flags of small servers, several of which share a GPU."""
START_S = {"embedded": 120.0, "vllm": 600.0, "sglang": 600.0}


class Broken(AssertionError):
    """Something that the campaign promises did not hold. The message says what, with the end of the log."""


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
        variables = environment() | {"CHAOS_AIM": str(scratch), "CHAOS_WATCHED": str(folder), MARK: self.mark}
        paths = [str(ROOT), str(HERE.parent), variables.get("PYTHONPATH")]
        variables["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
        script = HERE / "aimed.py"
        self._process: Ranks | subprocess.Popen
        if launcher == "torchrun":
            command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
            command += ["--max-restarts", str(restarts)]
            with self.log_path.open("wb") as log:
                self._process = subprocess.Popen(
                    [*command, str(script), *words], cwd=ROOT, env=variables, stdout=log, stderr=log, process_group=0
                )
        elif launcher == "agent":
            arguments = ["--nproc-per-node", ranks, script, *words]
            self._process = Ranks(1, HERE / "agent.py", *arguments, log=self.log_path, environment=variables)
        else:
            self._process = Ranks(ranks, script, *words, log=self.log_path, environment=variables)

    @property
    def log(self) -> str:
        return self.log_path.read_text(errors="replace")

    @property
    def pid(self) -> int:
        """Of rank 0; 0 if it does not run."""
        return named_process(self.scratch / "pid-rank 0") or 0

    def status(self) -> int | None:
        """The exit status; None while it runs. A rank that has failed ends the others."""
        status = self._process.poll()
        if status and isinstance(self._process, Ranks):
            for process in self._process.processes:
                process.terminate()
        return status

    def wait(self, limit_s: float, ready: Callable[[], object] = lambda: False) -> int | None:
        """Until it has ended altogether, or `ready`.

        Returns:
            The exit status, None if it was `ready` first.

        Raises:
            Broken: It took longer than `limit_s`.
        """
        deadline = time.monotonic() + limit_s
        while self.status() is None or self.left():
            if ready():
                return None
            if time.monotonic() > deadline:
                raise Broken(self._stuck(limit_s))
            time.sleep(0.02)
        return self.status()

    def _stuck(self, limit_s: float) -> str:
        """What is left of it after its time, its fault, and where each thread of each process was. It ends them."""
        left = {pid: _command(pid) for pid in self.left()}
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
        if isinstance(self._process, Ranks):
            own |= {process.pid for process in self._process.processes if process.exitcode is None}
        return sorted(own | set(marked(self.mark)))

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
        self._process.wait(20.0) if isinstance(self._process, subprocess.Popen) else None

    def __enter__(self) -> "Trainer":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Server:
    """An inference server that can be killed, frozen, and started again at its address.

    Args:
        folder: For its log.
        model: The Hugging Face folder that it serves, with or without weights.
        sequences: That an embedded server decodes at once.
        gpu: Where vLLM or SGLang serves; "" for the CPU.
    """

    def __init__(
        self, engine: str, folder: Path, name: str, model: Path = TINY, sequences: int = 64, gpu: str = ""
    ) -> None:
        self.engine, self.name, self.model, self._sequences, self._gpu = engine, name, model, sequences, gpu
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self._folder = folder / name
        self._folder.mkdir(parents=True, exist_ok=True)
        self._control = ENGINES[engine].control(self.url)
        self._process: Ranks | subprocess.Popen
        self.start()

    @property
    def pid(self) -> int:
        return self._process.pid if isinstance(self._process, subprocess.Popen) else self._process.processes[0].pid

    @property
    def log(self) -> str:
        return (self._folder / "server.log").read_text(errors="replace")

    def start(self, model: Path | None = None) -> None:
        """Start it, with another model if one is given; it may not be running."""
        model, log = model or self.model, self._folder / "server.log"
        if self.engine == "embedded":
            arguments = ["--model", model, "--port", self.port, "--max-sequences", self._sequences]
            self._process = Ranks(1, EMBEDDED, *arguments, log=log, environment=environment())
            return
        command = ["bash", f"scripts/serve_{self.engine}.sh", str(model), "--port", str(self.port)]
        command += ["--load-format", "dummy", *(["--gpu", self._gpu, *ON_GPU[self.engine]] if self._gpu else ["--cpu"])]
        paths = [str(ROOT)]
        if self.engine == "vllm":
            plugin = self._folder / "plugin"
            paths.append(str(plugin if plugin.exists() else plugin_path(plugin)))
        paths.append(os.environ.get("PYTHONPATH", ""))
        variables = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(filter(None, paths))}
        with log.open("ab") as file:
            self._process = subprocess.Popen(
                command, cwd=ROOT, env=variables, stdout=file, stderr=file, process_group=0
            )

    def signal(self, number: int) -> None:
        """To the server, with all processes that belong to it."""
        with contextlib.suppress(ProcessLookupError):
            if isinstance(self._process, subprocess.Popen):
                os.killpg(self._process.pid, number)
            else:
                os.kill(self.pid, number)

    def kill(self) -> None:
        """kill -9, and until it is gone: its address is free then."""
        self.signal(signal.SIGKILL)
        self.wait_gone(20.0)

    def wait_gone(self, limit_s: float) -> None:
        deadline = time.monotonic() + limit_s
        while self._process.poll() is None or (
            isinstance(self._process, subprocess.Popen) and group_members(self._process.pid)
        ):
            if time.monotonic() > deadline:
                raise Broken(f"{self.name} at {self.url} is there {limit_s:g} s after it was told to go")
            time.sleep(0.01)

    def is_healthy(self) -> bool:
        try:
            return self._control.is_healthy()
        except EngineError:
            return False

    def wait_healthy(self) -> float:
        """Until it answers; the time at which it did."""
        deadline = time.monotonic() + START_S[self.engine]
        while not self.is_healthy():
            if self._process.poll() is not None or time.monotonic() > deadline:
                raise Broken(f"{self.name} at {self.url} does not serve:\n{self.log[-4000:]}")
            time.sleep(0.02)
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


def _command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")[:200]
    except OSError:
        return "gone"


def metric_lines(folder: Path) -> list[dict]:
    """The complete lines of a run's metrics.jsonl that belong to steps of training."""
    try:
        text = (folder / "metrics.jsonl").read_text()
    except FileNotFoundError:
        return []
    return steps_of(text.split("\n")[:-1])


def steps_of(lines: list[str]) -> list[dict]:
    """Those of metrics.jsonl that belong to steps of training."""
    read = []
    for line in lines:
        with contextlib.suppress(json.JSONDecodeError):  # it is being merged into
            read.append(json.loads(line))
    return [line for line in read if line.get("step", 0) > 0]
