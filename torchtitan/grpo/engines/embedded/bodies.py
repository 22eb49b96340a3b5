"""Bodies of the embedded server's routes: requests are checked and read, replies are written, in vLLM's forms."""

import uuid
from typing import Any

import numpy as np
from aiohttp import web

from torchtitan.grpo.data.routes import to_npy
from torchtitan.grpo.engines.embedded.generator import Answer, Generator, Request
from torchtitan.grpo.engines.embedded.sampling import TEMPERATURE_MAX, TEMPERATURE_MIN
from torchtitan.grpo.engines.protocol import SamplingParams
from torchtitan.grpo.inside_vllm.flat_logprobs import KEPT_TOKENS, LOWEST, kept_text
from torchtitan.grpo.inside_vllm.prompt_scores import as_text

TOP_LOGPROBS_MAX = 128
ANSWERS_MAX = 1 << 16
"""Most answers to one request. All are in the queue at once."""
INT64 = range(-(1 << 63), 1 << 63)

NEUTRAL = {
    "repetition_penalty": (1, 1.0),
    "presence_penalty": (0, 0.0),
    "frequency_penalty": (0, 0.0),
    "detokenize": (False, True),
    "output_kind": (0, 1, 2),
}
"""Sampling parameters that are accepted only at values that have no effect."""


class BadRequest(ValueError):
    """Answered with HTTP 400."""


def generation(body: dict, generator: Generator) -> Request:
    """The request in a body of /inference/v1/generate.

    Raises:
        BadRequest: It has what this server does not do, or more than the model takes.
    """
    token_ids, sampling = token_ids_of(body.get("token_ids"), "token_ids", generator), body.get("sampling_params", {})
    if not isinstance(sampling, dict):
        raise BadRequest("sampling_params must be an object")
    if body.get("stream"):
        raise BadRequest("stream is not supported")
    sampling = {name: value for name, value in sampling.items() if value is not None}
    stop_token_ids = sampling.pop("stop_token_ids", [])
    if not isinstance(stop_token_ids, list) or not all(type(t) is int for t in stop_token_ids):
        raise BadRequest("stop_token_ids must be a list of integers")
    stop = sampling.pop("stop", [])
    if not isinstance(stop, list) or not all(isinstance(text, str) and text for text in stop):
        raise BadRequest("stop must be a list of texts, none of them empty")
    if stop and generator.decode is None:
        raise BadRequest("stop needs a tokenizer, and the model's folder has no tokenizer.json")
    room = max(1, generator.max_model_len - len(token_ids))
    params = SamplingParams(
        n=_whole(sampling, "n", 1, 1, ANSWERS_MAX),
        temperature=temperature_of(sampling),
        max_tokens=_whole(sampling, "max_tokens", room, 1, INT64.stop - 1),
        stop_token_ids=tuple(stop_token_ids),
        seed=_whole(sampling, "seed", None, INT64.start, INT64.stop - 1),
        ignore_eos=bool(sampling.pop("ignore_eos", False)),
        stop=tuple(stop),
        top_p=_share(sampling, "top_p", 1.0),
        top_k=max(0, _whole(sampling, "top_k", 0, -1, INT64.stop - 1)),
        min_p=_share(sampling, "min_p", 0.0),
        kept=bool(body.get("return_sampling_mask")),
    )
    if params.kept and not params.top_k:
        raise BadRequest("return_sampling_mask needs top_k over 0, which bounds how many tokens are kept")
    flat_logprobs = bool(sampling.pop("flat_logprobs", False))
    top_logprobs = _whole(sampling, "logprobs", 0, 0, min(TOP_LOGPROBS_MAX, generator.model.config.vocab_size))
    for name, value in sampling.items():
        if name not in NEUTRAL:
            raise BadRequest(f"sampling parameter {short(name)} is not supported by the embedded server")
        if value not in NEUTRAL[name]:
            raise BadRequest(f"sampling parameter {name!r} must be one of {NEUTRAL[name]}, not {short(value)}")
    try:
        generator.check(len(token_ids), params.max_tokens)
    except ValueError as error:
        raise BadRequest(str(error)) from error
    request_id = str(body.get("request_id") or uuid.uuid4().hex)
    routes = bool(body.get("return_routed_experts"))
    if routes and generator.routing.shape is None:
        raise BadRequest("return_routed_experts: the model has no experts")
    return Request(request_id, token_ids, params, top_logprobs, flat_logprobs, routes)


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


def _whole(sampling: dict, name: str, default: Any, lowest: int, highest: int) -> Any:
    """Take a whole number out of the sampling parameters."""
    value = sampling.pop(name, default)
    if value is not default and (type(value) is not int or not lowest <= value <= highest):
        raise BadRequest(
            f"sampling parameter {name!r} must be a whole number from {lowest} to {highest}, not {short(value)}"
        )
    return value


def temperature_of(sampling: dict) -> float:
    """Take the temperature out of the sampling parameters. 0 is greedy."""
    value = sampling.pop("temperature", 1.0)
    if type(value) not in (int, float) or not (value == 0 or TEMPERATURE_MIN <= value <= TEMPERATURE_MAX):
        raise BadRequest(
            f"sampling parameter 'temperature' must be 0, or a number from {TEMPERATURE_MIN:g} to {TEMPERATURE_MAX:g}, "
            f"not {short(value)}"
        )
    return float(value)


def _share(sampling: dict, name: str, default: float) -> float:
    """Take a number from 0 to 1 out of the sampling parameters."""
    value = sampling.pop(name, default)
    if type(value) not in (int, float) or not 0 <= value <= 1:
        raise BadRequest(f"sampling parameter {name!r} must be a number from 0 to 1, not {short(value)}")
    return float(value)


def short(value: Any) -> str:
    """A value for a message, however long it is."""
    return repr(value)[:100]
