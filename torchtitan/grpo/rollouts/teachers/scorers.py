"""Clients of a teacher's server: token ids in, log-probabilities of each answer token and the likeliest ones out."""

import asyncio
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import chain
from typing import Annotated, Any

import msgspec
import numpy as np

from torchtitan.grpo.data.samples import ANY_VOCAB, IMPOSSIBLE, TopTokens
from torchtitan.grpo.data.top_tokens import Arrays, checked, read
from torchtitan.grpo.engines.http_client import LARGEST_LOGPROB, HttpClient
from torchtitan.grpo.engines.sglang import GENERATE_ROUTE
from torchtitan.grpo.inside_vllm.flat_logprobs import LOWEST
from torchtitan.grpo.inside_vllm.prompt_scores import ARGUMENT

COMPLETIONS_ROUTE = "/v1/completions"
Logprob = Annotated[float, msgspec.Meta(ge=-1e4, le=LARGEST_LOGPROB)]
"""The range of what a teacher says of a token. It may find one impossible: servers write -9999 for -inf."""
Asked = tuple[list[int], list[int]]
"""Token ids of a prompt and of an answer to it."""


@dataclass(frozen=True)
class Scores:
    """What a teacher says of one answer.

    Attributes:
        logprobs: log p(token | prompt, tokens before it) of each of its tokens.
        top: The teacher's likeliest tokens in place of each; None if none were asked for.
    """

    logprobs: list[float]
    top: TopTokens | None


