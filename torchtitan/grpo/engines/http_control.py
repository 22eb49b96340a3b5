"""Control of one inference server over HTTP, whatever its engine: health, connections, errors. For threads."""

import json
import logging
import subprocess
import time
from collections.abc import Callable
from typing import Any, TypeVar
from urllib.parse import urlencode, urlsplit

import urllib3

from torchtitan.grpo.engines.protocol import EngineError, error_text
from torchtitan.grpo.errors import UserError

logger = logging.getLogger(__name__)
T = TypeVar("T")

KEEPALIVE_S = 2.0
"""Idle connections are dropped before uvicorn drops them (5 s): a request sent on a connection that the server is
just closing is lost, and a POST is not repeated."""
_HEALTH_POLL_S = 0.25
_HEALTH_REQUEST_S = 5.0
_MAY_BE_MISSING = "Start the server, correct [rollout] urls, or raise"
_MAY_HANG = (
    "It takes connections and answers none: if it hangs, as in a weight update whose trainer died, start it again; "
    "if it is still starting, raise"
)
_CONNECTIONS = 4
"""Kept at once: the update call takes as long as the transfer, and others are made meanwhile."""


class ServerError(EngineError):
    """A control call failed. The message names server, phase, HTTP status and what the server said."""


class NoReply(ServerError):
    """The server did not reply in time. It may only be busy."""


