"""Running grpo_train.py on a small version of the quickstart, and reading what it wrote."""

import atexit
import functools
import json
import os
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

from process_group import ProcessGroup, wait_for

from tests.helpers import ROOT, TINY_QWEN3
from tests.helpers.ranks import WAIT_S, Ranks, free_port
from torchtitan.grpo.engines.protocol import EngineError
from torchtitan.grpo.engines.vllm_control import VllmControl

SMALL = {
    "--job.config_file": "train_configs/quickstart.toml",
    "--training.steps": "3",
    "--sft.steps": "2",
    "--data.source_args": '{"max": 39, "size": 500}',  # all are tokenized at each start
    "--grpo.prompts_per_step": "8",
    "--grpo.group_size": "4",
    "--validation.prompts": "8",
    "--validation.freq": "100",
    # No step is without advantages, though the model has learned nothing.
    "--reward.functions": "exact_match,tests.helpers.rewards:varied",
    "--reward.workers": "1",
    "--metrics.no-enable_tensorboard": None,
}
UNHURRIED = {
    "--reward.functions": f"{SMALL['--reward.functions']},tests.helpers.rewards:unhurried",
    "--reward.workers": "2",
}
"""Of a run in which a test waits for something else: a step then takes half a second and little of the cores."""
ENDLESS = {"--training.steps": "100000", "--sft.steps": "1", "--sft.batch_size": "16"} | UNHURRIED
BACKGROUND = {"--async_grpo.enabled": None, "--weight_sync.async_weight_update": None}
"""Flags of a run that neither waits for answers nor for servers."""


def small_run(flags: dict[str, str | None]) -> dict[str, str | None]:
    """`flags` on top of SMALL. Where a warm start need not teach, its batches are a quarter of the quickstart's."""
    return SMALL | ({} if "--sft.steps" in flags else {"--sft.batch_size": "16"}) | flags


def arguments(folder: Path, flags: dict[str, str | None]) -> list[str]:
    given = small_run({"--job.dump_folder": str(folder)} | flags)
    return [part for flag in given.items() for part in flag if part is not None]


def command(folder: Path, flags: dict[str, str | None], ranks: int = 1) -> list[str]:
    line = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    return [*line, "grpo_train.py", *arguments(folder, flags)]


