"""A step whose gradient is not finite leaves no trace; weights that are not finite are not saved."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import torchtitan  # noqa: F401  the overlay's shims come first
from torchtitan.components.optimizer import OptimizersContainer
from torchtitan.distributed.utils import clip_grad_norm_
from torchtitan.grpo.errors import UserError
from torchtitan.grpo.host_memory.optimizer_states import HostOptimizerStates
from torchtitan.grpo.host_memory.pinned import local_tensor
from torchtitan.grpo.model.finite import check_finite
from torchtitan.grpo.policy.finite import SKIPPED_IN_A_ROW_MAX, FiniteSteps

CPU = torch.device("cpu")


@pytest.fixture(scope="module", autouse=True)
def one_rank():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


class Run:
    """A small model and its optimizer, stepped as the trainer does."""

    def __init__(self, sharded: bool = False, hosted: bool = False) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(5, 6), nn.Linear(6, 3))
        if sharded:
            fully_shard(self.model, mesh=init_device_mesh("cpu", (1,)))
        arguments = {"lr": 1e-2, "weight_decay": 0.1, "fused": True}
        self.optimizers = OptimizersContainer([self.model], torch.optim.AdamW, arguments)
        self.states = HostOptimizerStates(self.optimizers, CPU, part_bytes=64) if hosted else None
        self.finite_steps = FiniteSteps(self.optimizers, CPU)

    def step(self, seed: int, factor: float = 1.0) -> None:
        self.optimizers.zero_grad()
        inputs = torch.randn(7, 5, generator=torch.Generator().manual_seed(seed))
        (factor * self.model(inputs).square().mean()).backward()
        norm = clip_grad_norm_(list(self.model.parameters()), 1.0, foreach=True)
        self.finite_steps.guard(norm)
        (self.states or self.optimizers).step()

    def everything(self) -> list[torch.Tensor]:
        """Weights, then moments and step counters."""
        if self.states:
            self.states.to_device()
        parameters = list(self.model.parameters())
        states = [self.optimizers.optimizers[0].state[parameter] for parameter in parameters]
        values = [*parameters, *(value for state in states for value in state.values())]
        return [local_tensor(value).detach() for value in values]


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize(("sharded", "hosted"), [(False, False), (True, False), (True, True)])
def test_a_step_without_a_finite_gradient_leaves_no_trace(sharded, hosted, bad):
    run, expected = (Run(sharded, hosted) for _ in range(2))
    for factor in (bad, 1.0, 1.0, bad, bad, 1.0):  # before there is any state, and after
        run.step(3, factor)
        if factor == 1.0:
            expected.step(3)
    assert all(torch.equal(a, b) for a, b in zip(run.everything(), expected.everything(), strict=True))
    assert run.finite_steps.metrics() == {"train/skipped_steps": 3}
    assert expected.finite_steps.metrics() == {"train/skipped_steps": 0}


def test_a_run_of_bad_steps_ends_with_likely_causes():
    run = Run()
    for factor in [float("nan")] * (SKIPPED_IN_A_ROW_MAX - 1) + [1.0] + [float("nan")] * (SKIPPED_IN_A_ROW_MAX - 1):
        run.step(0, factor)
    assert run.finite_steps.metrics()["train/skipped_steps"] == 2 * (SKIPPED_IN_A_ROW_MAX - 1)
    run.finite_steps.check()
    run.step(0, float("nan"))
    with pytest.raises(UserError, match=rf"norm nan.* in {SKIPPED_IN_A_ROW_MAX} optimizer steps in a row"):
        run.finite_steps.check()


@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize("bad", [float("nan"), -float("inf")])
def test_weights_that_are_not_finite_are_refused_by_name(sharded, bad):
    model = Run(sharded=sharded).model
    check_finite(model, 7)
    with torch.no_grad():
        local_tensor(model[1].weight)[2, 4] = bad
    with pytest.raises(UserError, match=r"weights of step 7 are not finite.*: 1\.weight"):
        check_finite(model, 7)
