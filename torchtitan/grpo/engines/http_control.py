"""Control of one inference server over HTTP, whatever its engine: health, connections, errors. For threads."""

import json
import logging
import ssl
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Literal, TypeVar
from urllib.parse import urlencode, urlsplit

import urllib3

from torchtitan.grpo.engines.protocol import EngineError, error_text, key_hint, raise_if_local
from torchtitan.grpo.engines.whole_replies import pool_of
from torchtitan.grpo.errors import UserError
from torchtitan.grpo.weight_wire.model_identity import ModelIdentity

logger = logging.getLogger(__name__)
T = TypeVar("T")

KEEPALIVE_S = 2.0
"""Idle connections are dropped after this, before uvicorn drops them (5 s). A request on a connection that the server
is closing is lost, and a POST is not repeated."""
_HEALTH_POLL_S = 0.25
_HEALTH_REQUEST_S = 5.0
_MAY_BE_MISSING = "Start the server, correct [rollout] urls, or raise"
_MAY_BE_ANOTHER = "It is no such server: correct [rollout] engine or urls. If it is still starting, raise"
_MAY_HANG = (
    "It takes connections and answers none: if it hangs, as in a weight update whose trainer died, start it again; "
    "if it is still starting, raise"
)
_CONNECTIONS = 4
"""Kept at once: the update call lasts as long as the transfer, and other calls run meanwhile."""
_UNEXPECTED = ValueError, TypeError, LookupError, AttributeError, OverflowError, RecursionError
_TOP_TOKENS = 5
"""How many likeliest tokens the check of a server's log-probabilities compares."""


class ServerError(EngineError):
    """A control call failed. The message names server, phase, HTTP status and what the server said."""


class NoReply(ServerError):
    """The server did not reply in time. It may only be busy."""


