"""Optimizer state and frozen weights on the host: nothing is lost, storages are really emptied, steps stay bitwise."""

import copy
import time

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import torchtitan  # noqa: F401  the overlay's shims come first
from tests.helpers import TINY_QWEN3
from tests.helpers.hosted import on_device
from torchtitan.components.lr_scheduler import build_lr_schedulers
from torchtitan.components.optimizer import OptimizersContainer
from torchtitan.config import JobConfig
from torchtitan.grpo.config.load import load_config
from torchtitan.grpo.errors import UserError
from torchtitan.grpo.host_memory import pinned
from torchtitan.grpo.host_memory.offloading import HostedWeights
from torchtitan.grpo.host_memory.optimizer_states import HostOptimizerStates, OptimizerStateOffload, Phase
from torchtitan.grpo.host_memory.pinned import CopyStream, PinnedTwin, local_tensor, put_together

CPU = torch.device("cpu")
TINY = ["--model.hf_assets_path", str(TINY_QWEN3)]


@pytest.fixture(scope="module", autouse=True)
def one_rank():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture(params=["plain", "fsdp2", "fsdp2-bfloat16"])
def model(request) -> nn.Module:
    """Two blocks and a root that keeps its own weights gathered after a forward, as the trainer's does."""
    return build(request.param)


def build(kind: str, seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    blocks = [nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 6)) for _ in range(2)]
    model = nn.Sequential(nn.Linear(5, 6), *blocks, nn.LayerNorm(6))
    if kind != "plain":
        mesh = init_device_mesh("cpu", (1,))
        policy = MixedPrecisionPolicy(torch.bfloat16 if kind == "fsdp2-bfloat16" else None, torch.float32)
        for block in blocks:
            fully_shard(block, mesh=mesh, mp_policy=policy)
        fully_shard(model, mesh=mesh, mp_policy=policy, reshard_after_forward=False)
    return model


def container(model: nn.Module, **arguments) -> OptimizersContainer:
    arguments = {"lr": 1e-2, "weight_decay": 0.1, "fused": True, "foreach": False} | arguments
    return OptimizersContainer([model], torch.optim.AdamW, arguments)


def moments(optimizers: OptimizersContainer) -> list[torch.Tensor]:
    states = [state for optimizer in optimizers for state in optimizer.state.values()]
    return [local_tensor(state[name]) for state in states for name in ("exp_avg", "exp_avg_sq")]


def backward(model: nn.Module, step: int) -> None:
    inputs = torch.randn(7, 5, generator=torch.Generator().manual_seed(step))
    model(inputs).float().square().mean().backward()


def weights(model: nn.Module) -> list[torch.Tensor]:
    return [local_tensor(parameter).detach().clone() for parameter in model.parameters()]


def assert_equal(some: list[torch.Tensor], others: list[torch.Tensor]) -> None:
    assert len(some) == len(others) > 0
    assert all(torch.equal(a, b) for a, b in zip(some, others, strict=True))


def train(model: nn.Module, optimizers: OptimizersContainer, window, step_of, steps: int = 5) -> None:
    schedulers = build_lr_schedulers(optimizers, JobConfig().lr_scheduler, steps)  # a rate of its own each step
    for step in range(steps):
        window()
        optimizers.zero_grad()  # not the model's, which may show gathered parameters
        backward(model, step)
        step_of()
        schedulers.step()


def trained_plainly(model: nn.Module, **arguments) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    optimizers = container(model, **arguments)
    train(model, optimizers, lambda: None, optimizers.step)
    return weights(model), [tensor.clone() for tensor in moments(optimizers)]


# ------------------------------------------------------------------------------------------------ the memory


