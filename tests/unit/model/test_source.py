"""What [model] may name, and what is said about each thing that it may not."""

import json
import os
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import (
    Gemma2Config,
    Gemma3Config,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from tests.helpers import TINY_QWEN3
from tests.helpers.tiny_models import LLAMA3_ROPE
from torchtitan.grpo.config.load import load_config
from torchtitan.grpo.data.tokenizer import load_tokenizer
from torchtitan.grpo.errors import UserError
from torchtitan.grpo.model.source import (
    ModelSource,
    check_hf_weights,
    check_model,
    gather_hf,
    load_hf_weights,
    resolve_for_run,
    resolve_model,
    write_hf,
)

SHAPE = dict(
    vocab_size=67,
    hidden_size=32,
    intermediate_size=45,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=128,
)


def model_section(folder: Path | str):
    return SimpleNamespace(hf_assets_path=str(folder), weights="hf", implementation="torchtitan")


def edit_config(folder: Path, **changes) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changes))


def built(source: ModelSource) -> nn.Module:
    with torch.device("meta"):
        model = source.build()
    model.to_empty(device="cpu")
    with torch.no_grad():
        model.init_weights(buffer_device=torch.device("cpu"))
    return model


@pytest.fixture
def qwen3(tmp_path: Path) -> Path:
    torch.manual_seed(0)
    Qwen3ForCausalLM(Qwen3Config(**SHAPE, head_dim=16)).save_pretrained(tmp_path)
    return tmp_path


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(**SHAPE, rope_parameters=LLAMA3_ROPE)).save_pretrained(tmp_path)
    return tmp_path


@pytest.fixture
def qwen2(tmp_path: Path) -> Path:
    torch.manual_seed(0)
    Qwen2ForCausalLM(Qwen2Config(**SHAPE)).save_pretrained(tmp_path)
    return tmp_path


@pytest.fixture
def mistral(tmp_path: Path) -> Path:
    torch.manual_seed(0)
    MistralForCausalLM(MistralConfig(**SHAPE, sliding_window=None)).save_pretrained(tmp_path)
    return tmp_path


def test_config_json_gives_family_and_shape(qwen3):
    source = resolve_model(model_section(qwen3), seq_len=100)
    args = source.model_args
    assert source.name == "qwen3" and not source.tied
    assert (args.dim, args.n_layers, args.n_heads, args.n_kv_heads) == (32, 2, 4, 2)
    assert (args.head_dim, args.hidden_dim, args.vocab_size, args.max_seq_len) == (16, 45, 67, 100)
    assert (args.attn_type, args.attn_mask_type) == ("varlen", "block_causal")


@pytest.mark.parametrize("width", [1, 2, 45, 91, 8192, 14335, 14336])
def test_llama_keeps_any_feed_forward_width(llama, width):
    edit_config(llama, intermediate_size=width)
    with torch.device("meta"):
        model = resolve_model(model_section(llama), 64).build()
    assert model.layers["0"].feed_forward.w1.weight.shape == (width, 32)


@pytest.mark.parametrize(
    "layout",
    [
        dict(rope_parameters=LLAMA3_ROPE),
        dict(rope_theta=500000.0, rope_scaling={k: v for k, v in LLAMA3_ROPE.items() if k != "rope_theta"}),
        dict(
            rope_theta=500000.0,
            rope_scaling={
                "type" if key == "rope_type" else key: value
                for key, value in LLAMA3_ROPE.items()
                if key != "rope_theta"
            },
        ),
    ],
    ids=["transformers-5", "transformers-4", "older"],
)
def test_rope_layouts_of_transformers_4_and_5_mean_the_same(llama, layout):
    config = json.loads((llama / "config.json").read_text())
    del config["rope_parameters"]
    (llama / "config.json").write_text(json.dumps(config | layout))
    args = resolve_model(model_section(llama), 64).model_args
    scaling = args.rope_scaling_args
    assert args.rope_theta == 500000.0
    assert (scaling.scaling_factor, scaling.low_freq_factor, scaling.high_freq_factor) == (8.0, 1.0, 4.0)
    assert scaling.original_max_position_embeddings == 64


