"""vLLM answers log-probabilities as one list of numbers, to requests that ask for flat ones.

For each token of an answer vLLM's API server makes a dictionary and two objects, dumps them, and writes about 200 bytes
of JSON. With the many answers of a small model that takes its one thread longer than the GPU takes for the tokens:
requests, and pauses for new weights, wait in line behind complete answers, and the GPU stands idle.

A request may set vLLM's own sampling parameter `flat_logprobs`, with which the API server collects them in one list.
`install` has it send that list: each choice has `logprobs: null` and `token_logprobs`, one number a token. Only to
requests such as ours, which read answers when they are complete (FINAL_ONLY), as tokens and not as text, and no other
log-probability than the sampled token's. Without it the reply is vLLM's own, whatever the request asks.
"""

import functools
import logging
from collections.abc import AsyncIterator
from typing import Any

from torchtitan.grpo.inside_vllm.replies import with_field

logger = logging.getLogger("vllm.torchtitan_grpo")  # below "vllm", so that it is in the server's log

KEY = "token_logprobs"
LOWEST = -9999.0
"""JSON has no infinities; vLLM's own replies say this in their place."""

_TAKEN = object()


def install() -> None:
    """In vLLM's API server. A vLLM whose parts are elsewhere stays as it is, and the log says so."""
    try:
        _install()
    except (ImportError, AttributeError) as error:
        logger.warning("this vLLM's replies are unknown (%s): log-probabilities stay one object a token", error)


def _install() -> None:
    from vllm.entrypoints.scale_out.token_in_token_out.serving import ServingTokens
    from vllm.logprobs import FlatLogprobs
    from vllm.sampling_params import RequestOutputKind

    full_generator, create = ServingTokens.serve_tokens_full_generator, ServingTokens._create_tokens_logprobs
    if getattr(full_generator, "flat", False):
        return

    def asked(request: Any) -> bool:
        params = request.sampling_params
        whole = params.output_kind == RequestOutputKind.FINAL_ONLY
        tokens = getattr(request, "output_mode", "tokens") == "tokens"
        return bool(params.flat_logprobs) and params.logprobs == 0 and whole and tokens

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

        async def without_logprobs() -> AsyncIterator[Any]:
            async for result in results:
                for output in result.outputs:
                    if isinstance(output.logprobs, FlatLogprobs):
                        taken[output.index] = of_sampled_tokens(output.logprobs)
                        output.logprobs = _TAKEN
                yield result

        reply = await full_generator(self, request, without_logprobs(), *args, **kwargs)
        return with_field(reply, KEY, taken) if hasattr(reply, "choices") else reply

    reply_flat.flat = True
    ServingTokens._create_tokens_logprobs = create_unless_taken
    ServingTokens.serve_tokens_full_generator = reply_flat
    logger.info("log-probabilities are sent as lists of numbers to requests that ask for flat ones")


def of_sampled_tokens(flat: Any) -> list[float]:
    """Of vLLM's `FlatLogprobs`: at each position the sampled token's comes first."""
    found = [flat.logprobs[start] for start in flat.start_indices]
    return [value if value > LOWEST else LOWEST for value in found]  # a NaN is not greater either
