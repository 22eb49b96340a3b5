"""The dry run's memory estimate against what the CPU allocator hands out in a forward, and in whole steps.

Process groups are fake: collectives move nothing, but every rank's buffers are there. On a CPU torch computes attention
and RMS norm by other means than on a GPU, which save other tensors; here both are replaced by functions that save what
the GPU's kernels save.

Every two values of a forward's parameters meet in a case. MEMORY_GRID=1 runs all combinations.
"""

import contextlib
import gc
import itertools
import os
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import LlamaConfig, Qwen2Config, Qwen3Config, Qwen3MoeConfig

from tests.helpers import TINY_QWEN3
from tests.helpers.microbatches import microbatches
from torchtitan.config import JobConfig
from torchtitan.distributed import ParallelDims
from torchtitan.grpo.config.load import DryRun, load_config, take_dry_run
from torchtitan.grpo.config.target import Target, find_target
from torchtitan.grpo.dry_run.activations import block_activations
from torchtitan.grpo.dry_run.describe import describe, memory_lines
from torchtitan.grpo.dry_run.memory import memory_bytes
from torchtitan.grpo.errors import UserError
from torchtitan.grpo.host_memory import block_inputs
from torchtitan.grpo.model import document_attention, logprobs, parallelize
from torchtitan.grpo.model.source import resolve_model
from torchtitan.grpo.policy import gradients
from torchtitan.grpo.policy.gradients import accumulate_gradients
from torchtitan.grpo.policy.microbatch import Microbatch
from torchtitan.grpo.policy.rows import PackedSample

TINY = str(TINY_QWEN3)
DOCUMENTS = 4
SHAPES = {
    "tiny": dict(hidden_size=128, intermediate_size=384, num_hidden_layers=4),
    "small": dict(hidden_size=256, intermediate_size=768, num_hidden_layers=5),
    "deep": dict(hidden_size=256, intermediate_size=768, num_hidden_layers=8),  # for groups of three blocks
    "wide": dict(hidden_size=256, intermediate_size=6144, num_hidden_layers=2),
}
COMMON = dict(vocab_size=1000, num_attention_heads=8, num_key_value_heads=4, max_position_embeddings=4096)
EXPERTS = dict(head_dim=32, num_experts=16, num_experts_per_tok=4, moe_intermediate_size=96, norm_topk_prob=True)
CHECKPOINTING = {
    "none": ["--activation_checkpoint.mode", "none"],
    "full": ["--activation_checkpoint.mode", "full"],
    "selective": ["--activation_checkpoint.mode", "selective", "--activation_checkpoint.selective_ac_option", "op"],
    "layers": ["--activation_checkpoint.mode", "selective", "--activation_checkpoint.selective_ac_option", "2"],
    "matmul": ["--activation_checkpoint.mode", "selective", "--activation_checkpoint.selective_ac_option", "matmul"],
}


CHUNKS = ["--activation_checkpoint.mode", "full", "--activation_checkpoint.mlp_chunk_tokens"]
SHORT = ["--training.seq_len", "64", "--data.max_prompt_tokens", "16", "--rollout.max_answer_tokens", "16"]


@torch.library.custom_op("memory_test::flash", mutates_args={})
def flash(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.zeros_like(q), torch.zeros(q.shape[1], q.shape[0])  # and the log-sum-exp, float32


@flash.register_fake
def _(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.empty_like(q), q.new_empty((q.shape[1], q.shape[0]), dtype=torch.float32)


@torch.library.custom_op("memory_test::flash_backward", mutates_args={})
def flash_backward(
    grad: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor, log_sum_exp: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)


@flash_backward.register_fake
def _(grad, q, k, v, out, log_sum_exp):
    return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)


flash.register_autograd(
    lambda ctx, grad, _: flash_backward(grad, *ctx.saved_tensors),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs, *output),
)


class FusedNorm(torch.autograd.Function):
    """Saves its input and one float32 per row, as the GPU's kernel does."""

    @staticmethod
    def forward(ctx, x, weight, eps):
        ctx.save_for_backward(x, weight, torch.empty(*x.shape[:-1], 1))
        return torch.zeros_like(x)

    @staticmethod
    def backward(ctx, grad):
        x, weight, _ = ctx.saved_tensors
        return torch.zeros_like(x), torch.zeros_like(weight), None


