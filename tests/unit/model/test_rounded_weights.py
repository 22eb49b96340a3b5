"""A policy that computes with the weights of servers in FP8."""

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import LlamaConfig, Qwen2Config

from tests.helpers.microbatches import microbatches
from torchtitan.distributed import ParallelDims
from torchtitan.grpo.config.load import load_config
from torchtitan.grpo.model.parallelize import build_model
from torchtitan.grpo.model.rounded_weights import RoundedLinear, rounded
from torchtitan.grpo.model.source import resolve_model
from torchtitan.grpo.policy.rows import PackedSample


@pytest.fixture
def one_rank():
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_each_output_has_a_scale_of_its_own():
    weight = torch.tensor([[448.0, 20.5, 1.3], [0.448, 0.0205, -0.0013], [0, 0, 0]])
    expected = torch.tensor([[448.0, 20, 1.25], [0.448, 0.020, -0.00125], [0, 0, 0]])
    torch.testing.assert_close(rounded(weight), expected)


@pytest.mark.parametrize("family", [LlamaConfig, Qwen2Config])  # the latter with biases
@pytest.mark.parametrize("checkpointing", ["none", "full"])
def test_a_model_is_that_of_its_rounded_weights(family, checkpointing, tmp_path, one_rank):
    """Log-probabilities and gradients of all that is not rounded, and straight-through ones of what is."""
    sizes = dict(vocab_size=97, hidden_size=32, intermediate_size=48, num_hidden_layers=2)
    heads = dict(num_attention_heads=4, num_key_value_heads=2, head_dim=8, tie_word_embeddings=True)
    architecture = family.__name__.replace("Config", "ForCausalLM")
    family(**sizes, **heads, architectures=[architecture]).save_pretrained(tmp_path)
    flags = ["--model.hf_assets_path", str(tmp_path), "--model.weights", "random"]
    flags += ["--training.mixed_precision_param", "float32", "--activation_checkpoint.mode", checkpointing]
    config = load_config(flags)
    source = resolve_model(config.model, 64)
    samples = [PackedSample([5, 6, 7], [8, 9] * n, 1.0, 1.0, [0.0] * 2 * n) for n in (1, 4, 9)]
    ((row,),) = microbatches(samples, 64, 1, 64)
    found = []
    for rounds in (True, False):
        torch.manual_seed(0)
        dims = ParallelDims(1, 1, 1, 1, 1, 1, 1, 1)
        model = build_model(source, config, dims, torch.device("cpu"), rounded=rounds)
        linear = [name for name, layer in model.layers.named_modules() if isinstance(layer, torch.nn.Linear)]
        assert len(linear) == 14
        assert all(isinstance(model.layers.get_submodule(name), RoundedLinear) == rounds for name in linear)
        if not rounds:  # the same weights, already rounded
            with torch.no_grad():
                for name in linear:
                    weight = model.layers.get_submodule(name).weight
                    weight.copy_(rounded(weight))
        logprobs, entropy = model(row, 0.8)
        (logprobs.sum() + 0.1 * entropy.sum()).backward()
        found.append([logprobs.detach(), *(parameter.grad for parameter in model.parameters())])
    for ours, expected in zip(*found, strict=True):
        torch.testing.assert_close(ours, expected)
