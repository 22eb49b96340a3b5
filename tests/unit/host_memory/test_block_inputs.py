"""Block inputs on the host: bitwise the same results, two on the device at most, each copy one block ahead."""

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import Qwen3Config, Qwen3MoeConfig

from tests.helpers.microbatches import microbatches
from torchtitan.distributed import ParallelDims
from torchtitan.grpo.config.load import load_config
from torchtitan.grpo.errors import UserError
from torchtitan.grpo.host_memory import block_inputs
from torchtitan.grpo.host_memory.block_inputs import BlockInputs
from torchtitan.grpo.host_memory.offloading import Offloading
from torchtitan.grpo.model import document_attention, logprobs
from torchtitan.grpo.model.parallelize import build_model
from torchtitan.grpo.model.shards import local
from torchtitan.grpo.model.source import check_chunks, resolve_model
from torchtitan.grpo.policy.rows import PackedSample

CPU = torch.device("cpu")
LAYERS, WIDTH = 3, 32


@pytest.fixture(autouse=True)
def any_size_leaves(monkeypatch) -> None:
    monkeypatch.setattr(block_inputs, "LEAST_BYTES", 1)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> str:
    path = tmp_path_factory.mktemp("model")
    Qwen3Config(
        vocab_size=97,
        hidden_size=WIDTH,
        intermediate_size=48,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        tie_word_embeddings=True,
        architectures=["Qwen3ForCausalLM"],
    ).save_pretrained(path)
    return str(path)


# ------------------------------------------------------------------------------------------------ whole models


@pytest.fixture
def one_rank() -> Iterator[None]:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def attention_that_compiles(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *_: Any) -> torch.Tensor:
    """In place of that for CPUs, whose shapes follow from the row's values."""
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
    return (q.sigmoid() * k * v).cumsum(0) / 8


def trained(folder: str, offload: bool, kind: str, mlp_chunk: int = 0) -> tuple[list[torch.Tensor], nn.Module]:
    """Log-probabilities of three rows of several lengths, and all gradients."""
    flags = {
        "model.hf_assets_path": folder,
        "model.weights": "random",
        "activation_checkpoint.offload": str(offload).lower(),
        "activation_checkpoint.mlp_chunk_tokens": str(mlp_chunk),
        "training.mixed_precision_param": "float32" if kind == "float32" else "bfloat16",  # with FSDP2
        "model.implementation": "transformers" if "transformers" in kind else "auto",
    }
    config = load_config([word for key, value in flags.items() for word in (f"--{key}", value)])
    config.compile.enable, config.compile.backend = "compiled" in kind, "aot_eager_decomp_partition"
    config.lora.enable, config.lora.rank = "adapters" in kind, 4
    source = resolve_model(config.model, 64, config.lora)
    torch.manual_seed(0)
    model = build_model(source, config, ParallelDims(1, 1, 1, 1, 1, 1, 1, 1), CPU)
    with torch.no_grad():
        for number, (name, parameter) in enumerate(model.named_parameters()):
            if "lora_b" in name.lower():  # zero at the start
                local(parameter).normal_(std=0.05, generator=torch.Generator().manual_seed(number))
    found = []
    for lengths in ((1, 4, 9), (2,), (12, 11)):
        samples = [PackedSample([5, 6, 7], [8, 9] * n, 1.0, 1.0, [0.0] * 2 * n) for n in lengths]
        ((row,),) = microbatches(samples, 64, 1, 64 if "compiled" in kind else 1)
        logprobs_of_row, entropy = model(row, 0.8)
        (logprobs_of_row.sum() + 0.1 * entropy.sum()).backward()
        found.append(logprobs_of_row.detach())
    return found + [local(p.grad) for p in model.parameters() if p.grad is not None], model


@pytest.fixture
def compiler(folder, monkeypatch) -> None:
    """Blocks compile on a CPU."""
    config = load_config(["--model.hf_assets_path", folder, "--model.weights", "random"])
    config.model.implementation = "transformers"
    resolve_model(config.model, 64)  # which compares the class with itself, by attention as it is
    torch._dynamo.reset()
    monkeypatch.setattr(document_attention, "_by_length_class", attention_that_compiles)
    monkeypatch.setattr(logprobs, "_compiled", lambda function, whole_chunk: function)


KINDS = ["float32", "fsdp2", "compiled", "adapters", "transformers", "compiled transformers"]


