"""Log-probabilities of given tokens: what a teacher is asked for."""

import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from transformers import PreTrainedModel

from torchtitan.grpo.engines.embedded.generator import PREFILL_TOKENS

LOGITS_BYTES = 256 << 20
"""Most memory for logits at once, in float32."""


@torch.inference_mode()
def token_logprobs(
    model: PreTrainedModel, sequences: Sequence[list[int]], temperature: float = 1.0
) -> list[list[float]]:
    """log p(token | tokens before it) of every token but the first of each sequence, from logits / `temperature`.

    The sequences are computed together, so the result is a function of these arguments alone, to the last bit.

    Raises:
        FloatingPointError: The model's logits are NaN.
    """
    scored: list[list[float]] = []
    for batch in _batches(sequences):
        width = max(map(len, batch))
        # Padding is on the right, where causal attention hides it from every real token.
        tokens = torch.tensor([ids + [0] * (width - len(ids)) for ids in batch], device=model.device)
        hidden = model.base_model(input_ids=tokens, use_cache=False).last_hidden_state
        scored += [_of_sequence(model, states, ids, temperature) for states, ids in zip(hidden, tokens, strict=True)]
    logprobs = [own[: len(ids) - 1] for own, ids in zip(scored, sequences, strict=True)]
    if any(math.isnan(value) for own in logprobs for value in own):
        raise FloatingPointError("the model's logits are NaN")
    return logprobs


def _batches(sequences: Sequence[list[int]]) -> Iterator[list[list[int]]]:
    """In order, each of at most PREFILL_TOKENS with padding, or of one sequence."""
    batch: list[list[int]] = []
    for ids in sequences:
        if batch and (len(batch) + 1) * max(len(ids), *map(len, batch)) > PREFILL_TOKENS:
            yield batch
            batch = []
        batch.append(ids)
    yield batch


def _of_sequence(model: PreTrainedModel, hidden: torch.Tensor, ids: torch.Tensor, temperature: float) -> list[float]:
    """Log-probabilities of ids[1:] [T - 1], given the last layer's states [T, D]."""
    rows = max(1, LOGITS_BYTES // (4 * model.config.vocab_size))
    parts = []
    for start in range(0, len(ids) - 1, rows):
        end = min(start + rows, len(ids) - 1)
        logits = model.get_output_embeddings()(hidden[start:end]).float() / temperature
        parts.append(logits.log_softmax(-1).gather(1, ids[start + 1 : end + 1, None])[:, 0])
    return torch.cat(parts).tolist() if parts else []


def completions(model_name: str, sequences: Sequence[list[int]], logprobs: Sequence[list[float]]) -> dict[str, Any]:
    """In the form of vLLM's reply to `prompt_logprobs = 0`, with no completion."""
    return {
        "object": "text_completion",
        "model": model_name,
        "choices": [
            {
                "index": i,
                "text": "",
                "finish_reason": "length",
                "prompt_logprobs": [
                    None,
                    *(
                        {str(token): {"logprob": logprob, "rank": None, "decoded_token": None}}
                        for token, logprob in zip(ids[1:], own, strict=True)
                    ),
                ],
            }
            for i, (ids, own) in enumerate(zip(sequences, logprobs, strict=True))
        ],
    }
