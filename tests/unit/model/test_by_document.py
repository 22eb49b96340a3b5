"""Layers that run along a document: which kernels they take, and what models with them cannot have."""

import contextlib
import dataclasses
import json
import sys
from types import SimpleNamespace

import pytest
import torch
from transformers import CONFIG_MAPPING, Gemma3TextConfig

from tests.helpers.any_models import BY_DOCUMENT, SHAPE, save
from torchtitan.grpo.errors import UserError
from torchtitan.grpo.model.by_document import ByDocument
from torchtitan.grpo.model.documents import Documents
from torchtitan.grpo.model.flops import TrainingFlops
from torchtitan.grpo.model.source import check_degrees, resolve_model
from torchtitan.grpo.model.transformers import FAMILY


def resolve(folder, **lora):
    lora_cfg = SimpleNamespace(enable=bool(lora), rank=4, alpha=8.0, target_modules=["all-linear"])
    return resolve_model(SimpleNamespace(hf_assets_path=str(folder), weights="hf"), 128, lora_cfg)


def test_kernels_for_cuda_are_not_called_on_a_cpu(tmp_path, monkeypatch):
    """transformers puts them in the place of its own function wherever their package is installed."""
    reference = save("qwen3_5_text", tmp_path)
    code = sys.modules[type(reference).__module__]
    own = code.torch_chunk_gated_delta_rule

    def kernel(*args, **kwargs):
        raise AssertionError("called")

    kernel.__wrapped__, kernel.__module__ = own, own.__module__
    monkeypatch.setattr(code, "torch_chunk_gated_delta_rule", kernel)
    source = resolve(tmp_path)  # compares the class with itself
    model = source.build().eval()
    assert {type(m).__mro__[1] for m in model.modules() if type(m).__name__.endswith("GatedDeltaNet")} == {ByDocument}
    starts = torch.tensor([0, 5, 12], dtype=torch.int32)
    model.final_states(torch.arange(12), torch.tensor([*range(5), *range(7)]), Documents(starts, starts, 7, 7))
    with pytest.raises(AssertionError, match="called"):
        reference(torch.arange(12)[None])
    assert code.torch_chunk_gated_delta_rule is kernel


def test_blocks_without_attention_have_none_of_its_flops(tmp_path):
    save("qwen3_5_text", tmp_path)
    source = resolve(tmp_path)
    assert source.model_args.uses.windows == {1: 0, 3: 0} and source.model_args.uses.by_document
    with torch.device("meta"):
        model = source.build()
    flops = TrainingFlops.of(model)
    assert flops.windows == {0: 2}
    layers = flops.per_token + flops.per_answer_token
    assert flops.attention_tokens == layers / (12 * 4 * 32 * 2), "two of four layers attend"


def test_a_class_without_a_model_of_one_block_is_taken(tmp_path):
    CONFIG_MAPPING["olmo_hybrid"](**SHAPE, architectures=["OlmoHybridForCausalLM"]).save_pretrained(tmp_path)
    assert resolve(tmp_path).model_args.uses.windows == {3: 0}


def test_blocks_that_run_more_than_once_are_refused(tmp_path):
    CONFIG_MAPPING["hrm_text"](**SHAPE, architectures=["HrmTextForCausalLM"]).save_pretrained(tmp_path)
    with pytest.raises(UserError, match=r"num_hidden_layers = 32 .*its blocks are a list of 4, which runs more than"):
        resolve(tmp_path)


def test_a_window_has_the_flops_of_the_pairs_in_it():
    config = Gemma3TextConfig(
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=3,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        vocab_size=64,
        sliding_window=16,
        layer_types=["sliding_attention"] * 2 + ["full_attention"],
    )
    args = FAMILY.args_from_hf(config)
    with torch.device("meta"):
        flops = TrainingFlops.of(FAMILY.model_cls(args))
    assert flops.windows == {16: 2, 0: 1}
    pair, layers = 12 * 2 * 32, flops.per_token + flops.per_answer_token
    assert flops.attention_tokens == layers / pair + 2 * 16
    with torch.device("meta"):
        short = TrainingFlops.of(FAMILY.model_cls(dataclasses.replace(args, max_seq_len=16)))
    assert short.windows == {0: 3} and short.attention_tokens == layers / (3 * pair)

    def pairs(first: int, end: int, window: int) -> float:  # each token, and half of itself
        return sum(min(position + 0.5, window) for position in range(first, end))

    for own, before in ((10, 0), (100, 0), (100, 7), (30, 40)):
        attention = flops([own], 0, [before]) - flops.per_token * own
        assert attention == pair * (2 * pairs(before, before + own, 16) + pairs(before, before + own, 10**9))


@pytest.mark.parametrize(
    ("kind", "degree", "message"),
    [
        ("qwen3_5_text", 2, "this model has layers that run along a document as a whole"),
        ("gemma3_text", 3, "does not divide this model's 4 attention heads and 2 key/value heads"),
        ("gemma3_text", 8, "does not divide this model's 4 attention heads"),
        ("gemma3_text", 4, ""),  # key/value heads are repeated
    ],
)
def test_rows_are_split_by_heads_and_for_attention_alone(kind, degree, message, tmp_path):
    save(kind, tmp_path)
    degrees = SimpleNamespace(tensor_parallel_degree=1, expert_parallel_degree=1, context_parallel_degree=degree)
    refused = pytest.raises(UserError, match=rf"^\[parallelism\] context_parallel_degree = {degree}:? {message}")
    with refused if message else contextlib.nullcontext():
        check_degrees(resolve(tmp_path), degrees)


@pytest.mark.parametrize("kind", BY_DOCUMENT)
def test_adapters_are_refused(kind, tmp_path):
    save(kind, tmp_path)
    (name,) = json.loads((tmp_path / "config.json").read_text())["architectures"]
    with pytest.raises(UserError, match=rf"^\[lora\] enable = true: {name} has layers that run along a document"):
        resolve(tmp_path, enable=True)