def rms_norm(x: torch.Tensor, shape: list[int], weight: torch.Tensor, eps: float) -> torch.Tensor:
    if torch.compiler.is_compiling():  # torch.compile takes it apart on every device
        return torch.rms_norm(x, shape, weight, eps)
    return FusedNorm.apply(x, weight, eps)


@pytest.fixture(scope="module", autouse=True)
def imports_out_of_sight() -> Iterator[None]:
    """Of the garbage collector: half a million objects of torch take it 0.3 s each time."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture(scope="module", autouse=True)
def products_without_arithmetic() -> Iterator[None]:
    """Matrix products allocate as always, and are zero. In bfloat16 most CPUs take long to compute them."""
    products = {
        "mm": lambda a, b: a.new_zeros(len(a), b.shape[1]),
        "mm.out": lambda a, b, *, out: out.zero_(),
        "addmm": lambda c, a, b, *, beta=1, alpha=1: a.new_zeros(len(a), b.shape[1]),
        "addmm.out": lambda c, a, b, *, beta=1, alpha=1, out: out.zero_(),
    }
    library = torch.library.Library("aten", "IMPL")
    for name, product in products.items():
        library.impl(name, product, "CPU", allow_override=True)
    yield
    library._destroy()


@pytest.fixture
def gpu_kernels(monkeypatch) -> None:
    monkeypatch.setattr(document_attention, "_by_length_class", lambda q, k, v, *_: flash(q, k, v)[0])
    monkeypatch.setattr(F, "rms_norm", rms_norm)
    monkeypatch.setattr(parallelize, "KEPT_BY_SELECTIVE_CHECKPOINTING", torch.ops.memory_test.flash.default)


@pytest.fixture(autouse=True)
def every_block_by_itself(monkeypatch) -> None:
    """As blocks of real models are; these are small."""
    monkeypatch.setattr(parallelize, "TOGETHER_BYTES", 1)


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[str, str]:
    made = {}
    for size, shape in SHAPES.items():
        head_dim = shape["hidden_size"] // 4  # twice what Llama's would be: heads are wider than the model
        for name, config in {
            "qwen3": Qwen3Config(**COMMON, **shape, head_dim=head_dim, architectures=["Qwen3ForCausalLM"]),
            "llama": LlamaConfig(**COMMON, **shape, tie_word_embeddings=True, architectures=["LlamaForCausalLM"]),
            "qwen3_moe": Qwen3MoeConfig(**COMMON, **shape, **EXPERTS, architectures=["Qwen3MoeForCausalLM"]),
            "qwen2": Qwen2Config(**COMMON, **shape, architectures=["Qwen2ForCausalLM"]),
        }.items():
            made[f"{name}-{size}"] = str(tmp_path_factory.mktemp(f"{name}-{size}"))
            config.save_pretrained(made[f"{name}-{size}"])
    return made


@contextlib.contextmanager
def fake_world(size: int) -> Iterator[None]:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=size)
    try:
        yield
    finally:
        dist.destroy_process_group()


def read(folder: str, world: int, tokens: int, rows: int, *flags: str, monkeypatch) -> JobConfig:
    """A run with `rows` full rows of `tokens` for each data-parallel rank and optimizer step."""
    monkeypatch.setenv("WORLD_SIZE", str(world))
    length = tokens // DOCUMENTS
    settings = {
        "model.hf_assets_path": folder,
        "model.weights": "random",
        "training.seq_len": str(tokens),
        "data.max_prompt_tokens": str(length // 16),
        "rollout.max_answer_tokens": str(length - length // 16),
        "grpo.prompts_per_step": str(world),
        "grpo.group_size": str(DOCUMENTS * rows),
    }
    if "--training.reduce_gradients" not in flags:
        settings["training.reduce_gradients"] = "microbatch"  # `auto` takes `step` for models as small as these
    for split in {"--parallelism.tensor_parallel_degree", "--parallelism.context_parallel_degree"} & set(flags):
        settings["grpo.prompts_per_step"] = str(world // int(flags[flags.index(split) + 1]))
    return load_config([*(word for key, value in settings.items() for word in (f"--{key}", value)), *flags])


def build(config: JobConfig, world: int, trainable: bool = True) -> tuple[torch.nn.Module, Microbatch]:
    source = resolve_model(config.model, config.training.seq_len, config.lora)
    tensor = config.parallelism.tensor_parallel_degree
    replicas = config.parallelism.data_parallel_replicate_degree or 1
    context = config.parallelism.context_parallel_degree
    dims = ParallelDims(replicas, world // (tensor * context) // replicas, context, tensor, 1, 1, 1, world)
    model = parallelize.build_model(source, config, dims, torch.device("cpu"), trainable=trainable)
    length = config.training.seq_len // DOCUMENTS
    answer = length - length // 16 + 1  # the last token predicts nothing, and takes no place in the row
    samples = [  # with no prefix in common, which a CPU would compute once
        PackedSample([5 + i] * (length // 16), [7] * answer, 1.0, 1.0, [0.0] * answer) for i in range(DOCUMENTS)
    ]
    return model, microbatches(samples, config.training.seq_len, 1, tensor * context)[0][0]


@contextlib.contextmanager
def uncollected() -> Iterator[None]:
    """What an earlier test left must not be freed meanwhile."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def allocated(function: Callable[[], Any]) -> tuple[Any, int, int]:
    """What `function` returns, and the bytes that the CPU allocator gave it: left at its end, and at the peak."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    with uncollected(), torch.profiler.profile(activities=activities, profile_memory=True) as profile:
        result = function()
    events = [event for event in profile.profiler.kineto_results.events() if event.name() == "[memory]"]
    now = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        now += event.nbytes()
        peak = max(peak, now)
    return result, now, peak


def saved_by_autograd(function: Callable[[], Any], model: torch.nn.Module) -> int:
    """Bytes of the storages that autograd saves, each once, without parameters."""
    parameters = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    storages: dict[int, torch.UntypedStorage] = {}

    def save(tensor: torch.Tensor) -> torch.Tensor:
        storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(save, lambda tensor: tensor):
        kept = function()
    size = sum(storage.nbytes() for pointer, storage in storages.items() if pointer not in parameters)
    del kept
    return size


@pytest.mark.parametrize(
    ("model_name", "checkpointing", "targets"),
    [
        ("qwen3-tiny", "none", ["all-linear"]),
        ("qwen3-tiny", "none", ["q_proj", "down_proj"]),
        ("qwen2-tiny", "matmul", ["all-linear"]),
        ("qwen2-tiny", "matmul", ["q_proj", "down_proj"]),
        ("qwen3_moe-tiny", "none", ["all-linear"]),
    ],
)
def test_activations_of_adapters(model_name, checkpointing, targets, folders, gpu_kernels, monkeypatch):
    config = read(folders[model_name], 1, 1024, 1, *CHECKPOINTING[checkpointing], monkeypatch=monkeypatch)
    config.lora.enable, config.lora.target_modules = True, targets
    with fake_world(1):
        model, row = build(config, 1)
        _, held, _ = allocated(lambda: model(row, 1.0))
    parts = memory_bytes(config, 1).moments["log-probabilities' backward"]
    assert parts["activations"] + parts["kept logits"] + parts["gathered weights"] == pytest.approx(held, rel=0.05)


def forwards(whole: bool = False) -> list[tuple[str, str, str]]:
    """(model, checkpointing, dtype). Qwen2 and experts are tiny only."""
    families, dtypes = ("qwen3", "llama", "qwen2", "qwen3_moe"), ("bfloat16", "float32")
    cases = []
    for (f, family), (c, checkpointing) in itertools.product(enumerate(families), enumerate(CHECKPOINTING)):
        sizes = ("tiny", "small")[: 2 if f < 2 else 1]
        if whole:
            pairs = list(itertools.product(sizes, dtypes))
        else:
            pairs = [(sizes[(f + c) % len(sizes)], dtypes[(f // 2 + c) % 2])]
        cases += [(f"{family}-{size}", checkpointing, dtype) for size, dtype in pairs]
    return cases


@pytest.mark.parametrize(("model_name", "checkpointing", "dtype"), forwards("MEMORY_GRID" in os.environ))
def test_activations_of_a_forward(model_name, checkpointing, dtype, folders, gpu_kernels, monkeypatch):
    precision = ["--training.dtype", dtype, "--training.mixed_precision_param", dtype]
    flags = [*CHECKPOINTING[checkpointing], *precision]
    config = read(folders[model_name], 1, 1024, 1, *flags, monkeypatch=monkeypatch)
    with fake_world(1):
        model, row = build(config, 1)
        _, held, _ = allocated(lambda: model(row, 1.0))
        hooked = saved_by_autograd(lambda: model(row, 1.0), model)
    parts = memory_bytes(config, 1).moments["log-probabilities' backward"]
    estimate = parts["activations"] + parts["kept logits"]
    assert estimate == pytest.approx(held, rel=0.05)
    if checkpointing not in ("selective", "matmul"):  # whose cache autograd's hooks do not see
        assert estimate == pytest.approx(hooked, rel=0.05)


@pytest.mark.parametrize(
    ("model_name", "checkpointing"),
    [
        ("qwen3-tiny", "none"),
        ("qwen3-tiny", "full"),
        ("qwen3-tiny", "selective"),
        ("qwen3-tiny", "matmul"),
        ("qwen2-tiny", "selective"),
        ("qwen3-tiny lora", "none"),
        ("qwen3_moe-tiny", "none"),
        ("qwen3_moe-tiny", "matmul"),
    ],
)
def test_activations_of_compiled_blocks(model_name, checkpointing, folders, gpu_kernels, monkeypatch):
    """By the partitioner that decides what a compiled block saves, on a GPU too; without code generation."""
    monkeypatch.setattr(logprobs, "_compiled", lambda function, whole_chunk: function)
    model_name, _, config_lora = model_name.partition(" ")
    config = read(folders[model_name], 1, 1024, 1, *CHECKPOINTING[checkpointing], monkeypatch=monkeypatch)
    config.lora.enable = bool(config_lora)
    config.compile.enable, config.compile.backend = True, "aot_eager_decomp_partition"
    config.training.dtype = "bfloat16"
    torch._dynamo.reset()
    with fake_world(1):
        model, row = build(config, 1)
        model(row, 1.0)[0].sum().backward()  # compiles both; until then the first forward's tensors stay
        _, held, _ = allocated(lambda: model(row, 1.0))
    parts = memory_bytes(config, 1).moments["log-probabilities' backward"]
    estimate = parts["activations"] + parts["kept logits"]
    assert estimate == pytest.approx(held, rel=0.05)


STEPS = {
    # name: model, world, tokens, rows, flags, the moment that is the peak
    "one process": ("qwen3-small", 1, 1024, 2, [], "last block's backward"),
    "no checkpointing": ("llama-small", 4, 1024, 2, CHECKPOINTING["none"], "log-probabilities' backward"),
    "selective": ("qwen3-small", 2, 1024, 2, CHECKPOINTING["selective"], None),
    "one short row": ("qwen3-small", 4, 128, 1, [], "first block's backward"),
    "tensor parallel": (
        "qwen3-small",
        4,
        1024,
        2,
        ["--parallelism.tensor_parallel_degree", "2", *CHECKPOINTING["none"]],
        "log-probabilities' backward",
    ),
    "context parallel": (
        "qwen3-small",
        4,
        1024,
        2,
        ["--parallelism.context_parallel_degree", "2", *CHECKPOINTING["none"]],
        None,
    ),
    "full, context parallel": (
        "qwen3-small",
        4,
        2048,
        2,
        ["--parallelism.context_parallel_degree", "2"],
        None,
    ),
    "four context-parallel ranks": (
        "qwen3-small",
        4,
        4096,
        1,
        ["--parallelism.context_parallel_degree", "4", *CHECKPOINTING["full"]],
        "first block's backward",
    ),
    "rounded logits": (
        "qwen3-small",
        1,
        1024,
        1,
        ["--training.logits_dtype", "model", *CHECKPOINTING["none"]],
        "log-probabilities' backward",
    ),
    "selective, tensor parallel": (
        "llama-small",
        4,
        1024,
        2,
        ["--parallelism.tensor_parallel_degree", "2", *CHECKPOINTING["selective"]],
        None,
    ),
    "selective, tensor parallel, biases": (
        "qwen2-tiny",
        4,
        1024,
        2,
        ["--parallelism.tensor_parallel_degree", "2", *CHECKPOINTING["selective"]],
        None,
    ),
    "every product, tensor parallel": (
        "qwen3-small",
        4,
        1024,
        2,
        ["--parallelism.tensor_parallel_degree", "2", *CHECKPOINTING["matmul"]],
        None,
    ),
    "reduced once": (
        "qwen3-small",
        4,
        256,
        3,
        ["--training.reduce_gradients", "step"],
        "first block's backward",
    ),
    "replicas": (
        "qwen3-small",
        4,
        128,
        2,
        ["--parallelism.data_parallel_replicate_degree", "4", "--parallelism.data_parallel_shard_degree", "1"],
        "first block's backward",
    ),
    "adapters": ("qwen3-small", 4, 1024, 2, [], "log-probabilities' backward"),
    "adapters, tensor parallel": (
        "llama-small",
        4,
        1024,
        2,
        ["--parallelism.tensor_parallel_degree", "2", *CHECKPOINTING["matmul"]],
        None,
    ),
    "adapters, reduced once": (
        "qwen3-small",
        4,
        256,
        3,
        ["--training.reduce_gradients", "step", *CHECKPOINTING["none"]],
        None,
    ),
    "experts": ("qwen3_moe-small", 4, 512, 2, CHECKPOINTING["full"], None),
    "inputs on the host": ("qwen3-deep", 4, 1024, 2, ["--activation_checkpoint.offload"], None),
    "inputs on the host, three blocks together": ("qwen3-deep", 4, 1024, 2, ["--activation_checkpoint.offload"], None),
    "feed-forward layers in chunks": ("qwen3-wide", 1, 1024, 2, [*CHUNKS, "256"], "last block's backward"),
    "feed-forward layers in chunks, several ranks": (
        "llama-wide",
        4,
        1024,
        2,
        [*CHUNKS, "512"],
        "last block's backward",
    ),
    "three blocks together": ("qwen3-deep", 4, 1024, 2, [], None),
    "three blocks together, a short row": ("qwen3-deep", 4, 64, 2, [], "second group's backward"),
    "three blocks together, no checkpointing": ("llama-deep", 4, 512, 2, CHECKPOINTING["none"], None),
    "three blocks together, reduced once": ("qwen3-deep", 4, 256, 3, ["--training.reduce_gradients", "step"], None),
    "all blocks together": ("qwen3-small", 1, 64, 2, [], "blocks' reduction"),
    "all blocks together, reduced once": (
        "qwen3-small",
        4,
        64,
        3,
        ["--training.reduce_gradients", "step"],
        "blocks' reduction",
    ),
    "without FSDP": (
        "llama-small",
        1,
        512,
        2,
        ["--training.mixed_precision_param", "float32", "--grpo.entropy_coef", "0.1"],
        None,
    ),
}


@pytest.fixture
def host_memory_apart(monkeypatch) -> None:
    """Block inputs of any size leave, for memory that torch's profiler does not see."""
    monkeypatch.setattr(block_inputs, "LEAST_BYTES", 1)
    unseen = lambda self, nbytes, instead_of: torch.from_numpy(np.empty(nbytes, np.uint8))  # noqa: E731
    monkeypatch.setattr(block_inputs.BlockInputs, "_allocate", unseen)


