"""JSONL files of steps, each of which tells one history."""

import contextlib
import json
import logging
import os
from collections import deque
from pathlib import Path
from typing import Any, TextIO

logger = logging.getLogger(__name__)

WARM_START = "sft/step"
"""Axis of the supervised steps before GRPO's. Its metrics are `sft/...`; all others are over `step`."""
_TORN_MAX = 100
"""Most lines at the end of a file that may be torn."""
_WAITING_MAX = 1000
"""Most lines that wait for room on a full disk. Older ones are lost."""


class StepLines:
    """A JSONL file of step records that a resumed run continues.

    The first record on an axis drops what an earlier run wrote from that step on, so the file always tells one history.
    Every write is flushed. Lines that a full disk does not take are kept, and written when there is room.

    Attributes:
        is_writable: The last write was whole.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("ab", buffering=0)
        self._first: dict[str, int] = {}
        self._begun: set[str] = set()
        self._last: dict[str, Any] = {}
        self._last_offset = 0
        self._waiting: deque[bytes] = deque(maxlen=_WAITING_MAX)
        self.is_writable = True

    def append(self, record: dict[str, Any], axis: str = "step") -> None:
        """Write one record. `record[axis]` is its step."""
        self._last = record
        self._waiting.append((json.dumps(record, ensure_ascii=False) + "\n").encode(errors="backslashreplace"))
        self.begin(record[axis], axis)

    def merge(self, record: dict[str, Any], axis: str = "step") -> None:
        """Write one record; if the last line is of the same step, merge into it. So each step has one line."""
        if axis in self._first and self._last.get(axis) == record[axis]:
            record = self._last | record
            if self._waiting:
                self._waiting.pop()
            else:
                with contextlib.suppress(OSError):  # then it has two
                    self._file.truncate(self._last_offset)
        self.append(record, axis)

    def begin(self, step: int, axis: str = "step") -> None:
        """The first call, or the first record, drops what an earlier run wrote from that step on."""
        self._first.setdefault(axis, step)
        self._write()

    def last(self, name: str) -> float:
        """The newest number under a name in the whole file, 0 if there is none. Torn lines are passed over."""
        with _readable(self.path) as lines:
            newest = deque((line for line in lines if f'"{name}":' in line), maxlen=_TORN_MAX)
        return next((record[name] for line in reversed(newest) if name in (record := _record(line))), 0.0)

    def close(self) -> None:
        self._write()
        self._file.close()

    def _write(self) -> None:
        """Write what waits. What cannot be written waits on, and the first time an error says so."""
        try:
            for axis in self._first.keys() - self._begun:
                self._drop_from(axis, self._first[axis])
                self._begun.add(axis)
            while self._waiting:
                self._append_whole(self._waiting[0])
                self._waiting.popleft()
        except OSError as error:
            if self.is_writable:
                logger.error(f"{self.path} cannot be written: {error}; its lines wait for room, and the run goes on")
            self.is_writable = False
        else:
            if not self.is_writable:
                logger.info(f"{self.path} is written again")
            self.is_writable = True

    def _append_whole(self, line: bytes) -> None:
        """What a full disk takes of a line is cut off again."""
        self._last_offset = self._file.seek(0, os.SEEK_END)
        try:
            while line:
                line = line[self._file.write(line) :]
        except OSError:
            self._file.truncate(self._last_offset)
            raise

    def _drop_from(self, axis: str, step: int) -> None:
        """Rewrite the file without records whose `axis` is `step` or later, and without lines that are none."""
        kept_path = self.path.with_name(self.path.name + ".tmp")
        dropped = 0
        with _readable(self.path) as old, kept_path.open("w", encoding="utf-8") as kept:
            for line in old:
                record = _record(line) if line.endswith("\n") else {}
                if record and record.get(axis, step - 1) < step:
                    kept.write(line)
                else:
                    dropped += 1
        if dropped == 0:
            kept_path.unlink()
            return
        logger.info(f"{self.path}: dropped {dropped} lines of {axis} {step} and later, written before this run")
        os.replace(kept_path, self.path)
        self._file.close()
        self._file = self.path.open("ab", buffering=0)


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The complete lines of a file that may still be written; none if it does not exist."""
    if not path.exists():
        return []
    with _readable(path) as lines:
        return [record for line in lines if line.endswith("\n") and (record := _record(line))]


def _record(line: str) -> dict[str, Any]:
    """Empty if the line is none, as after a loss of power."""
    try:
        record = json.loads(line)
    except ValueError:
        return {}
    return record if isinstance(record, dict) else {}


def _readable(path: Path) -> TextIO:
    """A torn last line may end inside a character."""
    return path.open(encoding="utf-8", errors="replace")