def environment() -> dict[str, str]:
    return os.environ | {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive"}


@functools.cache
def embedded_url() -> str:
    """An embedded server that all `train` runs share, one after the other: a server of its own takes longer to start
    than a run. `endless` runs start one themselves, as users' runs do."""
    folder, stack = tempfile.TemporaryDirectory(), ExitStack()
    atexit.register(folder.cleanup)
    atexit.register(stack.close)
    return stack.enter_context(embedded_server(TINY_QWEN3, Path(folder.name, "server.log")))


@contextmanager
def embedded_server(model: Path, log: Path, *flags: object) -> Iterator[str]:
    """The address of an embedded server in a forked process, where a test is of something else than its start."""
    with forked_server(model, log, *flags) as (url, _):
        yield url


def wait_healthy(url: str, process: Any, limit_s: float = 120.0) -> None:
    """Wait until a server serves. Its process must not end meanwhile."""

    def serves() -> bool:
        with suppress(EngineError):
            return control.is_healthy()
        return False

    control = VllmControl(url)
    if why := wait_for(serves, limit_s, process.poll):
        raise AssertionError(f"{url} is not healthy: {why}")


@contextmanager
def forked_server(model: Path, log: Path, *flags: object) -> Iterator[tuple[str, int]]:
    """The same server's address and process id."""
    url = f"http://127.0.0.1:{(port := free_port())}"
    words = ["--model", model, "--port", port, *flags]
    server = Ranks(1, "torchtitan.grpo.engines.embedded", *words, log=log, environment=environment())
    try:
        wait_healthy(url, server)
        yield url, server.processes[0].pid
    finally:
        server.kill()


def train(
    folder: Path, flags: dict[str, str | None] | None = None, ranks: int = 1, own_server: bool = False, **variables: str
) -> list[dict]:
    """Run to the end; the lines of metrics.jsonl that belong to GRPO steps 1 and on. `variables`: see `attempt`."""
    flags = flags or {}
    if "--rollout.urls" not in flags and not own_server:
        flags = flags | {"--rollout.urls": embedded_url()}
    status, said = attempt(folder, flags, ranks, **variables)
    assert status == 0, said[-4000:]
    return steps(folder)


def attempt(
    folder: Path, flags: dict[str, str | None], ranks: int = 1, timeout_s: float = 240, **variables: str
) -> tuple[int, str]:
    """Run to whatever end: (exit status, what was printed). `variables`: of its environment, besides the usual ones."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    log = folder.parent / f"{folder.name}.log"
    environ = environment() | variables
    run = Ranks(ranks, ROOT / "grpo_train.py", *arguments(folder, flags), log=log, environment=environ)
    return run.wait(timeout_s), run.log


class EndlessRun:
    """A run that goes on until it is stopped: its process (torchrun's, or the ranks'), its folder and its log.

    Args:
        launcher: "torchrun" starts everything as users do. "agent" is torchrun's agent with ranks that are forked, see
            `forked_torchrun`; "ranks" does without. Servers of both are forked: see `forked_servers`.
    """

    def __init__(self, folder: Path, flags: dict[str, str | None], ranks: int, launcher: str) -> None:
        self.folder = folder
        self.log_path = folder.parent / "log.txt"
        own = arguments(folder, ENDLESS | flags)
        self.process: ProcessGroup | Ranks
        forks = {} if "--rollout.urls" in flags else {"FORKED_SERVERS": "4"}
        if launcher == "torchrun":
            self.process = ProcessGroup(command(folder, ENDLESS | flags, ranks), self.log_path, environment())
        elif launcher == "agent":
            agent, words = ROOT / "tests" / "helpers" / "forked_torchrun.py", ["--nproc-per-node", ranks]
            environ = environment() | {f"{name}_OF_RANKS": count for name, count in forks.items()}
            words += [ROOT / "grpo_train.py", *own]
            self.process = Ranks(1, agent, *words, log=self.log_path, environment=environ, found=False)
        else:
            environ = environment() | forks
            self.process = Ranks(ranks, ROOT / "grpo_train.py", *own, log=self.log_path, environment=environ)

    @property
    def log(self) -> str:
        return self.process.log

    def wait_for(self, what: str, ready: Callable[[], object], timeout_s: float = WAIT_S) -> None:
        """Wait while the run goes on."""
        if isinstance(self.process, Ranks):
            self.process.wait_until(what, ready, timeout_s)
        else:
            why = wait_for(ready, timeout_s, self.process.poll)
            assert not why, f"{what}: {why}\n{self.process.said()}"

    def wait_until_gone(self, timeout_s: float) -> None:
        """Nothing that names the run's folder is left."""
        why = wait_for(lambda: not processes_of(self.folder), timeout_s)
        assert not why, f"still running: {processes_of(self.folder)}"


@contextmanager
def endless(
    folder: Path, flags: dict[str, str | None] | None = None, ranks: int = 1, launcher: str = "ranks"
) -> Iterator[EndlessRun]:
    """A run that is in its loop. `launcher`: see `EndlessRun`."""
    run = EndlessRun(folder, flags or {}, ranks, launcher)
    try:
        run.wait_for("the first step", lambda: steps(folder))
        yield run
    finally:
        run.process.kill()
        for pid in processes_of(folder):  # none, unless the test has failed or is done with the run
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def steps(folder: Path) -> list[dict]:
    path = folder / "metrics.jsonl"
    whole = path.read_text().split("\n")[:-1] if path.exists() else []  # the last line may be in the making
    lines = [json.loads(line) for line in whole]
    return [line for line in lines if line.get("step", 0) > 0]


def without_times(lines: list[dict]) -> list[dict]:
    """What must repeat exactly when a run is repeated."""
    timed = ("time/", "sync/", "server/", "throughput/", "memory/", "cost/")
    timed += tuple(f"checkpoint/{name}_s" for name in ("exposed", "waited", "write"))
    return [{name: value for name, value in line.items() if not name.startswith(timed)} for line in lines]


def processes_of(folder: Path) -> list[int]:
    """Processes whose command line names the run's folder."""
    pids = (int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit())
    return [pid for pid in pids if pid != os.getpid() and str(folder) in command_of(pid)]


def servers_of(folder: Path) -> list[int]:
    """Embedded servers of a run. Their guards, whose command lines hold the servers', are others."""
    commands = {pid: command_of(pid) for pid in processes_of(folder)}
    return [
        pid
        for pid, command in commands.items()
        if "torchtitan.grpo.engines.embedded" in command and "guard.py" not in command
    ]


def command_of(pid: int) -> str:
    """Its command line; "" if it has ended."""
    with suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace")
    return ""
