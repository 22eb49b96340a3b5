"""What activation checkpointing recomputes, and that gradients do not depend on it."""

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import LlamaConfig, Qwen2Config, Qwen3Config

from tests.helpers.microbatches import microbatches
from torchtitan.distributed import ParallelDims
from torchtitan.grpo.config.load import load_config
from torchtitan.grpo.model.parallelize import build_model
from torchtitan.grpo.model.source import resolve_model
from torchtitan.grpo.policy.rows import PackedSample

LAYERS = 3
AGAIN = {
    # Matrix multiplications of a block that backward recomputes.
    ("none", "2"): 0,
    ("selective", "matmul"): 0,
    ("selective", "op"): 3,  # wk, wo, w3; where wq, wk and wv have biases w1 and w2
    ("full", "2"): 7,
}


class Matmuls(TorchDispatchMode):
    """Counts matrix multiplications."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
        return func(*args, **(kwargs or {}))


@pytest.fixture(autouse=True)
def one_rank():
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def gradients(folder: str, mode: str, option: str) -> tuple[dict[str, torch.Tensor], int]:
    """Gradient of every parameter, and the number of matrix multiplications in forward and backward."""
    flags = {"model.hf_assets_path": folder, "model.weights": "random", "training.mixed_precision_param": "float32"}
    flags |= {"activation_checkpoint.mode": mode, "activation_checkpoint.selective_ac_option": option}
    config = load_config([word for key, value in flags.items() for word in (f"--{key}", value)])
    source = resolve_model(config.model, 64)
    torch.manual_seed(0)
    model = build_model(source, config, ParallelDims(1, 1, 1, 1, 1, 1, 1, 1), torch.device("cpu"))
    samples = [PackedSample([5, 6, 7], [8, 9] * n, 1.0, 1.0, [0.0] * 2 * n) for n in (1, 4, 9)]
    ((row,),) = microbatches(samples, 64, 1, 64)
    with Matmuls() as matmuls:
        logprobs, entropy = model(row, 0.8)
        (logprobs.sum() + 0.1 * entropy.sum()).backward()
    return {name: parameter.grad for name, parameter in model.named_parameters()}, matmuls.count


@pytest.mark.parametrize("family", [Qwen3Config, LlamaConfig, Qwen2Config])
def test_only_what_was_not_kept_is_recomputed(family, tmp_path):
    family(
        vocab_size=97,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        tie_word_embeddings=True,
        architectures=[family.__name__.replace("Config", "ForCausalLM")],
    ).save_pretrained(tmp_path)
    found = {how: gradients(str(tmp_path), *how) for how in AGAIN}
    expected, least = found["none", "2"]
    assert all(gradient.abs().max() > 0 for gradient in expected.values())
    again = AGAIN | ({("selective", "op"): 2} if family is Qwen2Config else {})
    for how, (computed, matmuls) in found.items():
        assert matmuls - least == LAYERS * again[how], how
        for name, gradient in computed.items():
            key = name.replace("_checkpoint_wrapped_module.", "")
            assert torch.equal(gradient, expected[key]), (how, name)