@pytest.mark.parametrize("kind", KINDS)
def test_results_are_bitwise_the_same(kind, folder, one_rank, request):
    if "compiled" in kind:
        request.getfixturevalue("compiler")
    expected, plain = trained(folder, False, kind)
    found, model = trained(folder, True, kind)
    assert not hasattr(plain, "block_inputs")
    assert len(found) == len(expected) > 3 + 6 * LAYERS
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    assert all(gradient.abs().max() > 0 for gradient in found[3:])
    # The rows share their host memory: one place for each input that leaves, of the longest row's size.
    itemsize = 4 if kind == "float32" else 2
    assert [memory.nbytes for memory in model.block_inputs._free] == [2048 * WIDTH * itemsize] * (LAYERS - 1)
    figures = model.block_inputs.metrics()
    assert figures["offload/activations_gib"] * 2**30 == 2048 * WIDTH * itemsize * (LAYERS - 1)
    assert min(figures[f"offload/activations_{name}_s"] for name in ("out", "in", "exposed")) > 0


@pytest.mark.parametrize("kind", KINDS)
def test_feed_forward_layers_in_chunks_compute_the_same(kind, folder, one_rank, request):
    """Of rows of 64 tokens or fewer: the last chunk is shorter, and a short row is one."""
    if "compiled" in kind:
        request.getfixturevalue("compiler")
    expected, _ = trained(folder, False, kind)
    torch._dynamo.reset()
    with torch._dynamo.config.patch(recompile_limit=2):  # one graph for all blocks, and one for rows of other lengths
        found, _ = trained(folder, True, kind, mlp_chunk=24)
    assert len(found) == len(expected) > 3 + 6 * LAYERS
    close = dict(rtol=1e-5, atol=1e-6) if kind == "float32" else dict(rtol=0.02, atol=0.02)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, **close)


@pytest.mark.parametrize(
    ("family", "flags", "why"),
    [
        (Qwen3MoeConfig, [], "mlp_chunk_tokens is for blocks with one feed-forward layer, which Transformer"),
        (Qwen3Config, ["--parallelism.tensor_parallel_degree", "2"], r"mlp_chunk_tokens = 8: \[parallelism\] tensor"),
        (Qwen3Config, ["--activation_checkpoint.mode", "none"], 'mode = "full" only, not "none"'),
    ],
)
def test_chunks_are_refused_where_no_layer_is_for_them(family, flags, why, tmp_path):
    family(num_experts=8, hidden_size=32, num_attention_heads=4, num_key_value_heads=2).save_pretrained(tmp_path)
    words = ["--model.hf_assets_path", str(tmp_path), "--model.weights", "random", *flags]
    with pytest.raises(UserError, match=why):
        config = load_config([*words, "--activation_checkpoint.mlp_chunk_tokens", "8"], "h200", world_size=2)
        check_chunks(resolve_model(config.model, 64), config)


def test_a_run_reports_its_metrics(folder, one_rank):
    _, model = trained(folder, True, "fsdp2")
    off = SimpleNamespace(
        offload_optimizer_states_for_logprob=False, optimizer_states="device", reference_weights="device"
    )
    assert Offloading(off, [], None, CPU, lambda: True).metrics() == {}
    figures = Offloading(off, [], None, CPU, lambda: True, model.block_inputs).metrics()
    assert figures["offload/activations_in_s"] > 0


@pytest.mark.parametrize("mode", ["none", "selective"])
def test_other_modes_are_refused(mode, folder):
    flags = ["--model.hf_assets_path", folder, "--model.weights", "random", "--activation_checkpoint.mode", mode]
    refused = r'\[activation_checkpoint\] offload = true .* mode = "full" only, not "'
    with pytest.raises(UserError, match=refused + mode):
        load_config([*flags, "--activation_checkpoint.offload"])


# ------------------------------------------------------------------------------------------------ the copies


class Block(nn.Module):
    """Notes when it runs. `more`: what else it does with its input."""

    def __init__(self, number: int, log: list[str], more: Any = None) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((WIDTH,), 1.0 + number / 8))
        self.number, self.log, self.more = number, log, more

    def forward(self, states: torch.Tensor, rope: torch.Tensor) -> torch.Tensor:
        self.log.append(f"block {self.number}")
        if self.more is not None:
            self.more(states)
        return torch.tanh(states * self.weight) * rope


class LoggedCopies:
    """In place of `CopyStream`: it notes which copy begins, and which one the compute stream waits for."""

    def __init__(self, log: list[str]) -> None:
        self.device, self.stream, self.log, self.counts = CPU, None, log, {"out": -1, "in": LAYERS - 1}

    @contextmanager
    def after_compute(self, name: str) -> Iterator[str]:
        self.counts[name] += 1 if name == "out" else -1
        self.log.append(f"copy {name} {self.counts[name]}")
        yield f"{name} {self.counts[name]}"

    def order_compute_after(self, done: str) -> None:
        self.log.append(f"wait for {done}")


def blocks_of(log: list[str], more: Any = None) -> list[nn.Module]:
    return [checkpoint_wrapper(Block(number, log, more), preserve_rng_state=False) for number in range(LAYERS)]


