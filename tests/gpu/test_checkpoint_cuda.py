"""Checkpoints written in the background on CUDA: the copy is of its moment, whatever follows on the device."""

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import torchtitan  # noqa: F401  the overlay's shims come first
from torchtitan.grpo.checkpoint.parallel_writer import ParallelWriter
from torchtitan.grpo.host_memory.host_copy import HostCopy
from torchtitan.grpo.host_memory.optimizer_states import HostOptimizerStates, OptimizerStateOffload
from torchtitan.grpo.host_memory.pinned import local_tensor

DEVICE = torch.device("cuda", 0)
BUSY_CYCLES = 200_000_000
"""Of the device: a tenth of a second, in which the host gets far ahead."""


@pytest.fixture(scope="module", autouse=True)
def one_rank():
    torch.cuda.set_device(DEVICE)
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1, device_id=DEVICE)
    yield
    dist.destroy_process_group()


class Trained:
    """A model with 64 MiB of weights, and its AdamW."""

    def __init__(self, sharded: bool):
        torch.manual_seed(0)
        with DEVICE:
            self.model = nn.Sequential(*(nn.Linear(2048, 2048, bias=number % 2 == 1) for number in range(4)))
        self.model[3].weight = self.model[2].weight  # tied
        if sharded:
            fully_shard(self.model, mesh=init_device_mesh("cuda", (1,)))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2, fused=True)
        self.backward()
        self.optimizer.step()

    def backward(self) -> None:
        self.optimizer.zero_grad()
        self.model(torch.ones(8, 2048, device=DEVICE)).square().mean().backward()

    def states(self) -> dict:
        self.optimizer.state_dict()  # the offloading classes bring the state to the device
        state = {number: dict(own) for number, own in enumerate(self.optimizer.state.values())}
        return {"model": self.model.state_dict(), "optimizer": {"state": state, "betas": (0.9, 0.999)}}


def tensors(states: dict) -> list[torch.Tensor]:
    moments = [value for own in states["optimizer"]["state"].values() for value in own.values()]
    return [local_tensor(value) for value in (*states["model"].values(), *moments)]


def cloned(states: dict) -> list[torch.Tensor]:
    copies = [tensor.to("cpu", copy=True) for tensor in tensors(states)]
    torch.cuda.synchronize()
    return copies


def assert_equal(some: list[torch.Tensor], others: list[torch.Tensor]) -> None:
    assert len(some) == len(others) > 8
    assert all(tensor.isfinite().all() for tensor in others)
    assert [i for i, (a, b) in enumerate(zip(some, others, strict=True)) if not torch.equal(a, b)] == []


@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize("pinned", [True, False])
def test_the_copy_is_of_its_moment_though_the_next_step_overwrites_everything(sharded, pinned):
    trained, copy = Trained(sharded), HostCopy(DEVICE, pinned)
    trained.optimizer.register_step_pre_hook(lambda *_: copy.order_writes_after())
    memory = None
    for round_ in range(3):
        trained.backward()
        expected = cloned(trained.states())
        torch.cuda._sleep(BUSY_CYCLES)
        states = copy.take(trained.states())
        was_behind = not torch.cuda.current_stream().query()
        trained.optimizer.step()
        with torch.no_grad():
            for parameter in trained.model.parameters():
                parameter.fill_(1e-3 * (round_ + 1))  # small: gradients must not overflow, and NaN equals nothing
        assert was_behind or not pinned or memory is None, "only the first time, for memory, does the host wait"
        copy.wait()
        assert_equal(tensors(states), expected)
        assert all(tensor.device.type == "cpu" for tensor in tensors(states))
        assert states["optimizer"]["betas"] == (0.9, 0.999)
        weights = states["model"]
        assert local_tensor(weights["2.weight"]).data_ptr() == local_tensor(weights["3.weight"]).data_ptr(), "tied"
        assert isinstance(weights["0.weight"], DTensor) == sharded
        first = tensors(states)[0].data_ptr()
        assert memory in (None, first), "the memory is used again"
        memory = first
    assert copy.take_waited_s() >= 0


@pytest.mark.parametrize("offload", ["host", "window"])
def test_offloading_may_free_what_is_being_copied(offload):
    trained, copy = Trained(False), HostCopy(DEVICE, pinned=True)
    trained.optimizer.register_step_pre_hook(lambda *_: copy.order_writes_after())
    host = HostOptimizerStates([trained.optimizer], DEVICE) if offload == "host" else None
    window = OptimizerStateOffload([trained.optimizer], DEVICE) if offload == "window" else None
    for round_ in range(4):
        trained.backward()
        expected = cloned(trained.states())
        torch.cuda._sleep(BUSY_CYCLES)
        states = copy.take(trained.states())
        (host.to_host if host else window.begin_out)()
        junk = [torch.full((16 << 20,), round_, dtype=torch.uint8, device=DEVICE) for _ in range(16)]
        (host or trained.optimizer).step()
        del junk
        copy.wait()
        assert_equal(tensors(states), expected)


def test_writing_the_copy_waits_for_no_work_on_the_device(tmp_path):
    trained, copy = Trained(False), HostCopy(DEVICE, pinned=True)
    states = copy.take(trained.states())
    copy.wait()
    weights = {"model": states["model"]}
    dcp.save(weights, storage_writer=ParallelWriter(tmp_path / "warm"), no_dist=True)
    for _ in range(50):  # about 5 s
        torch.cuda._sleep(BUSY_CYCLES)
    dcp.save(weights, storage_writer=ParallelWriter(tmp_path / "busy"), no_dist=True)
    assert not torch.cuda.current_stream().query(), "the device was still busy when the write was done"
    torch.cuda.synchronize()
