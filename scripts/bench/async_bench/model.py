"""A model folder with random weights that never end an answer.

The weights decide, so server and trainer agree on every probability. Hidden number 0 is a constant: every embedding
has the same value there, and no layer reads it (norm weight 0) or writes to it (output row 0 is 0). The end token's
output row reads this number only, and gives the token practically no chance, whatever the context.
"""

import json
from pathlib import Path

import torch
from bench_common.shapes import write_model
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.utils.logging import disable_progress_bar

CONSTANT = 4.0  # hidden number 0; about as large as all others together, and exact in bfloat16
READ_BY_OUTPUT = 1 / 16  # the final norm's weight there; small, since with tied embeddings every row reads it
NEVER = -256.0  # what the end token's row has there: its logit is some -100


def make_model(folder: Path, shape: str, max_tokens: int) -> None:
    """Write config, tokenizer and bfloat16 weights of a model whose longest sequence has `max_tokens`."""
    disable_progress_bar()
    write_model(folder, shape, max_tokens)
    config = AutoConfig.from_pretrained(folder)
    _fill_tokenizer(folder / "tokenizer.json", config.vocab_size)

    torch.manual_seed(0)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    never_end(model, config.eos_token_id)
    model.to(torch.bfloat16).save_pretrained(folder)


def _fill_tokenizer(path: Path, vocab_size: int) -> None:
    """Give every row of the embedding a token, so that different answers are different texts."""
    tokenizer = json.loads(path.read_text())
    words = tokenizer["model"]["vocab"]
    words |= {f"<{i}>": i for i in range(len(words), vocab_size)}
    path.write_text(json.dumps(tokenizer))


@torch.no_grad()
def never_end(model: PreTrainedModel, end_token: int) -> None:
    """Give the end token practically no chance in any context."""
    table, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    head[end_token] = 0
    head[:, 0] = 0
    table[:, 0] = CONSTANT
    head[end_token, 0] = NEVER
    model.model.norm.weight[0] = READ_BY_OUTPUT
    for layer in model.model.layers:
        layer.input_layernorm.weight[0] = layer.post_attention_layernorm.weight[0] = 0
        layer.self_attn.o_proj.weight[0] = layer.mlp.down_proj.weight[0] = 0
