"""Block inputs on the host on CUDA: bitwise the same steps, however late the copies, in less memory, without a wait."""

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch
import torch._inductor.compile_fx
import torch.distributed as dist
from torch import nn
from transformers import Qwen3Config, Qwen3ForCausalLM

import torchtitan  # noqa: F401  the overlay's shims come first
from torchtitan.config import JobConfig
from torchtitan.distributed import ParallelDims
from torchtitan.grpo.host_memory import block_inputs
from torchtitan.grpo.host_memory.pinned import CopyStream
from torchtitan.grpo.model import parallelize
from torchtitan.grpo.model.shards import local
from torchtitan.grpo.model.source import load_hf_weights, resolve_model
from torchtitan.grpo.policy.microbatch import Microbatch
from torchtitan.grpo.policy.packing import pack
from torchtitan.grpo.policy.rows import PackedSample

DEVICE = torch.device("cuda", 0)
LAYERS, WIDTH, TOKENS = 6, 256, 16384
INPUT = TOKENS * WIDTH * 2  # bytes of a block's input in bfloat16


@pytest.fixture(scope="module", autouse=True)
def one_rank() -> Iterator[None]:
    torch.cuda.set_device(DEVICE)
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1, device_id=DEVICE)
    yield
    dist.destroy_process_group()


@pytest.fixture(autouse=True)
def every_block_by_itself(monkeypatch) -> None:
    """As blocks of real models are; these are small."""
    monkeypatch.setattr(parallelize, "TOGETHER_BYTES", 1)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=1000,
        hidden_size=WIDTH,
        intermediate_size=WIDTH,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
    )
    path = tmp_path_factory.mktemp("model")
    Qwen3ForCausalLM(config).save_pretrained(path)
    return path


def build(folder, kind: str = "eager") -> tuple[nn.Module, list[nn.Parameter]]:
    """A model whose block inputs leave, and its sharded parameters that are trained."""
    config = JobConfig()
    config.training = SimpleNamespace(
        dtype="float32",
        mixed_precision_param="bfloat16",
        mixed_precision_reduce="float32",
        seq_len=2048,
        tokens_per_microbatch=TOKENS,
        kept_logits_mib=1,
        logits_dtype="float32",
        flash_attention="FA2",
    )
    config.activation_checkpoint.mode = "full"
    config.activation_checkpoint.offload = True
    config.compile.enable = "compiled" in kind
    config.debug.seed = 0
    implementation = "transformers" if "transformers" in kind else "auto"
    wanted = SimpleNamespace(hf_assets_path=str(folder), weights="hf", implementation=implementation)
    lora = SimpleNamespace(enable="adapters" in kind, rank=8, alpha=16.0, target_modules=["all-linear"])
    source = resolve_model(wanted, 2048, lora)
    model = parallelize.build_model(source, config, ParallelDims(1, 1, 1, 1, 1, 1, 1, 1), DEVICE)
    load_hf_weights(model, source, folder)
    return model, [parameter for parameter in model.parameters() if parameter.requires_grad]


def make_rows(shorter: bool = True) -> list[Microbatch]:
    """Two rows of TOKENS, and between them one of fewer tokens."""
    generator = torch.Generator().manual_seed(2)

    def samples(count: int) -> list[PackedSample]:
        tokens = torch.randint(0, 1000, (count, 1000), generator=generator).tolist()
        return [PackedSample(each[:100], each[100:], 1.0, 1.0, [0.0] * 900) for each in tokens]

    rows = pack(samples(16), TOKENS, 1, TOKENS)[0] + pack(samples(9), TOKENS, 1, 128 if shorter else TOKENS)[0]
    rows += pack(samples(15), TOKENS, 1, TOKENS)[0]
    assert len(rows) == 3 and (len(rows[1].tokens) < TOKENS) == shorter
    return [Microbatch.of(row, DEVICE) for row in rows]


def passes(model: nn.Module, parameters: list[nn.Parameter], rows: list[Microbatch]) -> list[torch.Tensor]:
    """Log-probabilities of each row, and the gradients of all, with the host far ahead of the device."""
    for parameter in parameters:
        parameter.grad = None
    found = []
    torch.cuda._sleep(50_000_000)
    for row in rows:
        logprobs, entropy = model(row, 1.0)
        (logprobs.sum() + 0.1 * entropy.sum()).backward()
        found.append(logprobs.detach())
    found += [local(parameter.grad) for parameter in parameters]
    torch.cuda.synchronize()
    return found


