"""Running grpo_train.py as a user does, on a small version of the quickstart, and reading what it wrote."""

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SMALL = {
    "--job.config_file": "train_configs/quickstart.toml",
    "--training.steps": "3",
    "--sft.steps": "30",
    "--grpo.prompts_per_step": "8",
    "--grpo.group_size": "4",
    "--validation.prompts": "8",
    "--validation.freq": "100",
    "--metrics.no-enable_tensorboard": None,
}


def command(folder: Path, flags: dict[str, str | None], ranks: int = 1) -> list[str]:
    given = SMALL | {"--job.dump_folder": str(folder)} | flags
    line = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    return [*line, "grpo_train.py", *(part for flag in given.items() for part in flag if part is not None)]


def environment() -> dict[str, str]:
    return os.environ | {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive"}


def train(folder: Path, flags: dict[str, str | None] | None = None, ranks: int = 1) -> list[dict]:
    """Run to the end; the lines of metrics.jsonl that belong to GRPO steps 1 and on."""
    done = attempt(folder, flags or {}, ranks)
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    return steps(folder)


def attempt(
    folder: Path, flags: dict[str, str | None], ranks: int = 1, timeout_s: float = 240
) -> subprocess.CompletedProcess:
    return subprocess.run(
        command(folder, flags, ranks), cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=timeout_s
    )


def steps(folder: Path) -> list[dict]:
    path = folder / "metrics.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    return [line for line in lines if line.get("step", 0) > 0]


def without_times(lines: list[dict]) -> list[dict]:
    """What must repeat exactly when a run is repeated."""
    timed = ("time/", "sync/", "throughput/")
    return [{name: value for name, value in line.items() if not name.startswith(timed)} for line in lines]


def processes_of(folder: Path) -> list[int]:
    """Processes whose command line names the run's folder."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                line = (entry / "cmdline").read_bytes().decode(errors="replace")
            except OSError:
                continue
            if str(folder) in line:
                found.append(int(entry.name))
    return found


def servers_of(folder: Path) -> list[int]:
    return [
        pid
        for pid in processes_of(folder)
        if b"torchtitan.grpo.engines.embedded" in Path(f"/proc/{pid}/cmdline").read_bytes()
    ]
