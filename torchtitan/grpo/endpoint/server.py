"""The HTTP server of a run: model calls of sessions, and episodes for a harness outside."""

from __future__ import annotations

import contextlib
import hmac
import json
import logging
import os
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from aiohttp import web

from torchtitan.grpo.config.hub import model_name
from torchtitan.grpo.config.tables import training_sources
from torchtitan.grpo.data.samples import Prompt
from torchtitan.grpo.endpoint import requests
from torchtitan.grpo.endpoint.chat import CHARS_PER_TOKEN, Chat, off_loop
from torchtitan.grpo.endpoint.episodes import WAIT_MAX_S, Episodes, Outcome
from torchtitan.grpo.endpoint.requests import Asked, BadRequest
from torchtitan.grpo.endpoint.sessions import Answers, Session, SessionEnded
from torchtitan.grpo.engines.protocol import Completion
from torchtitan.grpo.errors import UserError
from torchtitan.grpo.process.addresses import http_url
from torchtitan.grpo.rollouts.collector import Collector
from torchtitan.grpo.rollouts.environment import ENDPOINT, RolloutClient

if TYPE_CHECKING:
    from torchtitan.config import JobConfig

logger = logging.getLogger(__name__)

SESSION_HEADER = "X-Session-ID"
_FREE_BYTES = 2**20
"""Of a request, besides those of a conversation that fits."""
_ENDED_KEPT = 100_000
"""Ids of ended sessions that are known as such: later calls get 410 and not 404."""
_SHUTDOWN_S = 1.0

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Endpoint:
    """An OpenAI-compatible server on the collector's event loop, for the model calls of environments and harnesses.

    Every model call belongs to a session, which records it. It is named by the address
    (`http://HOST:PORT/sessions/ID/v1`) or by the header `X-Session-ID`; the address counts first. Calls of a session
    that has ended get HTTP 410.

    Args:
        chat: Renders messages.
        model: The name in replies and in `/v1/models`.
        host, port, api_key: Where it listens, and the bearer token that it asks for; "" for none.
        longest_tokens: `[training] seq_len`, reported as `max_model_len`. It bounds the size of requests.

    Attributes:
        episodes: With `[rollout] environment = "endpoint"`, those of a harness outside.
    """

    def __init__(
        self, chat: Chat, model: str, host: str, port: int, api_key: str = "", longest_tokens: int = 0
    ) -> None:
        self.calls = 0
        self.episodes: Episodes | None = None
        self.chat, self._model, self._longest_tokens = chat, model, longest_tokens
        self._host, self._port, self._key = host, port, api_key.encode()
        self._sessions: dict[str, Session] = {}
        self._ended: dict[str, None] = {}
        self._longest_bytes = _FREE_BYTES + CHARS_PER_TOKEN * longest_tokens
        app = web.Application(client_max_size=self._longest_bytes, middlewares=[self._answer])
        for prefix in ("", "/sessions/{session}"):
            app.router.add_post(f"{prefix}/v1/chat/completions", self._chat_completions)
            app.router.add_post(f"{prefix}/v1/completions", self._completions)
            app.router.add_get(f"{prefix}/v1/models", self._models)
        app.router.add_post("/episodes/next", self._next_episode)
        app.router.add_post("/episodes/{episode}", self._end_episode)
        self._runner = web.AppRunner(
            app, access_log=None, handler_cancellation=True, shutdown_timeout=_SHUTDOWN_S, handle_signals=False
        )

    @property
    def url(self) -> str:
        """Its address for this machine."""
        host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(self._host, self._host)
        return http_url(host, self._port)

    async def start(self) -> None:
        """Listen.

        Raises:
            UserError: The address cannot be opened.
        """
        await self._runner.setup()
        try:
            await web.TCPSite(self._runner, self._host, self._port).start()
        except OSError as error:
            await self._runner.cleanup()
            why = os.strerror(error.errno) if error.errno else error
            raise UserError(
                f"[rollout] serve_port = {self._port}: {self._host}:{self._port} cannot be opened ({why}): set another "
                "port, or 0 for no endpoint"
            ) from error
        self._port = self._runner.addresses[0][1]

    async def close(self) -> None:
        """End the sessions and close the port. Bounded."""
        if self.episodes is not None:
            self.episodes.close()
        for session in self._sessions.values():
            session.end()
        await self._runner.cleanup()

    def metrics(self) -> dict[str, float]:
        """Model calls since the start, and sessions now."""
        return {"endpoint/calls": self.calls, "endpoint/open_sessions": len(self._sessions)}

    @contextlib.asynccontextmanager
    async def session(self, client: RolloutClient, prompt: Prompt, id: str = "") -> AsyncIterator[Session]:
        """A session of the group that `client` belongs to. It ends with the context, and so do its calls under way.

        Args:
            id: Its name in addresses and in `X-Session-ID`. Empty: a random one.

        Raises:
            UserError: A session has had this id.
        """
        session = self.open(client, prompt, id)
        try:
            yield session
        finally:
            self.end(session)

    def open(self, client: RolloutClient, prompt: Prompt, id: str = "") -> Session:
        """`session` without its context; `end` must follow."""
        id = id or secrets.token_hex(12)
        if id in self._sessions or id in self._ended:
            raise UserError(f"the endpoint has had a session {id!r} already: give each one an id of its own")
        number, client.sessions = client.sessions, client.sessions + 1
        base_url = f"{self.url}/sessions/{quote(id, safe='')}"
        session = self._sessions[id] = Session(id, base_url, client, prompt, number)
        return session

    def end(self, session: Session) -> None:
        session.end()
        if self._sessions.pop(session.id, None) is not None:
            self._ended[session.id] = None
            while len(self._ended) > _ENDED_KEPT:
                del self._ended[next(iter(self._ended))]

    # ---------------------------------------------------------------------------------------------- routes

    @web.middleware
    async def _answer(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Ask for the key, and give errors OpenAI's form."""
        if self._key and not self._has_key(request):
            return _error(401, "the endpoint asks for the API key of [rollout] serve_key_env as a bearer token")
        try:
            return await handler(request)
        except BadRequest as error:
            return _error(error.status, str(error), error.field)
        except RecursionError:  # JSON that was read, and cannot be rendered, written or shown
            return _error(400, "the request is nested too deeply")
        except SessionEnded:
            return _error(410, "the session has ended: its group is complete, was given up or came too late")
        except web.HTTPRequestEntityTooLarge:
            what = f"{self._longest_bytes} bytes: 1 MiB and {CHARS_PER_TOKEN} for each token of [training] seq_len"
            return _error(413, f"a request may have {what}")
        except web.HTTPException as error:
            return _error(error.status, error.text or error.reason)
        except Exception as error:  # of the model call: the session keeps it, and it ends the run
            return _error(502, f"{type(error).__name__}: {error}")

    def _has_key(self, request: web.Request) -> bool:
        scheme, _, given = request.headers.get("Authorization", "").partition(" ")
        same = hmac.compare_digest(given.strip().encode(errors="surrogateescape"), self._key)
        return same and scheme.lower() == "bearer"

    async def _asked(
        self, request: web.Request, read: Callable[[Session, dict[str, Any]], Asked]
    ) -> tuple[Session, Asked, Answers]:
        """The session of a call, the call, and its answers."""
        id = request.match_info.get("session") or request.headers.get(SESSION_HEADER, "")
        if not id:
            raise web.HTTPBadRequest(text=f"name the session: base_url http://.../sessions/ID/v1, or {SESSION_HEADER}")
        raw = await request.read()
        if (session := self._sessions.get(id)) is None:
            if id in self._ended:
                raise SessionEnded
            raise web.HTTPNotFound(text=f"there is no session {id[:64]!r}")
        self.calls += 1
        async with session.order:
            asked = await off_loop(len(raw), lambda: read(session, requests.body_of(raw)))
            answers = session.answer(asked)
        return session, asked, await answers

    def _read_completion(self, session: Session, body: dict[str, Any]) -> Asked:
        call = requests.parse(body, requests.COMPLETIONS, session.client.params)
        prompt = body.get("prompt")
        if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], str | list):
            prompt = prompt[0]
        if isinstance(prompt, str) and prompt:
            return Asked(call, self.chat.text(session, prompt), prompt)
        return Asked(call, requests.token_ids(prompt, "prompt", self.chat.vocab_size), "")

    async def _chat_completions(self, request: web.Request) -> web.StreamResponse:
        session, asked, answers = await self._asked(request, self.chat.asked)
        choices = []
        for i, (completion, place) in enumerate(answers):
            choice = self.chat.choice(session, asked, i, completion, place)
            choices.append(choice | self._extras(completion, asked.call, requests.chat_logprobs))
        return await self._reply(request, "chat.completion", asked, answers, choices)

    async def _completions(self, request: web.Request) -> web.StreamResponse:
        session, asked, answers = await self._asked(request, self._read_completion)
        call, choices = asked.call, []
        for i, (completion, place) in enumerate(answers):
            whole = self.chat.decode(completion.token_ids)
            shown = requests.cut_text(whole, call.stop)
            if place is not None and asked.key:
                for said in (whole, shown):
                    session.texts.add(asked.key + said, place)
            choice = {"index": i, "text": shown, "finish_reason": completion.finish_reason}
            choices.append(choice | self._extras(completion, call, requests.completion_logprobs))
        return await self._reply(request, "text_completion", asked, answers, choices)

    async def _models(self, request: web.Request) -> web.StreamResponse:
        card = {"id": self._model, "object": "model", "owned_by": "torchtitan-grpo"}
        return web.json_response({"object": "list", "data": [card | {"max_model_len": self._longest_tokens}]})

    async def _next_episode(self, request: web.Request) -> web.StreamResponse:
        """An episode; 204 if there is none within `wait_seconds`, 410 if the run has ended."""
        episodes = self._episodes()
        body = requests.body_of(await request.read()) if request.can_read_body else {}
        wait_s = body.get("wait_seconds", WAIT_MAX_S / 2)
        if type(wait_s) not in (int, float) or not 0 <= wait_s <= WAIT_MAX_S:
            raise BadRequest("wait_seconds", f"must be a number from 0 to {WAIT_MAX_S:g}")
        episode = await episodes.next(wait_s)
        if episode is None:
            return _error(410, "the run has ended") if episodes.is_closed else web.Response(status=204)
        base_url = f"{request.url.origin()}/sessions/{episode.session.id}"
        return web.json_response(episodes.describe(episode, base_url))

    async def _end_episode(self, request: web.Request) -> web.StreamResponse:
        outcome = requests.converted("body", requests.body_of(await request.read()), Outcome)
        if not self._episodes().end(request.match_info["episode"], outcome):
            return _error(410, "nobody waits for this episode: it was ended, given up, or handed out again")
        return web.Response(status=204)

    def _episodes(self) -> Episodes:
        if self.episodes is None:
            raise web.HTTPNotFound(text='episodes need [rollout] environment = "endpoint"')
        return self.episodes

    def _extras(self, completion: Completion, call: requests.Call, logprobs: Callable[..., Any]) -> dict[str, Any]:
        """The fields of a choice that were asked for."""
        extras: dict[str, Any] = {"logprobs": None}
        if call.logprobs:
            extras["logprobs"] = logprobs([self.chat.token(token) for token in completion.token_ids], completion)
        if call.return_token_ids:
            extras["token_ids"] = completion.token_ids
        return extras

    async def _reply(
        self, request: web.Request, kind: str, asked: Asked, answers: Answers, choices: list[dict[str, Any]]
    ) -> web.StreamResponse:
        call, prompt = asked.call, asked.token_ids
        counts = requests.usage(len(prompt), [completion for completion, _ in answers])
        whole = requests.reply(kind, f"call-{secrets.token_hex(8)}", call.model or self._model, choices, counts)
        if call.return_token_ids:
            whole["prompt_token_ids"] = prompt
        if not call.stream:
            return web.json_response(whole)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
        await response.prepare(request)
        await response.write(f"data: {json.dumps(requests.chunk(whole))}\n\ndata: [DONE]\n\n".encode())
        await response.write_eof()
        return response


