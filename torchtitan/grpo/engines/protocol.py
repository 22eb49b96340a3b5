"""What every inference engine offers the trainer: token ids in, sampled tokens and their log-probabilities out."""

import errno
import json
import resource
from dataclasses import dataclass
from typing import Protocol

from torchtitan.grpo.data.samples import FinishReason
from torchtitan.grpo.errors import UserError

COHORT_HEADER = "X-Rollout-Cohort"
"""Request header, "<name>/<size>", of the embedded server: see `cohort` in `EngineClient.generate`."""

_MESSAGE_CHARS = 2000


class EngineError(RuntimeError):
    """A server failed, is gone or took too long. The message names its address."""


class LocalError(UserError):
    """This process has no file descriptor left. No server is to blame, and none leaves traffic for it."""


def raise_if_local(error: BaseException) -> None:
    """Raise LocalError if a request failed because this process may open no more files. Call it with the client's error
    from its `except` clause."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, OSError) and cause.errno in (errno.EMFILE, errno.ENFILE):
            limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
            raise LocalError(
                f"the trainer ran out of file descriptors ({cause.strerror}; its limit is {limit}): raise the limit "
                "before the start (ulimit -Hn), lower [rollout] max_concurrent_requests, or find what a reward or an "
                "environment leaves open (ls -l /proc/PID/fd)"
            ) from error
        cause = cause.__cause__ or cause.__context__


def error_text(payload: bytes) -> str:
    """The message in the body of a server's error reply, without the JSON around it."""
    text = payload.decode(errors="replace")
    try:
        said = json.loads(text)
    except (ValueError, RecursionError):
        said = text
    while isinstance(said, dict):
        known = [said[key] for key in ("error", "message", "detail") if key in said]
        said = known[0] if known else json.dumps(said)
    return str(said)[:_MESSAGE_CHARS]


@dataclass(frozen=True)
class SamplingParams:
    """How a prompt is answered.

    Only the temperature shapes the distribution. There is no top-p, top-k or penalty, so a trainer that divides its
    logits by the same temperature computes the same log-probabilities.

    Attributes:
        n: Answers to the prompt.
        temperature: Logits are divided by it. 0 is greedy; log-probabilities are then those of temperature 1.
        max_tokens: Longest answer, stop token included.
        stop_token_ids: Tokens that end an answer besides the model's own end tokens. They are part of the answer.
        seed: The same seed, prompt and weights give the same answers. None leaves the seed to the engine.
        ignore_eos: Do not stop at the model's own end tokens; `stop_token_ids` still stop.
    """

    n: int
    temperature: float
    max_tokens: int
    stop_token_ids: tuple[int, ...] = ()
    seed: int | None = None
    ignore_eos: bool = False


@dataclass
class Completion:
    """One answer. `token_ids`, `logprobs` and `versions` have one entry per answer token.

    Attributes:
        logprobs: log p(token) after the temperature, in float32 precision.
        finish_reason: "stop" (a stop or end token) or "length" (`max_tokens`). What a server aborts by itself, as
            when it is stopped, is an EngineError.
        versions: The weight version that sampled each token.
        server: The address of the server, which the router fills in.
    """

    token_ids: list[int]
    logprobs: list[float]
    finish_reason: FinishReason
    versions: list[int]
    server: str = ""


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
            UserError: The server refuses the request for a reason that the user can fix.
            LocalError: This process cannot send the request.
        """
        ...

    async def close(self) -> None:
        """Close the connections. Running requests are dropped."""
        ...
