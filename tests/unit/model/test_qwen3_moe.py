"""Mixtures of experts: what config.json may say, degrees, and what is published, adapted and counted."""

from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

from tests.helpers import TINY_QWEN3
from tests.helpers.microbatches import microbatches
from tests.helpers.tiny_models import as_in_files
from torchtitan.grpo.errors import UserError
from torchtitan.grpo.model.experts import Experts, MoE
from torchtitan.grpo.model.flops import TrainingFlops
from torchtitan.grpo.model.packed import make_packed
from torchtitan.grpo.model.source import ModelSource, check_degrees, load_hf_weights, resolve_model
from torchtitan.grpo.policy.gradients import accumulate_gradients
from torchtitan.grpo.policy.rows import PackedSample
from torchtitan.grpo.weight_sync.published import model_weights
from torchtitan.models.moe import MoEArgs

SHAPE = dict(vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4)
SHAPE |= dict(num_key_value_heads=2, head_dim=8, max_position_embeddings=64)
EXPERTS = dict(num_experts=6, num_experts_per_tok=2, moe_intermediate_size=24)
LORA = dict(enable=True, rank=4, alpha=8.0)


@dataclass
class Parallelism:
    tensor_parallel_degree: int = 1
    expert_parallel_degree: int = 1
    context_parallel_degree: int = 1


def save(folder: Path, **changes: object) -> Path:
    Qwen3MoeConfig(**SHAPE | EXPERTS | changes, architectures=["Qwen3MoeForCausalLM"]).save_pretrained(folder)
    return folder


def resolve(folder: Path, lora: SimpleNamespace | None = None) -> ModelSource:
    return resolve_model(SimpleNamespace(hf_assets_path=str(folder), weights="hf"), 64, lora)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"mlp_only_layers": [1]}, r"mlp_only_layers = \[1\] is not supported: every block must have experts"),
        ({"decoder_sparse_step": 2}, r"decoder_sparse_step = 2 is not supported: every block must have experts"),
        ({"moe_intermediate_size": 20}, r"moe_intermediate_size = 20 .* a multiple of 8"),
        ({"num_experts_per_tok": 7}, r"num_experts_per_tok = 7 .* 1 or more of the 6 experts"),
    ],
)
def test_configs_that_are_refused(changes, message, tmp_path):
    with pytest.raises(UserError, match=message):
        resolve(save(tmp_path, **changes))


def test_config_json_gives_the_experts_and_balances_nothing(tmp_path):
    args = resolve(save(tmp_path, norm_topk_prob=True, router_aux_loss_coef=0.1)).model_args
    assert (args.moe_inter_dim, args.moe_args.num_experts, args.moe_args.top_k) == (24, 6, 2)
    assert args.moe_args.route_norm and args.moe_args.load_balance_coeff is None
    assert not resolve(save(tmp_path, norm_topk_prob=False)).model_args.moe_args.route_norm


@pytest.mark.parametrize(
    ("degrees", "message"),
    [
        (Parallelism(2), r"tensor_parallel_degree = 2: a mixture of experts is not split that way"),
        (Parallelism(1, 1, 2), r"context_parallel_degree = 2: rows of a mixture of experts are not split"),
        (Parallelism(1, 4), r"expert_parallel_degree = 4 does not divide this model's 6 experts"),
    ],
)
def test_degrees_that_are_refused(degrees, message, tmp_path):
    source = resolve(save(tmp_path))
    check_degrees(source, Parallelism(1, 3))
    with pytest.raises(UserError, match=message):
        check_degrees(source, degrees)
    dense = resolve_model(SimpleNamespace(hf_assets_path=str(TINY_QWEN3), weights="random"), 64)
    with pytest.raises(UserError, match=r"expert_parallel_degree = 2: a qwen3 has no experts"):
        check_degrees(dense, Parallelism(1, 2))


def test_each_expert_is_published_as_a_checkpoint_has_it(tmp_path):
    torch.manual_seed(0)
    reference = Qwen3MoeForCausalLM(Qwen3MoeConfig(**SHAPE, **EXPERTS))
    reference.save_pretrained(tmp_path)
    source = resolve(tmp_path)
    model = source.build()
    load_hf_weights(model, source, tmp_path)
    published = model_weights(model, source.adapter, torch.float32, source.tied)
    sent = {}
    for tensor in published.tensors:
        part = published.parameters[tensor.parameter][tuple(slice(start, start + n) for start, n in tensor.box)]
        sent[tensor.spec.name] = part.reshape(tensor.spec.shape)
    expected = as_in_files(reference.state_dict())
    assert sent.keys() == expected.keys()
    assert all(torch.equal(sent[name], value) for name, value in expected.items())
    again = source.adapter.from_hf(expected)
    assert all(torch.equal(again[name], value) for name, value in model.state_dict().items())


