"""The trainer's state in a checkpoint: `trainer.json`, and a file beside it for each value that is bytes."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Protocol

TRAINER_STATE = "trainer.json"
"""In a checkpoint: what the trainer saves besides tensors."""
BYTES_SUFFIX = ".msgpack"
"""Of the other files. `rollouts.msgpack` has the value of "rollouts"."""


class TrainerState(Protocol):
    """The other state of a run, as data that JSON preserves: string keys, lists, no tuples. A value of the outermost
    dict may be bytes or a memoryview instead.
    """

    def state_dict(self) -> dict[str, Any]:
        """What it is now. The run may go on before it is written, and changes nothing in it."""
        ...

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Rank 0 gets bytes where it saved some, and other ranks None."""
        ...


def files_of(state: dict[str, Any]) -> dict[str, bytes | memoryview]:
    """Its files: name and content."""
    raw = {key: value for key, value in state.items() if isinstance(value, bytes | memoryview)}
    rest = {key: value for key, value in state.items() if key not in raw}
    return {TRAINER_STATE: json.dumps(rest).encode()} | {f"{key}{BYTES_SUFFIX}": value for key, value in raw.items()}


def read_state(folder: Path, names: Iterable[str], is_rank0: bool) -> dict[str, Any]:
    """The state of the checkpoint in `folder`, see `TrainerState.load_state_dict`.

    Args:
        names: All of the checkpoint's files.
    """
    state = json.loads((folder / TRAINER_STATE).read_text(encoding="utf-8"))
    for name in names:
        if "/" not in name and name.endswith(BYTES_SUFFIX):
            state[name.removesuffix(BYTES_SUFFIX)] = (folder / name).read_bytes() if is_rank0 else None
    return state