class Scorer(HttpClient):
    """Requests to one teacher's server. All calls come from one asyncio event loop.

    Args:
        url, api_key: See `HttpClient`.
        model: The name by which it serves the teacher.
        request_timeout_s: Longest wait for one request.
        temperature: The sampler's, by which the teacher's logits are divided.
        top_k: How many likeliest tokens are asked for at each position.
        vocab_size: Of the trained model. The teacher's may have further rows, which no tokenizer uses: such a token is
            left out of the likeliest.

    Attributes:
        extra: What an SGLang request says besides: of the weights that are to score, and of the cache.
        cut: `[rollout] top_k`, which a vLLM that tells kept tokens demands of every request. It changes no score.
        in_flight: Requests that run now.
        failing: The last request failed.
    """

    def __init__(
        self,
        url: str,
        api_key: str | None,
        model: str,
        request_timeout_s: float,
        temperature: float = 1.0,
        top_k: int = 0,
        vocab_size: int = ANY_VOCAB,
    ) -> None:
        super().__init__(url, api_key, request_timeout_s, version=lambda: -1)
        self.model = model
        self.temperature = temperature
        self.top_k = top_k
        self._vocab_size = vocab_size
        self.extra: dict[str, Any] = {}
        self.cut = 0
        self.in_flight = 0
        self.failing = False

    async def score(self, asked: list[Asked], request_id: str) -> list[Scores]:
        """Each answer's scores, at `temperature`.

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
            scores = self._read(payload, asked)
            found, wanted = [len(own.logprobs) for own in scores], [len(answer) for _, answer in asked]
            if found != wanted:
                raise ValueError(f"{found} log-probabilities for answers of {wanted} tokens")
            if all(max(own.logprobs) <= IMPOSSIBLE for own in scores):
                raise ValueError("no token of any answer is possible: are the teacher's logits NaN?")
            return scores

    def _request(self, asked: list[Asked]) -> tuple[str, dict[str, Any]]:
        """Route and body."""
        raise NotImplementedError

    def _read(self, payload: bytes, asked: list[Asked]) -> list[Scores]:
        """What a reply says. ValueError if it is about other tokens."""
        raise NotImplementedError

    def _top(self, lengths: list[int], ids: Iterable[int], logprobs: Iterable[float]) -> TopTokens | None:
        """The likeliest tokens at each position, of which a reply has `lengths`, laid end to end.

        Arrays, since this takes the event loop's time: a list for each position takes ten times as long.
        """
        k, positions = self.top_k, len(lengths)
        if not k:
            return None
        if min(lengths, default=k) < k:
            raise ValueError(f"{min(lengths)} of the {k} likeliest tokens ([distill] top_k)")
        tokens, values = np.fromiter(ids, np.int64), np.fromiter(logprobs, np.float64)
        starts = np.cumsum([0, *lengths[:-1]])
        of_position: np.ndarray = np.repeat(np.arange(positions), lengths)
        order = np.lexsort((-values, of_position))
        best = order[(starts[:, None] + np.arange(k)).flatten()] if positions else order
        return checked(tokens[best].reshape(positions, k), values[best].reshape(positions, k), self._vocab_size)


class VllmScorer(Scorer):
    """Any vLLM server, by `prompt_logprobs` of OpenAI's completions route.

    vLLM applies no sampling parameter to them: they are those of temperature 1, unless its `--logprobs-mode` asks for
    logits (0.32: `GPUModelRunner._get_prompt_logprobs_dict`). It computes the whole prompt for such a request, without
    cached prefixes, and samples one token, which is ignored. A server with this project's plug-in replies with arrays
    (`inside_vllm/prompt_scores.py`).
    """

    route_hint = "is this a vLLM server that generates?"

    def _reply_type(self, token_id: Any) -> Any:
        return _Completions

    def _request(self, asked: list[Asked]) -> tuple[str, dict[str, Any]]:
        starts = {ARGUMENT: ",".join(str(len(prompt)) for prompt, _ in asked)}
        return COMPLETIONS_ROUTE, self._body(asked) | {"vllm_xargs": starts}

    def _body(self, asked: list[Asked]) -> dict[str, Any]:
        sequences = [prompt + answer for prompt, answer in asked]
        sampling = {"max_tokens": 1, "temperature": 1.0, "prompt_logprobs": self.top_k}
        return {"model": self.model, "prompt": sequences, **sampling} | ({"top_k": self.cut} if self.cut else {})

    def _read(self, payload: bytes, asked: list[Asked]) -> list[Scores]:
        choices = {choice.index: choice for choice in self._reply.decode(payload).choices}
        if sorted(choices) != list(range(len(asked))):
            raise ValueError(f"{len(choices)} choices for {len(asked)} answers")
        return [self._of_choice(choices[i], len(prompt), answer) for i, (prompt, answer) in enumerate(asked)]

    def _of_choice(self, choice: "_Choice", prompt_tokens: int, answer: list[int]) -> Scores:
        if choice.prompt_scores is not None:
            return self._of_arrays(choice.prompt_scores, answer)
        own = _of_answer(choice.prompt_logprobs or [], prompt_tokens, answer)
        entries = (known.logprob for position in own for known in position.values())
        return Scores(
            [position[token].logprob for token, position in zip(answer, own, strict=True)],
            self._top(list(map(len, own)), chain.from_iterable(own), entries),
        )

    def _of_arrays(self, sent: Arrays, answer: list[int]) -> Scores:
        ids, logprobs = read(sent, len(answer), self.top_k)
        if ids[:, 0].tolist() != answer:
            raise ValueError("log-probabilities of other tokens than were sent")
        if not (logprobs <= LARGEST_LOGPROB).all():
            raise ValueError("a log-probability that is NaN or over 0: are they logits (--logprobs-mode)?")
        likeliest = checked(ids[:, 1:], logprobs[:, 1:], self._vocab_size) if self.top_k else None
        return Scores(np.maximum(logprobs[:, 0], LOWEST).tolist(), likeliest)


class EmbeddedScorer(VllmScorer):
    """The embedded server, whose completions route only scores. It divides logits by a temperature of the request."""

    route_hint = "is this an embedded server?"

    def _request(self, asked: list[Asked]) -> tuple[str, dict[str, Any]]:
        return COMPLETIONS_ROUTE, self._body(asked) | {"prompt_logprobs_temperature": self.temperature}


class SglangScorer(Scorer):
    """An SGLang server, by `logprob_start_len` of its own route.

    Input log-probabilities are those of temperature 1, whatever the request's temperature is: the sampler's scaling
    applies to tokens that it samples. Prefixes up to the answers are cached.
    """

    route_hint = "is this an SGLang server?"

    def _reply_type(self, token_id: Any) -> Any:
        return list[_Answer]

    def _request(self, asked: list[Asked]) -> tuple[str, dict[str, Any]]:
        likeliest = {"top_logprobs_num": [self.top_k] * len(asked)} if self.top_k else {}
        return GENERATE_ROUTE, likeliest | self.extra | {
            "input_ids": [prompt + answer for prompt, answer in asked],
            "sampling_params": [{"max_new_tokens": 0, "temperature": 1.0}] * len(asked),
            "return_logprob": True,
            "logprob_start_len": [len(prompt) - 1 for prompt, _ in asked],  # the reply's first entry is None
            "stream": False,
        }

    def _read(self, payload: bytes, asked: list[Asked]) -> list[Scores]:
        replies = self._reply.decode(payload)
        if len(replies) != len(asked):
            raise ValueError(f"{len(replies)} replies for {len(asked)} answers")
        return [self._of_reply(reply.meta_info) for reply in replies]

    def _of_reply(self, meta: "_Meta") -> Scores:  # null stands for -inf
        logprobs = [LOWEST if entry[0] is None else entry[0] for entry in meta.input_token_logprobs[1:]]
        likeliest = [own or [] for own in (meta.input_top_logprobs or [])[1:]] if self.top_k else []
        if self.top_k and len(likeliest) != len(logprobs):
            raise ValueError(f"the likeliest tokens of {len(likeliest)} positions for {len(logprobs)} tokens")
        entries = list(chain.from_iterable(likeliest))
        of_entries = (-np.inf if value is None else value for value, _, _ in entries)
        return Scores(logprobs, self._top(list(map(len, likeliest)), (token for _, token, _ in entries), of_entries))


class _Token(msgspec.Struct):
    logprob: Logprob


class _Choice(msgspec.Struct):
    index: int
    prompt_logprobs: list[dict[int, _Token] | None] | None = None
    prompt_scores: Arrays | None = None


class _Completions(msgspec.Struct):
    choices: list[_Choice]


class _Meta(msgspec.Struct):
    input_token_logprobs: list[tuple[Logprob | None, int, Any]]
    input_top_logprobs: list[list[tuple[Logprob | None, int, Any]] | None] | None = None


class _Answer(msgspec.Struct):
    meta_info: _Meta


def _of_answer(
    positions: list[dict[int, _Token] | None], prompt_tokens: int, answer: list[int]
) -> list[dict[int, _Token]]:
    """What is known at each of the answer's tokens, that token included."""
    found = positions[prompt_tokens:]
    if len(found) != len(answer):
        raise ValueError(f"{len(found)} positions after the prompt for {len(answer)} tokens")
    missing = [token for token, known in zip(answer, found, strict=True) if known is None or token not in known]
    if missing:
        raise ValueError(f"no log-probability of token {missing[0]}, which was sent")
    return [known for known in found if known is not None]