def serve(config: JobConfig, collector: Collector) -> None:
    """With `[rollout] serve_port`: start the endpoint on the collector's event loop. It is closed with the collector.

    Raises:
        UserError: The address cannot be opened.
    """
    rollout = config.rollout
    if not rollout.serve_port:
        return
    chat = Chat(collector.tokenizer, config.data.chat_template_kwargs, not config.data.chat_template)
    key = os.environ.get(rollout.serve_key_env, "") if rollout.serve_key_env else ""
    model = model_name(config.model.hf_assets_path)
    endpoint = Endpoint(chat, model, rollout.serve_host, rollout.serve_port, key, config.training.seq_len)
    if rollout.environment == ENDPOINT:
        sources = {"": config.data} | {source.name: source.data for source in training_sources(config)}
        endpoint.episodes = Episodes(endpoint, rollout.lease_seconds, rollout.start_timeout_seconds, sources)
    collector.call(endpoint.start())
    collector.endpoint = endpoint
    logger.info(f"The endpoint is at {endpoint.url} ([rollout] serve_port)")


def _error(status: int, message: str, param: str | None = None) -> web.Response:
    kind = "invalid_request_error" if status < 500 else "server_error"
    return web.json_response(
        {"error": {"message": message, "type": kind, "param": param, "code": status}}, status=status
    )
