"""Where there is CUDA, DCP's writer waits for the stream of its thread. A write beside training must not."""

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import filesystem

import torchtitan  # noqa: F401  the overlay's shims come first
from torchtitan.grpo.checkpoint.checkpointer import storage_writer


@pytest.mark.parametrize("on_host", [True, False])
def test_a_copy_on_the_host_is_written_without_asking_the_device(tmp_path, monkeypatch, on_host):
    states = {"model": {f"weight.{i}": torch.randn(64, 64) for i in range(4)}}
    asked = []

    class Asks(filesystem._SerialCpuLoader):
        def __init__(self, resolve, **_):
            asked.append(True)
            super().__init__(resolve)

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(filesystem, "_OverlappingCpuLoader", Asks)
    dcp.save(states, storage_writer=storage_writer(tmp_path, on_host), no_dist=True)
    assert bool(asked) != on_host
    read = {"model": {name: torch.zeros(64, 64) for name in states["model"]}}
    dcp.load(read, checkpoint_id=tmp_path, no_dist=True)
    assert all(torch.equal(read["model"][name], value) for name, value in states["model"].items())
