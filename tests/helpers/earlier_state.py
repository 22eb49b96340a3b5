"""The state of rollouts as earlier versions saved it: complete groups as JSON values, in trainer.json."""

import json
from collections.abc import Callable
from dataclasses import fields
from typing import Any

import msgspec
import numpy as np

from torchtitan.grpo.data.group_arrays import from_bytes
from torchtitan.grpo.data.routes import to_npy
from torchtitan.grpo.data.samples import Prompt, Sample


def earlier_state(state: bytes, prompts_at: Callable[[list[int]], list[Prompt]]) -> dict[str, Any]:
    """What an earlier version saved of `RolloutStream.state_dict`."""
    values = msgspec.msgpack.decode(state)
    return values | {"buffer": earlier_buffer(values["buffer"], prompts_at)}


def earlier_buffer(state: dict[str, Any], prompts_at: Callable[[list[int]], list[Prompt]]) -> dict[str, Any]:
    """The same of `StalenessBuffer.state_dict`."""
    entries = []
    for entry, prompt in zip(state["entries"], prompts_at([e["prompt"] for e in state["entries"]]), strict=True):
        values = dict(entry)
        group = values.pop("group")
        entries.append(values | {"samples": group and [_sample_state(sample, prompt) for sample in from_bytes(group)]})
    return json.loads(json.dumps(state | {"entries": entries}))


def _sample_state(sample: Sample, prompt: Prompt) -> dict[str, Any]:
    state = {f.name: getattr(sample, f.name) for f in fields(sample) if f.name != "prompt"}
    if sample.routes is not None:
        state["routes"] = to_npy(sample.routes)
    if (top := state.pop("top")) is not None:
        state["teacher_top"] = [to_npy(top.ids), to_npy(top.logprobs.view(np.int32))]
    own = sample.prompt
    return state if own.token_ids == prompt.token_ids else state | {"began": [own.token_ids, own.text]}
