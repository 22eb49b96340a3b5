"""Log-probabilities of given tokens: what a teacher is asked for."""

import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from transformers import DynamicCache, PreTrainedModel

from torchtitan.grpo.engines.embedded.generator import PREFILL_TOKENS
from torchtitan.grpo.engines.embedded.kv_cache import cache_argument
from torchtitan.grpo.engines.embedded.model import logits_of
from torchtitan.grpo.inside_vllm.flat_logprobs import LOWEST

WORTH_TOKENS = 256
"""Computing fewer tokens twice costs less than a pass of their own."""
LOGITS_BYTES = 256 << 20
"""Most memory for logits at once, in float32."""


Known = dict[int, float]
"""Log-probabilities by token, at one position."""


@torch.inference_mode()
def token_logprobs(
    model: PreTrainedModel, sequences: Sequence[list[int]], temperature: float = 1.0, top_k: int = 0
) -> list[list[Known]]:
    """log p(token | tokens before it) of every token but the first of each sequence, from logits / `temperature`, and
    those of the `top_k` likeliest tokens in its place.

    The sequences are computed together, so the result is a function of these arguments alone, to the last bit. What all
    of a batch begin with, as a group's prompt, is computed once, if that saves `WORTH_TOKENS`.

    Raises:
        FloatingPointError: The model's logits are NaN.
    """
    scored: list[list[Known]] = []
    for batch in _batches(sequences):
        width, shared = max(map(len, batch)), _shared(batch)
        # Padding is on the right, where causal attention hides it from every real token.
        tokens = torch.tensor([ids + [0] * (width - len(ids)) for ids in batch], device=model.device)
        cached: dict[str, Any] = {"use_cache": False}
        begun: list[Known] = []
        if shared:
            prefix = DynamicCache(config=model.config)
            cached = {"use_cache": True, cache_argument(model.base_model): prefix}
            states = model.base_model(input_ids=tokens[:1, :shared], **cached).last_hidden_state
            begun = _of_sequence(model, states[0], tokens[0, :shared], temperature, top_k)
            prefix.batch_repeat_interleave(len(batch))
        hidden = model.base_model(input_ids=tokens[:, shared:], **cached).last_hidden_state
        if shared:  # the last shared state predicts the first token that is not
            hidden = torch.cat([states[:, -1:].expand(len(batch), -1, -1), hidden], 1)
        rest = tokens[:, max(0, shared - 1) :]
        scored += [begun + _of_sequence(model, *own, temperature, top_k) for own in zip(hidden, rest, strict=True)]
    logprobs = [own[: len(ids) - 1] for own, ids in zip(scored, sequences, strict=True)]
    if any(math.isnan(value) for own in logprobs for known in own for value in known.values()):
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


def _shared(batch: Sequence[list[int]]) -> int:
    """How many tokens all sequences begin with, at most all but one of the shortest; 0 if that saves little."""
    first, *others = batch
    most = min(map(len, batch)) - 1 if others else 0
    shared = next((i for i in range(most) if any(ids[i] != first[i] for ids in others)), most)
    return shared if shared * len(others) >= WORTH_TOKENS else 0


def _of_sequence(
    model: PreTrainedModel, hidden: torch.Tensor, ids: torch.Tensor, temperature: float, top_k: int
) -> list[Known]:
    """What is known at ids[1:] [T - 1], given the last layer's states [T, D]."""
    rows = max(1, LOGITS_BYTES // (4 * model.config.vocab_size))
    known: list[Known] = []
    for start in range(0, len(ids) - 1, rows):
        end = min(start + rows, len(ids) - 1)
        logits = logits_of(model, hidden[start:end]).float() / temperature
        logprobs = logits.log_softmax(-1)
        tokens = torch.cat([ids[start + 1 : end + 1, None], logprobs.topk(top_k).indices], 1)
        found = zip(tokens.tolist(), logprobs.gather(1, tokens).tolist(), strict=True)
        known += [dict(zip(*position, strict=True)) for position in found]
    return known


def completions(model_name: str, logprobs: Sequence[list[Known]]) -> dict[str, Any]:
    """In the form of vLLM's reply to `prompt_logprobs`, with no completion."""
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
                        {
                            str(token): {"logprob": max(logprob, LOWEST), "rank": None, "decoded_token": None}
                            for token, logprob in known.items()
                        }
                        for known in own
                    ),
                ],
            }
            for i, own in enumerate(logprobs)
        ],
    }