def test_plain_rope_of_transformers_4_is_not_scaled(llama):
    config = json.loads((llama / "config.json").read_text())
    del config["rope_parameters"]
    (llama / "config.json").write_text(json.dumps(config | {"rope_theta": 10000.0, "rope_scaling": None}))
    model = built(resolve_model(model_section(llama), 128))
    angles = torch.outer(torch.arange(128), 1 / 10000.0 ** (torch.arange(0, 8, 2).float() / 8))
    torch.testing.assert_close(model.freqs_cis, torch.polar(torch.ones(128, 4), angles), atol=0, rtol=0)


@pytest.mark.parametrize(("kind", "positions"), [("linear", 0), ("yarn", 0), ("default", 128)])
def test_positions_that_servers_scale_are_theirs_to_say(qwen3, kind, positions):
    edit_config(qwen3, rope_parameters={"rope_type": kind, "factor": 4.0, "rope_theta": 10000.0})
    section = SimpleNamespace(hf_assets_path=str(qwen3), weights="hf", implementation="transformers")
    assert resolve_model(section, 64).positions == positions


def test_tied_embeddings_are_one_parameter_after_materialising(llama):
    edit_config(llama, tie_word_embeddings=True)
    source = resolve_model(model_section(llama), 64)
    model = built(source)
    assert source.tied and model.output.weight is model.tok_embeddings.weight
    names = source.adapter.to_hf(model.state_dict())
    assert "model.embed_tokens.weight" in names and "lm_head.weight" not in names


@pytest.mark.parametrize(
    ("model", "what"),
    [
        (LlamaConfig(hidden_size=200, num_attention_heads=2), "heads of a width of 100, which 8 does not divide"),
        (Gemma2Config(num_hidden_layers=2), "a softcap of scores"),
    ],
)
def test_attention_that_no_kernel_computes_is_refused_on_a_gpu(model, what, tmp_path):
    model.save_pretrained(tmp_path)
    source = resolve_model(SimpleNamespace(hf_assets_path=str(tmp_path), weights="hf"), 64)
    flags = ["--model.hf_assets_path", str(TINY_QWEN3), "--training.mixed_precision_param"]
    float32, bfloat16 = (load_config([*flags, dtype], dry_run="h200") for dtype in ("float32", "bfloat16"))
    check_model(source, float32, cuda=True)
    check_model(source, bfloat16, cuda=False)
    with pytest.raises(UserError, match=f"this model has {what}, and no attention kernel here computes that on a GPU"):
        check_model(source, bfloat16, cuda=True)


def test_a_folder_that_is_not_there():
    with pytest.raises(UserError, match=r'hf_assets_path = "no/such/folder": no such folder'):
        resolve_model(model_section("no/such/folder"), 64)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"architectures": ["Gemma3ForCausalLM"], "model_type": "gemma3_text"},
            r'"torchtitan" has Qwen3ForCausalLM.*, and not "Gemma3ForCausalLM": set it to "auto"',
        ),
        ({"architectures": None, "model_type": "no such"}, r"""no causal language model "model_type 'no such'\""""),
        ({"architectures": ["Qwen3ForCausalLN"]}, r'no causal language model .* \(did you mean "Qwen3ForCausalLM"'),
        ({"architectures": ["My"]}, r'no causal language model "My"\. .* must hold'),
        ({"architectures": ["My"], "auto_map": {"A": "m.My"}}, r'"My", whose code in the folder is not run'),
        ({"use_sliding_window": True, "sliding_window": 32, "max_window_layers": 1}, r"sliding_window = 32"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, r"layer_types = .*sliding_attention"),
        ({"attention_bias": True}, r"attention_bias = True is not supported"),
        ({"quantization_config": {"quant_method": "fp8"}}, r"quantization_config = "),
        ({"hidden_act": "gelu"}, r"hidden_act = 'gelu'"),
        ({"num_key_value_heads": 3}, r"num_key_value_heads = 3.*must divide num_attention_heads = 4"),
        ({"head_dim": 15}, r"head_dim.*15"),
        ({"hidden_size": "wide"}, r"not a valid Qwen3Config.*hidden_size"),
        ({"dtype": "float9"}, r"not a valid Qwen3Config.*float9"),
        ({"id2label": []}, r"not a valid Qwen3Config"),
        ({"vocab_size": 0}, r"must be 1 or more"),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0}}, r"rope_type = 'yarn'"),
        ({"max_position_embeddings": 63}, r"seq_len = 64 is over this model's maximum of 63"),
    ],
)
def test_configs_that_are_refused(qwen3, changes, message):
    edit_config(qwen3, **changes)
    with pytest.raises(UserError, match=message):
        resolve_model(model_section(qwen3), 64)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"mlp_bias": True}, r"mlp_bias = True"),
        ({"head_dim": 16}, r"head_dim = 16 .*hidden_size / num_attention_heads = 8"),
        ({"sliding_window": 32}, r"sliding_window = 32"),
        ({"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}}, r"rope_type = 'linear'"),
    ],
)
def test_llama_configs_that_are_refused(llama, changes, message):
    edit_config(llama, **changes)
    with pytest.raises(UserError, match=message):
        resolve_model(model_section(llama), 64)