@pytest.mark.parametrize("case", STEPS)
def test_peak_of_whole_steps(case, folders, gpu_kernels, host_memory_apart, monkeypatch):
    """Weights, FSDP2's buffers, forward, backward, clipping and AdamW: a step of several rows after a first one."""
    name, world, tokens, rows, flags, moment = STEPS[case]
    config = read(folders[name], world, tokens, rows, *flags, monkeypatch=monkeypatch)
    config.lora.enable = case.startswith("adapters")
    if case.startswith("all blocks together"):
        monkeypatch.setattr(parallelize, "TOGETHER_BYTES", 1 << 40)
    if "three blocks together" in case:
        monkeypatch.setattr(parallelize, "TOGETHER_BYTES", 6_200_000)  # 3.2 blocks of Qwen3's, 3.9 of Llama's

    def two_steps() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
        model, row = build(config, world)
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)

        def loss_of(index: int, row: Microbatch) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
            values, entropy = model(row, 1.0)
            return values.sum() + (entropy.sum() if config.grpo.entropy_coef else 0), {}

        for count in (1, rows):  # the first one makes AdamW's state
            optimizer.zero_grad()
            accumulate_gradients(model, [row] * count, loss_of, config.training.reduce_gradients == "step")
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=True)
            optimizer.step()
        return model, optimizer

    with fake_world(world):
        _, _, peak = allocated(two_steps)
    memory = memory_bytes(config, world)
    elsewhere = sum(memory.moments[memory.peak][part] for part in ("snapshots", "buckets, at most"))
    print("ratio", (memory.total(memory.peak) - elsewhere) / peak, memory.peak, memory.moments)
    assert memory.total(memory.peak) - elsewhere == pytest.approx(peak, rel=0.05)
    assert moment in (None, memory.peak)