@pytest.fixture
def repeats(monkeypatch) -> Iterator[None]:
    """Runs repeat to the bit. With `warn_only`, torch's FlashAttention 2 adds gradients in any order nevertheless."""
    backward = torch.ops.aten._flash_attention_backward

    def in_order(*args, **kwargs):
        torch.use_deterministic_algorithms(True)
        try:
            return backward(*args, **kwargs)
        finally:
            torch.use_deterministic_algorithms(True, warn_only=True)

    monkeypatch.setattr(torch.ops.aten, "_flash_attention_backward", in_order)
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


def late_copies(monkeypatch) -> None:
    """Each copy begins a millisecond or two after it could."""
    after_compute = CopyStream.after_compute

    @contextmanager
    def late(self: CopyStream, *args):
        with after_compute(self, *args) as done:
            torch.cuda._sleep(3_000_000)
            yield done

    monkeypatch.setattr(CopyStream, "after_compute", late)


@pytest.mark.parametrize("kind", ["eager", "compiled", "adapters", "transformers", "compiled transformers adapters"])
def test_steps_are_bitwise_the_same_however_late_the_copies(folder, kind, repeats, monkeypatch):
    torch._dynamo.reset()
    model, parameters = build(folder, kind)
    rows = make_rows(shorter="compiled" not in kind)
    with monkeypatch.context() as patched:
        patched.setattr(block_inputs, "LEAST_BYTES", 1 << 60)  # none leaves
        passes(model, parameters, rows)
        expected, again = passes(model, parameters, rows), passes(model, parameters, rows)
    assert model.block_inputs.metrics()["offload/activations_in_s"] == 0
    assert all(torch.equal(a, b) for a, b in zip(again, expected, strict=True)), "no run repeats, even without it"
    found = passes(model, parameters, rows)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    late_copies(monkeypatch)
    late = passes(model, parameters, rows)
    assert all(torch.equal(a, b) for a, b in zip(late, expected, strict=True))
    assert len(expected) > 3 and all(values.isfinite().all() for values in expected)
    figures = model.block_inputs.metrics()
    print(kind, figures)
    assert figures["offload/activations_out_s"] > 0 and figures["offload/activations_in_s"] > 0
    assert figures["offload/activations_gib"] * 2**30 == (LAYERS - 1) * INPUT
    free = model.block_inputs._free
    assert [memory.nbytes for memory in free] == [INPUT] * (LAYERS - 1)
    assert all(memory.is_pinned() for memory in free)


@pytest.mark.parametrize("kind", ["eager", "compiled"])
def test_two_inputs_are_on_the_device_at_the_peak(folder, kind, monkeypatch):
    """Also while the host is ahead: memory of copies that are under way is not out of the allocator's reach."""
    torch._dynamo.reset()
    model, parameters = build(folder, kind)
    row = make_rows()[0]

    def peak() -> int:
        for _ in range(2):  # the first pass allocates what stays
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats(DEVICE)
            before = torch.cuda.memory_stats(DEVICE)["active_bytes.all.current"]
            torch.cuda._sleep(100_000_000)
            model(row, 1.0)[0].sum().backward()
            torch.cuda.synchronize()
        return torch.cuda.memory_stats(DEVICE)["active_bytes.all.peak"] - before

    offloaded = peak()
    monkeypatch.setattr(block_inputs, "LEAST_BYTES", 1 << 60)
    plain = peak()
    print(f"{kind}: {plain / 2**20:.1f} MiB, {offloaded / 2**20:.1f} with inputs of {INPUT / 2**20:.1f} on the host")
    assert plain - offloaded >= (LAYERS - 2.5) * INPUT
    assert len(parameters) > 0 and all(local(p.grad).isfinite().all() for p in parameters)


def test_the_host_waits_for_nothing(folder):
    model, parameters = build(folder)
    rows = make_rows()
    total = torch.zeros((), device=DEVICE)

    def train(row: Microbatch) -> None:
        logprobs, entropy = model(row, 1.0)
        loss = logprobs.sum() + 0.1 * entropy.sum()
        loss.backward()
        total.add_(loss.detach())

    train(rows[0])  # what is built and pinned on first use may wait
    torch.cuda.synchronize()
    held = model.block_inputs.metrics()["offload/activations_gib"]
    torch.cuda.set_sync_debug_mode("error")
    try:
        for row in rows:
            train(row)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert model.block_inputs.metrics()["offload/activations_gib"] == held > 0
    assert total.isfinite() and all(local(p.grad).isfinite().all() for p in parameters)
