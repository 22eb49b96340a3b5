"""Models by name: Qwen3's sizes with its vocabulary, SmolLM2-135M's as a Qwen3, small ones for a CPU, other classes."""

from pathlib import Path
from typing import Any

SHAPES: dict[str, dict[str, Any]] = {
    "tiny": {"layers": 4, "dim": 128, "ffn-dim": 384, "heads": 4, "kv-heads": 2, "head-dim": 32, "vocab-size": 512},
    "tiny-moe": {"layers": 2, "dim": 128, "ffn-dim": 384, "heads": 4, "kv-heads": 2, "head-dim": 32, "vocab-size": 512},
    "135m": {"layers": 30, "dim": 576, "ffn-dim": 1536, "heads": 9, "kv-heads": 3, "head-dim": 64, "vocab-size": 49152},
    "0.6b": {"layers": 28, "dim": 1024, "ffn-dim": 3072, "heads": 16, "kv-heads": 8},
    "1.7b": {"layers": 28, "dim": 2048, "ffn-dim": 6144, "heads": 16, "kv-heads": 8},
    "4b": {"layers": 36, "dim": 2560, "ffn-dim": 9728, "heads": 32, "kv-heads": 8},
    "8b": {"layers": 36, "dim": 4096, "ffn-dim": 12288, "heads": 32, "kv-heads": 8},
    "30b-a3b": {"layers": 48, "dim": 2048, "ffn-dim": 6144, "heads": 32, "kv-heads": 4},
}
"""Flags of make_tiny_model.py; or transformers' `model_type`, and what its config has."""
SHAPES["tiny-moe"] |= {"experts": 8, "experts-per-token": 2, "expert-width": 64}
SHAPES["30b-a3b"] |= {"experts": 128, "experts-per-token": 8, "expert-width": 768}
for _name in ("0.6b", "1.7b", "4b", "8b", "30b-a3b"):
    SHAPES[_name] |= {"head-dim": 128, "vocab-size": 151936}
SHAPES["gemma3-1b"] = dict(
    model_type="gemma3_text",
    vocab_size=262144,
    hidden_size=1152,
    intermediate_size=6912,
    num_hidden_layers=26,
    num_attention_heads=4,
    num_key_value_heads=1,
    head_dim=256,
    sliding_window=512,
    layer_types=[("full" if (i + 1) % 6 == 0 else "sliding") + "_attention" for i in range(26)],
)
SHAPES["qwen3.5-0.8b"] = dict(
    model_type="qwen3_5_text",
    vocab_size=248320,
    hidden_size=1024,
    intermediate_size=3584,
    num_hidden_layers=24,
    num_attention_heads=8,
    num_key_value_heads=2,
    head_dim=256,
    linear_num_key_heads=16,
    linear_num_value_heads=16,
    layer_types=[("full" if (i + 1) % 4 == 0 else "linear") + "_attention" for i in range(24)],
    tie_word_embeddings=True,
)


def write_model(folder: Path, shape: str, max_tokens: int, layers: int = 0) -> None:
    """Config and tokenizer of such a model, or of one with so many `layers`, for sequences of `max_tokens`."""
    import make_tiny_model  # imports transformers, which takes seconds
    from transformers import CONFIG_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING

    if kind := SHAPES[shape].get("model_type"):
        make_tiny_model.main([str(folder), "--max-tokens", str(max_tokens)])
        ends = {f"{token}_token_id": getattr(make_tiny_model, token.upper()) for token in ("pad", "bos", "eos")}
        config = CONFIG_MAPPING[kind](**SHAPES[shape] | ends, max_position_embeddings=max_tokens)
        config.architectures = [MODEL_FOR_CAUSAL_LM_MAPPING[type(config)].__name__]
        config.save_pretrained(folder)
        return
    flags = SHAPES[shape] | {"max-tokens": max_tokens} | ({"layers": layers} if layers else {})
    words = [word for name, value in flags.items() for word in (f"--{name}", str(value))]
    make_tiny_model.main([str(folder), *words, *["--no-tie"] * (shape in ("8b", "30b-a3b"))])