def test_every_two_values_of_a_forward_meet():
    def pairs(cases):
        names = [(*name.split("-"), *others) for name, *others in cases]
        return {pair for case in names for pair in itertools.combinations(enumerate(case), 2)}

    assert pairs(forwards()) == pairs(forwards(whole=True)) and len(forwards()) < len(forwards(whole=True)) / 2


def test_servers_get_the_adapters_alone(folders, monkeypatch):
    config = read(folders["qwen3-tiny"], 1, 64, 1, monkeypatch=monkeypatch)
    config.lora.enable, config.grpo.kl_coef = True, 0.1
    memory = memory_bytes(config, 1)
    parts = memory.moments[memory.peak]
    assert parts["snapshots"] == parts["buckets, at most"] == 4 * memory.trained < memory.parameters
    assert not parts["reference model"], "it is the model without its adapters"


def test_the_estimate_knows_what_auto_does(folders, monkeypatch):
    def peak(choice: str) -> int:
        flags = ["--training.reduce_gradients", choice]
        config = read(folders["qwen3-small"], 4, 128, 2, *flags, monkeypatch=monkeypatch)
        memory = memory_bytes(config, 4)
        return memory.total(memory.peak)

    assert peak("auto") == peak("step") > peak("microbatch")
    monkeypatch.setattr(gradients, "SMALL_MODEL", 1000)
    assert peak("auto") == peak("microbatch")


