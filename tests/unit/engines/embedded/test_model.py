"""Which folders the embedded server loads."""

import pytest
import torch
from transformers import GPT2Config, MistralConfig, MistralForCausalLM

from torchtitan.grpo.engines.embedded.model import load_model
from torchtitan.grpo.errors import UserError
from torchtitan.grpo.model.families import MODEL_TYPES

SHAPE = dict(
    vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=2,
    num_key_value_heads=1, max_position_embeddings=64,
)  # fmt: skip


def test_what_does_not_train_is_refused_by_name(tmp_path):
    GPT2Config(n_layer=1).save_pretrained(tmp_path)
    with pytest.raises(UserError, match=rf"runs {', '.join(MODEL_TYPES.values())}, not 'gpt2'"):
        load_model(tmp_path, torch.device("cpu"), torch.float32)


def test_mistral_without_its_window(tmp_path):
    MistralConfig(**SHAPE, sliding_window=None).save_pretrained(tmp_path)
    assert isinstance(load_model(tmp_path, torch.device("cpu"), torch.float32), MistralForCausalLM)
    MistralConfig(**SHAPE, sliding_window=16).save_pretrained(tmp_path)
    with pytest.raises(UserError, match="sliding-window attention is not supported"):
        load_model(tmp_path, torch.device("cpu"), torch.float32)
