"""The HTTP side of an `EngineClient`: a connection pool, a deadline per request, errors that say what to change."""

import asyncio
import contextlib
from collections.abc import Callable, Iterator
from typing import Annotated, Any

import aiohttp
import msgspec
import numpy as np

from torchtitan.grpo.data.kept_tokens import KeptTokens
from torchtitan.grpo.data.routes import RouteShape
from torchtitan.grpo.data.samples import ANY_VOCAB, IMPOSSIBLE, TopTokens
from torchtitan.grpo.data.top_tokens import checked, read
from torchtitan.grpo.engines.http_control import KEEPALIVE_S
from torchtitan.grpo.engines.protocol import (
    Completion,
    EngineError,
    Refused,
    SamplingParams,
    error_text,
    key_hint,
    raise_if_local,
)
from torchtitan.grpo.errors import UserError
from torchtitan.grpo.weight_wire.version_names import origin, version_of

_ERROR_CHARS = 300
LARGEST_LOGPROB = 1e-3
Logprob = Annotated[float, msgspec.Meta(gt=IMPOSSIBLE, le=LARGEST_LOGPROB)]
"""The range of a sampled token's log-probability. Only rounding takes it above 0."""


class Span(msgspec.Struct):
    """Tokens `start` to `end` - 1 of an answer were sampled by weights `version`."""

    version: str
    start: int
    end: int


Told = tuple[str | None, str | list[list[int]] | None, Any]
"""What a server tells of an answer beside its tokens: experts, kept tokens and likeliest tokens, as it sends them."""


