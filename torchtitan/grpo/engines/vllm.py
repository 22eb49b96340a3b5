"""Asynchronous client of vLLM's token-in, token-out route, which the embedded server speaks too."""

import asyncio
import dataclasses
from collections.abc import Callable
from typing import Any

import aiohttp
import msgspec

from torchtitan.grpo.engines.control import KEEPALIVE_S
from torchtitan.grpo.engines.protocol import Completion, EngineError, SamplingParams, error_text
from torchtitan.grpo.errors import UserError
from torchtitan.grpo.rollouts.samples import FinishReason

GENERATE_ROUTE = "/inference/v1/generate"
COHORT_HEADER = "X-Rollout-Cohort"
_FINAL_ONLY = 2


class VllmClient:
    """An `EngineClient` for one vLLM (0.25 to 0.32) or embedded server.

    Args:
        url: The server's base address.
        api_key: Sent as a bearer token; None sends none.
        request_timeout_s: Longest wait for one `generate`, from sending to the last byte.
        version: The newest weight version that this server has acknowledged. It is each request's cache salt, so
            that no prefix cache outlives its weights, and stands in for a token's version where the server does not
            report one (vLLM before 0.32, if `weight_sync.token_versions` could not have it do so); then it is that of
            the request's start, so that a token is never taken to be newer than it is. From 0 on a token that was
            sampled by weights of another name is an `EngineError`: a server names its weights so until it is given
            any, so it was restarted and its answers are not ours.
    """

    def __init__(self, url: str, api_key: str | None, request_timeout_s: float, version: Callable[[], int]) -> None:
        self.url = url.rstrip("/")
        self.request_timeout_s = request_timeout_s
        self._version = version
        self._headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._session: aiohttp.ClientSession | None = None

    async def generate(
        self, prompt_ids: list[int], params: SamplingParams, request_id: str, cohort: tuple[str, int] | None = None
    ) -> list[Completion]:
        """See `EngineClient.generate`. Cancelling the call closes the connection, and the server drops the request."""
        deadline = asyncio.get_running_loop().time() + self.request_timeout_s
        completions = await self._ask(prompt_ids, params, request_id, cohort, deadline)
        if len(completions) < params.n:
            # A version whose route reports one choice only: ask for the others one by one, with the seeds that
            # vLLM itself derives for the choices of one request.
            singles = [
                dataclasses.replace(params, n=1, seed=None if params.seed is None else params.seed + i)
                for i in range(params.n)
            ]
            asked = [
                self._ask(prompt_ids, single, f"{request_id}-{i}", None, deadline) for i, single in enumerate(singles)
            ]
            completions = [answers[0] for answers in await asyncio.gather(*asked)]
        return completions

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()

    async def _ask(
        self,
        prompt_ids: list[int],
        params: SamplingParams,
        request_id: str,
        cohort: tuple[str, int] | None,
        deadline: float,
    ) -> list[Completion]:
        version = self._version()
        body = {
            "request_id": request_id,
            "token_ids": prompt_ids,
            "sampling_params": _sampling_params(params),
            "cache_salt": str(version),
        }
        headers = {COHORT_HEADER: f"{cohort[0]}/{cohort[1]}"} if cohort else {}
        if self._session is None:
            # Made here, inside the event loop. No limit on connections: the collector limits requests.
            connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEPALIVE_S)
            self._session = aiohttp.ClientSession(connector=connector, headers=self._headers)
        remaining_s = max(deadline - asyncio.get_running_loop().time(), 0.001)
        timeout = aiohttp.ClientTimeout(total=remaining_s)
        try:
            async with self._session.post(
                self.url + GENERATE_ROUTE, json=body, headers=headers, timeout=timeout
            ) as reply:
                status, payload = reply.status, await reply.read()
        except TimeoutError as error:
            raise EngineError(
                f"{self.url}: no answer to request {request_id} within {self.request_timeout_s:g} s "
                "([rollout] request_timeout_seconds)"
            ) from error
        except aiohttp.ClientError as error:
            raise EngineError(f"{self.url}: request {request_id}: {type(error).__name__}: {error}") from error
        if status != 200:
            self._raise_for_status(status, payload, request_id)
        try:
            choices = _REPLY.decode(payload).choices
        except msgspec.MsgspecError as error:
            raise EngineError(f"{self.url}: request {request_id}: the answer is not as expected: {error}") from error
        foreign = [span.version for c in choices for span in c.weight_versions or [] if not span.version.isdecimal()]
        if foreign and version >= 0:
            raise EngineError(
                f"{self.url}: request {request_id} was answered by weights {foreign[0]!r} in place of version "
                f"{version}: the server was restarted and serves other weights"
            )
        completions = [_completion(choice, version) for choice in sorted(choices, key=lambda choice: choice.index)]
        for completion in completions:
            if len(completion.logprobs) != len(completion.token_ids):
                raise EngineError(
                    f"{self.url}: request {request_id}: {len(completion.token_ids)} tokens came with "
                    f"{len(completion.logprobs)} log-probabilities"
                )
        return completions

    def _raise_for_status(self, status: int, payload: bytes, request_id: str) -> None:
        said = error_text(payload)
        if status == 401:
            raise UserError(
                f"{self.url}: HTTP 401: name the environment variable that holds the server's API key in "
                "[rollout] api_key_env"
            )
        if status in (403, 404):
            raise UserError(
                f"{self.url}: HTTP {status} on {GENERATE_ROUTE}: start vLLM with --enable-scale-out (0.32 and newer)"
            )
        if status in (400, 413, 422):
            raise UserError(f"{self.url} refuses request {request_id}: {said}")
        raise EngineError(f"{self.url}: request {request_id}: HTTP {status}: {said}")