def test_a_published_qwen25_folder_is_read(qwen2):
    """Its config.json names a window that it does not use; folders of Qwen2 write no head_dim."""
    edit_config(qwen2, use_sliding_window=False, sliding_window=32768, max_window_layers=21, rope_theta=1e6)
    source = resolve_model(model_section(qwen2), 64)
    assert (source.name, source.model_args.head_dim) == ("qwen2", 8)
    load_hf_weights(built(source), source, qwen2)
    edit_config(qwen2, head_dim=16)
    with pytest.raises(UserError, match=r"head_dim = 16 .*hidden_size / num_attention_heads = 8"):
        resolve_model(model_section(qwen2), 64)


def test_mistral_is_a_llama_that_keeps_its_name(mistral):
    source = resolve_model(model_section(mistral), 64)
    assert (source.name, source.hf_config["architectures"]) == ("llama3", ["MistralForCausalLM"])
    load_hf_weights(built(source), source, mistral)
    edit_config(mistral, architectures=None)  # model_type says it as well
    assert resolve_model(model_section(mistral), 64).hf_config["architectures"] == ["MistralForCausalLM"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"sliding_window": 4096}, r'sliding_window = 4096 .*must say "sliding_window": null'),
        ({"sliding_window": 4096, "use_sliding_window": False}, r"sliding_window = 4096"),  # transformers' slides
        ({"head_dim": 16}, r"head_dim = 16 .*hidden_size / num_attention_heads = 8"),
    ],
)
def test_mistral_configs_that_are_refused(mistral, changes, message):
    edit_config(mistral, **changes)
    with pytest.raises(UserError, match=message):
        resolve_model(model_section(mistral), 64)


def test_mistral_without_the_key_has_transformers_window(mistral):
    config = json.loads((mistral / "config.json").read_text())
    del config["sliding_window"]
    (mistral / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match=r"sliding_window = 4096"):
        resolve_model(model_section(mistral), 64)


def test_a_published_smollm2_config_is_read(llama):
    """As its folder has it: keys of the framework that trained it, RoPE as transformers 4 wrote it."""
    config = {
        "architectures": ["LlamaForCausalLM"], "attention_bias": False, "attention_dropout": 0.0, "bos_token_id": 1,
        "eos_token_id": 2, "hidden_act": "silu", "hidden_size": 576, "initializer_range": 0.041666666666666664,
        "intermediate_size": 1536, "is_llama_config": True, "max_position_embeddings": 8192, "mlp_bias": False,
        "model_type": "llama", "num_attention_heads": 9, "num_hidden_layers": 30, "num_key_value_heads": 3,
        "pad_token_id": 2, "pretraining_tp": 1, "rms_norm_eps": 1e-05, "rope_interleaved": False,
        "rope_scaling": None, "rope_theta": 100000, "tie_word_embeddings": True, "torch_dtype": "bfloat16",
        "transformers.js_config": {"kv_cache_dtype": {"q4f16": "float16"}}, "transformers_version": "4.42.3",
        "use_cache": True, "vocab_size": 49152,
    }  # fmt: skip
    (llama / "config.json").write_text(json.dumps(config))
    source = resolve_model(model_section(llama), 8192)
    with torch.device("meta"):
        model = source.build()
    assert sum(parameter.numel() for parameter in model.parameters()) == 134_515_008
    assert source.tied and source.model_args.rope_theta == 100000


