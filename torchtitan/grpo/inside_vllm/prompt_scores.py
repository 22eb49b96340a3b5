"""vLLM replies with the log-probabilities of answers that it was sent as arrays, to requests that ask for them.

A teacher's server scores answers by `prompt_logprobs` of its completions route. For each position the API server
decodes the text of each likely token, builds a dictionary and an object for it, and writes them as JSON. One thread
does it all: docs/distillation.md has what it takes.

`install` leaves texts, objects and JSON out where a request names ARGUMENT in `vllm_xargs`: the position at which each
of its sequences has its first answer token, with commas between. Each choice then has `prompt_logprobs: null` and KEY:
base64 of `ids` (int32) and of `logprobs` (float32), for the positions from there on. At each stands the token that was
sent, and then the likeliest ones, best first. Without `install`, vLLM ignores the argument and replies as ever.
"""

import base64
import functools
from typing import Any

import numpy as np

from torchtitan.grpo.inside_vllm.replies import with_field

ARGUMENT = "torchtitan_grpo_scores_from"
KEY = "prompt_scores"


def install() -> None:
    """In vLLM's API server."""
    from vllm.entrypoints.openai.completion.protocol import CompletionRequest
    from vllm.entrypoints.openai.completion.serving import OpenAIServingCompletion
    from vllm.logprobs import FlatLogprobs

    to_params = CompletionRequest.to_sampling_params
    respond = OpenAIServingCompletion.request_output_to_completion_response

    @functools.wraps(to_params)
    def flat_if_asked(self: CompletionRequest, *args: Any, **kwargs: Any) -> Any:
        params = to_params(self, *args, **kwargs)
        if starts(self):
            params.flat_logprobs, params.detokenize = True, False
        return params

    @functools.wraps(respond)
    def respond_with_scores(
        self: OpenAIServingCompletion, results: list[Any], request: CompletionRequest, *args: Any, **kwargs: Any
    ) -> Any:
        taken: dict[int, dict[str, str]] = {}
        for i, (begin, result) in enumerate(zip(starts(request), results, strict=False)):
            if isinstance(result.prompt_logprobs, FlatLogprobs):
                taken[i] = packed(result.prompt_logprobs, begin)
                result.prompt_logprobs = None
        reply = respond(self, results, request, *args, **kwargs)
        return with_field(reply, KEY, taken) if taken else reply

    CompletionRequest.to_sampling_params = flat_if_asked
    OpenAIServingCompletion.request_output_to_completion_response = respond_with_scores


def starts(request: Any) -> list[int]:
    """The position of each sequence's first answer token; none unless a `CompletionRequest` asks for scores alone, of a
    list of sequences of token ids."""
    named = (request.vllm_xargs or {}).get(ARGUMENT)
    scores_alone = request.prompt_logprobs is not None and (request.n or 1) == 1
    if not (isinstance(named, str) and scores_alone) or request.logprobs is not None or request.echo or request.stream:
        return []
    numbers, sequences = named.split(","), request.prompt
    of_each = isinstance(sequences, list) and len(sequences) == len(numbers) and isinstance(sequences[0], list)
    return list(map(int, numbers)) if of_each and all(map(str.isdecimal, numbers)) else []


def packed(flat: Any, begin: int) -> dict[str, str]:
    """What vLLM's `FlatLogprobs` of a sequence says of the positions from `begin` on."""
    first = flat.start_indices[begin] if begin < len(flat.start_indices) else len(flat.logprobs)
    return as_text(flat.token_ids[first:], flat.logprobs[first:])


def as_text(ids: Any, logprobs: Any) -> dict[str, str]:
    """Tokens and their log-probabilities as base64 of int32 and float32."""
    arrays = {"ids": np.asarray(ids, np.int32), "logprobs": np.asarray(logprobs, np.float32)}
    return {name: base64.b64encode(array.tobytes()).decode() for name, array in arrays.items()}
