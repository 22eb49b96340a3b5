"""What every inference engine offers the trainer: token ids in, sampled tokens and their log-probabilities out."""

import errno
import json
import os
import resource
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, Self

import numpy as np

from torchtitan.grpo.data.kept_tokens import KeptTokens
from torchtitan.grpo.data.routes import RouteShape
from torchtitan.grpo.data.samples import ANY_VOCAB, FinishReason, TopTokens
from torchtitan.grpo.errors import PlainError, UserError

COHORT_HEADER = "X-Rollout-Cohort"
"""Request header, "<name>/<size>", of the embedded server: see `cohort` in `EngineClient.generate`."""

_MESSAGE_CHARS = 2000
_NO_FILES = (errno.EMFILE, errno.ENFILE)


class EngineError(PlainError, RuntimeError):
    """A server failed, is gone or took too long. The message names its address."""


class LocalError(UserError):
    """This process has no file descriptor left. No server is to blame, and none leaves traffic for it."""


class Refused(UserError):
    """A server refuses one request as wrong: its tokens, its parameters or its size."""


def raise_if_local(error: BaseException) -> None:
    """Raise LocalError if a request failed because this process may open no more files, and MemoryError if it got no
    memory. Call it with the client's error from its `except` clause."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, MemoryError):
            raise MemoryError from error
        # The resolver of names needs files too, and fails with any number.
        if isinstance(cause, OSError) and (cause.errno in _NO_FILES or _no_files_left()):
            limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
            raise LocalError(
                f"the trainer ran out of file descriptors ({cause.strerror}; its limit is {limit}): raise the limit "
                "before the start (ulimit -Hn), lower [rollout] max_concurrent_requests, or find what a reward or an "
                "environment leaves open (ls -l /proc/PID/fd)"
            ) from error
        cause = cause.__cause__ or cause.__context__


def _no_files_left() -> bool:
    try:
        os.close(os.open(os.devnull, os.O_RDONLY))
    except OSError as error:
        return error.errno in _NO_FILES
    return False


def key_hint(sent: bool) -> str:
    """What to change after HTTP 401.

    Args:
        sent: The request had an API key.
    """
    if sent:
        return (
            "the server refuses the API key in the variable that [rollout] api_key_env names: export the server's own"
        )
    return "the server asks for an API key: name the environment variable that holds it in [rollout] api_key_env"


def error_text(payload: bytes) -> str:
    """The message in the body of a server's error reply, without the JSON around it."""
    text = payload.decode(errors="replace")
    try:
        said = json.loads(text)
    except (ValueError, RecursionError):
        said = text
    while isinstance(said, dict):
        known = [said[key] for key in ("error", "message", "detail", "error_message") if key in said]
        said = known[0] if known else json.dumps(said)
    return str(said)[:_MESSAGE_CHARS]


@dataclass(frozen=True)
class SamplingParams:
    """How a prompt is answered.

    A trainer that divides its logits by the same temperature computes the same log-probabilities. Where top-k, top-p or
    min-p cut tokens, it needs to know which: `kept`. Without it, log-probabilities are those of the engine: of the kept
    tokens alone, or of all.

    Attributes:
        n: Answers to the prompt.
        temperature: Logits are divided by it. 0 is greedy; log-probabilities are then those of temperature 1.
        max_tokens: Longest answer, stop token included.
        stop_token_ids: Tokens that end an answer besides the model's own end tokens. They are part of the answer.
        stop: Texts that end an answer. The token that completes one is part of the answer.
        seed: The same seed, prompt and weights give the same answers. None leaves the seed to the engine.
        ignore_eos: Do not stop at the model's own end tokens; `stop_token_ids` and `stop` still stop.
        top_p: Keep the most likely tokens that have this probability together. 1 keeps all.
        top_k: Keep so many of the most likely tokens. 0 keeps all.
        min_p: Keep tokens of at least this share of the most likely one's probability.
        kept: Have each answer say which tokens could be drawn, with log-probabilities among these. It needs `top_k`.
        routes: Have each answer say which experts computed it, as routes of this shape. None: it need not.
        vocab_size: The model's. No token that an environment puts in may be over it.
        top_tokens: How many of the likeliest tokens to tell, with their log-probabilities, in place of each token.
        first: Answer it before waiting requests that do not say so, where the server schedules by priority.
    """

    n: int
    temperature: float
    max_tokens: int
    stop_token_ids: tuple[int, ...] = ()
    seed: int | None = None
    ignore_eos: bool = False
    stop: tuple[str, ...] = ()
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    kept: bool = False
    routes: RouteShape | None = None
    top_tokens: int = 0
    first: bool = False
    vocab_size: int = ANY_VOCAB

    @property
    def cuts(self) -> bool:
        """Whether only a part of the vocabulary can be drawn."""
        return self.top_p != 1 or self.top_k > 0 or self.min_p > 0


@dataclass
class Completion:
    """One answer. `token_ids`, `logprobs` and `versions` have one entry per answer token.

    Attributes:
        logprobs: log p(token) after the temperature, in float32 precision; among the kept tokens if `kept` is there.
        finish_reason: "stop" (a stop or end token, or a stop string) or "length" (`max_tokens`). What a server aborts
            by itself, as when it is stopped, is an EngineError.
        versions: The weight version that sampled each token.
        server: The address of the server, which the router fills in.
        routes: If asked for: the experts of prompt and answer less its last token, [positions, layers, top_k].
        kept: If asked for: what could be drawn in place of each token.
        top: If asked for: the likeliest tokens in place of each token, after the temperature.
    """

    token_ids: list[int]
    logprobs: list[float]
    finish_reason: FinishReason
    versions: list[int]
    server: str = ""
    routes: np.ndarray | None = field(default=None, compare=False)
    kept: KeptTokens | None = field(default=None, compare=False)
    top: TopTokens | None = field(default=None, compare=False)

    def stopped_after(self, tokens: int) -> Self:
        """The answer as if it had stopped after so many tokens."""
        left_out = len(self.token_ids) - tokens
        return replace(
            self,
            token_ids=self.token_ids[:tokens],
            logprobs=self.logprobs[:tokens],
            versions=self.versions[:tokens],
            finish_reason="stop",
            routes=None if self.routes is None else self.routes[: len(self.routes) - left_out],
            kept=None if self.kept is None else self.kept.first(tokens),
            top=self.top and self.top.cut(tokens),
        )


class EngineClient(Protocol):
    """One server's generation route. All calls of a client come from one asyncio event loop."""

    url: str

    async def generate(
        self, prompt_ids: list[int], params: SamplingParams, request_id: str, cohort: tuple[str, int] | None = None
    ) -> list[Completion]:
        """Answer one prompt `params.n` times.

        Args:
            request_id: Names the request in logs, and orders it within its cohort.
            cohort: (name, number of requests) of a set of requests that the server should start as one batch. Then
                floating-point results do not depend on arrival times. Servers may ignore it.

        Raises:
            EngineError: The server failed, is gone, did not answer in time, or its answer cannot be.
            UserError: The server refuses the request for a reason that the user can fix; Refused for one that is
                in the request.
            LocalError: This process cannot send the request.
        """
        ...

    def weights(self, version: int) -> dict[str, Any]:
        """What a request's body says of the weights that it wants."""
        ...

    def running_versions(self) -> set[int]:
        """Versions that running requests have named. Empty where a server has one version at a time. For any thread."""
        ...

    async def close(self) -> None:
        """Close the connections. Running requests are dropped."""
        ...