def test_a_reference_model_keeps_what_its_forward_gathered(folders, gpu_kernels, monkeypatch):
    config = read(folders["qwen3-small"], 4, 64, 1, "--grpo.kl_coef", "0.1", monkeypatch=monkeypatch)

    def forward() -> torch.nn.Module:
        reference, row = build(config, 4, trainable=False)
        with torch.no_grad():
            reference(row, 1.0)
        return reference

    with fake_world(4):
        _, left, _ = allocated(forward)
    memory = memory_bytes(config, 4)
    assert memory.moments["optimizer step"]["reference model"] == pytest.approx(left, rel=0.05)


def test_parts_of_the_tiny_model(monkeypatch):
    flags = ["--weight_sync.dtype", "bfloat16", "--grpo.kl_coef", "0.1"]
    config = read(TINY, 2, 64, 2, *flags, monkeypatch=monkeypatch)
    block = 2 * 128 + 2 * 32 + 2 * 128 * 128 + 2 * 128 * 64 + 3 * 128 * 384  # norms, q/k norms, q and o, k and v, mlp
    outside = 64 * 128 + 128  # tied: one embedding; and the last norm
    parameters = 4 * block + outside
    memory = memory_bytes(config, world_size=2)
    assert memory.parameters == parameters
    step = memory.moments["optimizer step"]
    assert step["weights"] == step["gradients"] == 4 * parameters // 2
    assert step["AdamW state"] == 4 * parameters
    assert step["reference model"] == 4 * parameters // 2 + 2 * outside
    assert step["snapshots"] == 2 * parameters // 2
    assert step["buckets, at most"] == 2 * parameters
    assert memory.moments["last block's backward"]["gathered weights"] == 2 * (outside + 2 * block)
    assert memory.moments["log-probabilities' backward"]["logits chunk"] == 64 * 64 * 4 * 4  # besides the kept logits


