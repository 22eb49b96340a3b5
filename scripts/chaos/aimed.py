"""grpo_train.py as one rank, with a fault that falls at a chosen moment. The campaign starts it, also under torchrun.

The environment variable CHAOS_AIM names a folder. In it:

    aim.json            the fault, see `Aim`; without it the rank only leaves its trace
    pid-<name>          the processes "rank 0", "torchrun", "server": what a fault can hit. See `name_process`
    pid-rollouts        rank 0's rollout process, the newest one
    trace-<rank>.jsonl  written here: each operation on a file of the run's folder, with its time
    witness.json        written here just before the signal goes out: where the rank was, and what it had written

Python announces each open, rename, remove and mkdir to audit hooks before it happens. So a fault can fall between any
two file operations of a save or a load, and the package under test knows nothing of it.
"""

import json
import os
import re
import runpy
import signal
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

EVENTS = {"open": "open", "os.rename": "rename", "os.remove": "remove", "os.mkdir": "mkdir", "shutil.rmtree": "rmtree"}
"""Audit events that count, and their names in a trace."""
START_TIMES = 3
"""How much longer than later a rollout process may say nothing while it starts."""
_NUMBERED = re.compile(r"step-\d+")


@dataclass
class Aim:
    """Which process gets which signal, and when.

    Attributes:
        target: "rank 0", "rank 1", "torchrun" or "server".
        number: The signal.
        rank: Whose file operations, or clock, decide.
        event: Operation and file, as in a trace. "": a moment instead.
        nth: The how-manieth such operation of the process.
        delay_s: From the operation, or from the start of the script, to the signal.
    """

    target: str
    number: int
    rank: int = 0
    event: str = ""
    nth: int = 1
    delay_s: float = 0.0

    def describe(self) -> str:
        when = f"{self.delay_s:.3f} s after "
        when += f"{self.event!r} number {self.nth} of rank {self.rank}" if self.event else "the start"
        return f"{signal.Signals(self.number).name} to {self.target}, {when}"


def name_process(file: Path, pid: int) -> None:
    """Write down a process: its id and when it started, because ids come again."""
    file.write_text(f"{pid} {_started(pid)}")


def named_process(file: Path) -> int | None:
    """The id of the process that was written down; None if it has ended or was not written down."""
    try:
        pid, started = map(int, file.read_text().split())
        return pid if _started(pid) == started else None
    except (OSError, ValueError):
        return None


def _started(pid: int) -> int:
    """When it started, in clock ticks since the machine did; -1 for a zombie."""
    state, *fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return -1 if state in "ZX" else int(fields[18])


class Marksman:
    """Writes the trace of this rank, and sends the signal of its aim."""

    def __init__(self, folder: Path, watched: Path, rank: int) -> None:
        self._folder, self._watched = folder, f"{watched}{os.sep}"
        self._trace = os.open(folder / f"trace-{rank}.jsonl", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        self._counts: dict[str, int] = {}
        self._lock = threading.RLock()
        self._quiet = threading.local()
        aim = folder / "aim.json"
        fallen = (folder / "witness.json").exists()  # torchrun has started the ranks again
        self._aim = Aim(**json.loads(aim.read_text())) if aim.exists() and not fallen else None
        if self._aim and self._aim.rank != rank:
            self._aim = None
        if self._aim and not self._aim.event:
            self._after(self._aim.delay_s, "")

    def on_audit(self, name: str, arguments: tuple[Any, ...]) -> None:
        """The audit hook. It runs in every thread, before the operation."""
        if name not in EVENTS or getattr(self._quiet, "on", False):
            return
        path = arguments[0]
        if not isinstance(path, str | os.PathLike) or not os.fspath(path).startswith(self._watched):
            return
        mode = f" {arguments[1] or 'fd'}" if name == "open" else ""
        self._note(f"{EVENTS[name]}{mode} {os.fspath(path)[len(self._watched) :]}")

    def _note(self, event: str) -> None:
        event = _NUMBERED.sub("step-N", event)
        with self._lock:
            count = self._counts[event] = self._counts.get(event, 0) + 1
            os.write(self._trace, f"{json.dumps({'time': time.time(), 'event': event})}\n".encode())
        aim = self._aim
        if aim and (event, count) == (aim.event, aim.nth):
            if aim.delay_s:
                self._after(aim.delay_s, event)
            else:
                self._strike(event)

    def _after(self, delay_s: float, event: str) -> None:
        def wait_and_strike() -> None:
            time.sleep(delay_s)
            self._strike(event)

        threading.Thread(target=wait_and_strike, name="chaos", daemon=True).start()

    def _strike(self, event: str) -> None:
        """Leave a witness, then send the signal. A target that is gone is no hit."""
        aim, self._quiet.on = self._aim, True
        files = {}
        for path in sorted(Path(self._watched).rglob("*")):
            try:
                files[str(path.relative_to(self._watched))] = path.stat().st_size
            except FileNotFoundError:  # removed just now
                continue
        pid = named_process(self._folder / f"pid-{aim.target}")
        if pid is None:
            return
        witness = {"time": time.time(), "pid": pid, "event": event, "files": files}
        (self._folder / "witness.json").write_text(json.dumps(witness))
        os.kill(pid, aim.number)


def name_rollout_processes(folder: Path) -> None:
    """Write down each rollout process that this rank starts. CHAOS_FROZEN_S: how long one may say nothing."""
    import torchtitan_overlay  # noqa: F401  before torchtitan

    from torchtitan.grpo.run import rollout_process

    start = rollout_process.start

    def named(*how: Any) -> Any:
        process = start(*how)
        name_process(folder / "pid-rollouts", process.pid)
        return process

    rollout_process.start = named
    if frozen_s := int(os.environ.get("CHAOS_FROZEN_S", 0)):
        rollout_process.FROZEN_S, rollout_process.START_S = frozen_s, START_TIMES * frozen_s


def main() -> None:
    """Run grpo_train.py with this process's arguments."""
    rank, folder = int(os.environ["RANK"]), Path(os.environ["CHAOS_AIM"])
    name_process(folder / f"pid-rank {rank}", os.getpid())
    if "TORCHELASTIC_RUN_ID" in os.environ:
        name_process(folder / "pid-torchrun", os.getppid())
    marksman = Marksman(folder, Path(os.environ["CHAOS_WATCHED"]), rank)
    sys.addaudithook(marksman.on_audit)
    script = Path(__file__).resolve().parents[2] / "grpo_train.py"
    sys.argv[0] = str(script)
    sys.path.insert(0, str(script.parent))
    name_rollout_processes(folder)
    runpy.run_path(str(script), run_name="__main__")


if __name__ == "__main__":
    main()