class HttpControl:
    """Control of the server at `url` (its base address). Every call is bounded by `timeout_s`.

    One object may be used from several threads. Connections are kept for the calls of one update, and no longer.
    urllib3, since a call through `requests` takes four times the interpreter time of one through what is below it, and
    these calls run beside a training step. As with the clients of the generation route, proxies of the environment do
    not count.

    Subclasses: one for each engine, with the calls below and those that its link of weight sync makes.
    """

    health_path = "/health"
    sampling_hint = ""
    """What to change if log-probabilities are not those of the distribution that is sampled from."""

    def __init__(self, url: str, api_key: str | None = None, timeout_s: float = 300.0):
        self.url = url.rstrip("/")
        self.timeout_s = timeout_s
        self._headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._path = urlsplit(self.url).path
        self._pool = self._new_pool()
        self._used_at = time.monotonic()

    def wait_healthy(self, timeout_s: float, process: subprocess.Popen | None = None) -> None:
        """Wait until the health route says 200; `process`, if given, is the server's, and its exit ends the wait.

        Raises:
            UserError: No answer within `timeout_s`.
            ServerError: The process is gone.
        """
        started = time.monotonic()
        seen, announced = "no connection", False
        while time.monotonic() < started + timeout_s:
            if process is not None and process.poll() is not None:
                raise ServerError(f"{self.url}: the server's process ended with exit status {process.returncode}")
            try:
                reply = self._send("GET", self.health_path, min(_HEALTH_REQUEST_S, timeout_s))
            except urllib3.exceptions.HTTPError as error:
                seen = type(error).__name__
            else:
                if _ok(reply):
                    return
                seen = f"HTTP {reply.status}"
            if not announced and time.monotonic() > started + _HEALTH_REQUEST_S:
                announced = True
                logger.info("waiting up to %g s for %s (%s)", timeout_s, self.url, seen)
            time.sleep(_HEALTH_POLL_S)
        hint = _MAY_HANG if seen == urllib3.exceptions.ReadTimeoutError.__name__ else _MAY_BE_MISSING
        raise UserError(
            f"{self.url}: not healthy after {timeout_s:g} s (last: {seen}). {hint} [rollout] start_timeout_seconds."
        )

    def is_healthy(self) -> bool:
        """Whether the health route says 200 now.

        Raises:
            ServerError: Nobody answers at that address, or not in time.
        """
        return _ok(self._request("GET", self.health_path, "health", timeout_s=_HEALTH_REQUEST_S))

    def world_size(self) -> int:
        """Worker processes that take part in a weight update."""
        raise NotImplementedError

    def check(self, longest_tokens: int, prompt_id: int = 1, recomputes: bool = False) -> None:
        """Check, before the first rollout, that the server is set up as the trainer needs it.

        A server that is known to be paused, as an update that was broken off leaves it, is not asked for
        log-probabilities: it gets weights before it answers anything.

        Args:
            longest_tokens: Of a prompt with its answer.
            prompt_id: Any token that the model knows.
            recomputes: Updates come in the midst of answers, whose keys and values are then to be computed anew.

        Raises:
            UserError: Its routes, its model's length or its log-probabilities do not fit; the message says what to
                change.
        """
        raise NotImplementedError

    def is_paused(self) -> bool:
        raise NotImplementedError

    def pause(self, mode: str = "keep", clear_cache: bool = True, timeout_s: float | None = None) -> None:
        """Stop at a step boundary. `keep` freezes running requests, `wait` lets them finish first, which `timeout_s`
        may allow more time for; `clear_cache` has frozen requests recomputed on resume."""
        raise NotImplementedError

    def resume(self) -> None:
        raise NotImplementedError

    def start_update(self) -> None:
        """Weights will come; the server is paused."""
        raise NotImplementedError

    def finish_update(self, version: str) -> None:
        """All weights of this version have come."""
        raise NotImplementedError

    def weight_version(self) -> str | None:
        """The version that the server says it serves; None if it does not say."""
        raise NotImplementedError

    def check_sampling(self, prompt_ids: list[int]) -> None:
        """Check that the server's log-probabilities are those of the distribution that it samples from.

        At temperature T the log-probability of one token less that of another is their logits' difference over T.
        One token is asked at T = 1 and at T = 2: the gaps must halve. A server that answers raw log-probabilities
        gives the same gap twice, and would mislead every importance ratio.

        Raises:
            UserError: The log-probabilities are not processed ones, or the server does not offer the route.
        """
        at_one, at_two = self._top_logprobs(prompt_ids, 1.0), self._top_logprobs(prompt_ids, 2.0)
        shared = sorted(at_one.keys() & at_two.keys(), key=lambda token: at_one[token])
        if len(shared) < 2:
            raise UserError(
                f"{self.url}: the most likely tokens at temperatures 1 and 2 have only {len(shared)} in common; the "
                "server must return at least 2 top log-probabilities (vLLM: --max-logprobs 20)."
            )
        low, high = shared[0], shared[-1]
        gap_at_one, gap_at_two = at_one[high] - at_one[low], at_two[high] - at_two[low]
        if abs(gap_at_two - gap_at_one / 2) > abs(gap_at_two - gap_at_one):
            raise UserError(
                f"{self.url}: log-probabilities do not follow the temperature (gap between two tokens {gap_at_one:.4f} "
                f"at temperature 1, {gap_at_two:.4f} at 2). {self.sampling_hint}"
            )

    def _top_logprobs(self, prompt_ids: list[int], temperature: float) -> dict[int, float]:
        """Log-probabilities of the most likely next tokens."""
        raise NotImplementedError

    def _models(self) -> list[dict[str, Any]]:
        """The served models' entries of `/v1/models`, which every engine has."""
        return self._json("GET", "/v1/models", "model info", lambda said: [dict(model) for model in said["data"]])

    def _json(self, method: str, path: str, phase: str, read: Callable[[Any], T], **kwargs: Any) -> T:
        """What `read` finds in the JSON of a reply."""
        return self._read(self._call(method, path, phase, **kwargs), path, phase, read)

    def _read(self, reply: urllib3.BaseHTTPResponse, path: str, phase: str, read: Callable[[Any], T]) -> T:
        try:
            return read(reply.json())
        except (ValueError, TypeError, LookupError, AttributeError) as error:  # a proxy, say, answers for a lost server
            what = f"{type(error).__name__}: {error}"
            raise ServerError(f"{self.url}: phase {phase}: {path} answers not as expected: {what}") from error

    def _call(self, method: str, path: str, phase: str, **kwargs: Any) -> urllib3.BaseHTTPResponse:
        reply = self._request(method, path, phase, **kwargs)
        self._check(reply, phase, path)
        return reply

    def _request(
        self,
        method: str,
        path: str,
        phase: str,
        *,
        body: dict | None = None,
        params: dict | None = None,
        timeout_s: float | None = None,
    ) -> urllib3.BaseHTTPResponse:
        timeout_s = timeout_s or self.timeout_s
        if time.monotonic() - self._used_at > KEEPALIVE_S:
            self._pool = self._new_pool()
        self._used_at = time.monotonic()
        try:
            return self._send(method, path, timeout_s, body=body, params=params)
        except urllib3.exceptions.NewConnectionError as error:  # refused, and yet a TimeoutError to urllib3
            raise ServerError(f"{self.url}: phase {phase}: {path}: nobody listens there: {error}") from error
        except urllib3.exceptions.TimeoutError as error:
            raise NoReply(f"{self.url}: phase {phase}: no reply to {path} within {timeout_s:g} s") from error
        except urllib3.exceptions.HTTPError as error:
            raise ServerError(f"{self.url}: phase {phase}: {path}: {type(error).__name__}: {error}") from error

    def _send(
        self, method: str, path: str, timeout_s: float, *, body: dict | None = None, params: dict | None = None
    ) -> urllib3.BaseHTTPResponse:
        query = "?" + urlencode(params) if params else ""
        headers, data = self._headers, None
        if body is not None:
            headers, data = headers | {"Content-Type": "application/json"}, json.dumps(body)
        return self._pool.urlopen(method, self._path + path + query, data, headers, timeout=timeout_s)

    def _new_pool(self) -> urllib3.HTTPConnectionPool:
        """Connections of the one before end with the requests on them."""
        return urllib3.connection_from_url(self.url, maxsize=_CONNECTIONS, retries=False)

    def _check(self, reply: urllib3.BaseHTTPResponse, phase: str, path: str) -> None:
        if _ok(reply):
            return
        self._pool = self._new_pool()  # a server that failed may close the connection behind its answer
        if reply.status == 401:
            raise UserError(
                f"{self.url}: HTTP 401 on {path}: name the environment variable that holds the server's API key in "
                "[rollout] api_key_env"
            )
        said = error_text(reply.data)
        self._explain(reply.status, phase, path, said)
        raise ServerError(f"{self.url}: phase {phase}: HTTP {reply.status} on {path}: {said}")

    def _explain(self, status: int, phase: str, path: str, said: str) -> None:
        """Raise a UserError if the user can mend what the server said."""


def _ok(reply: urllib3.BaseHTTPResponse) -> bool:
    return 200 <= reply.status < 300