@pytest.mark.parametrize(
    ("flags", "moment", "part"),
    [
        (["--offload.optimizer_states", "host"], "optimizer step", "AdamW state"),
        (["--offload.offload_optimizer_states_for_logprob"], "reference's log-probabilities", "AdamW state"),
        (["--offload.reference_weights", "host"], "optimizer step", "reference model"),
    ],
)
def test_what_is_on_the_host_takes_no_device_memory(flags, moment, part, monkeypatch):
    base = ["--grpo.kl_coef", "0.1"]
    here = memory_bytes(read(TINY, 1, 64, 2, *base, monkeypatch=monkeypatch), 1)
    away = memory_bytes(read(TINY, 1, 64, 2, *base, *flags, monkeypatch=monkeypatch), 1)
    assert here.moments[moment][part] > 0
    assert away.moments[moment][part] == 0


@pytest.mark.parametrize("family", ["qwen3", "llama"])
def test_a_compiled_block_saves_neither_silu_nor_the_last_product(family, folders):
    source = resolve_model(SimpleNamespace(hf_assets_path=folders[f"{family}-small"]), 64)
    with torch.device("meta"):
        block = source.build().layers["0"]
    eager, compiled = (
        block_activations(source.model_args, block, 64, 2, 1, compiled, "none") for compiled in (False, True)
    )
    assert eager.saved - compiled.saved == 64 * 768 * 2
    assert eager.selected - compiled.selected == 64 * 256 * 2
    assert eager.input == compiled.input


