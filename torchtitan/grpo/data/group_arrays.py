"""Groups as arrays, and a group as bytes.

The arrays lay all answers end to end, see `rollouts/record.py`. Python's lists take some 100 bytes a token, and their
JSON some 36. The bytes of a group take 8 to 12 a token, and its text.
"""

import itertools
import json
from collections.abc import Container, Iterator, Sequence
from dataclasses import fields
from typing import Any

import numpy as np

from torchtitan.grpo.data import array_bytes
from torchtitan.grpo.data.kept_tokens import KeptTokens
from torchtitan.grpo.data.samples import Group, Prompt, Sample, TopTokens
from torchtitan.grpo.sources.rows import always_json

PER_TOKEN = {
    "token_ids": np.int32,
    "logprobs": np.float32,
    "versions": np.int32,
    "loss_mask": np.bool_,
    "teacher_logprobs": np.float32,
}
"""Fields of `Sample` with an entry per token. The trainer too computes with float32 log-probabilities."""
_FLOATS = [name for name, dtype in PER_TOKEN.items() if dtype is np.float32]
_IN_RUNS = "versions", "loss_mask"


def to_bytes(group: Group) -> bytes:
    """One group as bytes, from which `from_bytes` makes an equal one.

    A log-probability takes 4 bytes if all of a column are float32 numbers, as those of servers are, else 8.
    """
    arrays = to_arrays([group], {}, exact=True)
    packed = {name: _narrowed(arrays[name]) for name in _FLOATS if name in arrays}
    return array_bytes.to_bytes([arrays | packed | {name: _runs(arrays[name]) for name in _IN_RUNS}])


def from_bytes(data: bytes | memoryview) -> Group:
    """Inverse of `to_bytes`. The group's arrays cannot be written."""
    (arrays,) = array_bytes.from_bytes(data)
    arrays |= {name: _without_runs(arrays[name]).astype(PER_TOKEN[name]) for name in _IN_RUNS}
    (group,) = from_arrays(json.loads(arrays["about"].tobytes()), arrays)
    return group


def to_arrays(groups: Sequence[Group], about: dict[str, Any], exact: bool = False) -> dict[str, np.ndarray]:
    """Groups as named arrays.

    Args:
        about: JSON values that stand beside those of the groups in the array of this name.
        exact: Log-probabilities are float64, and what no step needs is kept too.
    """
    samples = [sample for group in groups for sample in group]
    prompts = list({id(sample.prompt): sample.prompt for sample in samples}.values())
    number = {id(prompt): i for i, prompt in enumerate(prompts)}

    # After a resume, groups of before may name another number of likeliest tokens: none of use now.
    k = next((sample.top.ids.shape[1] for sample in reversed(samples) if sample.top is not None), 0)

    def own_top(sample: Sample) -> TopTokens | None:
        return sample.top if sample.top is not None and sample.top.ids.shape[1] == k else None

    def described(sample: Sample) -> dict[str, Any]:
        known = _fields(sample, but=(*PER_TOKEN, "top", "routes", "kept", "final"))
        known |= {"prompt": number[id(sample.prompt)], "masked": sample.loss_mask is not None}
        is_taught, has_top = sample.teacher_logprobs is not None, own_top(sample) is not None
        if is_taught:
            known["taught"] = True
        if sample.kept is not None:
            known["kept"] = True
        if has_top != is_taught and (exact or has_top):
            known["top"] = has_top
        if exact and sample.routes is not None and not len(sample.routes):
            known["routed"] = True
        return known

    about = about | {
        "prompts": [_fields(prompt, but=("token_ids",)) for prompt in prompts],
        "groups": [[described(sample) for sample in group] for group in groups],
    }
    try:  # an environment may keep objects of its own in a prompt's columns
        text = json.dumps(about, default=str, skipkeys=True)
    except Exception:  # and such as JSON cannot write, as a list that holds itself
        for prompt in about["prompts"]:
            prompt["columns"] = always_json(prompt["columns"])
        text = json.dumps(about)
    columns = {name: [getattr(sample, name) for sample in samples] for name in PER_TOKEN}
    columns["loss_mask"] = [sample.loss_mask or [True] * len(sample.token_ids) for sample in samples]
    if all(sample.teacher_logprobs is None for sample in samples):
        del columns["teacher_logprobs"]
    else:
        columns["teacher_logprobs"] = [s.teacher_logprobs or [0.0] * len(s.token_ids) for s in samples]
    dtypes = PER_TOKEN | (dict.fromkeys(_FLOATS, np.float64) if exact else {})
    prompt_ids = [prompt.token_ids for prompt in prompts]
    arrays = {name: _laid(lists, dtypes[name]) for name, lists in columns.items()} | {
        "answer_lengths": np.array([len(ids) for ids in columns["token_ids"]], np.int64),
        "prompt_ids": _laid(prompt_ids, np.int32),
        "prompt_lengths": np.array([len(ids) for ids in prompt_ids], np.int64),
        "about": np.frombuffer(text.encode(), np.uint8),
    }
    if k:
        parts = [own_top(sample) or TopTokens.none(len(sample.token_ids), k) for sample in samples]
        arrays["top_ids"] = np.concatenate([part.ids for part in parts])
        arrays["top_logprobs"] = np.concatenate([part.logprobs for part in parts])
    if routes := [sample.routes for sample in samples if sample.routes is not None]:
        lengths = [0 if sample.routes is None else len(sample.routes) for sample in samples]
        arrays["routes"], arrays["route_lengths"] = np.concatenate(routes), np.array(lengths, np.int64)
    if any(sample.kept is not None for sample in samples):
        joined = KeptTokens.joined([sample.kept or KeptTokens.all(len(sample.token_ids)) for sample in samples])
        arrays["kept_counts"], arrays["kept_ids"] = joined.counts, joined.ids
    return arrays


