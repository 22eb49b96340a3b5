"""The trainer's state is a JSON file, and a file of its own for each value that is bytes."""

import json
import mmap
from pathlib import Path

import pytest

from torchtitan.grpo.checkpoint.marker import is_read_back
from torchtitan.grpo.checkpoint.trainer_state import files_of, read_state


def test_bytes_have_files_of_their_own_and_only_rank_0_reads_them(tmp_path: Path):
    shared = mmap.mmap(-1, 4)
    shared[:] = b"\x00\xffab"
    state = {"step": 3, "rollouts": b"\x01" * 5, "more": memoryview(shared), "none": None, "nested": {"é": [0.1, [2]]}}
    files = files_of(state)
    assert list(files) == ["trainer.json", "rollouts.msgpack", "more.msgpack"] and all(map(is_read_back, files))
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
    plain = {"step": 3, "none": None, "nested": {"é": [0.1, [2]]}}
    assert json.loads((tmp_path / "trainer.json").read_text()) == plain
    names = [*files, "run_config.json", "hf/other.msgpack"]  # what is below is not the trainer's
    assert read_state(tmp_path, names, True) == plain | {"rollouts": b"\x01" * 5, "more": b"\x00\xffab"}
    (tmp_path / "rollouts.msgpack").unlink()
    assert read_state(tmp_path, names, False) == plain | {"rollouts": None, "more": None}
    assert not is_read_back("hf/other.msgpack")


@pytest.mark.parametrize("is_rank0", [True, False])
def test_an_earlier_checkpoint_has_all_in_one_file(is_rank0, tmp_path: Path):
    state = {"step": 3, "rollouts": {"buffer": {"entries": []}}}
    (tmp_path / "trainer.json").write_text(json.dumps(state))
    assert read_state(tmp_path, ["trainer.json", "rng-rank-0.pt"], is_rank0) == state