def test_twin_copies_across_the_borders_of_chunks(monkeypatch):
    monkeypatch.setattr(pinned, "_CHUNK_BYTES", 16)
    tensors = [torch.arange(n, dtype=torch.float32) + 100 * n for n in (3, 4, 1, 11)]
    before = [tensor.clone() for tensor in tensors]
    twin = PinnedTwin([tensor.untyped_storage() for tensor in tensors], CopyStream(CPU))
    assert twin.nbytes == 4 * 19
    twin.save()
    twin.empty()
    assert [tensor.untyped_storage().size() for tensor in tensors] == [0] * 4
    twin.load()
    twin.use()
    assert_equal(tensors, before)


def test_tensors_are_put_together_and_stay_what_they_are():
    transposed = torch.randn(4, 6).t()
    tensors = [torch.randn(3, 5), transposed, torch.randn(2).double(), torch.randn(300), torch.randn(1).bfloat16()]
    before, strides = [tensor.clone() for tensor in tensors], [tensor.stride() for tensor in tensors]
    storages = put_together(tensors, flat_bytes=2048)
    assert_equal(tensors, before)
    assert [tensor.stride() for tensor in tensors] == strides
    assert {tensor.data_ptr() % 8 for tensor in tensors} == {0}
    # 3 x 512, since a tensor starts at a multiple of 512 bytes; 1200 bytes do not fit behind them, 2 more do
    assert [storage.nbytes() for storage in storages] == [1024 + 16, 1536 + 2]
    owners = [tensor.untyped_storage().data_ptr() for tensor in tensors]
    assert owners == [storages[0].data_ptr()] * 3 + [storages[1].data_ptr()] * 2
    assert len(put_together([torch.randn(9), torch.randn(9)], flat_bytes=8)) == 2  # each larger than a flat
    assert put_together([]) == []


# ------------------------------------------------------------------------------------- the window's offload


def test_state_leaves_and_comes_back(model):
    optimizers = container(model)
    offload = OptimizerStateOffload(optimizers, CPU)
    backward(model, 0)
    optimizers.step()
    tensors = moments(optimizers)
    before = [tensor.clone() for tensor in tensors]
    counters = [state["step"] for optimizer in optimizers for state in optimizer.state.values()]
    offload.begin_out()
    assert offload.phase is Phase.ON_HOST
    assert all(tensor.untyped_storage().size() == 0 for tensor in tensors)
    assert [float(counter) for counter in counters] == [1.0] * len(counters)
    offload.begin_in()
    offload.finish()
    assert all(a is b for a, b in zip(moments(optimizers), tensors, strict=True))
    assert_equal(tensors, before)
    figures = offload.metrics()
    state_bytes = sum(tensor.numel() * 4 for tensor in tensors)
    assert state_bytes <= figures["offload/freed_gib"] * 2**30 <= state_bytes + 512 * len(tensors)
    assert figures["offload/exposed_s"] == pytest.approx(figures["offload/out_s"] + figures["offload/in_s"])
    assert figures["offload/out_s"] > 0 and figures["offload/in_s"] > 0 and figures["offload/hidden_s"] == 0
    assert figures["offload/host_s"] > 0 and figures["offload/skipped"] == 0
    assert offload.metrics() == {}  # they are those since the last call


@pytest.mark.parametrize("kind", ["plain", "fsdp2", "fsdp2-bfloat16"])
@pytest.mark.parametrize("implementation", [{}, {"fused": False}, {"amsgrad": True}], ids=["fused", "loop", "amsgrad"])
def test_training_with_a_window_is_bitwise_the_same(kind, implementation):
    expected = trained_plainly(build(kind), **implementation)
    model = build(kind)
    optimizers = container(model, **implementation)
    offload = OptimizerStateOffload(optimizers, CPU)

    def window() -> None:
        offload.begin_out()
        with torch.no_grad():
            model(torch.ones(2, 5))
        offload.begin_in()

    train(model, optimizers, window, optimizers.step)
    assert_equal(weights(model), expected[0])
    assert_equal(moments(optimizers), expected[1])