def _sampling_params(params: SamplingParams) -> dict[str, Any]:
    """The request's sampling parameters. All that shape the distribution are explicit: a server's defaults may come
    from the model's generation_config.json."""
    return {
        "n": params.n,
        "temperature": params.temperature,
        "max_tokens": params.max_tokens,
        "stop_token_ids": list(params.stop_token_ids),
        "seed": params.seed,
        "ignore_eos": params.ignore_eos,
        "top_p": 1.0,
        "top_k": 0,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "logprobs": 0,
        "detokenize": False,
        # vLLM 0.25's route keeps the default, cumulative outputs, and then reports only one of n choices.
        "output_kind": _FINAL_ONLY,
    }


class _Span(msgspec.Struct):
    version: str
    start: int
    end: int


class _Token(msgspec.Struct):
    logprob: float


class _Logprobs(msgspec.Struct):
    content: list[_Token] | None = None


class _Choice(msgspec.Struct):
    index: int
    token_ids: list[int] | None = None
    logprobs: _Logprobs | None = None
    finish_reason: FinishReason | None = None
    weight_versions: list[_Span] | None = None


class _Reply(msgspec.Struct):
    """What is read of an answer. Parsing shares the interpreter with the trainer: this is several times faster than
    `json`, which makes a dictionary of each token."""

    choices: list[_Choice]


_REPLY = msgspec.json.Decoder(_Reply)


def _completion(choice: _Choice, version: int) -> Completion:
    token_ids = choice.token_ids or []
    versions = [version] * len(token_ids)
    for span in choice.weight_versions or []:
        # Ours are decimal; servers start with a name of their own ("default"), and have it while `version` is -1.
        if span.version.isdecimal():
            versions[span.start : span.end] = [int(span.version)] * (span.end - span.start)
    content = (choice.logprobs and choice.logprobs.content) or []
    return Completion(
        token_ids=token_ids,
        logprobs=[token.logprob for token in content],
        finish_reason=choice.finish_reason or "abort",
        versions=versions,
    )
