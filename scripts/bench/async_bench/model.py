"""A model folder with random weights that end an answer with a chosen probability at each token.

The weights decide, so server and trainer agree on every probability. Hidden number 0 is a constant: every embedding
has the same value there, and no layer reads it (norm weight 0) or writes to it (output row 0 is 0). The end token's
output row reads this number only, which raises or lowers its log-odds by any amount, whatever the context. With chance
1/mean at each token, lengths are geometric: the median is 0.69 mean, the longest of n answers about ln(n) mean.
"""

import json
import subprocess
import sys
from pathlib import Path

import torch
from bench_common import ROOT
from bench_common.shapes import model_flags
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.utils.logging import disable_progress_bar

CONSTANT = 4.0  # hidden number 0; about as large as all others together, and exact in bfloat16
READ_BY_OUTPUT = 1 / 16  # the final norm's weight there; small, since with tied embeddings every row reads it
NEVER_LOG_ODDS = -30.0


def make_model(folder: Path, shape: str, mean_tokens: float | None, max_tokens: int) -> float:
    """Write config, tokenizer and bfloat16 weights. Returns the measured mean length in tokens.

    Args:
        mean_tokens: Wanted mean length; None never ends an answer, and the measured mean is inf.
        max_tokens: Longest sequence of the model.
    """
    disable_progress_bar()
    words = model_flags(shape, max_tokens)
    subprocess.run([sys.executable, str(ROOT / "scripts" / "make_tiny_model.py"), str(folder), *words], check=True)
    config = AutoConfig.from_pretrained(folder)
    _fill_tokenizer(folder / "tokenizer.json", config.vocab_size)

    torch.manual_seed(0)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    found = set_end(model, config.eos_token_id, mean_tokens)
    model.to(torch.bfloat16).save_pretrained(folder)
    return found


def _fill_tokenizer(path: Path, vocab_size: int) -> None:
    """Give every row of the embedding a token, so that different answers are different texts."""
    tokenizer = json.loads(path.read_text())
    words = tokenizer["model"]["vocab"]
    words |= {f"<{i}>": i for i in range(len(words), vocab_size)}
    path.write_text(json.dumps(tokenizer))


@torch.no_grad()
def set_end(model: PreTrainedModel, end_token: int, mean_tokens: float | None) -> float:
    """Set the end token's mean probability over random contexts to 1/`mean_tokens`, or to practically 0 for None.

    Returns one over that mean, measured.
    """
    table, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    head[end_token] = 0  # or it would read what answers to one prompt share, and each prompt had its own mean
    head[:, 0] = 0
    table[:, 0] = CONSTANT
    model.model.norm.weight[0] = READ_BY_OUTPUT
    for layer in model.model.layers:
        layer.input_layernorm.weight[0] = layer.post_attention_layernorm.weight[0] = 0
        layer.self_attn.o_proj.weight[0] = layer.mlp.down_proj.weight[0] = 0

    random = torch.Generator().manual_seed(1)
    contexts = torch.randint(end_token + 1, len(table), (8, 96), generator=random).to(table.device)
    hidden = model.model(contexts).last_hidden_state[:, 8:].flatten(0, 1)
    log_odds = torch.cat([_log_odds(part @ head.T, end_token) for part in hidden.split(64)])
    gain = hidden[:, 0]  # what 1.0 in the end token's row adds to its logit
    if mean_tokens is None:
        bonus = NEVER_LOG_ODDS / gain.mean()
    else:
        low, high = torch.tensor(0.0), torch.tensor(1e4)
        for _ in range(50):
            bonus = (low + high) / 2
            too_rare = (log_odds + bonus * gain).sigmoid().mean() < 1 / mean_tokens
            low, high = (bonus, high) if too_rare else (low, bonus)
    row = (head[end_token, 0] + bonus).bfloat16()  # as it will be stored
    bonus = row.float() - head[end_token, 0]
    head[end_token, 0] = row
    chance = (log_odds + bonus * gain).sigmoid().mean().item()
    return float("inf") if mean_tokens is None else 1 / chance


def _log_odds(logits: torch.Tensor, token: int) -> torch.Tensor:
    own = logits[:, token].clone()
    logits[:, token] = -torch.inf
    return own - logits.logsumexp(-1)
