"""Runs of grpo_train.py as child processes. Every wait is bounded."""

import sys
from collections.abc import Callable
from pathlib import Path

from bench_common.arguments import as_flags
from bench_common.process import device_environment, import_environment, limited
from process_group import ProcessGroup, wait_for

from torchtitan.grpo.engines.protocol import EngineError
from torchtitan.grpo.engines.registry import ENGINES
from torchtitan.grpo.reporting.step_lines import read_lines

POLL_S = 0.5


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
    return follow(ProcessGroup(words, folder.parent / f"{folder.name}.log", environment), name, folder, limit_s, show)


def follow(run: ProcessGroup, name: str, folder: Path, limit_s: float, show: Callable[[dict], bool]) -> str:
    """Wait for a run that writes `folder`/metrics.jsonl, and end it.

    Args:
        limit_s: Longest time for all of it; then it is ended.
        show: Gets each record of metrics.jsonl. Once it returns True the run is ended.

    Returns:
        "" if it ended well or `show` had seen enough, else what went wrong.
    """
    seen = 0

    def enough() -> bool:
        nonlocal seen
        lines = read_lines(folder / "metrics.jsonl")[seen:]
        seen += len(lines)
        return any([show(line) for line in lines])  # a list: every line is shown

    with run:
        why = wait_for(enough, limit_s, run.poll, POLL_S)
        return f"{name}: {limited(why)}, {seen} lines; {run.said()}" if why and run.poll() != 0 else ""
