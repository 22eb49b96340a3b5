"""Tiny models of many classes of transformers, for the row that takes any of them.

`python -m tests.helpers.any_models` prints how far packed rows of each are from the class itself, document by document.
"""

from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

SHAPE: dict[str, Any] = dict(
    vocab_size=131,  # odd, so that shards are uneven
    hidden_size=128,
    intermediate_size=96,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=32,  # vLLM on a CPU has no smaller ones
    max_position_embeddings=128,
    initializer_range=0.1,
    pad_token_id=None,
    bos_token_id=1,
    eos_token_id=2,
)
MIXES = dict(layer_types=["linear_attention", "full_attention"] * 2)
SLIDES = dict(sliding_window=8, layer_types=["sliding_attention", "full_attention"] * 2)
KINDS: dict[str, dict[str, Any]] = {
    "cohere2": SLIDES,
    "ernie4_5": {},
    "exaone4": SLIDES,
    "falcon_h1": dict(mamba_d_ssm=64, mamba_n_heads=4, mamba_d_head=16, mamba_d_state=16, mamba_chunk_size=32),
    "gemma2": SLIDES,
    "gemma3_text": SLIDES,
    "gemma4_text": SLIDES | dict(initializer_range=0.02, hidden_size_per_layer_input=8, vocab_size_per_layer_input=131),
    "glm4": {},
    "granite": dict(logits_scaling=3.0, residual_multiplier=0.5, embedding_multiplier=2.0),
    "lfm2": dict(  # vLLM reads names that published files have
        layer_types=["conv", "full_attention"] * 2,
        conv_dim=128,
        block_dim=128,
        block_ff_dim=96,
        block_multiple_of=1,
        block_auto_adjust_ff_dim=False,
        block_ffn_dim_multiplier=1.0,
    ),
    "llama": dict(
        rope_parameters=dict(
            rope_type="yarn", rope_theta=1e4, factor=4.0, original_max_position_embeddings=32, beta_fast=32
        )
    ),
    "mistral": dict(sliding_window=8),
    "olmo2": {},
    "olmo3": SLIDES,
    "phi3": {},
    "qwen3": dict(attention_bias=True),
    "qwen3_5_text": MIXES
    | dict(linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=128, linear_value_head_dim=128),
    "seed_oss": {},
    "smollm3": dict(no_rope_layers=[1, 0, 1, 0]),
    "starcoder2": dict(sliding_window=8),
}
"""model_type: what its config has beyond SHAPE."""
BY_DOCUMENT = ("falcon_h1", "lfm2", "qwen3_5_text")
"""Those with layers that run along a document."""


def save(kind: str, folder: Path, **changes: Any) -> PreTrainedModel:
    """A random model of this kind, in float32, saved in `folder`."""
    torch.manual_seed(1)
    config = CONFIG_MAPPING[kind](**SHAPE | KINDS[kind] | changes)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager", dtype=torch.float32)
    with torch.no_grad():  # norms and biases that a new model has at 0 or 1
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn_like(parameter), alpha=0.1)
    model.save_pretrained(folder)
    return model.eval()  # some have dropout by default


def print_differences() -> None:
    """The numbers of docs/models.md: of log-probabilities in nat, and of a gradient as a part of its largest value."""
    from torchtitan.grpo.model import same_packed

    for kind, more in KINDS.items():
        torch.manual_seed(0)
        config = CONFIG_MAPPING[kind](**SHAPE | more)
        _, logprobs, gradients = same_packed._compare(same_packed._tiny(config, same_packed._kinds(config)))
        print(f"{kind} {logprobs:.1e} {gradients:.1e}")


if __name__ == "__main__":
    print_differences()
