"""The run's own folder, `[job] dump_folder`: nobody else's now, and no earlier run's that a new one would overwrite."""

import contextlib
import itertools
import json
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from torchtitan.grpo.checkpoint.marker import candidates, step_of
from torchtitan.grpo.config.torchtitan_keys import Checkpoint
from torchtitan.grpo.errors import UserError
from torchtitan.grpo.process.folder_lock import only_run_in

RECORDS = ("metrics.jsonl", "samples.jsonl", "validation_samples.jsonl")
"""What a run writes step by step, and a new run in its folder would drop."""
_OVERLAP_S = 15.0


@contextlib.contextmanager
def own_folder(cfg: Checkpoint, dump_folder: str | Path, saves: bool = True) -> Iterator[None]:
    """Hold the folder, checked, and that of checkpoints, which may be elsewhere. For rank 0, at the start.

    A job that resumes waits for the run before it, which may still be saving. A new run does not wait: it could not use
    that folder anyway. What killed saves have left is removed.

    Args:
        saves: Checkpoints are written, not only read.

    Raises:
        UserError: Another run uses it, or `check_folder` refuses it.
    """
    wait_s, folder = cfg.stop_seconds + _OVERLAP_S if cfg.resume else 0.0, Path(dump_folder) / cfg.folder
    with only_run_in(dump_folder, wait_s), contextlib.ExitStack() as held:
        check_folder(cfg, dump_folder, saves)
        if cfg.enable and saves:
            if folder.resolve() != Path(dump_folder).resolve():
                held.enter_context(only_run_in(folder, wait_s, "[checkpoint] folder"))
            for unfinished in folder.glob("step-*[0-9].tmp"):
                shutil.rmtree(unfinished, ignore_errors=True)
        yield


def check_folder(cfg: Checkpoint, dump_folder: str | Path, saves: bool = True) -> None:
    """Check that this run may begin, or go on, in its folder. `saves`: it writes checkpoints there, if it has any.

    An earlier run is one that has trained a step. What another has left does not count, and a new run removes it: so a
    run that failed at its start is started again by the same command.

    Raises:
        UserError: Checkpoints cannot be written. A new run would overwrite an earlier one. There is no checkpoint to
            resume from, or not that of `load_step`.
    """
    dump, folder = Path(dump_folder), Path(dump_folder) / cfg.folder
    if cfg.enable and saves:
        try:
            str(folder).encode()  # safetensors takes no other name
            folder.mkdir(parents=True, exist_ok=True)
            tempfile.TemporaryFile(dir=folder).close()
        except (OSError, UnicodeError) as error:
            raise UserError(
                f"checkpoints cannot be written to {folder} ({error}): change [job] dump_folder or [checkpoint] folder"
            ) from error
    found, torn = candidates(folder, cfg.load_step)
    saved = sorted(map(step_of, (*found, *torn)))
    if cfg.resume is True and not saved:
        raise UserError(
            f"[checkpoint] resume = true: {folder} holds no checkpoint. Name the run to continue by [job] dump_folder, "
            'or set resume = "auto", which begins a new run if there is nothing to resume'
        )
    if not cfg.resume:
        if saved or has_steps(dump):
            with_checkpoints = f" with checkpoints of steps {saved}" if saved else ", without a checkpoint"
            how = "continue it by --checkpoint.resume ([checkpoint] resume = true), or " if saved else ""
            raise UserError(
                f"{dump} already holds a run{with_checkpoints}: {how}begin a new one elsewhere by --job.dump_folder "
                f"{_free(dump)} ([job] dump_folder)"
            )
        for name in RECORDS:
            (dump / name).unlink(missing_ok=True)


def has_steps(dump: Path) -> bool:
    """Whether a folder has records of training steps."""
    return any(_has_steps(dump / name) for name in RECORDS)


def _has_steps(path: Path) -> bool:
    try:
        with path.open(encoding="utf-8", errors="replace") as lines:
            return any(json.loads(line).get("step", 0) > 0 for line in lines if line.endswith("\n"))
    except (FileNotFoundError, NotADirectoryError):  # which is refused elsewhere
        return False
    except (ValueError, AttributeError, TypeError):  # not this program's: not to be overwritten either
        return True


def _free(dump: Path) -> Path:
    """The folder's name with the first number that no other folder has."""
    named = dump if dump.name.strip(".") else dump.resolve()  # `.` and `..` are no names
    names = (Path(f"{named}-{number}") for number in itertools.count(2))
    return next(path for path in names if not path.exists())