@pytest.mark.parametrize(("said", "is_tied"), [(True, True), (None, False)])
def test_a_language_model_within_is_tied_if_the_whole_is(said, is_tied, tmp_path):
    whole = Gemma3Config(text_config=SHAPE | {"head_dim": 8}).to_dict()
    (tmp_path / "config.json").write_text(json.dumps(whole | {"tie_word_embeddings": said}))
    source = resolve_model(SimpleNamespace(hf_assets_path=str(tmp_path), weights="hf"), 64)
    assert (source.name, source.tied, source.is_part) == ("transformers", is_tied, True)


def test_missing_and_broken_config_json(qwen3):
    (qwen3 / "config.json").write_text('{"model_type": ')
    with pytest.raises(UserError, match=r"config.json is not valid JSON"):
        resolve_model(model_section(qwen3), 64)
    (qwen3 / "config.json").write_text("[]")
    with pytest.raises(UserError, match=r"must hold a JSON object, not a list"):
        resolve_model(model_section(qwen3), 64)
    (qwen3 / "config.json").unlink()
    with pytest.raises(UserError, match=r"has no config.json"):
        resolve_model(model_section(qwen3), 64)
    (qwen3 / "config.json").symlink_to("/proc/self/mem")  # root may read all others
    with pytest.raises(UserError, match=r'hf_assets_path = ".*": config.json cannot be read \(\[Errno'):
        resolve_model(model_section(qwen3), 64)


def test_tensors_missing_left_over_and_misshapen_are_named_together(qwen3):
    source = resolve_model(model_section(qwen3), 64)
    tensors = load_file(qwen3 / "model.safetensors")
    del tensors["model.norm.weight"]
    tensors["model.layers.0.self_attn.q_proj.bias"] = torch.zeros(64)
    tensors["model.layers.1.mlp.up_proj.weight"] = torch.zeros(44, 32)
    save_file(tensors, qwen3 / "model.safetensors")
    with pytest.raises(UserError) as raised:
        load_hf_weights(built(source), source, qwen3)
    message = str(raised.value)
    assert "1 missing: model.norm.weight" in message
    assert "no place for: model.layers.0.self_attn.q_proj.bias" in message
    assert "model.layers.1.mlp.up_proj.weight [44, 32], not [45, 32]" in message


def test_untied_config_over_tied_weights_names_the_output_and_the_key(tmp_path):
    Qwen3ForCausalLM(Qwen3Config(**SHAPE, head_dim=16, tie_word_embeddings=True)).save_pretrained(tmp_path)
    edit_config(tmp_path, tie_word_embeddings=False)
    source = resolve_model(model_section(tmp_path), 64)
    with pytest.raises(UserError, match=r"missing: lm_head.weight.*tie_word_embeddings"):
        load_hf_weights(built(source), source, tmp_path)


def test_a_second_copy_of_a_tied_embedding_and_old_rotary_tables_are_ignored(tmp_path):
    Qwen3ForCausalLM(Qwen3Config(**SHAPE, head_dim=16, tie_word_embeddings=True)).save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    embedding = tensors["model.embed_tokens.weight"]
    tensors["lm_head.weight"] = embedding + 1
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.zeros(8)
    save_file(tensors, tmp_path / "model.safetensors")
    source = resolve_model(model_section(tmp_path), 64)
    model = built(source)
    load_hf_weights(model, source, tmp_path)
    assert torch.equal(model.output.weight, embedding)


@pytest.mark.parametrize(("dtype", "name"), [(torch.int8, "I8"), (torch.float8_e4m3fn, "F8_E4M3")])
def test_quantised_tensors_are_named(qwen3, dtype, name):
    tensors = load_file(qwen3 / "model.safetensors")
    tensors["model.layers.1.mlp.up_proj.weight"] = tensors["model.layers.1.mlp.up_proj.weight"].to(dtype)
    save_file(tensors, qwen3 / "model.safetensors")
    with pytest.raises(UserError, match=rf"are quantised.* F16 or F32: model.layers.1.mlp.up_proj.weight {name}\."):
        check_hf_weights(resolve_model(model_section(qwen3), 64))


