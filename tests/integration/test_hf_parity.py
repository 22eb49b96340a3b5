"""Folders that transformers wrote load into torchtitan's models, and what is exported loads into transformers."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from tests.helpers import ROOT
from tests.helpers.ranks import Ranks
from tests.helpers.tiny_models import LLAMA3_ROPE, with_biases
from torchtitan.grpo.model.document_attention import PackedAttention
from torchtitan.grpo.model.documents import Documents
from torchtitan.grpo.model.source import (
    ModelSource,
    gather_hf,
    load_hf_weights,
    resolve_model,
    write_hf,
    write_hf_config,
)

SHAPE = dict(
    vocab_size=127,  # odd, so that FSDP2 and TP shards are uneven
    hidden_size=64,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=512,
    initializer_range=0.1,
)
# Odd widths are refused under tensor parallelism; even ones divide unevenly in 4.
ODD, EVEN = dict(intermediate_size=91), dict(intermediate_size=90)
QWEN3_LARGE_HEADS = dict(head_dim=32, rope_parameters={"rope_type": "default", "rope_theta": 1e6})
EXPERTS = dict(head_dim=16, moe_intermediate_size=24, num_experts=6, num_experts_per_tok=2)
SMOLLM2 = dict(
    hidden_size=96,
    num_attention_heads=6,  # three to each of the keys' heads
    rope_parameters={"rope_type": "default", "rope_theta": 1e5},
    rope_interleaved=False,
)
CASES = {
    "qwen3-tied": (Qwen3ForCausalLM, Qwen3Config(**SHAPE, **EVEN, **QWEN3_LARGE_HEADS, tie_word_embeddings=True)),
    "qwen3": (Qwen3ForCausalLM, Qwen3Config(**SHAPE, **ODD, head_dim=8)),
    "llama-tied-llama3-rope": (
        LlamaForCausalLM,
        LlamaConfig(**SHAPE, **EVEN, rope_parameters=LLAMA3_ROPE, tie_word_embeddings=True),
    ),
    "llama": (LlamaForCausalLM, LlamaConfig(**SHAPE, **ODD)),
    "qwen2-tied": (Qwen2ForCausalLM, Qwen2Config(**SHAPE, **EVEN, tie_word_embeddings=True)),
    "qwen2": (Qwen2ForCausalLM, Qwen2Config(**SHAPE, **EVEN)),
    "qwen3-moe-tied": (Qwen3MoeForCausalLM, Qwen3MoeConfig(**SHAPE, **EVEN, **EXPERTS, tie_word_embeddings=True)),
    "qwen3-moe": (Qwen3MoeForCausalLM, Qwen3MoeConfig(**SHAPE, **ODD, **EXPERTS | dict(norm_topk_prob=True))),
    "mistral": (MistralForCausalLM, MistralConfig(**SHAPE, **EVEN, sliding_window=None)),
    "smollm2-tied": (LlamaForCausalLM, LlamaConfig(**SHAPE | SMOLLM2, **EVEN, tie_word_embeddings=True)),
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    vocabulary = {f"t{i}": i for i in range(SHAPE["vocab_size"])}
    words = Tokenizer(models.WordLevel(vocabulary, unk_token="t0"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, unk_token="t0", eos_token="t1", pad_token="t2")
    made = {}
    for seed, (name, (model_cls, config)) in enumerate(CASES.items()):
        torch.manual_seed(seed)
        made[name] = tmp_path_factory.mktemp("models") / name
        # The untied ones come in several files with an index.
        shard_size = "50GB" if config.tie_word_embeddings else "50KB"
        with_biases(model_cls(config)).save_pretrained(made[name], max_shard_size=shard_size)
        tokenizer.save_pretrained(made[name])
    return made


def load(folder: Path, dtype: torch.dtype = torch.float32) -> tuple[ModelSource, nn.Module]:
    section = SimpleNamespace(hf_assets_path=str(folder), weights="hf")
    source = resolve_model(section, SHAPE["max_position_embeddings"])
    with torch.device("meta"):
        model = source.build()
    model.to(dtype).to_empty(device="cpu")
    with torch.no_grad():
        model.init_weights(buffer_device=torch.device("cpu"))
    load_hf_weights(model, source, folder)
    for block in model.layers.values():
        block.attention.inner_attention = PackedAttention()
    return source, model


@torch.no_grad()
def logits(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    """[T, V] of torchtitan's model for one document."""
    ends = torch.tensor([0, len(tokens)], dtype=torch.int32)
    return model(tokens[None], Documents(ends, ends, len(tokens), len(tokens)))[0]


