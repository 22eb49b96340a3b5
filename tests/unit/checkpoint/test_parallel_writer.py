"""What several threads write is what one would write, and none of their errors is lost."""

import threading

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import filesystem
from torch.distributed.checkpoint.api import CheckpointException

import torchtitan  # noqa: F401  the overlay's shims come first
from torchtitan.grpo.checkpoint import parallel_writer
from torchtitan.grpo.checkpoint.parallel_writer import FILES, ParallelWriter


def states_of(tensors: int) -> dict:
    weights = {f"weight.{i}": torch.randn(16 * (i + 1), 64) for i in range(tensors)}
    return {"model": weights | {"view": torch.randn(64, 64)[:, ::2], "none": torch.empty(0)}, "step": 3}


def read_back(folder, states: dict) -> None:
    read = {"model": {name: torch.zeros_like(value) for name, value in states["model"].items()}, "step": 0}
    dcp.load(read, checkpoint_id=folder, no_dist=True)
    assert read["step"] == states["step"]
    assert all(torch.equal(read["model"][name], value) for name, value in states["model"].items())


def files(folder) -> dict[str, int]:
    return {path.name: path.stat().st_size for path in sorted(folder.glob("*.distcp"))}


def test_what_is_small_is_one_file(tmp_path):
    states = states_of(4)
    dcp.save(states, storage_writer=ParallelWriter(tmp_path), no_dist=True)
    assert list(files(tmp_path)) == ["__0_0.distcp"]
    read_back(tmp_path, states)


@pytest.mark.parametrize(("tensors", "files_expected"), [(2, 2), (12, FILES)])
def test_files_have_about_the_same_size(tmp_path, monkeypatch, tensors, files_expected):
    monkeypatch.setattr(parallel_writer, "FILE_BYTES", 8 << 10)
    states, entered = states_of(tensors), []
    writer = ParallelWriter(tmp_path, lambda: entered.append(threading.get_ident()))
    dcp.save(states, storage_writer=writer, no_dist=True)
    sizes = files(tmp_path)
    assert list(sizes) == [f"__0_{number}_0.distcp" for number in range(files_expected)]
    assert 1 <= len(set(entered)) == len(entered) <= files_expected
    if tensors > FILES:
        assert max(sizes.values()) < 1.5 * min(sizes.values())
    read_back(tmp_path, states)


@pytest.mark.parametrize("number", range(FILES))
def test_a_full_disk_in_any_thread_is_an_error(tmp_path, monkeypatch, number):
    monkeypatch.setattr(parallel_writer, "FILE_BYTES", 8 << 10)
    (tmp_path / f"__0_{number}_0.distcp").symlink_to("/dev/full")
    with pytest.raises(CheckpointException, match="No space left on device"):
        dcp.save(states_of(12), storage_writer=ParallelWriter(tmp_path), no_dist=True)


def test_a_copy_on_the_host_is_written_without_asking_the_device(tmp_path, monkeypatch):
    """Where there is CUDA, DCP's own loader would wait for the stream of its thread."""
    states = states_of(4)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(filesystem, "_OverlappingCpuLoader", None)
    dcp.save(states, storage_writer=ParallelWriter(tmp_path), no_dist=True)
    read_back(tmp_path, states)