def test_without_state_there_is_nothing_to_do(model):
    offload = OptimizerStateOffload(container(model), CPU)
    offload.begin_out()
    assert offload.phase is Phase.ON_DEVICE
    offload.begin_in()
    offload.finish()
    assert offload.metrics() == {}


def test_calls_may_be_repeated_and_left_out():
    model = build("plain")
    optimizers = container(model)
    offload = OptimizerStateOffload(optimizers, CPU)
    offload.finish()
    backward(model, 0)
    optimizers.step()
    before = [tensor.clone() for tensor in moments(optimizers)]
    offload.begin_in()
    assert offload.phase is Phase.ON_DEVICE
    offload.begin_out()
    offload.begin_out()
    offload.finish()
    assert_equal(moments(optimizers), before)
    offload.begin_out()
    offload.begin_in()
    offload.begin_in()
    offload.begin_out()  # while it arrives
    assert offload.phase is Phase.ON_HOST
    offload.finish()
    offload.finish()
    assert_equal(moments(optimizers), before)


@pytest.mark.parametrize("back", ["step", "state_dict", "load_state_dict"])
def test_state_on_the_host_is_never_missed(back):
    expected, model = build("plain"), build("plain")
    plain, optimizers = container(expected), container(model)
    offload = OptimizerStateOffload(optimizers, CPU)
    for a, b in ((expected, plain), (model, optimizers)):
        backward(a, 0)
        b.step()
    saved = plain.state_dict()
    backward(expected, 1)
    backward(model, 1)
    offload.begin_out()
    if back == "state_dict":
        found = optimizers.state_dict()
        assert found.keys() == saved.keys()
        tensors = [name for name in saved if "exp_avg" in name]
        assert_equal([found[name] for name in tensors], [saved[name] for name in tensors])
    if back == "load_state_dict":
        optimizers.load_state_dict(copy.deepcopy(saved))  # other tensors: what was put together before is void
        offload.begin_out()
        assert all(tensor.untyped_storage().size() == 0 for tensor in moments(optimizers))
    plain.step()
    optimizers.step()
    assert offload.phase is Phase.ON_DEVICE
    assert_equal(weights(model), weights(expected))


def test_nothing_is_copied_while_the_link_is_taken():
    model = build("plain")
    optimizers = container(model)
    free = False
    offload = OptimizerStateOffload(optimizers, CPU, link_free=lambda: free, link_patience_s=0.05)
    backward(model, 0)
    optimizers.step()
    before = [tensor.clone() for tensor in moments(optimizers)]
    offload.begin_out()
    assert offload.phase is Phase.LEAVING
    offload.begin_in()  # the window has passed without it
    assert offload.phase is Phase.ON_DEVICE
    figures = offload.metrics()
    assert (figures["offload/skipped"], figures["offload/freed_gib"], figures["offload/out_s"]) == (1, 0, 0)

    offload.begin_out()
    free = True
    offload.poll()
    assert offload.phase is Phase.ON_HOST
    free = False
    offload.begin_in()
    offload.poll()
    assert offload.phase is Phase.RETURNING
    free = True
    offload.poll()
    assert offload.phase is Phase.ARRIVING
    offload.finish()
    assert offload.metrics()["offload/skipped"] == 0

    offload.begin_out()
    free = False
    started = time.monotonic()
    offload.finish()  # the step cannot go without it: after a bounded wait it is copied anyway
    assert time.monotonic() - started >= 0.05
    assert_equal(moments(optimizers), before)
    assert offload.metrics()["offload/host_s"] >= 0.05


# ---------------------------------------------------------------------------------------- state on the host


