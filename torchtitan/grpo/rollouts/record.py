"""What each step was trained on, in files: written with `[rollout] record_gib`, read by `torchtitan-grpo replay`.

`rollouts/step-000012.npz` in the run's folder holds step 12. It is a compressed zip archive of .npy arrays with a
CRC-32 each: numpy.load opens it, and nothing in it is pickled. The arrays lay all answers end to end:

    token_ids, logprobs, versions, loss_mask    one entry per answer token: int32, float32, int32, bool
    teacher_logprobs                            float32, the same; only with [distill]
    top_ids, top_logprobs                       int32 and float32 [answer tokens, K]; only with [distill] top_k or
                                                [grpo] score_centering
    answer_lengths                              tokens of each answer, int64
    prompt_ids, prompt_lengths                  the same for the prompts, each of them once
    routes, route_lengths                       experts [positions, layers, top_k] of prompts and answers, and the
                                                positions of each; only with [grpo] routing_replay
    kept_counts, kept_ids                       int32: how many tokens could be drawn in place of each, 0 for all, and
                                                their ids, end to end; only with [rollout] top_k
    about                                       JSON as bytes: rewards, texts, and which answer is of which group
"""

import contextlib
import json
import logging
import zlib
from pathlib import Path
from typing import Any
from zipfile import ZIP_DEFLATED, BadZipFile, ZipFile, is_zipfile

import numpy as np

from torchtitan.grpo.config.job_config import Rollout
from torchtitan.grpo.data.group_arrays import from_arrays, to_arrays
from torchtitan.grpo.data.samples import Group
from torchtitan.grpo.errors import UserError

logger = logging.getLogger(__name__)

FOLDER = "rollouts"
FORMAT = 1
_COMPRESSION = 1
"""zlib's level: higher ones take several times as long and save a few percent."""


class RolloutRecord:
    """Writes each step's groups before they are trained on, so that a step that fails can be replayed too.

    The first step that a run writes drops those that an earlier run wrote from there on, so the record tells one
    history. A file has its name only when it is complete. A failed write is logged, and the run goes on.

    Args:
        rollout: `record_gib` bounds the record: the oldest steps are removed, but never the newest. 0 writes nothing.
        dump_folder: `[job] dump_folder`.
    """

    def __init__(self, rollout: Rollout, dump_folder: str | Path) -> None:
        self._limit_bytes = int(rollout.record_gib * 2**30)
        self._temperature = rollout.temperature
        self._folder = Path(dump_folder) / FOLDER
        self._bytes: dict[int, int] | None = None
        """Of each step that is there, oldest first. None: this run has written none yet."""

    def write(self, step: int, groups: list[Group]) -> None:
        if not self._limit_bytes:
            return
        path = _path(self._folder, step)
        unfinished = path.with_suffix(".tmp")
        try:
            if self._bytes is None:
                self._bytes = self._continue_at(step)
            about = {"format": FORMAT, "step": step, "temperature": self._temperature}
            _save(unfinished, to_arrays(groups, about))
            unfinished.replace(path)
            self._bytes[step] = path.stat().st_size
            self._drop_oldest(self._bytes)
        except OSError as error:
            logger.error(f"step {step} is not recorded: {path}: {error}; the run goes on")
            with contextlib.suppress(OSError):
                unfinished.unlink()

    def _continue_at(self, step: int) -> dict[int, int]:
        self._folder.mkdir(parents=True, exist_ok=True)
        for unfinished in self._folder.glob("step-*.tmp"):
            unfinished.unlink()
        found = _files(self._folder)
        later = [number for number in found if number >= step]
        if later:
            logger.info(f"{self._folder}: dropped {len(later)} steps from {step} on, recorded before this run")
        for number in later:
            found.pop(number).unlink()
        return {number: path.stat().st_size for number, path in found.items()}

    def _drop_oldest(self, sizes: dict[int, int]) -> None:
        total, newest = sum(sizes.values()), next(reversed(sizes))
        while total > self._limit_bytes and (oldest := next(iter(sizes))) != newest:
            _path(self._folder, oldest).unlink(missing_ok=True)
            total -= sizes.pop(oldest)


def recorded_steps(run: Path) -> dict[int, Path]:
    """The complete files of a run's record by step, in ascending order. A torn one is named and passed over.

    Raises:
        UserError: There is none.
    """
    found = _files(run / FOLDER)
    torn = {step: path for step, path in found.items() if not is_zipfile(path)}
    for path in torn.values():
        logger.warning(f"{path} is torn and passed over")
    if len(torn) == len(found):
        raise UserError(f"{run / FOLDER} holds no recorded step: a run writes them with [rollout] record_gib over 0")
    return {step: path for step, path in found.items() if step not in torn}


def read_step(path: Path) -> tuple[dict[str, Any], list[Group]]:
    """A step's file: what it says of itself (`step`, `temperature`), and its groups.

    Raises:
        UserError: The file is damaged, or was written by another version of this project.
    """
    try:
        with np.load(path, allow_pickle=False) as archive:
            arrays = {name: archive[name] for name in archive.files}
        about = json.loads(arrays["about"].tobytes())
        if about["format"] != FORMAT:
            raise UserError(f"{path} has format {about['format']}, and this version of the project reads {FORMAT}")
        return about, from_arrays(about, arrays)
    except UserError:
        raise
    except (OSError, EOFError, LookupError, TypeError, ValueError, RuntimeError, BadZipFile, zlib.error) as error:
        what = f"{type(error).__name__}: {error}"
        raise UserError(f"{path} is damaged ({what}): remove it, and the replay leaves the step out") from error


def _save(path: Path, arrays: dict[str, np.ndarray]) -> None:
    """As numpy.savez_compressed does, which has no choice of level."""
    with ZipFile(path, "w", ZIP_DEFLATED, compresslevel=_COMPRESSION) as archive:
        for name, array in arrays.items():
            with archive.open(f"{name}.npy", "w", force_zip64=True) as file:
                np.lib.format.write_array(file, array, allow_pickle=False)


def _path(folder: Path, step: int) -> Path:
    return folder / f"step-{step:06d}.npz"


def _files(folder: Path) -> dict[int, Path]:
    """By step, in ascending order."""
    numbered = ((path.stem.removeprefix("step-"), path) for path in folder.glob("step-*.npz"))
    return dict(sorted((int(number), path) for number, path in numbered if number.isdecimal()))
