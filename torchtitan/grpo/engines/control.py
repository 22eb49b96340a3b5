"""The control routes of one inference server: health, pause, weight updates. Synchronous, for threads.

The routes are vLLM's development routes (0.25.1 and 0.32.0); the embedded server has the same ones.
"""

import json
import subprocess
import time
from typing import Any
from urllib.parse import urlencode, urlsplit

import urllib3

from torchtitan.grpo.engines.protocol import EngineError, error_text
from torchtitan.grpo.errors import UserError

BACKEND = "torchtitan_grpo"
KEEPALIVE_S = 2.0
"""Idle connections are dropped before uvicorn drops them (5 s): a request sent on a connection that the server is
just closing is lost, and a POST is not repeated."""
_HEALTH_POLL_S = 0.25
_HEALTH_REQUEST_S = 5.0
_TOP_LOGPROBS = 5
_CONNECTIONS = 4
"""Kept at once: the update call takes as long as the transfer, and others are made meanwhile."""


class ServerError(EngineError):
    """A control call failed. The message names server, phase, HTTP status and what the server said."""


class ServerControl:
    """Control of the server at `url` (its base address). Every call is bounded by `timeout_s`.

    One object may be used from several threads. Connections are kept for the calls of one update, and no longer.
    urllib3, since a call through `requests` takes four times the interpreter time of one through what is below it, and
    these calls run beside a training step. As with the clients of the generation route, proxies of the environment do
    not count.
    """

    def __init__(self, url: str, api_key: str | None = None, timeout_s: float = 300.0):
        self.url = url.rstrip("/")
        self.timeout_s = timeout_s
        self._headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._path = urlsplit(self.url).path
        self._pool = self._new_pool()
        self._used_at = time.monotonic()

    def wait_healthy(self, timeout_s: float, process: subprocess.Popen | None = None) -> None:
        """Wait until `GET /health` says 200; `process`, if given, is the server's, and its exit ends the wait.

        Raises:
            UserError: No answer within `timeout_s`.
            ServerError: The process is gone.
        """
        deadline = time.monotonic() + timeout_s
        seen = "no connection"
        while time.monotonic() < deadline:
            if process is not None and process.poll() is not None:
                raise ServerError(f"{self.url}: the server's process ended with exit status {process.returncode}")
            try:
                reply = self._send("GET", "/health", min(_HEALTH_REQUEST_S, timeout_s))
            except urllib3.exceptions.HTTPError as error:
                seen = type(error).__name__
            else:
                if _ok(reply):
                    return
                seen = f"HTTP {reply.status}"
            time.sleep(_HEALTH_POLL_S)
        raise UserError(
            f"{self.url}: not healthy after {timeout_s:g} s (last: {seen}). Start the server, correct [rollout] urls, "
            "or raise [rollout] start_timeout_seconds."
        )

    def is_healthy(self) -> bool:
        """Whether `GET /health` says 200 now.

        Raises:
            ServerError: Nobody answers at that address, or not in time.
        """
        return _ok(self._request("GET", "/health", "health", timeout_s=_HEALTH_REQUEST_S))

    def world_size(self) -> int:
        """Worker processes that take part in a weight update, over all of the server's parallelism."""
        return int(self._json("GET", "/get_world_size", "world size", params={"include_dp": "true"})["world_size"])

    def model_info(self) -> dict[str, Any]:
        """The served model's entry of `/v1/models`: `id`, `max_model_len` and what else the server says."""
        models = self._json("GET", "/v1/models", "model info")["data"]
        if not models:
            raise UserError(f"{self.url}: /v1/models lists no model")
        return models[0]

    def check(self, longest_tokens: int, prompt_id: int = 1) -> None:
        """Check, before the first rollout, that the server is set up as the trainer needs it.

        Args:
            longest_tokens: Of a prompt with its answer.
            prompt_id: Any token that the model knows.

        Raises:
            UserError: Its routes, its model's length or its log-probabilities do not fit; the message says what to
                change.
        """
        self.world_size()
        served = self.model_info().get("max_model_len")
        if served is not None and served < longest_tokens:
            raise UserError(
                f"{self.url}: serves at most {served} tokens (--max-model-len), the trainer asks for up to "
                f"{longest_tokens} ([training] seq_len)"
            )
        self.check_sampling([prompt_id])

    def pause(self, mode: str = "keep", clear_cache: bool = True, timeout_s: float | None = None) -> None:
        """Stop at a step boundary. `keep` freezes running requests, `wait` lets them finish first, which `timeout_s`
        may allow more time for; `clear_cache` has frozen requests recomputed on resume."""
        params = {"mode": mode, "clear_cache": str(clear_cache).lower()}
        self._call("POST", "/pause", "pause", params=params, timeout_s=timeout_s)

    def resume(self) -> None:
        self._call("POST", "/resume", "resume")

    def is_paused(self) -> bool:
        return bool(self._json("GET", "/is_paused", "pause state")["is_paused"])

    def init_transfer(self, init_info: dict[str, Any]) -> None:
        """Have the server join the weight-transfer group; returns when it has (`weight_sync.receiver.InitInfo`)."""
        self._call("POST", "/init_weight_transfer_engine", "connect", body={"init_info": init_info})

    def start_update(self) -> None:
        self._call("POST", "/start_weight_update", "start")

    def update(self, update_info: dict[str, Any], timeout_s: float | None = None) -> None:
        """Have the server receive one version; returns when it has loaded all of it. Bounded by `timeout_s` if given:
        one call holds the whole transfer."""
        self._call("POST", "/update_weights", "update", timeout_s=timeout_s, body={"update_info": update_info})

    def finish_update(self, version: str) -> None:
        self._call("POST", "/finish_weight_update", "finish", body={"weight_version": version})

    def weight_version(self) -> str | None:
        """The version that the server says it serves; None if it has no such route (vLLM before 0.32)."""
        reply = self._request("GET", "/weight_info", "weight version")
        if reply.status == 404:
            return None
        self._check(reply, "weight version", "/weight_info")
        return str(reply.json()["weight_version"])

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
                f"at temperature 1, {gap_at_two:.4f} at 2). Start vLLM with --logprobs-mode processed_logprobs."
            )

    def _top_logprobs(self, prompt_ids: list[int], temperature: float) -> dict[int, float]:
        phase, path = "sampling check", "/inference/v1/generate"
        sampling = {"n": 1, "max_tokens": 1, "temperature": temperature, "top_p": 1.0, "min_p": 0.0, "seed": 0}
        sampling |= {"repetition_penalty": 1.0, "logprobs": _TOP_LOGPROBS, "detokenize": False, "ignore_eos": True}
        reply = self._request("POST", path, phase, body={"token_ids": prompt_ids, "sampling_params": sampling})
        if reply.status in (403, 404):
            raise UserError(
                f"{self.url}: HTTP {reply.status} on {path}. Start vLLM with --enable-scale-out (0.32 and newer)."
            )
        self._check(reply, phase, path)
        entry = reply.json()["choices"][0]["logprobs"]["content"][0]
        return {_token_id(top): float(top["logprob"]) for top in [entry, *(entry.get("top_logprobs") or [])]}

    def _json(self, method: str, path: str, phase: str, **kwargs: Any) -> dict[str, Any]:
        return self._call(method, path, phase, **kwargs).json()

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
        except urllib3.exceptions.TimeoutError as error:
            raise ServerError(f"{self.url}: phase {phase}: no reply to {path} within {timeout_s:g} s") from error
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
        if reply.status == 404:
            raise UserError(
                f"{self.url}: HTTP 404 on {path}: start vLLM with the environment variable VLLM_SERVER_DEV_MODE=1"
            )
        said = error_text(reply.data)
        if phase == "connect" and any(m in said for m in _WRONG_BACKEND) and "TorchtitanGrpoEngine" not in said:
            raise UserError(
                f"{self.url}: the server has another weight-transfer engine ({said}). Install torchtitan-grpo in its "
                f"environment and start it with --weight-transfer-config '{json.dumps({'backend': BACKEND})}'."
            )
        raise ServerError(f"{self.url}: phase {phase}: HTTP {reply.status} on {path}: {said}")


_WRONG_BACKEND = ("Weight transfer not configured", "Invalid init_info for")


def _ok(reply: urllib3.BaseHTTPResponse) -> bool:
    return 200 <= reply.status < 300


def _token_id(entry: dict[str, Any]) -> int:
    """vLLM 0.32 has `token_id`; 0.25 has `token` as "token_id:123"."""
    if "token_id" in entry:
        return int(entry["token_id"])
    return int(str(entry["token"]).rpartition(":")[2])