@pytest.mark.parametrize("kind", ["plain", "fsdp2", "fsdp2-bfloat16"])
@pytest.mark.parametrize("part_bytes", [1, 700, 1 << 30], ids=["parameter", "few", "all"])
def test_steps_with_state_on_the_host_are_bitwise_the_same(kind, part_bytes):
    expected = trained_plainly(build(kind))
    model = build(kind)
    optimizers = container(model)
    host = HostOptimizerStates(optimizers, CPU, part_bytes)
    emptied = []

    def window() -> None:
        emptied.append(all(tensor.untyped_storage().size() == 0 for tensor in moments(optimizers)))

    train(model, optimizers, window, host.step)
    window()
    assert all(emptied)
    assert_equal(weights(model), expected[0])
    figures = host.metrics()
    state_bytes = sum(tensor.numel() * 4 for tensor in moments(optimizers))
    assert state_bytes <= figures["offload/freed_gib"] * 2**30 < state_bytes + 512 * len(moments(optimizers))
    assert figures["offload/in_s"] > 0 and figures["offload/out_s"] > 0
    host.to_device()
    assert_equal(moments(optimizers), expected[1])
    assert len(next(iter(optimizers)).param_groups[0]["params"]) == len(list(model.parameters()))
    assert host.metrics()["offload/freed_gib"] == 0
    assert host.metrics() == {}


def test_a_checkpoint_sees_state_that_lives_on_the_host(tmp_path):
    model = build("fsdp2")
    optimizers = container(model)
    host = HostOptimizerStates(optimizers, CPU, 700)
    train(model, optimizers, lambda: None, host.step, steps=2)
    dcp.save({"model": get_model_state_dict(model), "optimizer": optimizers}, checkpoint_id=tmp_path)
    host.to_host()
    assert all(tensor.untyped_storage().size() == 0 for tensor in moments(optimizers))

    other = build("fsdp2", seed=1)
    others = container(other)
    other_host = HostOptimizerStates(others, CPU, 300)
    states = {"model": get_model_state_dict(other), "optimizer": others}
    dcp.load(states, checkpoint_id=tmp_path)
    set_model_state_dict(other, states["model"])
    for step in range(2, 4):
        for each, each_optimizers, each_host in ((model, optimizers, host), (other, others, other_host)):
            each_optimizers.zero_grad()
            backward(each, step)
            each_host.step()
    assert_equal(weights(other), weights(model))
    for each in (host, other_host):
        each.to_device()
    assert_equal(moments(others), moments(optimizers))


def test_parameters_without_gradient_have_no_state():
    model = build("plain")
    optimizers = container(model)
    host = HostOptimizerStates(optimizers, CPU, 1)
    host.step()
    assert host.metrics() == {} and moments(optimizers) == []
    backward(model, 0)
    model[0].weight.grad = None
    host.step()
    host.step()
    assert len(moments(optimizers)) == 2 * (len(list(model.parameters())) - 1)


# ---------------------------------------------------------------------------------------- the reference


