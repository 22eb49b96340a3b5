"""vLLM replies with log-probabilities as lists of numbers, to requests that ask for flat ones.

For each token of an answer vLLM's API server builds a dictionary and two objects and writes about 200 bytes of JSON.
One thread does it all. With many answers of a small model that takes longer than the GPU takes to sample them.
Requests, and pauses for new weights, then wait behind complete answers while the GPU is idle.

vLLM's own sampling parameter `flat_logprobs` has the API server collect a request's log-probabilities in one list.
`install` has it send that list: each choice then has `logprobs: null` and `token_logprobs`, one number per token. With
`logprobs` = K there are also `top_tokens`, each token and the K likeliest ones in its place (`prompt_scores.packed`).
Only requests like our trainer's get it: read when complete (FINAL_ONLY), as tokens and not text. Without `install`,
vLLM's reply ignores `flat_logprobs`.

The tokens that the sampler kept, of a vLLM with --return-sampling-mask, come as one text in place of lists of numbers.
"""

import base64
import functools
import itertools
from collections.abc import AsyncIterator, Sequence
from typing import Any

import numpy as np

from torchtitan.grpo.inside_vllm.prompt_scores import packed
from torchtitan.grpo.inside_vllm.replies import with_field

KEY, TOP_KEY, KEPT_TOKENS = "token_logprobs", "top_tokens", "kept_tokens"
LOWEST = -9999.0
"""JSON has neither infinities nor NaN. vLLM's own replies have this number in their place, which clients refuse of a
sampled token."""

_TAKEN = object()


def install() -> None:
    """In vLLM's API server."""
    from vllm.entrypoints.scale_out.token_in_token_out.serving import ServingTokens
    from vllm.logprobs import FlatLogprobs
    from vllm.sampling_params import RequestOutputKind

    full_generator, create = ServingTokens.serve_tokens_full_generator, ServingTokens._create_tokens_logprobs

    def asked(request: Any) -> bool:
        params = request.sampling_params
        whole = params.output_kind == RequestOutputKind.FINAL_ONLY
        tokens = getattr(request, "output_mode", "tokens") == "tokens"
        named = params.logprobs is not None and params.logprobs >= 0
        return bool(params.flat_logprobs) and named and whole and tokens

    @functools.wraps(create)
    def create_unless_taken(self: ServingTokens, token_ids: Any, top_logprobs: Any, *args: Any, **kwargs: Any) -> Any:
        return None if top_logprobs is _TAKEN else create(self, token_ids, top_logprobs, *args, **kwargs)

    @functools.wraps(full_generator)
    async def reply_flat(
        self: ServingTokens, request: Any, results: AsyncIterator[Any], *args: Any, **kwargs: Any
    ) -> Any:
        if not asked(request):
            return await full_generator(self, request, results, *args, **kwargs)
        taken: dict[int, list[float]] = {}
        kept: dict[int, str] = {}
        tops: dict[int, dict[str, str]] = {}
        k = request.sampling_params.logprobs or 0

        async def without_logprobs() -> AsyncIterator[Any]:
            async for result in results:
                for output in result.outputs:
                    if isinstance(output.logprobs, FlatLogprobs):
                        taken[output.index] = of_sampled_tokens(output.logprobs)
                        if k:
                            tops[output.index] = packed(output.logprobs, 0)
                        output.logprobs = _TAKEN
                    if (mask := getattr(output, "sampling_mask", None)) is not None:
                        kept[output.index], output.sampling_mask = kept_text(mask.token_ids), None
                yield result

        reply = await full_generator(self, request, without_logprobs(), *args, **kwargs)
        if not hasattr(reply, "choices"):
            return reply
        reply = with_field(reply, KEY, taken)
        for key, values in ((TOP_KEY, tops), (KEPT_TOKENS, kept)):
            reply = with_field(reply, key, values) if values else reply
        return reply

    ServingTokens._create_tokens_logprobs = create_unless_taken
    ServingTokens.serve_tokens_full_generator = reply_flat


def of_sampled_tokens(flat: Any) -> list[float]:
    """Log-probabilities of the sampled tokens in vLLM's `FlatLogprobs`: the first at each position."""
    found = [flat.logprobs[start] for start in flat.start_indices]
    return [value if value > LOWEST else LOWEST for value in found]  # a NaN is not greater either


def kept_text(masks: Sequence[Sequence[int]]) -> str:
    """The ids that were kept at each position as base64 of int32: how many at each, then all.

    With 16 ids at a position, JSON of lists takes 40 times as long to parse.
    """
    numbers = itertools.chain(map(len, masks), *masks)
    return base64.b64encode(np.fromiter(numbers, "<i4").tobytes()).decode("ascii")