def test_long_shared_prompts_take_memory_at_attention(folders, monkeypatch):
    """Copies of keys, values and their gradients, beyond what the feed-forward layer needs at its own moment."""
    source = resolve_model(SimpleNamespace(hf_assets_path=folders["qwen3-small"]), 64)
    with torch.device("meta"):
        block = source.build().layers["0"]
    args = source.model_args
    once, more, often = (
        block_activations(args, block, 64, 2, 1, True, "none", None, copies).gradients for copies in (1.0, 3.0, 8.0)
    )
    assert once == 64 * 2 * (args.dim + args.hidden_dim) <= more
    assert often - more == 64 * 2 * 5 * (2 * args.n_heads + 4 * args.n_kv_heads) * args.head_dim
    config = read(TINY, 1, 64, 2, monkeypatch=monkeypatch)
    config.data.max_prompt_tokens, config.rollout.max_answer_tokens = 60, 4
    shared, apart = (memory_bytes(config, 1, job=job).moments["last block's backward"] for job in ("grpo", "sft"))
    assert shared["activations' gradients"] > apart["activations' gradients"], "supervised rows share no prompt"


def test_the_target_decides_what_is_published_and_how_large_buckets_are(monkeypatch):
    config = read(TINY, 2, 64, 2, monkeypatch=monkeypatch)
    cpu, h200 = Target("cpu", False, 2**20), find_target("h200", config)
    on_cpu, on_gpu = (memory_bytes(config, 2, target).moments["optimizer step"] for target in (cpu, h200))
    assert on_cpu["snapshots"] == 2 * on_gpu["snapshots"]
    assert on_gpu["buckets, at most"] == 2 * memory_bytes(config, 2, h200).parameters, "all of them, in bfloat16"


def test_snapshots_are_counted(monkeypatch):
    def taken(*flags: str) -> int:
        config = read(TINY, 2, 64, 2, *flags, monkeypatch=monkeypatch)
        return memory_bytes(config, 2).moments["optimizer step"]["snapshots"]

    assert taken("--weight_sync.async_weight_update") == 2 * taken() > 0


