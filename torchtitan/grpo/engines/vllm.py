"""Asynchronous client of vLLM's token-in, token-out route, which the embedded server has too."""

import asyncio
from typing import Any, Generic, TypeVar

import msgspec

from torchtitan.grpo.data.samples import FinishReason
from torchtitan.grpo.data.top_tokens import Arrays
from torchtitan.grpo.engines.http_client import HttpClient, Logprob, Span, Told, versions_of
from torchtitan.grpo.engines.protocol import COHORT_HEADER, Completion, SamplingParams

GENERATE_ROUTE = "/inference/v1/generate"
_FINAL_ONLY = 2
Id = TypeVar("Id")


class VllmClient(HttpClient):
    """An `EngineClient` for one vLLM (0.25 to 0.33) or embedded server.

    Args:
        url: The server's base address.
        api_key: Sent as a bearer token; None sends none.
        request_timeout_s: Longest wait for one `generate`, from sending to the last byte.
        version: Returns the newest weight version that this server has acknowledged. It is each request's cache salt,
            so no cached prefix outlives its weights. It also stands in for a token's version where the server does not
            report one (vLLM before 0.32 without `inside_vllm/before_vllm_0_32.py`). Then it is the version at the
            request's start, so a token never counts as newer than it is. From version 0 on, a token sampled by weights
            of another name is an EngineError: a server has such a name only until its first update, so it was
            restarted.
        newest, vocab_size: See `HttpClient`.
    """

    routes_hint = "start vLLM with --enable-return-routed-experts --moe-backend triton"
    kept_hint = "start vLLM (0.32 or newer) with --return-sampling-mask"
    route_hint = "start vLLM with --enable-scale-out (0.32 and newer)"

    def _reply_type(self, token_id: Any) -> Any:
        reply: Any = _Reply
        return reply[token_id]

    async def generate(
        self, prompt_ids: list[int], params: SamplingParams, request_id: str, cohort: tuple[str, int] | None = None
    ) -> list[Completion]:
        """See `EngineClient.generate`. Cancelling the call closes the connection, and the server drops the request."""
        deadline = asyncio.get_running_loop().time() + self.request_timeout_s
        version = self._version()
        body: dict[str, Any] = {
            "request_id": request_id,
            "token_ids": prompt_ids,
            "sampling_params": _sampling_params(params),
            "cache_salt": str(version),
        }
        if params.first:
            body["priority"] = -1  # without effect if vLLM schedules in order of arrival
        if params.routes is not None:
            body["return_routed_experts"] = True  # vLLM ignores it, and tells if it was started so
        if params.kept:
            body["return_sampling_mask"] = True  # the same
        headers = {COHORT_HEADER: f"{cohort[0]}/{cohort[1]}"} if cohort else {}
        payload = await self._post(GENERATE_ROUTE, body, request_id, deadline, headers)
        with self._reading(request_id):
            choices = sorted(self._reply.decode(payload).choices, key=lambda choice: choice.index)
            if [choice.index for choice in choices] != list(range(params.n)):
                raise ValueError(f"{len(choices)} answers, {params.n} were asked, with numbers 0 to {params.n - 1}")
            completions = [_completion(choice, version) for choice in choices]
            told: list[Told] = [(c.routed_experts, c.kept_tokens or c.sampling_mask, c.top_tokens) for c in choices]
            self._add_told(params, prompt_ids, completions, told)
        spans = [choice.weight_versions for choice in choices]
        self._check_origin(request_id, spans, version)
        self._check(request_id, completions, spans, params, version)
        return completions


def _sampling_params(params: SamplingParams) -> dict[str, Any]:
    """The request's sampling parameters. Those that shape the distribution are explicit, since a server's defaults may
    come from the model's generation_config.json. A vLLM that tells the kept tokens is never asked for a temperature of
    0, or for all tokens, which it refuses."""
    picks = params.top_k > 0 and not params.temperature
    return {
        "n": params.n,
        "temperature": 1.0 if picks else params.temperature,
        "max_tokens": params.max_tokens,
        "stop_token_ids": list(params.stop_token_ids),
        "seed": params.seed,
        "stop": list(params.stop),
        "ignore_eos": params.ignore_eos,
        "top_p": params.top_p,
        "top_k": 1 if picks else params.top_k,
        "min_p": params.min_p,
        "repetition_penalty": 1.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "logprobs": params.top_tokens,
        "flat_logprobs": True,  # see `inside_vllm/flat_logprobs.py`
        "detokenize": bool(params.stop),  # vLLM's API server looks for stop strings in the text
        # With vLLM 0.25's default, cumulative outputs, its route reports only one of n choices.
        "output_kind": _FINAL_ONLY,
    }


class _Token(msgspec.Struct):
    logprob: Logprob


class _Logprobs(msgspec.Struct):
    content: list[_Token] | None = None


class _Choice(msgspec.Struct, Generic[Id]):
    index: int
    token_ids: list[Id] | None = None
    logprobs: _Logprobs | None = None
    token_logprobs: list[Logprob] | None = None
    finish_reason: FinishReason | None = None
    weight_versions: list[Span] | None = None
    routed_experts: str | None = None
    sampling_mask: list[list[Id]] | None = None
    kept_tokens: str | None = None
    top_tokens: Arrays | None = None


class _Reply(msgspec.Struct, Generic[Id]):
    """The parts of an answer that are read. Parsing takes the event loop's time, and this is several times faster than
    `json`, which makes a dictionary of each token."""

    choices: list[_Choice[Id]]


def _completion(choice: _Choice[int], version: int) -> Completion:
    token_ids = choice.token_ids or []
    logprobs = choice.token_logprobs
    if logprobs is None:  # a vLLM in which our plug-in's flat replies are not installed
        logprobs = [token.logprob for token in (choice.logprobs and choice.logprobs.content) or []]
    return Completion(
        token_ids=token_ids,
        logprobs=logprobs,
        finish_reason=choice.finish_reason or "abort",
        versions=versions_of(choice.weight_versions, len(token_ids), version),
    )
