"""`/v1/models` with the model's shape, on objects such as vLLM's; tests/integration/test_vllm.py has the real ones."""

import asyncio
import importlib
import sys
from types import ModuleType, SimpleNamespace

import pydantic
import pytest
from transformers import LlamaConfig, Qwen3Config, Qwen3MoeConfig

from torchtitan.grpo.inside_vllm import plugin, served_model
from torchtitan.grpo.weight_wire.model_identity import KEY, identity, identity_of_folder


class Card(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(extra="allow")
    id: str


@pytest.fixture
def serving(monkeypatch):
    """Stands in for vLLM's module."""

    class OpenAIServingModels:
        async def show_available_models(self):
            return SimpleNamespace(data=[Card(id="m")])

    name = "vllm.entrypoints.openai.models.serving"
    for i in range(1, name.count(".") + 2):
        monkeypatch.setitem(sys.modules, ".".join(name.split(".")[:i]), ModuleType(name))
    sys.modules[name].OpenAIServingModels = OpenAIServingModels
    return OpenAIServingModels


def test_the_list_of_models_tells_the_shape_once_installed(serving):
    config = Qwen3Config(vocab_size=64, hidden_size=32, num_hidden_layers=3, architectures=["Qwen3ForCausalLM"])
    served_model.install(config)
    [card] = asyncio.run(serving().show_available_models()).data
    told = card.model_dump()[KEY]
    assert (told["architectures"], told["vocab_size"], told["num_hidden_layers"]) == (["Qwen3ForCausalLM"], 64, 3)


def test_a_vllm_whose_parts_are_elsewhere_stays_as_it_is(serving, caplog, monkeypatch):
    monkeypatch.setattr(plugin, "_changed", set())
    monkeypatch.delattr(serving, "show_available_models")
    plugin.change("a part", lambda: served_model.install(Qwen3Config()), "it does not tell the model's shape")
    assert "show_available_models" in caplog.text and "it does not tell the model's shape" in caplog.text


def test_a_part_is_changed_once(monkeypatch):
    monkeypatch.setattr(plugin, "_changed", set())
    calls = []
    for _ in range(2):
        plugin.change("a part", lambda: calls.append(1), "")
    assert calls == [1]


def test_a_part_that_must_be_changed_raises(monkeypatch):
    monkeypatch.setattr(plugin, "_changed", set())
    with pytest.raises(ImportError):
        plugin.change("a part", lambda: importlib.import_module("no_such"), None)


def test_only_what_both_know_is_compared(tmp_path):
    ours = identity("ours", {"hidden_size": 32, "num_hidden_layers": 2, "tie_word_embeddings": False})
    theirs = identity("theirs", LlamaConfig(hidden_size=64, num_hidden_layers=2, tie_word_embeddings=True))
    assert ours.differing(theirs) == ["hidden_size", "tie_word_embeddings"]
    assert theirs.describe(["hidden_size"]) == "theirs (hidden_size 64)"
    assert ours.differing(identity("none", {})) == []
    (tmp_path / "config.json").write_text("[")
    assert identity_of_folder(str(tmp_path)).config == identity_of_folder("/no/such").config == {}


def test_rotary_embeddings_are_known_in_every_place():
    """transformers 5 has all of them in `rope_parameters`; before it, and in most folders, they are in two places."""
    old = {"rope_theta": 1e6, "rope_scaling": {"type": "yarn", "factor": 4}}
    new = {"rope_parameters": {"rope_theta": 1000000.0, "rope_type": "yarn", "factor": 4.0}}
    plain = identity("plain", {"rope_theta": 10000, "rope_scaling": None})
    told = identity("told", identity("old", old).config)  # as a server's list of models has it
    assert identity("old", old).config == identity("new", new).config == told.config
    assert plain.differing(identity("new", new)) == ["rope_theta", "rope_type", "rope_factor"]
    assert plain.differing(identity("none", {"hidden_size": 1})) == []
    assert plain.differing(identity("object", LlamaConfig(rope_theta=10000.0))) == []
    layers = {"full_attention": {"rope_theta": 1e6}, "sliding_attention": {"rope_theta": 1e4}}
    assert identity("several", {"rope_parameters": layers}).config == {}


def test_the_number_of_experts_is_known_by_either_name():
    """transformers writes `num_local_experts`; the folders of Qwen have `num_experts`."""
    config = Qwen3MoeConfig(num_experts=6)
    for entries in (config, config.to_dict(), {"num_experts": 6}, {"num_local_experts": 6}):
        assert identity("m", entries).config["num_experts"] == 6
    assert identity("m", {"num_experts": 8}).differing(identity("m", config.to_dict())) == ["num_experts"]
