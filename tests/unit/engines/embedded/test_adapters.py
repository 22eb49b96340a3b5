"""Adapters beside the embedded server's model, against `peft`, and what is refused."""

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from torchtitan.grpo.engines.embedded.adapters import base_parameters, check_adapters
from torchtitan.grpo.engines.embedded.model import ModelUpdate
from torchtitan.grpo.weight_wire.adapters import AdapterInfo, adapted_layers, fingerprint

peft = pytest.importorskip("peft")
LAYERS = ["q_proj", "down_proj"]


def make_model(seed: int = 0) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    shape = dict(vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2)
    config = LlamaConfig(**shape, num_key_value_heads=1, max_position_embeddings=64, tie_word_embeddings=True)
    return LlamaForCausalLM(config).eval()


def info_of(model: LlamaForCausalLM, rank: int = 3) -> AdapterInfo:
    return AdapterInfo(rank, 6.0, "trained", {name: fingerprint(w) for name, w in base_parameters(model).items()})


def adapters(rank: int, seed: int) -> tuple[torch.nn.Module, dict[str, torch.Tensor]]:
    """The model with adapters of `peft`, and their tensors by its names."""
    config = peft.LoraConfig(r=rank, lora_alpha=6.0, target_modules=LAYERS, init_lora_weights=False)
    torch.manual_seed(seed)
    model = peft.get_peft_model(make_model(), config).eval()
    tensors = peft.get_peft_model_state_dict(model)
    return model, {name: value.detach().clone() for name, value in tensors.items()}


@torch.no_grad()
def test_versions_replace_one_another_and_leave_the_base_as_it_was():
    served, tokens = make_model(), torch.arange(3, 40)[None]
    base = served(tokens).logits
    for rank, seed in ((3, 1), (3, 2), (5, 3)):
        theirs, tensors = adapters(rank, seed)
        update = ModelUpdate(served, info_of(make_model(), rank), list(tensors))
        half = len(tensors) // 2
        update.load(list(tensors.items())[:half])
        with pytest.raises(ValueError, match=f"{len(tensors) - half} parameters were never sent"):
            update.check_complete()
        update.load(list(tensors.items())[half:])
        update.check_complete()
        torch.testing.assert_close(served(tokens).logits, theirs(tokens).logits, atol=1e-5, rtol=1e-5)
        assert (served(tokens).logits - base).abs().max() > 1e-2, "the adapters do something"
        with pytest.raises(ValueError, match="the served model has"):
            update.load([(name, value[:1]) for name, value in tensors.items()])
    ModelUpdate(served)  # of a run that trains all weights
    assert torch.equal(served(tokens).logits, base) and type(served.model.layers[0].self_attn.q_proj) is torch.nn.Linear


def test_other_bases_layers_and_names_are_refused_and_named():
    served, (_, tensors) = make_model(), adapters(3, 1)
    check_adapters(served, "served", info_of(served), tensors)
    check_adapters(served.to(torch.bfloat16), "served", info_of(make_model()), tensors)  # the dtype does not matter
    with pytest.raises(ValueError) as caught:
        check_adapters(served, "served", info_of(make_model(1)), tensors)
    for word in (
        "[lora]",
        "the trainer has those of 'trained' with",
        "this server those of 'served' with",
        "model.embed_tokens.weight",
    ):
        assert word in str(caught.value)
    with pytest.raises(ValueError, match=r"served has no linear layer model\.layers\.9\.q"):
        ends = ("lora_A.weight", "lora_B.weight")
        check_adapters(served, "served", info_of(served), [f"base_model.model.model.layers.9.q.{end}" for end in ends])
    with pytest.raises(ValueError, match="x has one of its adapter's two matrices only"):
        adapted_layers(["base_model.model.x.lora_A.weight"])
    with pytest.raises(ValueError, match=r"x\.weight is no adapter's name"):
        adapted_layers(["x.weight"])
