"""Bodies of the embedded server's routes: requests are checked and read, replies are written, in vLLM's forms."""

import uuid
from typing import Annotated, Any, Literal

import msgspec
import numpy as np
from aiohttp import web

from torchtitan.grpo.data.routes import to_npy
from torchtitan.grpo.engines.embedded.generator import Answer, Generator, Request
from torchtitan.grpo.engines.embedded.sampling import TEMPERATURE_MAX, TEMPERATURE_MIN
from torchtitan.grpo.engines.protocol import SamplingParams
from torchtitan.grpo.errors import shown
from torchtitan.grpo.inside_vllm.flat_logprobs import KEPT_TOKENS, LOWEST, kept_text
from torchtitan.grpo.inside_vllm.prompt_scores import as_text

TOP_LOGPROBS_MAX = 128
ANSWERS_MAX = 1 << 16
"""Most answers to one request. All are in the queue at once."""
_INT64 = msgspec.Meta(ge=-(1 << 63), le=(1 << 63) - 1)
_Share = Annotated[float, msgspec.Meta(ge=0, le=1)]
_Zero = Annotated[float, msgspec.Meta(ge=0, le=0)]


class _Sampling(msgspec.Struct, forbid_unknown_fields=True):
    """`sampling_params`. Those from `repetition_penalty` on are accepted only at values that have no effect."""

    n: Annotated[int, msgspec.Meta(ge=1, le=ANSWERS_MAX)] = 1
    temperature: float = 1.0
    max_tokens: Annotated[int, msgspec.Meta(ge=1)] | None = None
    stop_token_ids: list[int] = []
    seed: Annotated[int, _INT64] | None = None
    ignore_eos: bool = False
    stop: list[Annotated[str, msgspec.Meta(min_length=1)]] = []
    top_p: _Share = 1.0
    top_k: Annotated[int, msgspec.Meta(ge=-1, le=(1 << 63) - 1)] = 0
    min_p: _Share = 0.0
    flat_logprobs: bool = False
    logprobs: Annotated[int, msgspec.Meta(ge=0, le=TOP_LOGPROBS_MAX)] = 0
    repetition_penalty: Annotated[float, msgspec.Meta(ge=1, le=1)] = 1.0
    presence_penalty: _Zero = 0.0
    frequency_penalty: _Zero = 0.0
    detokenize: bool = False
    output_kind: Literal[0, 1, 2] = 0


class BadRequest(ValueError):
    """Answered with HTTP 400."""


def generation(body: dict, generator: Generator) -> Request:
    """The request in a body of /inference/v1/generate.

    Raises:
        BadRequest: It has what this server does not do, or more than the model takes.
    """
    token_ids, given = token_ids_of(body.get("token_ids"), "token_ids", generator), body.get("sampling_params", {})
    if not isinstance(given, dict):
        raise BadRequest("sampling_params must be an object")
    if body.get("stream"):
        raise BadRequest("stream is not supported")
    try:
        sampling = msgspec.convert({name: value for name, value in given.items() if value is not None}, _Sampling)
        "".join(sampling.stop).encode()
    except (msgspec.ValidationError, UnicodeEncodeError) as error:  # the latter of half a character
        raise BadRequest(f"sampling_params: {str(error)[:200]}") from error
    if sampling.stop and generator.decode is None:
        raise BadRequest("stop needs a tokenizer, and the model's folder has no tokenizer.json")
    params = SamplingParams(
        n=sampling.n,
        temperature=checked_temperature(sampling.temperature),
        max_tokens=sampling.max_tokens or max(1, generator.max_model_len - len(token_ids)),
        stop_token_ids=tuple(sampling.stop_token_ids),
        seed=sampling.seed,
        ignore_eos=sampling.ignore_eos,
        stop=tuple(sampling.stop),
        top_p=sampling.top_p,
        top_k=max(0, sampling.top_k),
        min_p=sampling.min_p,
        kept=bool(body.get("return_sampling_mask")),
    )
    if params.kept and not params.top_k:
        raise BadRequest("return_sampling_mask needs top_k over 0, which bounds how many tokens are kept")
    try:
        generator.check(len(token_ids), params.max_tokens)
    except ValueError as error:
        raise BadRequest(str(error)) from error
    request_id = str(body.get("request_id") or uuid.uuid4().hex)
    routes = bool(body.get("return_routed_experts"))
    if routes and generator.routing.shape is None:
        raise BadRequest("return_routed_experts: the model has no experts")
    top_logprobs = min(sampling.logprobs, generator.model.config.vocab_size)
    return Request(request_id, token_ids, params, top_logprobs, sampling.flat_logprobs, routes)


