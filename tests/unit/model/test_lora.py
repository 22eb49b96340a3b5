"""Which layers `[lora]` adapts, how adapters begin, and their names in PEFT's files."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn
from transformers import LlamaConfig

from tests.helpers import TINY_QWEN3
from torchtitan.grpo.checkpoint.adapters import BaseState
from torchtitan.grpo.config.job_config import Lora
from torchtitan.grpo.config.load import load_config
from torchtitan.grpo.errors import UserError
from torchtitan.grpo.evaluation.inputs import OF_THE_RUN
from torchtitan.grpo.model.flops import TrainingFlops
from torchtitan.grpo.model.hf_config import model_folder
from torchtitan.grpo.model.lora import LoraLinear, PeftNames, adapters_off, add_adapters, init_adapters, merged
from torchtitan.grpo.model.peft_folder import adapter_config
from torchtitan.grpo.model.source import resolve_model


def resolve(targets: list[str], **model):
    section = SimpleNamespace(hf_assets_path=str(TINY_QWEN3), weights="random")
    lora = SimpleNamespace(enable=True, rank=4, alpha=6.0, target_modules=targets)
    return resolve_model(SimpleNamespace(**vars(section) | model), 64, lora)


def adapted(targets: list[str], device: str = "meta", **model) -> nn.Module:
    source = resolve(targets, **model)
    with torch.device(device):
        built = source.build()
    add_adapters(built, source.lora, torch.float32)
    return built


def test_layers_are_named_as_in_hugging_face():
    assert resolve(["v_proj", "down_proj"]).lora.layers == {"v_proj": "attention.wv", "down_proj": "feed_forward.w2"}
    assert len(resolve(["all-linear"]).lora.layers) == 7 and resolve(["q_proj"]).lora.scaling == 1.5


@pytest.mark.parametrize(
    ("name", "word"),
    [("q_prj", 'did you mean "q_proj"'), ("lm_head", "they have q_proj"), ("q_norm", "no linear layer")],
)
def test_a_layer_that_the_model_lacks_is_refused(name, word):
    with pytest.raises(UserError, match=r"\[lora\] target_modules.*" + word):
        resolve([name])


def test_only_adapters_are_trained_and_frozen_parameters_count_four_flops():
    model = adapted(["q_proj", "down_proj"])
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert trained == {
        f"layers.{i}.{layer}.lora_{x}" for i in range(4) for layer in ("attention.wq", "feed_forward.w2") for x in "AB"
    }
    adapters = sum(p.numel() for p in model.parameters() if p.requires_grad)
    matrices = sum(p.numel() for p in model.layers.parameters() if p.dim() == 2) - adapters
    assert TrainingFlops.of(model).per_token == 4 * matrices + 6 * adapters
    assert TrainingFlops.of(model).per_answer_token == 4 * 64 * 128


def test_a_model_begins_as_its_base_and_the_seed_says_how():
    models = [adapted(["all-linear"], "cpu") for _ in range(3)]
    for model, seed in zip(models, (1, 1, 2), strict=True):
        init_adapters(model, seed)
    first, same, _ = ([p for p in model.parameters() if p.requires_grad] for model in models)
    assert all(map(torch.equal, first, same))
    layer = models[0].layers["0"].attention.wq
    assert not layer.lora_B.any() and layer.lora_A.abs().max() <= 128**-0.5 and layer.lora_A.std() > 0.5 * 128**-0.5
    assert not torch.equal(layer.lora_A, models[2].layers["0"].attention.wq.lora_A)
    assert not torch.equal(layer.lora_A, models[0].layers["1"].attention.wq.lora_A)


def test_without_its_adapter_a_layer_is_the_base_to_the_bit():
    layer = nn.Linear(6, 5)
    x = torch.randn(2, 3, 6)
    expected = layer(x)
    lora = SimpleNamespace(rank=2, scaling=3.0)
    LoraLinear.adapt(layer, lora, torch.float32)
    nn.init.normal_(layer.lora_A)
    nn.init.normal_(layer.lora_B)
    update = 3.0 * layer.lora_B @ layer.lora_A
    torch.testing.assert_close(layer(x), expected + x @ update.T)
    torch.testing.assert_close(merged(layer.weight, layer.lora_A, layer.lora_B, 3.0), layer.weight + update)
    with adapters_off(layer):
        assert torch.equal(layer(x), expected)
    assert not torch.equal(layer(x), expected)


def test_b_follows_the_rows_of_its_weight(tmp_path):
    """Llama's rows of queries and keys lie in another order at Hugging Face. Then B A moves as the weight does."""
    shape = dict(hidden_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, vocab_size=67)
    LlamaConfig(**shape, architectures=["LlamaForCausalLM"]).save_pretrained(tmp_path)
    source = resolve(["q_proj", "k_proj", "v_proj"], hf_assets_path=str(tmp_path))
    args = source.model_args
    for layer, rows in (
        ("wq", args.dim),
        ("wk", args.n_kv_heads * args.head_dim),
        ("wv", args.n_kv_heads * args.head_dim),
    ):
        name = f"layers.1.attention.{layer}"
        pair = {f"{name}.lora_A": torch.randn(4, args.dim), f"{name}.lora_B": torch.randn(rows, 4)}
        names = PeftNames(source.adapter, {key: value.shape for key, value in pair.items()})
        down, up = names.convert(pair).values()
        (weight,) = source.adapter.to_hf({f"{name}.weight": pair[f"{name}.lora_B"] @ pair[f"{name}.lora_A"]}).values()
        torch.testing.assert_close(up @ down, weight)
        assert (names.order(f"{name}.lora_B") is None) == (layer == "wv")
    assert names.name(f"{name}.lora_B") == "base_model.model.model.layers.1.self_attn.v_proj.lora_B.weight"