@pytest.mark.parametrize(
    ("flags", "name", "target", "why"),
    [
        ([], "", "H100 (80 GB)", 'mixed_precision_param = "bfloat16", and this machine has no GPU'),
        (["--training.mixed_precision_param", "float32"], "", "this machine's CPU", ""),
        (["--training.mixed_precision_param", "float32", "--compile.enable"], "", "H100 (80 GB)", "[compile] enable"),
        (["--compile.enable", "--weight_sync.transport", "nccl"], "b200", "B200 (192 GB)", ""),
        (["--rollout.api_key_env", "NOT_HERE"], "a100", "A100 (80 GB)", ""),
    ],
)
def test_a_laptop_can_plan_a_run_on_gpus(flags, name, target, why, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    config = load_config(["--model.hf_assets_path", TINY, *SHORT, *flags], dry_run=name)
    found = find_target(name, config)
    assert found.name == target and why in found.why
    assert memory_lines(config, 1, found)[0].startswith(f"memory of one rank on {target}, for ")


def test_a_dry_run_needs_config_json_alone_and_counts_the_disk(tmp_path):
    (tmp_path / "config.json").write_text((TINY_QWEN3 / "config.json").read_text())
    flags = ["--checkpoint.enable", "--checkpoint.keep_latest_k", "2", "--grpo.kl_coef", "0.1"]
    config = load_config(["--model.hf_assets_path", str(tmp_path), *SHORT, *flags], dry_run="h200")
    lines = describe(config, 2, "h200").splitlines()
    each = memory_bytes(config, 2).parameters * (12 + 4 + 4) / 2**20  # AdamW's two moments, reference, float32 export
    disk = lines.index("# disk for checkpoints, in outputs/checkpoint")
    assert lines[disk + 1].split()[1:] == [
        "each",
        f"{each:.1f}",
        "MiB",
        "weights,",
        "AdamW",
        "state,",
        "reference,",
        "export",
    ]
    assert lines[disk + 2].split()[1:] == ["at", "most", "3", "at", "once", f"{3 * each:.1f}", "MiB"]
    assert any(line.endswith("%: it fits") for line in lines) and lines[-1].startswith(
        "# Read: config.json of the model. No weights"
    )


def test_a_dry_run_refuses_experts_that_a_run_could_not_compile(tmp_path):
    Qwen3MoeConfig(num_experts=8, mlp_only_layers=[]).save_pretrained(tmp_path)
    compiles = ["--compile.enable", "--training.mixed_precision_param"]
    flags = ["--model.hf_assets_path", str(tmp_path), "--model.weights", "random", *SHORT, *compiles]
    memory_bytes(load_config([*flags, "bfloat16"], dry_run="h200"), 1)
    with pytest.raises(UserError, match="a mixture of experts compiles in bfloat16 only"):
        memory_bytes(load_config([*flags, "float32"], dry_run="h200"), 1)


def test_the_target_is_taken_out_of_the_command_line():
    assert take_dry_run(["--a.b", "1"]) == (None, ["--a.b", "1"])
    assert take_dry_run(["--dry_run", "--a.b", "1"]) == (DryRun(), ["--a.b", "1"])
    assert take_dry_run(["--a.b", "1", "--dry-run", "h100", "--c.d"]) == (DryRun("h100"), ["--a.b", "1", "--c.d"])
    assert take_dry_run(["--dry_run=cpu"]) == (DryRun("cpu"), [])
    assert take_dry_run(["--dry_run", "full", "h100"]) == (DryRun("h100", full=True), [])
    assert take_dry_run(["--check", "--dry_run", "h100", "full"]) == (DryRun("h100", full=True, check=True), [])
    assert take_dry_run(["--a.b", "--check=h200"]) == (DryRun("h200", check=True), ["--a.b"])
    with pytest.raises(UserError, match=r'--check "ful": no such target \(did you mean "full"'):
        take_dry_run(["--check", "h100", "ful"])
    with pytest.raises(UserError, match="--dry_run and --check name h100 and h200: keep one target"):
        take_dry_run(["--dry_run", "h100", "--check", "h200"])


def test_table_names_the_peak(monkeypatch):
    config = read(TINY, 1, 64, 2, monkeypatch=monkeypatch)
    memory = memory_bytes(config, 1)
    lines = memory_lines(config, 1)
    peak = next(line for line in lines if line.startswith("  peak"))
    assert peak.endswith(memory.peak)
    assert f"{memory.total(memory.peak) / 2**20:,.1f} MiB" in peak
    assert all(any(moment in line for line in lines) for moment in memory.moments)


def test_inputs_of_blocks_leave_the_device(folders, gpu_kernels, host_memory_apart, monkeypatch):
    """One is there after a forward, two in the backward pass, and the rest are on the host."""
    config = read(folders["qwen3-deep"], 1, 1024, 1, monkeypatch=monkeypatch)
    assert not any("the blocks' inputs" in line for line in memory_lines(config, 1))
    layers = SHAPES["deep"]["num_hidden_layers"]
    config.activation_checkpoint.offload = True
    with fake_world(1):
        model, row = build(config, 1)
        _, held, _ = allocated(lambda: model(row, 1.0))
    memory = memory_bytes(config, 1)
    parts = memory.moments["log-probabilities' backward"]
    assert parts["activations"] + parts["kept logits"] + parts["gathered weights"] == pytest.approx(held, rel=0.05)
    each = memory.on_host["blocks' inputs"] // (layers - 1)
    assert each > 0
    one, two = (memory.moments[f"{name} block's backward"]["activations"] for name in ("first", "last"))
    assert two - one == each
    (line,) = (line for line in memory_lines(config, 1) if "blocks' inputs" in line)
    assert f" {(layers - 1) * each / 2**20:,.1f} MiB" in line


def test_the_host_memory_of_checkpoints_written_in_the_background(monkeypatch):
    config = read(TINY, 1, 64, 2, monkeypatch=monkeypatch)
    assert not any("copy for checkpoints" in line for line in memory_lines(config, 1))
    config.checkpoint.async_mode = "async_with_pinned_mem"
    weights = memory_bytes(config, 2).moments["optimizer step"]["weights"]
    copy = "copy for checkpoints"
    assert memory_bytes(config, 2).on_host[copy] == 3 * weights, "weights and both moments of AdamW"
    (line,) = (line for line in memory_lines(config, 2) if copy in line)
    assert f" {3 * weights / 2**20:,.1f} MiB" in line and line.endswith("of each rank")
    config.grpo.kl_coef = 0.1
    assert memory_bytes(config, 2).on_host[copy] == 4 * weights
    config.checkpoint.enable = False
    assert memory_bytes(config, 2).on_host[copy] == 0