@pytest.mark.parametrize(("dtype", "value"), [(torch.bfloat16, torch.nan), (torch.float64, 1e200)])
def test_weights_that_are_not_finite_are_named_with_their_file(tmp_path, dtype, value):
    Qwen3ForCausalLM(Qwen3Config(**SHAPE, head_dim=16)).save_pretrained(tmp_path, max_shard_size="20KB")
    path = sorted(tmp_path.glob("model-*.safetensors"))[-1]
    tensors = load_file(path)
    name = list(tensors)[-1]
    tensors[name] = tensors[name].to(dtype)
    tensors[name][-1] = value  # 1e200 is infinite as float32
    save_file(tensors, path)
    source = resolve_model(model_section(tmp_path), 64)
    with pytest.raises(UserError, match=rf"hold NaN or infinity.*: {name} \({path.name}\)\. Download"):
        load_hf_weights(built(source), source, tmp_path)


def test_truncated_file(qwen3):
    source = resolve_model(model_section(qwen3), 64)
    path = qwen3 / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(UserError, match=r"model.safetensors is truncated or not a safetensors file"):
        load_hf_weights(built(source), source, qwen3)


def test_no_weights(qwen3):
    source = resolve_model(model_section(qwen3), 64)
    (qwen3 / "model.safetensors").unlink()
    with pytest.raises(UserError, match=r'neither model.safetensors nor .*weights = "random"'):
        load_hf_weights(built(source), source, qwen3)


def test_weights_that_random_ones_replace_are_named(qwen3, tmp_path, caplog):
    job, training = SimpleNamespace(dump_folder=str(tmp_path / "run")), SimpleNamespace(seq_len=64)
    for folder, said in ((TINY_QWEN3, ""), (qwen3, f"The weights in {qwen3} are not loaded")):
        model = SimpleNamespace(hf_assets_path=str(folder), weights="random")
        resolve_for_run(SimpleNamespace(model=model, training=training, lora=None, job=job))
        assert said in caplog.text and bool(said) == bool(caplog.text)


def test_index_without_its_file_and_without_a_map(tmp_path):
    Qwen3ForCausalLM(Qwen3Config(**SHAPE, head_dim=16)).save_pretrained(tmp_path, max_shard_size="20KB")
    source = resolve_model(model_section(tmp_path), 64)
    shards = sorted(tmp_path.glob("model-*.safetensors"))
    assert len(shards) > 2
    load_hf_weights(built(source), source, tmp_path)
    shards[1].unlink()
    shards[2].write_bytes(shards[2].read_bytes()[:-1])
    with pytest.raises(UserError, match=rf"missing: {shards[1].name} .*index.json.*{shards[2].name} is truncated"):
        check_hf_weights(source)
    (tmp_path / "model.safetensors.index.json").write_text("{}")
    with pytest.raises(UserError, match=r"has no weight_map"):
        load_hf_weights(built(source), source, tmp_path)


def test_others_may_read_an_export_as_any_file(qwen3, tmp_path):
    source = resolve_model(model_section(qwen3), 64)
    tokenizer, model = load_tokenizer(str(TINY_QWEN3)), built(source)
    before = os.umask(0o027)
    try:
        write_hf(gather_hf(model, source, torch.float32), source, tmp_path / "out", tokenizer)
    finally:
        os.umask(before)
    modes = {path.name: oct(path.stat().st_mode & 0o777) for path in (tmp_path / "out").iterdir()}
    assert "model.safetensors" in modes and set(modes.values()) == {"0o640"}


def test_a_model_on_meta_is_a_mistake_of_the_caller(qwen3):
    source = resolve_model(model_section(qwen3), 64)
    with torch.device("meta"):
        model = source.build()
    with pytest.raises(RuntimeError, match="materialised"):
        load_hf_weights(model, source, qwen3)