@pytest.mark.parametrize("part", ["", "adapter"])
def test_adapters_without_their_base_are_no_model(part, tmp_path):
    (tmp_path / part).mkdir(exist_ok=True)
    (tmp_path / part / "adapter_config.json").touch()
    model = SimpleNamespace(hf_assets_path=str(tmp_path))
    for look in (lambda: resolve_model(model, 64), lambda: model_folder(tmp_path)):
        with pytest.raises(UserError, match="LoRA adapters without their base; merge"):
            look()


def test_an_evaluation_sets_back_every_key():
    of_run = {"lora.enable": True, "lora.rank": 4, "lora.target_modules": ["q_proj"], "lora.merge": True}
    argv = [f"--model.hf_assets_path={TINY_QWEN3}", "--rollout.urls=http://127.0.0.1:1"]
    assert load_config(argv, defaults=of_run, flags_only=lambda given: OF_THE_RUN).lora == Lora()


def test_a_base_is_known_by_every_weight_and_its_adapters_by_their_keys():
    source, model = resolve(["q_proj"]), adapted(["q_proj"], "cpu")
    with torch.no_grad():
        model.init_weights(buffer_device=torch.device("cpu"))
        init_adapters(model, 0)
    saved = BaseState(model, source.lora).state_dict()
    with torch.no_grad():
        model.layers["3"].attention.wq.lora_B.add_(1)
    now = BaseState(model, source.lora)
    now.state_dict()
    now.load_state_dict(saved)  # a trained adapter has the same base
    for key, value, word in (
        ("alpha", 3.0, r"\[lora\] alpha = 3, not 6"),
        ("rank", 8, r"\[lora\] rank = 8, not 4"),
        ("layers", 0, "other layers than q_proj: restore"),
    ):
        with pytest.raises(UserError, match=word):
            now.load_state_dict(saved | {key: torch.tensor(value)})
    with torch.no_grad():
        model.layers["3"].ffn_norm.weight[-1] += 1e-6
    other = BaseState(model, source.lora)
    other.state_dict()
    with pytest.raises(UserError, match="checksum"):
        other.load_state_dict(saved)


@pytest.mark.parametrize("is_cached", [True, False])
def test_an_adapter_names_its_base_by_the_hubs_id_and_no_path_of_the_cache(is_cached, tmp_path, monkeypatch):
    monkeypatch.setattr("torchtitan.grpo.config.hub._cache", lambda: str(tmp_path))
    folder = tmp_path / f"models--alice--tiny/snapshots/{'a' * 40}" if is_cached else tmp_path / "a@b" / "tiny"
    config = adapter_config(SimpleNamespace(lora=resolve(["q_proj"]).lora, folder=folder, is_part=False))
    expected = ("alice/tiny", "a" * 40) if is_cached else (str(folder), None)
    assert (config["base_model_name_or_path"], config.get("revision")) == expected
