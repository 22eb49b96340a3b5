"""A policy that computes with the weights of servers in FP8."""

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import AutoConfig, AutoModelForCausalLM, Gemma4TextConfig, LlamaConfig, Qwen2Config, Qwen3MoeConfig

from tests.helpers.microbatches import microbatches
from torchtitan.distributed import ParallelDims
from torchtitan.grpo.config.load import load_config
from torchtitan.grpo.model.parallelize import build_model
from torchtitan.grpo.model.rounded_weights import RoundedLinear, round_exported, round_weights, rounded, scale_of
from torchtitan.grpo.model.source import gather_hf, resolve_model
from torchtitan.grpo.policy.rows import PackedSample


@pytest.fixture
def one_rank():
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_weights_that_a_server_fuses_have_one_scale():
    weight, wider = torch.tensor([[448.0, 20.5, 1.3], [0.448, 0.0205, -0.0013]]), torch.tensor([[-896.0, 41]])
    alone = torch.tensor([[448.0, 20, 1.25], [0.4375, 0.01953125, -0.001953125]])
    torch.testing.assert_close(rounded(weight, scale_of(weight)), alone, atol=0, rtol=0)
    fused = torch.tensor([[448.0, 20, 1.25], [0.4375, 0.01953125, 0]])
    torch.testing.assert_close(rounded(weight, scale_of(weight, wider)), fused, atol=0, rtol=0)
    assert not rounded(torch.zeros(2, 3), scale_of(torch.zeros(2, 3))).any()


def test_compiled_code_rounds_likewise(monkeypatch):
    monkeypatch.setattr(torch._inductor.config, "emulate_precision_casts", False)
    round_weights(torch.nn.ModuleDict({"output": torch.nn.Linear(1, 1)}))
    torch.manual_seed(0)
    weight = torch.randn(64, 32).bfloat16()
    compiled = torch.compile(lambda weight: rounded(weight, scale_of(weight)), fullgraph=True)
    assert torch.equal(compiled(weight), rounded(weight, scale_of(weight)))


def tiny(family, folder, *flags, **more):
    sizes = dict(vocab_size=97, hidden_size=32, intermediate_size=48, num_hidden_layers=2) | more
    heads = dict(num_attention_heads=4, num_key_value_heads=2, head_dim=8, tie_word_embeddings=True)
    architecture = family.__name__.replace("Config", "ForCausalLM").replace("TextFor", "For")
    family(**sizes, **heads, architectures=[architecture]).save_pretrained(folder)
    words = ["--model.hf_assets_path", str(folder), "--model.weights", "random"]
    config = load_config([*words, "--training.mixed_precision_param", "float32", *flags])
    return config, resolve_model(config.model, 64)


@pytest.mark.parametrize("family", [LlamaConfig, Qwen2Config])  # the latter with biases
@pytest.mark.parametrize("checkpointing", ["none", "full"])
def test_a_model_is_that_of_its_rounded_weights(family, checkpointing, tmp_path, one_rank):
    """Log-probabilities and gradients of all that is not rounded, and straight-through ones of what is."""
    config, source = tiny(family, tmp_path, "--activation_checkpoint.mode", checkpointing)
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
        if not rounds:  # the same weights, fused as vLLM fuses them and already rounded
            for layer in model.layers.children():
                attention, mlp = layer.attention, layer.feed_forward
                for parts in ([attention.wq, attention.wk, attention.wv], [attention.wo], [mlp.w1, mlp.w3], [mlp.w2]):
                    fused = torch.cat([part.weight.detach() for part in parts])
                    now = rounded(fused, scale_of(fused)).split([part.out_features for part in parts])
                    for part, weight in zip(parts, now, strict=True):
                        part.weight.data.copy_(weight)
        logprobs, entropy = model(row, 0.8)
        (logprobs.sum() + 0.1 * entropy.sum()).backward()
        found.append([logprobs.detach(), *(parameter.grad for parameter in model.parameters())])
    for ours, expected in zip(*found, strict=True):
        torch.testing.assert_close(ours, expected)


EXPERTS = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16)
BESIDE = dict(hidden_size_per_layer_input=8, vocab_size_per_layer_input=97)


@pytest.mark.parametrize(
    "family, more, beyond",
    [
        (Qwen3MoeConfig, EXPERTS, "layers.1.moe.router.gate"),
        (Gemma4TextConfig, BESIDE, "hf.model.per_layer_model_projection"),
    ],
)
def test_routers_and_layers_beside_the_blocks_are_rounded(family, more, beyond, tmp_path):
    """As in vLLM 0.25 to 0.32."""
    _, source = tiny(family, tmp_path, **more)
    with torch.device("meta"):
        model = source.build()
    linear = {name for name, layer in model.named_modules() if isinstance(layer, torch.nn.Linear)}
    round_weights(model)
    exact = {name for name in linear if not isinstance(model.get_submodule(name), RoundedLinear)}
    assert beyond in linear - exact
    assert [model.get_submodule(name) for name in exact] == [model.output]


@pytest.mark.parametrize("family", [LlamaConfig, Qwen2Config])
def test_what_is_exported_is_the_model_that_was_trained(family, tmp_path, one_rank):
    """Computed by transformers."""
    config, source = tiny(family, tmp_path)
    model = build_model(source, config, ParallelDims(1, 1, 1, 1, 1, 1, 1, 1), torch.device("cpu"), rounded=True)
    exported = gather_hf(model, source, torch.float32)
    exact = {name: weight.clone() for name, weight in exported.items()}
    round_exported(exported, source, torch.float32)
    changed = {name.split(".", 3)[3] for name in exact if not torch.equal(exported[name], exact[name])}
    projections = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    assert sorted(name.split(".")[1] for name in changed) == sorted(projections)

    theirs = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(tmp_path)).float()
    theirs.load_state_dict(exported, strict=False)
    theirs.tie_weights()
    answer = [8, 9, 3, 11]
    ((row,),) = microbatches([PackedSample([5, 6, 7], answer, 1.0, 1.0, [0.0] * 4)], 64, 1, 64)
    with torch.no_grad():
        found, _ = model(row, 1.0)
        logits = theirs(torch.tensor([[5, 6, 7, *answer]])).logits[0, 2:-1]
    expected = logits.log_softmax(-1)[range(4), answer]
    torch.testing.assert_close(found, expected, atol=1e-6, rtol=1e-5)