class HttpControl:
    """Control of the server at `url` (its base address). Every call is bounded by `timeout_s` (I6).

    Several threads may use one object. Connections are kept for the calls of one update. Calls go through urllib3:
    they run beside a training step, and `requests` takes four times the interpreter time. Proxies that the environment
    names are ignored, as in the clients of the generation route.

    Each engine has a subclass with the calls below and those that its weight-sync link makes.
    """

    health_path = "/health"
    sampling_hint = ""
    """What to change if log-probabilities are not those of the sampled distribution."""
    length_flag = ""
    """Its flag for the longest prompt and answer together."""
    asleep = False
    """The server may have no weights, keys and values now, since it was told to sleep."""

    def __init__(self, url: str, api_key: str | None = None, timeout_s: float = 300.0):
        self.url = url.rstrip("/")
        self.timeout_s = timeout_s
        self._headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._path = urlsplit(self.url).path
        self._pool = self._new_pool()
        self._used_at = time.monotonic()
        self.workers = 0
        """What `world_size` returned last; 0 before."""

    def wait_healthy(self, timeout_s: float) -> None:
        """Wait until the health route answers 200.

        Raises:
            UserError: The server is not healthy within `timeout_s`, asks for another API key, or speaks plain HTTP at
                an https:// address.
        """
        started = time.monotonic()
        seen, announced = "no connection", False
        while time.monotonic() < started + timeout_s:
            try:
                reply = self._send("GET", self.health_path, min(_HEALTH_REQUEST_S, timeout_s))
            except urllib3.exceptions.SSLError as error:
                if not isinstance(error.args[0], ssl.SSLCertVerificationError):  # who has a certificate speaks TLS
                    self._check_scheme()
                seen = f"SSLError: {error}"
            except urllib3.exceptions.HTTPError as error:
                seen = type(error).__name__
            else:
                if _ok(reply):
                    return
                self._check_key(reply.status, self.health_path)  # waiting will not help
                seen = f"HTTP {reply.status}"
            if not announced and time.monotonic() > started + _HEALTH_REQUEST_S:
                announced = True
                logger.info("waiting up to %g s for %s (%s)", timeout_s, self.url, seen)
            time.sleep(_HEALTH_POLL_S)
        hint = _MAY_HANG if seen == urllib3.exceptions.ReadTimeoutError.__name__ else _MAY_BE_MISSING
        hint = _MAY_BE_ANOTHER if seen == "HTTP 404" else hint
        raise UserError(
            f"{self.url}: not healthy after {timeout_s:g} s (last: {seen}). {hint} [rollout] start_timeout_seconds."
        )

    def is_healthy(self, timeout_s: float = 0.0) -> bool:
        """Whether the health route answers 200 now.

        Args:
            timeout_s: Longest wait for the reply; 0 for the usual one.

        Raises:
            ServerError: No server listens at that address.
            NoReply: The server did not reply in time.
        """
        return _ok(self._request("GET", self.health_path, "health", timeout_s=timeout_s or _HEALTH_REQUEST_S))

    def software_version(self) -> str:
        """The version of the engine's software, "" if it does not say."""
        return ""

    def sleep(self) -> None:
        """Have the server finish what runs, stop, and give up the memory of weights, keys and values. The next update
        wakes it up. For engines that share the trainer's GPU."""
        raise NotImplementedError

    def wake_up(self, what: Literal["weights", "kv_cache"]) -> None:
        """Have it take the memory again, which then holds anything. It is awake when it has both."""
        raise NotImplementedError

    def world_size(self) -> int:
        """Number of worker processes that take part in a weight update."""
        raise NotImplementedError

    def check(
        self,
        longest_tokens: int,
        prompt_id: int = 1,
        recomputes: bool = False,
        trained: ModelIdentity | None = None,
        routes: bool = False,
        top_k: int = 0,
        min_p: float = 0.0,
        top_tokens: int = 0,
    ) -> None:
        """Check, before the first rollout, that the server is set up as the trainer needs it.

        A server that is known to be paused, as an interrupted update leaves it, is not asked for log-probabilities. It
        gets weights before it answers anything.

        Args:
            longest_tokens: Longest prompt and answer together.
            prompt_id: Any token of the model's vocabulary.
            recomputes: Updates arrive while answers run, and their keys and values must then be computed again.
            trained: The trainer's model. None: any will do.
            routes: Answers must say which experts computed them.
            top_k, min_p: `[rollout] top_k`. Over 0, answers must say which tokens could be drawn.
            top_tokens: How many likeliest tokens answers must name in place of each of theirs.

        Raises:
            UserError: Its routes, its model, its maximum length, its log-probabilities or what it tells of experts or
                kept tokens do not fit. The message says what to change.
        """
        with self._reading("phase check: a route"):
            self._check_setup(recomputes)
            self.world_size()
            if trained is not None:
                self._check_model(self._identity(), trained)
            served = self._longest_tokens()
            if served is not None and served < longest_tokens:
                raise UserError(
                    f"{self.url}: serves at most {served} tokens ({self.length_flag}), the trainer asks for up to "
                    f"{longest_tokens} ([training] seq_len, or what a held-out set needs)"
                )
            if self._answers():
                if top_k:
                    self._check_kept(prompt_id, top_k, min_p)
                # One token alone ends vLLM 0.32 on a CPU with a Qwen3.5.
                self.check_sampling([prompt_id] * 2, top_tokens, top_k)
                if routes:
                    self._check_routes(prompt_id, top_k)

    def _check_setup(self, recomputes: bool) -> None:
        """Refuse versions and flags that `check` finds nothing of."""

    def _identity(self) -> ModelIdentity:
        """The served model, as far as the server tells."""
        raise NotImplementedError

    def _longest_tokens(self) -> int | None:
        """The longest prompt and answer together that it serves; None if it does not say."""
        raise NotImplementedError

    def _answers(self) -> bool:
        """Whether it answers requests before it gets weights: not if an interrupted update left it paused."""
        raise NotImplementedError

    def _check_routes(self, prompt_id: int, top_k: int) -> None:
        """Refuse a server that does not say which experts compute an answer."""
        raise NotImplementedError

    def _check_kept(self, prompt_id: int, top_k: int, min_p: float) -> None:
        """Refuse a server that does not say which tokens it kept."""
        raise NotImplementedError

    def _check_model(self, served: ModelIdentity, trained: ModelIdentity) -> None:
        """Refuse a server of another model, as far as it tells: weights of another shape would break it."""
        if differing := trained.differing(served):
            mend = "Start the server with [model] hf_assets_path, or correct [rollout] urls"
            if served.has_other_parts:
                mend = (
                    "The language model alone is trained: start the server with a folder of that, such as a run's "
                    "served_model with [rollout] replicas, or an exported checkpoint"
                )
            raise UserError(
                f"{self.url}: serves another model: {served.describe(differing)}, and the trainer has "
                f"{trained.describe(differing)}. {mend}"
            )

    def is_paused(self) -> bool:
        raise NotImplementedError

    def pause(self, mode: str = "keep", clear_cache: bool = True, timeout_s: float | None = None) -> None:
        """Pause at a step boundary.

        Args:
            mode: `keep` freezes running requests, `wait` lets them finish first.
            clear_cache: Frozen requests are recomputed on resume.
            timeout_s: Longest wait for the reply; for `wait`, which takes longer than other calls.
        """
        raise NotImplementedError

    def resume(self) -> None:
        raise NotImplementedError

    def weight_version(self) -> str | None:
        """The version that the server reports; None if it reports none."""
        raise NotImplementedError

    def check_sampling(self, prompt_ids: list[int], top_tokens: int = 0, top_k: int = 0) -> None:
        """Check that the server's log-probabilities are those of the distribution that it samples from.

        The gap between the log-probabilities of two tokens is the gap between their logits, divided by the temperature.
        The check asks for one token at temperatures 1 and 2, and the gap must halve. A server that returns raw
        log-probabilities gives the same gap twice, which would corrupt every importance ratio.

        Args:
            top_tokens: It must tell so many.

        Raises:
            UserError: The log-probabilities do not follow the temperature, or the server does not have the route.
        """
        k = min(_TOP_TOKENS, top_k) if top_k else max(_TOP_TOKENS, top_tokens)
        at_one, at_two = (self._top_logprobs(prompt_ids, temperature, k, top_k) for temperature in (1.0, 2.0))
        if len(at_one) < top_tokens:
            raise UserError(f"{self.url}: tells {len(at_one)} likeliest tokens: lower [grpo] score_centering to that")
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

    def _top_logprobs(self, prompt_ids: list[int], temperature: float, k: int, top_k: int) -> dict[int, float]:
        """Log-probabilities of the k most likely next tokens, sampled from `top_k` of them if that is over 0."""
        raise NotImplementedError

    def tokenize(self, body: dict[str, Any]) -> list[int]:
        """Token ids of a text, by the server's tokenizer: every engine's `/tokenize`."""
        return self._json("POST", "/tokenize", "tokenizer", lambda said: list(said["tokens"]), body=body)

    def models(self) -> list[dict[str, Any]]:
        """The served models' entries of `/v1/models`, which every engine has."""
        return self._json("GET", "/v1/models", "model info", lambda said: [dict(model) for model in said["data"]])

    def _json(self, method: str, path: str, phase: str, read: Callable[[Any], T], **kwargs: Any) -> T:
        """What `read` finds in the JSON of a reply."""
        return self._read(self._call(method, path, phase, **kwargs), path, phase, read)

    def _read(self, reply: urllib3.BaseHTTPResponse, path: str, phase: str, read: Callable[[Any], T]) -> T:
        with self._reading(f"phase {phase}: {path}"):
            return read(reply.json())

    @contextmanager
    def _reading(self, what: str) -> Iterator[None]:
        """Around the reading of replies: what cannot be one is the server's failure."""
        try:
            yield
        except UserError:
            raise
        except _UNEXPECTED as error:  # for example from a proxy in front of a lost server
            cause = f"{type(error).__name__}: {error}"
            raise ServerError(f"{self.url}: {what} answers not as expected: {cause}") from error

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
        except urllib3.exceptions.NewConnectionError as error:  # refused, but urllib3 calls it a TimeoutError
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
        try:
            timeout = urllib3.Timeout(total=timeout_s)
            return self._pool.urlopen(method, self._path + path + query, data, headers, timeout=timeout)
        except urllib3.exceptions.HTTPError as error:
            raise_if_local(error)
            raise

    def _new_pool(self) -> urllib3.HTTPConnectionPool:
        """A fresh pool. Connections of the old one end with their requests."""
        return pool_of(self.url, _CONNECTIONS)

    def _check(self, reply: urllib3.BaseHTTPResponse, phase: str, path: str) -> None:
        if _ok(reply):
            return
        self._pool = self._new_pool()  # a server that failed may close the connection after its reply
        self._check_key(reply.status, path)
        said = error_text(reply.data)
        self._explain(reply.status, phase, path, said)
        raise ServerError(f"{self.url}: phase {phase}: HTTP {reply.status} on {path}: {said}")

    def _check_key(self, status: int, path: str) -> None:
        if status == 401:
            raise UserError(f"{self.url}: HTTP 401 on {path}: {key_hint('Authorization' in self._headers)}")

    def _check_scheme(self) -> None:
        """After TLS failed: waiting will not help if the server speaks plain HTTP. It gets no API key so."""
        parts = urlsplit(self.url)
        port = "" if parts.port else ":443"  # at http's own port another server may listen
        plain = parts._replace(scheme="http", netloc=parts.netloc + port).geturl()
        timeout = urllib3.Timeout(total=_HEALTH_REQUEST_S)
        try:
            reply = pool_of(plain).urlopen("GET", self._path + self.health_path, timeout=timeout)
        except urllib3.exceptions.HTTPError:
            return
        if reply.status != 400 and not reply.get_redirect_location():  # which servers of TLS answer
            raise UserError(f"{self.url}: the server speaks plain HTTP: write {plain}")

    def _explain(self, status: int, phase: str, path: str, said: str) -> None:
        """Raise a UserError if the user can fix what the server reported."""


def _ok(reply: urllib3.BaseHTTPResponse) -> bool:
    return 200 <= reply.status < 300