def from_arrays(about: dict[str, Any], arrays: dict[str, np.ndarray]) -> list[Group]:
    """Inverse of `to_arrays`.

    Args:
        about: What the array of this name holds.
    """
    prompt_ids = _cut(arrays["prompt_ids"], arrays["prompt_lengths"])
    prompts = [
        Prompt(token_ids=ids, **known | {"functions": tuple(known["functions"])})
        for ids, known in zip(prompt_ids, about["prompts"], strict=True)
    ]
    names = [name for name in PER_TOKEN if name in arrays or name != "teacher_logprobs"]
    routes: Iterator[np.ndarray | None] = itertools.repeat(None)
    if "routes" in arrays:
        routes = iter(_split(arrays["routes"], arrays["route_lengths"]))
    tops: Iterator[TopTokens | None] = itertools.repeat(None)
    if "top_ids" in arrays:
        pairs = (_split(arrays[name], arrays["answer_lengths"]) for name in ("top_ids", "top_logprobs"))
        tops = itertools.starmap(TopTokens, zip(*pairs, strict=True))
    kept: Iterator[KeptTokens | None] = itertools.repeat(None)
    if "kept_counts" in arrays:
        counts = _split(arrays["kept_counts"], arrays["answer_lengths"])
        ids = _split(arrays["kept_ids"], np.array([own.sum() for own in counts], np.int64))
        kept = itertools.starmap(KeptTokens, zip(counts, ids, strict=True))
    per_token = zip(*(_cut(arrays[name], arrays["answer_lengths"]) for name in names), strict=True)

    def sample(known: dict[str, Any]) -> Sample:
        values = known | dict(zip(names, next(per_token), strict=True)) | {"prompt": prompts[known["prompt"]]}
        values["servers"] = [(first, server) for first, server in known.get("servers", [])]
        if not values.pop("masked"):
            values["loss_mask"] = None
        is_taught = values.pop("taught", False)
        if not is_taught:
            values["teacher_logprobs"] = None
        top, own_routes, own_kept = next(tops), next(routes), next(kept)
        if not values.pop("top", is_taught):
            top = None
        if not (values.pop("routed", False) or (own_routes is not None and len(own_routes))):
            own_routes = None
        if not values.pop("kept", False):
            own_kept = None
        return Sample(**values, top=top, routes=own_routes, kept=own_kept)

    return [[sample(known) for known in group] for group in about["groups"]]


def _fields(record: Any, but: Container[str]) -> dict[str, Any]:
    return {f.name: getattr(record, f.name) for f in fields(record) if f.name not in but}


def _laid(lists: list[list[Any]], dtype: Any) -> np.ndarray:
    """The lists' values end to end. One list at a time, for no other thread runs meanwhile."""
    return np.concatenate([np.empty(0, dtype), *(as_array(values, dtype) for values in lists)])


def as_array(values: list[Any], dtype: Any) -> np.ndarray:
    """The values. Integers that are all the same, as the versions of most answers, take a tenth of the time."""
    if values and isinstance(values[0], int) and values[0] == values[-1] and values.count(values[0]) == len(values):
        return np.full(len(values), values[0], dtype)
    return np.fromiter(values, dtype, len(values))


def _cut(values: np.ndarray, lengths: np.ndarray) -> list[list[Any]]:
    """The reverse: the values as one list for each length."""
    return [part.tolist() for part in _split(values, lengths)]


def _split(values: np.ndarray, lengths: np.ndarray) -> list[np.ndarray]:
    """The same as arrays."""
    if len(values) != lengths.sum():
        raise ValueError(f"{len(values)} values for {lengths.sum()} tokens or positions")
    return np.split(values, lengths.cumsum()[:-1]) if len(lengths) else []


def _narrowed(values: np.ndarray) -> np.ndarray:
    """float64 numbers as float32 if that loses nothing."""
    with np.errstate(over="ignore"):
        narrow: np.ndarray = values.astype(np.float32)
    return narrow if np.array_equal(narrow, values, equal_nan=True) else values


def _runs(values: np.ndarray) -> np.ndarray:
    """Equal values in a row as int32 [runs, 2], value and length, if that takes less room."""
    starts = np.flatnonzero(np.diff(values, prepend=values[:1] ^ 1))
    runs = np.stack([values[starts], np.diff(starts, append=len(values))], axis=1).astype(np.int32)
    return runs if runs.nbytes < values.nbytes else values


def _without_runs(values: np.ndarray) -> np.ndarray:
    return np.repeat(values[:, 0], values[:, 1]) if values.ndim == 2 else values