def token_ids_of(token_ids: Any, name: str, generator: Generator) -> list[int]:
    """Token ids of the model's vocabulary, at least one, in the field `name` of a body."""
    if not isinstance(token_ids, list) or not token_ids or not all(type(t) is int for t in token_ids):
        raise BadRequest(f"{name} must be a list of at least one integer")
    vocab_size = generator.model.config.vocab_size
    if min(token_ids) < 0 or max(token_ids) >= vocab_size:
        raise BadRequest(f"{name} must lie in 0..{vocab_size - 1}")
    return token_ids


def reply(request: Request, model_name: str) -> dict:
    """What answers a finished request, in vLLM's form."""
    prompt_tokens = len(request.prompt_ids)
    answer_tokens = sum(len(answer.token_ids) for answer in request.answers)
    return {
        "request_id": request.request_id,
        "model": model_name,
        "usage": {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": answer_tokens,
            "total_tokens": prompt_tokens + answer_tokens,
        },
        "choices": [_choice(i, answer) for i, answer in enumerate(request.answers)],
    }


def _choice(index: int, answer: Answer) -> dict:
    ends = [start for _, start in answer.version_starts[1:]] + [len(answer.token_ids)]
    return {
        "index": index,
        "finish_reason": answer.finish_reason,
        "stop_reason": answer.token_ids[-1]
        if answer.token_ids[-1:] and answer.token_ids[-1] in answer.request.params.stop_token_ids
        else None,
        "token_ids": answer.token_ids,
        "weight_versions": [
            {"version": version, "start": start, "end": end}
            for (version, start), end in zip(answer.version_starts, ends, strict=True)
        ]
        if answer.token_ids
        else [],
        **_logprobs(answer),
        **({"routed_experts": to_npy(np.concatenate(answer.routes))} if answer.routes else {}),
        **_kept(answer),
    }


def _kept(answer: Answer) -> dict:
    if not answer.request.params.kept:
        return {}
    masks = [ids.tolist() for ids in answer.kept]
    return {KEPT_TOKENS: kept_text(masks)} if answer.request.flat_logprobs else {"sampling_mask": masks}


def _logprobs(answer: Answer) -> dict:
    """In the form of vLLM with our plug-in (`inside_vllm/flat_logprobs.py`)."""
    if answer.request.flat_logprobs:
        reply: dict[str, Any] = {"logprobs": None, "token_logprobs": answer.logprobs}
        if answer.top_tokens:
            ids, logprobs = zip(*answer.top_tokens, strict=True)
            sampled = np.array(answer.token_ids)[:, None], np.array(answer.logprobs)[:, None]
            reply["top_tokens"] = as_text(np.hstack([sampled[0], ids]), np.hstack([sampled[1], logprobs]))
        return reply
    content: list[dict[str, Any]] = [
        {"token_id": token, "logprob": logprob, "rank": None, "top_logprobs": []}
        for token, logprob in zip(answer.token_ids, answer.logprobs, strict=True)
    ]
    for entry, best in zip(content, answer.top_tokens, strict=False):
        sampled = entry["token_id"], entry["logprob"]
        pairs = [sampled, *(pair for pair in zip(*best, strict=True) if pair[0] != sampled[0])][: len(best[0])]
        # Tokens that top-p or min-p cut have -inf.
        entry["top_logprobs"] = [
            {"token_id": token, "logprob": max(logprob, LOWEST), "rank": None} for token, logprob in pairs
        ]
    return {"logprobs": {"content": content}}


async def json_of(http: web.Request) -> dict:
    """The JSON object in a request's body."""
    try:
        body = await http.json()
    except (ValueError, LookupError, RecursionError) as error:  # also no text, or in an unknown encoding
        raise BadRequest(f"the body is not JSON: {error}") from error
    if not isinstance(body, dict):
        raise BadRequest("the body must be a JSON object")
    return body


def checked_temperature(value: Any) -> float:
    """A temperature; 0 is greedy."""
    if type(value) not in (int, float) or not (value == 0 or TEMPERATURE_MIN <= value <= TEMPERATURE_MAX):
        raise BadRequest(
            f"temperature must be 0, or a number from {TEMPERATURE_MIN:g} to {TEMPERATURE_MAX:g}, not {shown(value)}"
        )
    return float(value)