def test_answer_tokens_of_each_expert_are_those_of_transformers_routers(tmp_path):
    torch.manual_seed(0)
    reference = Qwen3MoeForCausalLM(Qwen3MoeConfig(**SHAPE, **EXPERTS, initializer_range=0.1))
    reference.save_pretrained(tmp_path)
    source = resolve(tmp_path)
    model = source.build()
    make_packed(model)
    with torch.no_grad():
        model.init_weights()
    load_hf_weights(model, source, tmp_path)
    prompt, answers = list(range(1, 11)), [torch.randint(0, 64, (n,)).tolist() for n in (30, 12)]
    rows = [microbatches([PackedSample(prompt, a, 1.0, 1.0, None)], 64, 1, 64)[0][0] for a in answers]  # and padding
    sums = accumulate_gradients(model, rows, lambda _, row: (model(row, 1.0)[0].sum(), {}), False)
    expected = torch.zeros(2, 6)
    for answer in answers:
        logits = reference(torch.tensor([prompt + answer[:-1]]), output_router_logits=True).router_logits
        for counts, of_layer in zip(expected, logits, strict=True):
            counts += of_layer[len(prompt) - 1 :].topk(2).indices.flatten().bincount(minlength=6)
    assert sums["expert_tokens"].tolist() == expected.tolist() and expected[0].sum() == 2 * 42
    model(rows[0], 1.0, predictions=True)
    assert model.expert_tokens is None, "supervised training counts none"


def test_adapters_are_of_the_attention(tmp_path):
    lora = resolve(save(tmp_path), SimpleNamespace(**LORA, target_modules=["all-linear"])).lora
    assert list(lora.layers) == ["q_proj", "k_proj", "v_proj", "o_proj"]
    for name in ("gate", "gate_proj"):
        with pytest.raises(UserError, match=f'no linear layer "{name}"'):
            resolve(tmp_path, SimpleNamespace(**LORA, target_modules=[name]))


def test_flops_are_of_the_experts_that_a_token_goes_through(tmp_path):
    with torch.device("meta"):
        model = resolve(save(tmp_path)).build()
    attention = 32 * (4 + 2 + 2) * 8 + 4 * 8 * 32
    block = attention + 32 * 6 + 2 * 3 * 32 * 24  # the router, and two of six experts
    flops = TrainingFlops.of(model)
    assert flops.per_token == 6 * 2 * block
    assert flops.attention_tokens == 6 * (2 * block + 64 * 32) / (12 * 2 * 4 * 8)


def test_experts_without_tokens_get_zero_gradients():
    moe = MoE(MoEArgs(num_experts=4, top_k=1, route_norm=True, load_balance_coeff=None), 8, 16)
    with torch.no_grad():
        moe.init_weights(0.5)
        moe.router.gate.weight.zero_()[2] = 1.0
    x = torch.rand(1, 5, 8, requires_grad=True)
    out = moe(x)
    out.square().sum().backward()
    w1, w2, w3 = (weight[2] for weight in (moe.experts.w1, moe.experts.w2, moe.experts.w3))
    expected = (torch.nn.functional.silu(x @ w1.t()) * (x @ w3.t())) @ w2.t()
    torch.testing.assert_close(out, expected)
    used = [bool(gradient.any()) for gradient in moe.experts.w1.grad]
    assert used == [False, False, True, False]


def test_experts_of_a_rank_that_no_token_chose_get_zero_gradients():
    experts = Experts(8, 16, 4)
    with torch.no_grad():
        experts.init_weights(0.5)
    rows = torch.zeros(0, 8, requires_grad=True)
    experts(rows, torch.zeros(2, 4, dtype=torch.int32), torch.zeros(0)).sum().backward()
    assert all(weight.grad is not None and not weight.grad.any() for weight in experts.parameters())


def test_a_large_one_has_as_many_parameters_as_transformers(tmp_path):
    sizes = dict(vocab_size=151936, hidden_size=2048, num_hidden_layers=48, num_attention_heads=32)
    experts = dict(num_experts=128, num_experts_per_tok=8, moe_intermediate_size=768, norm_topk_prob=True)
    config = Qwen3MoeConfig(**sizes, **experts, num_key_value_heads=4, head_dim=128, tie_word_embeddings=False)
    config.architectures = ["Qwen3MoeForCausalLM"]
    config.save_pretrained(tmp_path)
    source = resolve(tmp_path)
    with torch.device("meta"):
        theirs = AutoModelForCausalLM.from_config(config)
        ours = source.build()
    assert sum(p.numel() for p in theirs.parameters()) == sum(p.numel() for p in ours.parameters()) == 30_532_122_624
