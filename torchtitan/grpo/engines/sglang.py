"""Asynchronous client of SGLang's own generation route: token ids in, token ids and log-probabilities out."""

import asyncio
import uuid
from typing import Any, Generic, TypeVar

import msgspec
import numpy as np

from torchtitan.grpo.data.routes import RouteShape
from torchtitan.grpo.data.samples import FinishReason, TopTokens
from torchtitan.grpo.data.top_tokens import checked
from torchtitan.grpo.engines.http_client import HttpClient, Logprob, Span, Told, versions_of
from torchtitan.grpo.engines.protocol import Completion, EngineError, SamplingParams

GENERATE_ROUTE = "/generate"
ABORT_ROUTE = "/abort_request"
_ABORT_S = 5.0
Id = TypeVar("Id")
_Likely = list[tuple[float | None, int, Any]]
"""Log-probability and id of the likeliest tokens at one position; null is an impossible one."""


class SglangClient(HttpClient):
    """An `EngineClient` for one SGLang server (0.5.15 or newer).

    A prompt's answers are sent as a batch of requests with a seed each. SGLang uses one seed for all samples of one
    request (`n`), so it would give the same answer n times. Seeds need SGLang's `--enable-deterministic-inference`;
    without it they are ignored.

    Args:
        url, api_key, request_timeout_s: See `HttpClient`.
        version: Returns the newest weight version that this server has acknowledged. It is part of each request's key
            in the prefix cache (`extra_key`), so no cached key or value outlives its weights. It also stands in for a
            token's version where the server does not report one (before 0.5.19). Then it is the version at the
            request's start, so a token never counts as newer than it is.
        newest, vocab_size: See `HttpClient`.
    """

    route_hint = "is this an SGLang server?"
    kept_hint = "use SGLang 0.5.23 or newer"

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._name = uuid.uuid4().hex[:8]  # part of each id: another trainer's request with this number may be running
        self._aborts: set[asyncio.Task[None]] = set()

    def _reply_type(self, token_id: Any) -> Any:
        answer: Any = _Answer
        reply: Any = list
        return reply[answer[token_id]]

    async def generate(
        self, prompt_ids: list[int], params: SamplingParams, request_id: str, cohort: tuple[str, int] | None = None
    ) -> list[Completion]:
        """See `EngineClient.generate`. Cancelling the call has the server drop the request. Cohorts are ignored."""
        return await self._generate(prompt_ids, params, request_id, self._version())

    def _likeliest(self, sent: list[_Likely], positions: int, k: int) -> TopTokens:
        if len(sent) != positions or min(map(len, sent), default=k) < k:
            raise ValueError(f"{len(sent)} positions of {k} likeliest tokens, {positions} are due")
        pairs = [entry for own in sent for entry in own[:k]]
        ids = np.fromiter((token for _, token, _ in pairs), np.int64).reshape(positions, k)
        logprobs = np.fromiter((-np.inf if p is None else p for p, _, _ in pairs), np.float64).reshape(positions, k)
        return checked(ids, logprobs, self._vocab_size)

    def _routes(self, shape: RouteShape, text: str, positions: int) -> np.ndarray:
        return shape.from_int32(text, positions)

    def weights(self, version: int) -> dict[str, Any]:
        """What a request says of the weights that it wants."""
        return {"extra_key": str(version)}

    def _spans(self, meta: "_Meta[int]") -> list[Span] | None:
        """Which versions sampled an answer, as far as the server reports them; else one did, the request's."""
        return meta.weight_versions

    async def _generate(
        self, prompt_ids: list[int], params: SamplingParams, request_id: str, version: int
    ) -> list[Completion]:
        deadline = asyncio.get_running_loop().time() + self.request_timeout_s
        ids = [f"{self._name}-{request_id}-{i}" for i in range(params.n)]
        body = {
            "rid": ids,
            "input_ids": [prompt_ids] * params.n,
            "sampling_params": [_sampling_params(params, i) for i in range(params.n)],
            "return_logprob": True,
            "logprob_start_len": -1,  # of the answer alone
            "stream": False,
        } | self.weights(version)
        if params.routes is not None:
            body["return_routed_experts"] = True
        if params.kept:
            body["return_sampling_mask"] = True
        if params.top_tokens:
            body["top_logprobs_num"] = params.top_tokens
        try:
            payload = await self._post(GENERATE_ROUTE, body, request_id, deadline)
        except (asyncio.CancelledError, EngineError):
            # SGLang checks for closed connections only now and then. An abort takes effect at once.
            self._abort(ids)
            raise
        with self._reading(request_id):
            answers = self._reply.decode(payload)
            if len(answers) != params.n:
                raise ValueError(f"{len(answers)} answers, {params.n} were asked")
            metas = [answer.meta_info for answer in answers]
            spans = [self._spans(meta) for meta in metas]
            completions = [_completion(answer, version, own) for answer, own in zip(answers, spans, strict=True)]
            told: list[Told] = [
                (meta.routed_experts, meta.output_token_sampling_mask, meta.output_top_logprobs) for meta in metas
            ]
            self._add_told(params, prompt_ids, completions, told)
        self._check_origin(request_id, [meta.weight_versions for meta in metas], version)
        self._check(request_id, completions, spans, params, version)
        if params.ignore_eos:  # SGLang then ignores `stop_token_ids` too
            completions = [_cut(completion, params.stop_token_ids) for completion in completions]
        return completions

    async def close(self) -> None:
        """See `EngineClient.close`."""
        if self._aborts:
            await asyncio.wait(self._aborts, timeout=_ABORT_S)
        await super().close()

    def _abort(self, ids: list[str]) -> None:
        async def tell() -> None:
            deadline = asyncio.get_running_loop().time() + _ABORT_S
            asked = [self._post(ABORT_ROUTE, {"rid": rid}, rid, deadline) for rid in ids]
            await asyncio.gather(*asked, return_exceptions=True)  # the server may be gone

        task = asyncio.get_running_loop().create_task(tell())
        self._aborts.add(task)
        task.add_done_callback(self._aborts.discard)


