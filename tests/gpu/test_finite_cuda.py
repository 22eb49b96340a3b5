"""On CUDA a step without a finite gradient is left out on the device: the host does not wait for the norm."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import torchtitan  # noqa: F401  the overlay's shims come first
from torchtitan.components.optimizer import OptimizersContainer
from torchtitan.distributed.utils import clip_grad_norm_
from torchtitan.grpo.host_memory.optimizer_states import HostOptimizerStates
from torchtitan.grpo.host_memory.pinned import local_tensor
from torchtitan.grpo.policy.finite import FiniteSteps

DEVICE = torch.device("cuda", 0)


@pytest.fixture(scope="module", autouse=True)
def one_rank():
    torch.cuda.set_device(DEVICE)
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1, device_id=DEVICE)
    yield
    dist.destroy_process_group()


def trained(factors: list[float], sharded: bool, hosted: bool) -> list[torch.Tensor]:
    """Weights, moments and step counters after steps whose losses are multiplied by `factors`."""
    torch.manual_seed(0)
    with DEVICE:
        model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 8))
    if sharded:
        fully_shard(model, mesh=init_device_mesh("cuda", (1,)))
    arguments = {"lr": 1e-2, "weight_decay": 0.1, "fused": True, "foreach": False}
    optimizers = OptimizersContainer([model], torch.optim.AdamW, arguments)
    states = HostOptimizerStates(optimizers, DEVICE, part_bytes=64 << 10) if hosted else None
    finite_steps = FiniteSteps(optimizers, DEVICE)
    inputs = torch.ones(16, 64, device=DEVICE)
    for factor in factors:
        optimizers.zero_grad()
        (factor * model(inputs).square().mean()).backward()
        norm = clip_grad_norm_(list(model.parameters()), 1.0, foreach=True)
        torch.cuda.set_sync_debug_mode("default" if hosted else "error")  # a hosted state waits for its copies
        try:
            finite_steps.guard(norm)
            (states or optimizers).step()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    assert finite_steps.metrics() == {"train/skipped_steps": sum(factor != 1 for factor in factors)}
    if states:
        states.to_device()
    state = optimizers.optimizers[0].state
    values = [value for parameter in model.parameters() for value in (parameter, *state[parameter].values())]
    return [local_tensor(value).detach().cpu() for value in values]


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize(("sharded", "hosted"), [(False, False), (True, False), (True, True)])
def test_it_leaves_no_trace_and_no_wait(sharded, hosted, bad):
    some, expected = (trained(factors, sharded, hosted) for factors in ([bad, 1, 1, bad, 1], [1, 1, 1]))
    assert all(torch.equal(a, b) for a, b in zip(some, expected, strict=True))
