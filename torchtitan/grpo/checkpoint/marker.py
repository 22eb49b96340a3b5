"""`complete.json`: what a checkpoint is, and by which sizes and checksums a damaged file is found."""

import json
import os
import re
import zlib
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from torchtitan.grpo.errors import UserError

MARKER = "complete.json"
_STEP_NAME = re.compile(r"step-(\d+)")
_READ_BACK = re.compile(r"dcp/|rng-rank-|trainer\.json$|[^/]+\.msgpack$")
"""Weights and states. What else is in a checkpoint is for its reader, and a run goes on without it."""
_WRITER = re.compile(r"(?:dcp/__(\d+)_\d+(?:_\d+)?\.distcp|rng-rank-(\d+)\.pt)")
_PIECE_BYTES = 16 << 20
_THREADS = 4


class Damaged(Exception):
    """A checkpoint is not what was written. The message says what is wrong with which file."""


@dataclass(frozen=True)
class Marker:
    """What `complete.json` holds.

    Attributes:
        step: The step after which it was written.
        world_size: Ranks that wrote it.
        saved_at: Seconds since 1970.
        states: What `dcp/` holds.
        files: Bytes by file name.
        number: Counts the checkpoints of a folder in the order they were written; a clock may go back.
        checksums: `checksum` by file name.
    """

    step: int
    world_size: int
    saved_at: float
    states: list[str]
    files: dict[str, int]
    number: int
    checksums: dict[str, str]

    def write(self, folder: Path) -> None:
        (folder / MARKER).write_text(_sealed(asdict(self)), encoding="utf-8")


_ENTRIES = {entry.name for entry in fields(Marker)}


def read_marker(folder: Path) -> Marker:
    """The marker of the checkpoint in `folder`.

    Raises:
        Damaged: It cannot be read, or is not what was written.
    """
    try:
        text = (folder / MARKER).read_text(encoding="utf-8")
        entries = json.loads(text)
    except OSError as error:
        raise Damaged(f"its {MARKER} cannot be read ({error})") from error
    except (ValueError, RecursionError) as error:
        raise Damaged(f"its {MARKER} is not JSON") from error
    if not isinstance(entries, dict) or not entries.keys() >= _ENTRIES:
        raise Damaged(f"its {MARKER} lacks entries, as that of an early version of this program")
    entries.pop("checksum", None)
    if entries.keys() != _ENTRIES or _sealed(entries) != text:  # the entries determine every byte of the file
        raise Damaged(f"its {MARKER} is not what was written")
    if folder.name != f"step-{entries['step']}":
        raise Damaged(f"its {MARKER} is that of step {entries['step']}")
    return Marker(**entries)


def _sealed(entries: dict[str, Any]) -> str:
    """The file's text: the entries and their checksum."""
    return json.dumps(entries | {"checksum": _hex(zlib.crc32(json.dumps(entries).encode()))}, indent=2)


def markers(folder: Path) -> tuple[list[Marker], dict[Path, str]]:
    """The checkpoints in `folder`: markers in the order they were written, and what is wrong with those that cannot be
    read.
    """
    found, damaged = [], {}
    for path in folder.glob("step-*"):
        if _STEP_NAME.fullmatch(path.name) and (path / MARKER).is_file():
            try:
                found.append(read_marker(path))
            except Damaged as error:
                damaged[path] = str(error)
    return sorted(found, key=lambda marker: (marker.number, marker.saved_at)), damaged


def complete_steps(folder: Path) -> list[int]:
    """Steps of the complete checkpoints in `folder`, in the order they were written."""
    return [marker.step for marker in markers(folder)[0]]


def step_of(path: Path) -> int:
    """The step in the name of a checkpoint's folder."""
    return int(path.name.removeprefix("step-"))


def candidates(folder: Path, load_step: int) -> tuple[dict[Path, Marker], dict[Path, str]]:
    """Checkpoints that may be loaded: the markers in the order they were written, and what is wrong with unreadable
    ones. All of the folder with `load_step` -1, else that one.

    Raises:
        UserError: There is no checkpoint of `load_step`.
    """
    found, torn = markers(folder)
    by_path = {folder / f"step-{marker.step}": marker for marker in found}
    if load_step < 0:
        return by_path, torn
    path = folder / f"step-{load_step}"
    if path not in by_path and path not in torn:
        steps = [marker.step for marker in found]
        raise UserError(f"[checkpoint] load_step = {load_step}: {folder} holds complete checkpoints of {steps}")
    return {path: by_path[path]} if path in by_path else {}, {path: torn[path]} if path in torn else {}


def checksum(path: Path) -> str:
    """The CRC-32 of a file's pieces, in hexadecimal. It finds any change of up to 32 bits in a row.

    Several threads read, since one of them checks about 3 GB/s (BLAKE2b 0.5, SHA-256 0.9).
    """

    def of_piece(start: int) -> bytes:
        with path.open("rb") as file:
            file.seek(start)
            return zlib.crc32(file.read(_PIECE_BYTES)).to_bytes(4, "big")

    with ThreadPoolExecutor(_THREADS) as pool:
        pieces = pool.map(of_piece, range(0, path.stat().st_size, _PIECE_BYTES))
        return _hex(zlib.crc32(b"".join(pieces)))


def _hex(number: int) -> str:
    return f"{number:08x}"


def measured(folder: Path, rank: int) -> dict[str, tuple[int, str]]:
    """Size and checksum by name of the files that `rank` has written, after a flush to disk."""
    result = {}
    for path in folder.rglob("*"):
        name = path.relative_to(folder).as_posix()
        writer = _WRITER.fullmatch(name)
        if path.is_file() and rank == int(writer[1] or writer[2] if writer else 0):
            flush(path)
            result[name] = path.stat().st_size, checksum(path)
    return result


def damages(folder: Path, marker: Marker, rank: int = 0, ranks: int = 1) -> dict[str, str]:
    """What is wrong with the checkpoint's files, by name; each rank checks its share of the bytes."""
    by_size = sorted(marker.files, key=lambda name: (marker.files[name], name))
    found = {name: _damage(folder / name, marker.files[name], marker.checksums[name]) for name in by_size[rank::ranks]}
    return {name: what for name, what in found.items() if what}


def is_read_back(name: str) -> bool:
    """Whether a run that resumes needs this file of a checkpoint."""
    return _READ_BACK.match(name) is not None


def _damage(path: Path, size: int, expected: str) -> str | None:
    try:
        found = path.stat().st_size
        if found != size:
            return f"has {found} bytes, not {size}"
        return "has another checksum than when it was written" if checksum(path) != expected else None
    except FileNotFoundError:
        return "is missing"
    except (OSError, ValueError) as error:  # ValueError: no file can have that name
        return f"cannot be read ({error})"


def flush(path: Path) -> None:
    """Flush a file or a folder's entries to disk, so that they survive a power failure."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
