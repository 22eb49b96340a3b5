"""Clients of a teacher's server: token ids in, the log-probability of each answer token out."""

import asyncio
from typing import Any

import msgspec

from torchtitan.grpo.engines.http_client import HttpClient, Logprob
from torchtitan.grpo.engines.sglang import GENERATE_ROUTE

COMPLETIONS_ROUTE = "/v1/completions"
Asked = tuple[list[int], list[int]]
"""Token ids of a prompt and of an answer to it."""


class Scorer(HttpClient):
    """Requests to one teacher's server. All calls come from one asyncio event loop.

    Args:
        url, api_key: See `HttpClient`.
        model: The name by which it serves the teacher.
        request_timeout_s: Longest wait for one request.
        temperature: The sampler's, by which the teacher's logits are divided.

    Attributes:
        in_flight: Requests that run now.
        failing: The last request failed.
    """

    def __init__(
        self, url: str, api_key: str | None, model: str, request_timeout_s: float, temperature: float = 1.0
    ) -> None:
        super().__init__(url, api_key, request_timeout_s, version=lambda: -1)
        self.model = model
        self.temperature = temperature
        self.in_flight = 0
        self.failing = False

    async def score(self, asked: list[Asked], request_id: str) -> list[list[float]]:
        """log p(token | prompt, tokens before it) of each token of each answer, at `temperature`.

        Answers go in one request, so that an embedded teacher computes them as one batch: its results then do not
        depend on what else it is asked.

        Args:
            asked: One answer or more, each of at least one token.

        Raises:
            EngineError: The server failed, is gone, did not answer in time, or its reply cannot be.
            UserError: It refuses the request for a reason that the user can fix.
            LocalError: This process cannot send the request.
        """
        deadline = asyncio.get_running_loop().time() + self.request_timeout_s
        payload = await self._post(*self._request(asked), request_id, deadline)
        with self._reading(request_id):
            logprobs = self._read(payload, asked)
            found, wanted = [len(own) for own in logprobs], [len(answer) for _, answer in asked]
            if found != wanted:
                raise ValueError(f"{found} log-probabilities for answers of {wanted} tokens")
            return logprobs

    def _request(self, asked: list[Asked]) -> tuple[str, dict[str, Any]]:
        """Route and body."""
        raise NotImplementedError

    def _read(self, payload: bytes, asked: list[Asked]) -> list[list[float]]:
        """The log-probabilities in a reply. ValueError if it is about other tokens."""
        raise NotImplementedError


class VllmScorer(Scorer):
    """Any vLLM server, by `prompt_logprobs` of OpenAI's completions route.

    vLLM applies no sampling parameter to them, whatever its `--logprobs-mode`: they are those of temperature 1 (0.32:
    `GPUModelRunner._get_prompt_logprobs_dict`). It computes the whole prompt for such a request, without cached
    prefixes, and samples one token, which is ignored.
    """

    route_hint = "is this a vLLM server that generates?"

    def _reply_type(self, token_id: Any) -> Any:
        return _Completions

    def _request(self, asked: list[Asked]) -> tuple[str, dict[str, Any]]:
        sequences = [prompt + answer for prompt, answer in asked]
        sampling = {"max_tokens": 1, "temperature": 1.0, "prompt_logprobs": 0}
        return COMPLETIONS_ROUTE, {"model": self.model, "prompt": sequences, **sampling}

    def _read(self, payload: bytes, asked: list[Asked]) -> list[list[float]]:
        choices = {choice.index: choice for choice in self._reply.decode(payload).choices}
        if sorted(choices) != list(range(len(asked))):
            raise ValueError(f"{len(choices)} choices for {len(asked)} answers")
        return [_of_answer(choices[i].prompt_logprobs, len(prompt), answer) for i, (prompt, answer) in enumerate(asked)]


class EmbeddedScorer(VllmScorer):
    """The embedded server, whose completions route only scores. It divides logits by a temperature of the request."""

    route_hint = "is this an embedded server?"

    def _request(self, asked: list[Asked]) -> tuple[str, dict[str, Any]]:
        route, body = super()._request(asked)
        return route, body | {"prompt_logprobs_temperature": self.temperature}


class SglangScorer(Scorer):
    """An SGLang server, by `logprob_start_len` of its own route.

    Input log-probabilities are those of temperature 1, whatever the request's temperature is: the sampler's scaling
    applies to tokens that it samples. Prefixes up to the answers are cached.
    """

    route_hint = "is this an SGLang server?"

    def _reply_type(self, token_id: Any) -> Any:
        return list[_Answer]

    def _request(self, asked: list[Asked]) -> tuple[str, dict[str, Any]]:
        return GENERATE_ROUTE, {
            "input_ids": [prompt + answer for prompt, answer in asked],
            "sampling_params": [{"max_new_tokens": 0, "temperature": 1.0}] * len(asked),
            "return_logprob": True,
            "logprob_start_len": [len(prompt) - 1 for prompt, _ in asked],  # the reply's first entry is None
            "stream": False,
        }

    def _read(self, payload: bytes, asked: list[Asked]) -> list[list[float]]:
        replies = self._reply.decode(payload)
        if len(replies) != len(asked):
            raise ValueError(f"{len(replies)} replies for {len(asked)} answers")
        return [[_known(entry[0]) for entry in reply.meta_info.input_token_logprobs[1:]] for reply in replies]


SCORERS: dict[str, type[Scorer]] = {"embedded": EmbeddedScorer, "vllm": VllmScorer, "sglang": SglangScorer}
"""`[distill] engine` -> its client."""


class _Token(msgspec.Struct):
    logprob: Logprob


class _Choice(msgspec.Struct):
    index: int
    prompt_logprobs: list[dict[int, _Token] | None]


class _Completions(msgspec.Struct):
    choices: list[_Choice]


class _Meta(msgspec.Struct):
    input_token_logprobs: list[tuple[Logprob | None, int, Any]]


class _Answer(msgspec.Struct):
    meta_info: _Meta


def _of_answer(positions: list[dict[int, _Token] | None], prompt_tokens: int, answer: list[int]) -> list[float]:
    found = positions[prompt_tokens:]
    if len(found) != len(answer):
        raise ValueError(f"{len(found)} positions after the prompt for {len(answer)} tokens")
    missing = [token for token, known in zip(answer, found, strict=True) if known is None or token not in known]
    if missing:
        raise ValueError(f"no log-probability of token {missing[0]}, which was sent")
    return [known[token].logprob for token, known in zip(answer, found, strict=True) if known is not None]


def _known(logprob: float | None) -> float:
    if logprob is None:
        raise ValueError("a token of the answer has no log-probability")
    return logprob