class HttpClient:
    """Requests to one server's generation route. All calls of a client come from one asyncio event loop.

    Args:
        url: The server's base address.
        api_key: Sent as a bearer token; None sends none.
        request_timeout_s: Longest wait for one answer, from sending the request to the last byte.
        version: Returns the newest weight version that this server has acknowledged. No token may be older.
        newest: Returns the newest weight version that any server was sent. No token may be newer. None: no check.
        vocab_size: Token ids of an answer are below this.
    """

    route_hint = ""
    """What to change if the server does not have the route."""
    routes_hint = "start the server with --enable-return-routed-experts"
    kept_hint = ""
    top_hint = "the server needs this project's plug-in (docs/servers.md)"

    def __init__(
        self,
        url: str,
        api_key: str | None,
        request_timeout_s: float,
        version: Callable[[], int],
        newest: Callable[[], int] | None = None,
        vocab_size: int = ANY_VOCAB,
    ) -> None:
        self.url = url.rstrip("/")
        self.request_timeout_s = request_timeout_s
        self._version = version
        self._newest = newest
        self._vocab_size = vocab_size
        self._reply = msgspec.json.Decoder(self._reply_type(Annotated[int, msgspec.Meta(ge=0, lt=vocab_size)]))
        self._headers = {"Content-Type": "application/json"}
        if api_key:
            self._headers["Authorization"] = f"Bearer {api_key}"
        self._session: aiohttp.ClientSession | None = None

    def _reply_type(self, token_id: Any) -> Any:
        """What a reply is parsed as, given the type of a token id. The parser checks the id's range."""
        raise NotImplementedError

    def running_versions(self) -> set[int]:
        """See `EngineClient.running_versions`."""
        return set()

    def weights(self, version: int) -> dict[str, Any]:
        """What a request says of the weights that it wants, besides the cache that goes with them."""
        return {}

    async def close(self) -> None:
        """See `EngineClient.close`."""
        if self._session is not None:
            await self._session.close()

    async def _post(
        self, route: str, body: dict[str, Any], request_id: str, deadline: float, headers: dict[str, str] | None = None
    ) -> bytes:
        """The body of a 200 reply.

        Args:
            deadline: On the event loop's clock.

        Raises:
            EngineError: The server failed, is gone, or did not answer in time.
            UserError: It refuses every request, for a reason that the user can fix.
            Refused: It refuses this one.
            LocalError: This process cannot send the request.
        """
        if self._session is None:
            # Created here, inside the event loop. Connections have no limit, since the collector limits requests.
            connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEPALIVE_S)
            self._session = aiohttp.ClientSession(connector=connector, headers=self._headers)
        remaining_s = max(deadline - asyncio.get_running_loop().time(), 0.001)
        timeout = aiohttp.ClientTimeout(total=remaining_s)
        data = msgspec.json.encode(body)  # fast, since it takes the event loop's time
        try:
            async with self._session.post(self.url + route, data=data, headers=headers, timeout=timeout) as reply:
                status, payload = reply.status, await reply.read()
        except TimeoutError as error:
            raise EngineError(
                f"{self.url}: no answer to request {request_id} within {self.request_timeout_s:g} s "
                "([rollout] request_timeout_seconds)"
            ) from error
        except aiohttp.ClientError as error:
            raise_if_local(error)
            raise EngineError(f"{self.url}: request {request_id}: {type(error).__name__}: {error}") from error
        if status != 200:
            self._raise_for_status(route, status, payload, request_id)
        return payload

    def _raise_for_status(self, route: str, status: int, payload: bytes, request_id: str) -> None:
        said = error_text(payload)
        if status == 401:
            raise UserError(f"{self.url}: HTTP 401 on {route}: {key_hint('Authorization' in self._headers)}")
        if status in (403, 404):
            raise UserError(f"{self.url}: HTTP {status} on {route}: {self.route_hint}")
        if status in (400, 413, 422):
            raise Refused(f"{self.url} refuses request {request_id}: {said}")
        raise EngineError(f"{self.url}: request {request_id}: HTTP {status}: {said}")

    @contextlib.contextmanager
    def _reading(self, request_id: str) -> Iterator[None]:
        """Around the reading of a reply. What cannot be an answer is the server's failure."""
        try:
            yield
        except (msgspec.MsgspecError, ValueError, OverflowError, RecursionError) as error:
            what = str(error)[:_ERROR_CHARS]
            if f"> {IMPOSSIBLE}" in what:
                what += ": a sampled token cannot be so unlikely. vLLM writes -9999 for NaN: are the logits finite?"
            raise EngineError(f"{self.url}: request {request_id}: the answer is not as expected: {what}") from error

    def _check_origin(self, request_id: str, spans: list[list[Span] | None], version: int) -> None:
        """Raise an EngineError if weights that we did not send sampled an answer, as far as the server reports it."""
        names = (span.version for own in spans for span in own or [])
        foreign = next((name for name in names if version_of(name) is None), "")
        if foreign and version >= 0:
            raise EngineError(
                f"{self.url}: request {request_id} was answered by weights {foreign[:100]!r} in place of version "
                f"{version}: {origin(foreign)}"
            )

    def _check(
        self,
        request_id: str,
        completions: list[Completion],
        spans: list[list[Span] | None],
        params: SamplingParams,
        version: int,
    ) -> None:
        """Refuse answers that cannot be. Token ids and log-probabilities were checked while they were parsed.

        Args:
            spans: Of each completion, as `versions_of` took them. Checking these alone costs nothing per token.
            version: The newest weight version that this server had acknowledged when it was asked.

        Raises:
            EngineError: The message says what is wrong.
        """
        for i, (completion, own) in enumerate(zip(completions, spans, strict=True)):
            tokens = len(completion.token_ids)
            versions = [completion.versions[span.start] for span in own or [] if span.start < span.end]
            wrong = ""
            if tokens != len(completion.logprobs):
                wrong = f"{tokens} tokens came with {len(completion.logprobs)} log-probabilities"
            elif completion.finish_reason == "abort":
                wrong = f"the server aborted it after {tokens} tokens"
            elif not 1 <= tokens <= params.max_tokens:
                wrong = f"it has {tokens} tokens, 1 to {params.max_tokens} were asked"
            elif versions != sorted(versions):
                wrong = "the versions of its weights go backwards"
            elif versions and versions[0] < version:
                wrong = f"weights of version {versions[0]} sampled it, after the server had {version}"
            elif versions and self._newest is not None and versions[-1] > self._newest():
                wrong = f"weights of version {versions[-1]} sampled it, and {self._newest()} is the newest sent"
            if wrong:
                raise EngineError(f"{self.url}: request {request_id}: answer {i} is refused: {wrong}")

    def _add_told(
        self, params: SamplingParams, prompt_ids: list[int], completions: list[Completion], told: list[Told]
    ) -> None:
        """Give each completion what was asked for beside its tokens.

        Raises:
            ValueError: The server does not tell it, or what it tells cannot be.
        """
        for i, (completion, (routes, kept, top)) in enumerate(zip(completions, told, strict=True)):
            tokens = len(completion.token_ids)
            if params.routes is not None:
                if not routes:
                    raise ValueError(f"answer {i} says nothing of its experts; {self.routes_hint}")
                completion.routes = self._routes(params.routes, routes, len(prompt_ids) + tokens - 1)
            if params.kept:
                if kept is None:
                    raise ValueError(f"answer {i} says nothing of the tokens that were kept; {self.kept_hint}")
                completion.kept = KeptTokens.of(kept, completion.token_ids, self._vocab_size)
            if params.top_tokens:
                if top is None:
                    raise ValueError(f"answer {i} names no likeliest tokens ([grpo] score_centering): {self.top_hint}")
                completion.top = self._likeliest(top, tokens, params.top_tokens)

    def _likeliest(self, sent: Any, positions: int, k: int) -> TopTokens:
        """Likeliest tokens as this engine sends them."""
        ids, logprobs = read(sent, positions, k)
        return checked(ids[:, 1:], logprobs[:, 1:], self._vocab_size)

    def _routes(self, shape: RouteShape, text: str, positions: int) -> np.ndarray:
        """Routes as this engine sends them."""
        return shape.from_npy(text, positions)


def versions_of(spans: list[Span] | None, tokens: int, version: int) -> list[int]:
    """The weight version of each token of an answer.

    Args:
        spans: As the server reports them, if it does.
        version: Of tokens in no span of ours. A server's own first name ("default") is no version of ours, and
            `version` is -1 until it is gone.

    Raises:
        ValueError: One reaches beyond the answer or into another.
    """
    versions, end = [version] * tokens, 0
    for span in spans or []:
        if not end <= span.start <= span.end <= tokens:
            raise ValueError(f"weight versions of tokens {span.start} to {span.end} in an answer of {tokens}")
        end = span.end
        if (number := version_of(span.version)) is not None:
            versions[span.start : end] = [number] * (end - span.start)
    return versions
