"""What each step was trained on, in files: written with `[rollout] record_gib`, read by `scripts/replay.py`.

`rollouts/step-000012.npz` in the run's folder holds step 12. It is a compressed zip archive of .npy arrays with a
CRC-32 each: numpy.load opens it, and nothing in it is pickled. The arrays lay all answers end to end:

    token_ids, logprobs, versions, loss_mask    one entry per answer token: int32, float32, int32, bool
    teacher_logprobs                            float32, the same; only with [distill]
    top_ids, top_logprobs                       int32 and float32 [answer tokens, K]; only with [distill] top_k
    answer_lengths                              tokens of each answer, int64
    prompt_ids, prompt_lengths                  the same for the prompts, each of them once
    routes, route_lengths                       experts [positions, layers, top_k] of prompts and answers, and the
                                                positions of each; only with [grpo] routing_replay
    about                                       JSON as bytes: rewards, texts, and which answer is of which group
"""

import contextlib
import itertools
import json
import logging
import zlib
from collections.abc import Container, Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any
from zipfile import ZIP_DEFLATED, BadZipFile, ZipFile, is_zipfile

import numpy as np

from torchtitan.grpo.config.job_config import Rollout
from torchtitan.grpo.data.samples import Group, Prompt, Sample, TopTokens
from torchtitan.grpo.errors import UserError

logger = logging.getLogger(__name__)

FOLDER = "rollouts"
FORMAT = 1
PER_TOKEN = {
    "token_ids": np.int32,
    "logprobs": np.float32,
    "versions": np.int32,
    "loss_mask": np.bool_,
    "teacher_logprobs": np.float32,
}
"""Fields of `Sample` with an entry per token. The trainer too computes with float32 log-probabilities."""
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
            _save(unfinished, _arrays(step, self._temperature, groups))
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
        return about, _groups(about, arrays)
    except UserError:
        raise
    except (OSError, EOFError, LookupError, TypeError, ValueError, RuntimeError, BadZipFile, zlib.error) as error:
        what = f"{type(error).__name__}: {error}"
        raise UserError(f"{path} is damaged ({what}): remove it, and the replay leaves the step out") from error


def _arrays(step: int, temperature: float, groups: list[Group]) -> dict[str, np.ndarray]:
    samples = [sample for group in groups for sample in group]
    prompts = list({id(sample.prompt): sample.prompt for sample in samples}.values())
    number = {id(prompt): i for i, prompt in enumerate(prompts)}

    def described(sample: Sample) -> dict[str, Any]:
        known = _fields(sample, but=(*PER_TOKEN, "teacher_top", "routes"))
        taught = {"taught": True} if sample.teacher_logprobs is not None else {}
        return known | {"prompt": number[id(sample.prompt)], "masked": sample.loss_mask is not None} | taught

    about = {
        "format": FORMAT,
        "step": step,
        "temperature": temperature,
        "prompts": [_fields(prompt, but=("token_ids",)) for prompt in prompts],
        "groups": [[described(sample) for sample in group] for group in groups],
    }
    columns = {name: [getattr(sample, name) for sample in samples] for name in PER_TOKEN}
    columns["loss_mask"] = [sample.loss_mask or [True] * len(sample.token_ids) for sample in samples]
    if all(sample.teacher_logprobs is None for sample in samples):
        del columns["teacher_logprobs"]
    else:
        columns["teacher_logprobs"] = [s.teacher_logprobs or [0.0] * len(s.token_ids) for s in samples]
    taught = [sample.teacher_top for sample in samples if sample.teacher_top is not None]
    top: dict[str, np.ndarray] = {}
    if taught:
        k = taught[0].ids.shape[1]
        parts = [sample.teacher_top or TopTokens.none(len(sample.token_ids), k) for sample in samples]
        top["top_ids"] = np.concatenate([part.ids for part in parts])
        top["top_logprobs"] = np.concatenate([part.logprobs for part in parts])
    prompt_ids = [prompt.token_ids for prompt in prompts]
    routes = [sample.routes for sample in samples if sample.routes is not None]
    routed: dict[str, np.ndarray] = {}
    if routes:
        lengths = [0 if sample.routes is None else len(sample.routes) for sample in samples]
        routed = {"routes": np.concatenate(routes), "route_lengths": np.array(lengths, np.int64)}
    return {
        **routed,
        **top,
        **{name: _laid(lists, PER_TOKEN[name]) for name, lists in columns.items()},
        "answer_lengths": np.array([len(ids) for ids in columns["token_ids"]], np.int64),
        "prompt_ids": _laid(prompt_ids, np.int32),
        "prompt_lengths": np.array([len(ids) for ids in prompt_ids], np.int64),
        "about": np.frombuffer(json.dumps(about).encode(), np.uint8),
    }


def _fields(record: Any, but: Container[str]) -> dict[str, Any]:
    return {f.name: getattr(record, f.name) for f in fields(record) if f.name not in but}


def _groups(about: dict[str, Any], arrays: dict[str, np.ndarray]) -> list[Group]:
    prompt_ids = _cut(arrays["prompt_ids"], arrays["prompt_lengths"])
    prompts = [
        Prompt(token_ids=ids, **known | {"functions": tuple(known["functions"])})
        for ids, known in zip(prompt_ids, about["prompts"], strict=True)
    ]
    names = [name for name in PER_TOKEN if name in arrays or name != "teacher_logprobs"]
    routes: Iterator[np.ndarray | None] = itertools.repeat(None)
    if "routes" in arrays:
        parts = _split(arrays["routes"], arrays["route_lengths"])
        routes = iter([part if len(part) else None for part in parts])
    tops: Iterator[TopTokens | None] = itertools.repeat(None)
    if "top_ids" in arrays:
        pairs = (_split(arrays[name], arrays["answer_lengths"]) for name in ("top_ids", "top_logprobs"))
        tops = itertools.starmap(TopTokens, zip(*pairs, strict=True))
    per_token = zip(*(_cut(arrays[name], arrays["answer_lengths"]) for name in names), strict=True)

    def sample(known: dict[str, Any]) -> Sample:
        values = known | dict(zip(names, next(per_token), strict=True)) | {"prompt": prompts[known["prompt"]]}
        if not values.pop("masked"):
            values["loss_mask"] = None
        top = next(tops)
        if not values.pop("taught", False):
            values["teacher_logprobs"] = top = None
        return Sample(**values, teacher_top=top, routes=next(routes))

    return [[sample(known) for known in group] for group in about["groups"]]


def _laid(lists: list[list[Any]], dtype: Any) -> np.ndarray:
    """The lists' values end to end."""
    return np.fromiter(itertools.chain.from_iterable(lists), dtype)


def _cut(values: np.ndarray, lengths: np.ndarray) -> list[list[Any]]:
    """The reverse: the values as one list for each length."""
    return [part.tolist() for part in _split(values, lengths)]


def _split(values: np.ndarray, lengths: np.ndarray) -> list[np.ndarray]:
    """The same as arrays."""
    if len(values) != lengths.sum():
        raise ValueError(f"{len(values)} values for {lengths.sum()} tokens or positions")
    return np.split(values, lengths.cumsum()[:-1]) if len(lengths) else []


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