def forward(blocks: list[nn.Module], seed: int = 0, tokens: int = 6, broken: bool = False) -> torch.Tensor:
    """The loss. Of one that is `broken`, the backward pass ends in the midst of the blocks."""
    states = torch.randn(1, tokens, WIDTH, generator=torch.Generator().manual_seed(seed))
    rope = torch.linspace(0.5, 1, WIDTH)
    for block in blocks:
        states = block(states, rope)
        if broken and block is blocks[1]:
            states.register_hook(lambda grad: 1 / 0)
    return states.square().sum()


def gradients(blocks: list[nn.Module]) -> list[torch.Tensor]:
    return [parameter.grad.clone() for block in blocks for parameter in block.parameters()]


def test_each_copy_is_one_block_ahead(monkeypatch):
    log: list[str] = []
    monkeypatch.setattr(block_inputs, "CopyStream", lambda device: LoggedCopies(log))
    blocks = blocks_of(log)
    BlockInputs(blocks, CPU, 6 * WIDTH * 4)
    loss = forward(blocks)
    assert log == [
        *("copy out 0", "block 0", "wait for out 0"),
        *("copy out 1", "block 1", "wait for out 1"),
        "block 2",
    ]
    log.clear()
    loss.backward()
    assert log == [
        *("copy in 1", "block 2"),
        *("wait for in 1", "copy in 0", "block 1"),
        *("wait for in 0", "block 0"),
    ]


def test_two_inputs_are_on_the_device_at_most():
    """Counted by who owns their memory, at each run of a block."""
    most: list[int] = []

    def count(states: torch.Tensor) -> None:
        most.append(sum(kept.device is not None for kept in made))

    made: list[Any] = []
    log: list[str] = []
    blocks = blocks_of(log, count)
    inputs = BlockInputs(blocks, CPU, 0)
    start_out = inputs._start_out
    inputs._start_out = lambda kept: (made.append(kept), start_out(kept))[1]  # type: ignore[method-assign]
    loss = forward(blocks)
    assert most == [1, 1, 0]  # the last one's is autograd's alone
    most.clear()
    loss.backward()
    assert most == [1, 1, 0]  # that of the block before; its own is autograd's


@pytest.mark.parametrize("turn", ["given up", "rows at once", "twice", "without gradients"])
def test_any_order_of_passes_gives_the_same(turn):
    """Inputs that autograd still has keep their host memory, and no other row gets it."""

    def passes(blocks: list[nn.Module]) -> list[torch.Tensor]:
        if turn == "given up":
            forward(blocks, 0)
            loss = forward(blocks, 1, 9, broken=True)
            with pytest.raises(ZeroDivisionError):
                loss.backward()
            forward(blocks, 2).backward()
        elif turn == "rows at once":
            losses = [forward(blocks, seed, 5 + seed) for seed in range(3)]
            for loss in losses:
                loss.backward()
        elif turn == "twice":
            loss = forward(blocks)
            loss.backward(retain_graph=True)
            loss.backward()
        else:
            loss = forward(blocks)
            with torch.no_grad():
                forward(blocks, 1, 12)
            loss.backward()
        return gradients(blocks)

    expected = passes(blocks_of([]))
    blocks = blocks_of([])
    inputs = BlockInputs(blocks, CPU, 0)
    found = passes(blocks)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    at_once = {"rows at once": 3, "given up": 2}.get(turn, 1)
    assert LAYERS - 1 <= len(inputs._free) <= at_once * (LAYERS - 1)
    assert turn != "rows at once" or len(inputs._free) == 3 * (LAYERS - 1)


def test_host_memory_grows_with_the_longest_row():
    blocks = blocks_of([])
    inputs = BlockInputs(blocks, CPU, 8 * WIDTH * 4)
    longest = 8  # what is expected
    for tokens in (3, 8, 5, 11, 2):
        forward(blocks, 0, tokens).backward()
        longest = max(longest, tokens)
        assert [memory.nbytes for memory in inputs._free] == [longest * WIDTH * 4] * (LAYERS - 1)
        assert inputs.metrics()["offload/activations_gib"] * 2**30 == (LAYERS - 1) * longest * WIDTH * 4


def test_small_inputs_stay(monkeypatch):
    monkeypatch.setattr(block_inputs, "LEAST_BYTES", 6 * WIDTH * 4 + 1)
    blocks = blocks_of([])
    inputs = BlockInputs(blocks, CPU, 0)
    forward(blocks).backward()
    assert not inputs._free
    forward(blocks, 0, 7).backward()
    assert len(inputs._free) == LAYERS - 1


def test_a_block_that_changes_its_input_is_refused():
    blocks = blocks_of([], lambda states: states.detach().add_(1))
    BlockInputs(blocks, CPU, 0)
    with pytest.raises(UserError, match=r"changes its input in place: set \[activation_checkpoint\] offload = false"):
        forward(blocks)
