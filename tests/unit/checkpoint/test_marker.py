"""`complete.json`: any change of it is refused, and none ends in a traceback."""

import itertools
import json

import pytest

from torchtitan.grpo.checkpoint import marker as module
from torchtitan.grpo.checkpoint.marker import MARKER, Damaged, Marker, checksum, damages, markers, read_marker

FIRST = {"step": 3, "world_size": 2, "saved_at": 1.5, "states": ["model"], "files": {"dcp/.metadata": 10}}
"""A marker from before there were numbers and checksums: it is refused."""


def written(folder, **changes) -> Marker:
    marker = Marker(**FIRST | {"number": 1, "checksums": {"dcp/.metadata": "0a1b2c3d"}} | changes)
    path = folder / f"step-{marker.step}"
    path.mkdir(exist_ok=True)
    marker.write(path)
    return marker


def test_a_marker_comes_back_and_any_flipped_bit_is_refused(tmp_path):
    marker = written(tmp_path)
    folder = tmp_path / "step-3"
    assert read_marker(folder) == marker
    content = (folder / MARKER).read_bytes()
    for position in range(8 * len(content)):
        damaged = bytearray(content)
        damaged[position // 8] ^= 1 << position % 8
        (folder / MARKER).write_bytes(damaged)
        assert markers(tmp_path)[0] == [], f"bit {position}"


@pytest.mark.parametrize(
    "entries",
    [
        [],
        3,
        {"step": 3},
        FIRST,
        FIRST | {"number": 1},
        FIRST | {"number": 1, "checksums": {"dcp/.metadata": "0a1b2c3d"}},
        FIRST | {"number": 1, "checksums": {}, "checksum": 3},
        FIRST | {"number": 1, "checksums": {}, "saved_at": float("nan")},
        FIRST | {"number": 1, "checksums": {}, "step": 10**400},
    ],
)
def test_odd_entries_are_refused(entries, tmp_path):
    (tmp_path / "step-3").mkdir()
    (tmp_path / "step-3" / MARKER).write_text(json.dumps(entries))
    with pytest.raises(Damaged, match=f"its {MARKER} "):
        read_marker(tmp_path / "step-3")


@pytest.mark.parametrize("content", [b"", b"\xff", b"{" * 100_000, b"[" * 100_000, b'{"step": 3'])
def test_what_is_not_json_is_refused(content, tmp_path):
    (tmp_path / "step-3").mkdir()
    (tmp_path / "step-3" / MARKER).write_bytes(content)
    with pytest.raises(Damaged, match=f"its {MARKER} is not JSON"):
        read_marker(tmp_path / "step-3")
    assert markers(tmp_path) == ([], {tmp_path / "step-3": f"its {MARKER} is not JSON"})


def test_the_order_is_that_of_the_numbers(tmp_path):
    for step, number, saved_at in ((1, 2, 9.0), (2, 4, 7.0), (3, 3, 8.0)):
        written(tmp_path, step=step, number=number, saved_at=saved_at)
    assert [marker.step for marker in markers(tmp_path)[0]] == [1, 3, 2]


def test_the_marker_of_another_step_is_refused(tmp_path):
    written(tmp_path)
    (tmp_path / "step-3").rename(tmp_path / "step-4")
    assert markers(tmp_path) == ([], {tmp_path / "step-4": f"its {MARKER} is that of step 3"})


def test_a_file_of_several_pieces(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "_PIECE_BYTES", 10)
    content = bytes(range(95))
    path = tmp_path / "file"
    seen = set()
    for position in range(0, 95, 7):
        for piece in (content, content[:position] + b"\xff" + content[position + 1 :], content[:position]):
            path.write_bytes(piece)
            seen.add(checksum(path))
    assert len(seen) == 1 + 2 * 14


def test_files_that_no_one_can_have_written_are_damages(tmp_path):
    (tmp_path / "folder").mkdir()
    size = (tmp_path / "folder").stat().st_size
    found = damages(tmp_path, Marker(1, 1, 1.0, [], {"folder": size, "a\0b": 1}, 1, {"folder": "", "a\0b": ""}))
    assert list(found) == ["a\0b", "folder"] and all(what.startswith("cannot be read (") for what in found.values())


def test_every_rank_checks_a_share(tmp_path):
    files = {f"file-{i}": 1 for i in range(7)}
    marker = Marker(1, 1, 1.0, [], files, 1, dict.fromkeys(files, ""))
    shares = [damages(tmp_path, marker, rank, 3) for rank in range(3)]
    assert sorted(itertools.chain(*shares)) == list(files) and all(len(share) >= 2 for share in shares)
    assert {what for share in shares for what in share.values()} == {"is missing"}