def _sampling_params(params: SamplingParams, index: int) -> dict[str, Any]:
    """The sampling parameters of answer `index`. Those that shape the distribution are explicit, since a server's
    defaults may come from the model's generation_config.json."""
    return {
        "temperature": params.temperature,
        "max_new_tokens": params.max_tokens,
        "stop_token_ids": list(params.stop_token_ids),
        "stop": list(params.stop),
        "sampling_seed": None if params.seed is None else params.seed + index,
        "ignore_eos": params.ignore_eos,
        "top_p": params.top_p,
        "top_k": params.top_k or -1,
        "min_p": params.min_p,
        "repetition_penalty": 1.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "no_stop_trim": True,
    }


class _Finish(msgspec.Struct):
    type: str
    message: str | None = None


class _Meta(msgspec.Struct, Generic[Id]):
    finish_reason: _Finish | None = None
    output_token_logprobs: list[tuple[Logprob, int, Any]] | None = None
    output_top_logprobs: list[_Likely] | None = None
    weight_versions: list[Span] | None = None
    routed_experts: str | None = None
    output_token_sampling_mask: list[list[Id]] | None = None
    output_token_sampling_logprobs: list[Logprob] | None = None
    """Among the kept tokens; those of `output_token_logprobs` are among all."""


class _Answer(msgspec.Struct, Generic[Id]):
    meta_info: _Meta[Id]
    output_ids: list[Id] | None = None


_COMPLETE: tuple[FinishReason, ...] = ("stop", "length")


def _completion(answer: _Answer[int], version: int, spans: list[Span] | None) -> Completion:
    token_ids, meta = answer.output_ids or [], answer.meta_info
    if meta.finish_reason is None or meta.finish_reason.type not in _COMPLETE:
        raise ValueError(f"the server aborted an answer after {len(token_ids)} tokens: {meta.finish_reason}")
    logprobs = meta.output_token_sampling_logprobs
    if logprobs is None:
        logprobs = [logprob for logprob, _, _ in meta.output_token_logprobs or []]
    return Completion(
        token_ids=token_ids,
        logprobs=logprobs,
        finish_reason=meta.finish_reason.type,
        versions=versions_of(spans, len(token_ids), version),
    )


def _cut(completion: Completion, stop_token_ids: tuple[int, ...]) -> Completion:
    """The answer up to its first stop token."""
    ends = [i for i, token in enumerate(completion.token_ids) if token in stop_token_ids]
    return completion.stopped_after(ends[0] + 1) if ends else completion