@torch.no_grad()
def transformers_logits(folder: Path, tokens: torch.Tensor) -> torch.Tensor:
    model, report = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, output_loading_info=True)
    assert not report["missing_keys"] and not report["unexpected_keys"] and not report["mismatched_keys"]
    return model.eval()(tokens[None]).logits[0]


def some_tokens(n: int) -> torch.Tensor:
    return torch.randint(SHAPE["vocab_size"], (n,), generator=torch.Generator().manual_seed(3))


@pytest.mark.parametrize("name", CASES)
def test_logits_equal_transformers(folders, name):
    tokens = some_tokens(SHAPE["max_position_embeddings"])
    expected = transformers_logits(folders[name], tokens)
    assert expected.std() > 0.3  # the model has opinions, so that equality means something
    torch.testing.assert_close(logits(load(folders[name])[1], tokens), expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("name", CASES)
def test_export_loads_into_transformers(folders, name, tmp_path):
    source, model = load(folders[name])
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.02)
    # By class: for a folder of Qwen2, AutoTokenizer takes its tokenizer whatever tokenizer_config.json says.
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folders[name])
    write_hf(gather_hf(model, source, torch.float32), source, tmp_path, tokenizer)
    tokens = some_tokens(200)
    torch.testing.assert_close(transformers_logits(tmp_path, tokens), logits(model, tokens), atol=1e-5, rtol=0)
    assert PreTrainedTokenizerFast.from_pretrained(tmp_path).encode("t5 t7") == [5, 7]
    # What was exported is a model folder like any other, for the next run.
    again = load(tmp_path)[1]
    assert torch.equal(logits(again, tokens), logits(model, tokens))


def test_export_casts_and_says_so(folders, tmp_path):
    source, model = load(folders["qwen3-tied"])
    tokenizer = AutoTokenizer.from_pretrained(folders["qwen3-tied"])
    write_hf(gather_hf(model, source, torch.bfloat16), source, tmp_path, tokenizer)
    exported = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert exported.dtype == torch.bfloat16
    assert torch.equal(exported.lm_head.weight, model.output.weight.bfloat16())


def test_weights_are_cast_to_the_parameters_precision(folders):
    model = load(folders["llama"], torch.bfloat16)[1]
    reference = AutoModelForCausalLM.from_pretrained(folders["llama"], dtype=torch.bfloat16)
    assert model.output.weight.dtype == torch.bfloat16
    assert torch.equal(model.output.weight, reference.lm_head.weight)


def test_config_without_weights_describes_the_model_to_a_server(folders, tmp_path):
    source, _ = load(folders["llama-tied-llama3-rope"])
    write_hf_config(source, AutoTokenizer.from_pretrained(folders["llama-tied-llama3-rope"]), tmp_path)
    served = LlamaConfig.from_pretrained(tmp_path)
    original = LlamaConfig.from_pretrained(folders["llama-tied-llama3-rope"])
    assert served.to_dict() == original.to_dict() | {"_name_or_path": served.to_dict()["_name_or_path"]}
    assert not list(tmp_path.glob("*.safetensors"))


def test_a_config_without_token_ids_takes_them_from_the_tokenizer(folders, tmp_path):
    config = json.loads((folders["llama"] / "config.json").read_text())
    kept = {key: value for key, value in config.items() if not key.endswith("_token_id")}
    (tmp_path / "config.json").write_text(json.dumps(kept))
    source = resolve_model(SimpleNamespace(hf_assets_path=str(tmp_path), weights="random"), 64)
    write_hf_config(source, AutoTokenizer.from_pretrained(folders["llama"]), tmp_path)
    config = LlamaConfig.from_pretrained(tmp_path)
    assert (config.bos_token_id, config.eos_token_id, config.pad_token_id) == (None, 1, 2)


@pytest.mark.parametrize(("ranks", "tp"), [(2, 1), (2, 2), (4, 2)], ids=["fsdp2", "tp2", "fsdp2-tp2"])
def test_sharded_load_and_export(folders, tmp_path, ranks, tp):
    out = tmp_path / "seen.json"
    fitting = [
        str(folder)
        for name, folder in folders.items()
        if tp == 1 or (CASES[name][1].intermediate_size % tp == 0 and "moe" not in name)
    ]
    worker = ROOT / "tests" / "helpers" / "parity_worker.py"
    Ranks(ranks, worker, tp, out, *fitting, log=tmp_path / "log", cwd=tmp_path).check()
    seen = json.loads(out.read_text())
    assert len(seen) == len(fitting)
    for folder, of_folder in seen.items():
        assert of_folder["differing"] == [], folder
        assert of_folder["export_difference"] == 0, folder
        assert of_folder["load_difference"] <= 1e-5, folder