def outputs(model: nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return model(torch.linspace(-1, 1, 15).view(3, 5))


def storages(model: nn.Module) -> list[int]:
    return [local_tensor(parameter).untyped_storage().size() for parameter in model.parameters()]


def test_reference_is_on_the_device_while_it_is_used(model):
    model.requires_grad_(False)
    expected = outputs(model)
    parameters = list(model.parameters())
    hosted = HostedWeights(model, CPU)
    hosted.begin_in()  # they are there
    hosted.release()
    assert not any(storages(model))
    assert hosted.metrics()["offload/reference_freed_gib"] > 0
    for _ in range(2):
        with on_device(hosted):
            assert torch.equal(outputs(model), expected)
            assert torch.equal(outputs(model), expected)
        assert not any(storages(model))
    hosted.begin_in()
    hosted.begin_in()
    hosted.finish()
    assert torch.equal(outputs(model), expected)
    figures = hosted.metrics()
    assert figures["offload/reference_freed_gib"] == 0
    assert figures["offload/reference_in_s"] > 0 and figures["offload/reference_exposed_s"] > 0
    hosted.release()
    hosted.release()
    assert not any(storages(model))
    hosted.finish()
    assert all(a is b for a, b in zip(model.parameters(), parameters, strict=True)) or hasattr(model, "reshard")


def test_reference_can_leave_before_its_first_forward(model):
    expected = outputs(copy.deepcopy(model)) if not hasattr(model, "reshard") else None
    hosted = HostedWeights(model.requires_grad_(False), CPU)
    hosted.release()
    assert not any(storages(model))
    with on_device(hosted):
        found = outputs(model)
        assert torch.equal(found, expected) if expected is not None else found.isfinite().all()


def test_reference_that_is_loaded_anew_comes_back_new(model):
    other = build("plain" if not hasattr(model, "reshard") else "fsdp2", seed=3)
    hosted = HostedWeights(model.requires_grad_(False), CPU)
    hosted.release()
    model.load_state_dict(other.state_dict())
    hosted.release()
    assert not any(storages(model))
    assert_equal([local_tensor(value) for value in model.state_dict().values()], weights(other))
    with on_device(hosted):
        assert_equal(weights(model), weights(other))


def test_reference_in_a_checkpoint(tmp_path, model):
    """As a run does it: saved while the weights are on the host, loaded in place by another run."""
    kind = "plain" if not hasattr(model, "reshard") else "fsdp2"
    hosted = HostedWeights(model.requires_grad_(False), CPU)
    hosted.release()
    dcp.save({"reference": get_model_state_dict(model)}, checkpoint_id=tmp_path)
    other = build(kind, seed=4).requires_grad_(False)
    other_hosted = HostedWeights(other, CPU)
    other_hosted.release()
    state = {"reference": get_model_state_dict(other)}
    dcp.load(state, checkpoint_id=tmp_path)
    other_hosted.release()
    with on_device(hosted), on_device(other_hosted):
        assert_equal(weights(other), weights(model))


def test_tied_weights_leave_once():
    model = build("plain").requires_grad_(False)
    model[1][2].bias = model[0].bias
    hosted = HostedWeights(model, CPU)
    expected = weights(model)
    hosted.release()
    assert not any(storages(model))
    assert hosted.metrics()["offload/reference_freed_gib"] * 2**30 == sum(4 * tensor.numel() for tensor in expected)
    hosted.finish()
    assert_equal(weights(model), expected)


def test_weights_that_are_trained_stay():
    with pytest.raises(ValueError, match="only those of a frozen model"):
        HostedWeights(build("plain"), CPU)


# ---------------------------------------------------------------------------------------- the configuration


KL = ["--grpo.kl_coef", "0.1"]
WINDOW = ["--offload.offload_optimizer_states_for_logprob"]


@pytest.mark.parametrize(
    "flags",
    [
        [*WINDOW, *KL],
        [*WINDOW, "--grpo.minibatches", "2"],
        ["--offload.optimizer_states", "host"],
        ["--offload.reference_weights", "host", *KL],
        ["--offload.reference_weights", "host", "--offload.optimizer_states", "host", *KL],
    ],
)
def test_what_goes_together(flags):
    load_config([*TINY, *flags])


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (WINDOW, "has no window"),
        ([*WINDOW, "--grpo.minibatches", "2", "--grpo.proximal_logprobs", "sampler"], "has no window"),
        ([*WINDOW, *KL, "--offload.optimizer_states", "host"], "on the host already"),
        (["--offload.reference_weights", "host"], "[grpo] kl_coef over 0 only"),
        (["--offload.optimizer_states", "disk"], '"device" or "host"'),
    ],
)
def test_contradictions_are_named(flags, expected):
    with pytest.raises(UserError) as caught:
        load_config([*TINY, *flags])
    assert expected in str(caught.value) and "[offload]" in str(caught.value)


def test_off_is_the_default():
    offload = load_config(TINY).offload
    assert not offload.offload_optimizer_states_for_logprob
    assert (offload.optimizer_states, offload.reference_weights) == ("device", "device")
