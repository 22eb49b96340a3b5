"""The model of `verifiers`, which is the run's: a client of its interception server that asks the run's servers."""

import asyncio
from collections.abc import Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

from verifiers.v1.clients import Client
from verifiers.v1.configs.client import BaseClientConfig
from verifiers.v1.dialects import ChatDialect, Dialect
from verifiers.v1.errors import ProviderError
from verifiers.v1.graph import PendingTurn
from verifiers.v1.interception import InterceptionServer
from verifiers.v1.session import RolloutSession
from verifiers.v1.types import Response, SamplingConfig, TurnTokens

from torchtitan.grpo.data.samples import Prompt
from torchtitan.grpo.endpoint.chat import Chat, characters, off_loop
from torchtitan.grpo.endpoint.requests import BadRequest, reply, usage
from torchtitan.grpo.endpoint.sessions import Session, SessionEnded
from torchtitan.grpo.environments.in_process import NO_TOKENS_LEFT
from torchtitan.grpo.rollouts.environment import RolloutClient

MODEL = "policy"
"""The model's name in requests and traces."""
ADDRESS = "http://in-process"
"""Of the model, in verifiers' configuration. Nobody connects to it."""


@dataclass(eq=False)
class Conversation:
    """The model calls of one sample: a session for each of verifiers' traces.

    Attributes:
        loop: The collector's event loop, which servers are asked on.
    """

    client: RolloutClient
    prompt: Prompt
    chat: Chat
    loop: asyncio.AbstractEventLoop
    sessions: dict[str, Session] = field(default_factory=dict)
    numbers: dict[str, int] = field(default_factory=dict)

    def number(self, trace_id: str) -> int:
        """Of the session: traces are numbered as the episode makes them, whichever of several agents asks first."""
        return self.numbers.setdefault(trace_id, len(self.numbers))

    async def answer(self, trace_id: str, body: dict[str, Any]) -> tuple[dict[str, Any], TurnTokens]:
        """One model call, on the collector's event loop: the reply in OpenAI's form, and its tokens.

        Raises:
            ProviderError: The request is refused, or no tokens are left.
        """
        if trace_id not in self.sessions:
            self.sessions[trace_id] = Session(trace_id, ADDRESS, self.client, self.prompt, self.number(trace_id))
        session = self.sessions[trace_id]
        try:
            one = body | {"n": 1, "stream": False}
            async with session.order:
                asked = await off_loop(characters(body["messages"]), self.chat.asked, session, one)
                answers = session.answer(asked)
            [(completion, place)] = await answers
            if place is None:
                raise ProviderError(NO_TOKENS_LEFT, status_code=400)
            choice = self.chat.choice(session, asked, 0, completion, place)
        except (BadRequest, SessionEnded, RecursionError) as error:  # RecursionError: nested deeply
            raise ProviderError(str(error), status_code=400) from error
        counts = usage(len(asked.token_ids), [completion])
        tokens = TurnTokens.model_construct(
            prompt_ids=asked.token_ids,
            completion_ids=completion.token_ids,
            completion_logprobs=completion.logprobs,
        )
        return reply("chat.completion", f"{trace_id}-{session.calls}", MODEL, [choice], counts), tokens


CURRENT: ContextVar[Conversation] = ContextVar("conversation")
"""Of the task that runs an episode, and of the tasks that it starts."""


class FleetClient(Client):
    """Answers model calls of every conversation, by their traces."""

    def __init__(self) -> None:
        self.conversations: dict[str, Conversation] = {}

    async def get_response(
        self,
        dialect: Dialect,
        body: dict,
        sampling: SamplingConfig,
        session_id: str | None = None,
        turn: PendingTurn | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> Response:
        if not isinstance(dialect, ChatDialect):
            raise ProviderError(
                "trained models answer /v1/chat/completions only: take a harness that asks there", status_code=400
            )
        conversation = self.conversations.get(session_id or "")
        if conversation is None:
            raise ProviderError("the sample has ended", status_code=409)
        answer = asyncio.run_coroutine_threadsafe(conversation.answer(session_id or "", body), conversation.loop)
        raw, tokens = await asyncio.wrap_future(answer)
        response = dialect.parse_response(dialect.validate_response(raw))
        response.raw, response.tokens = raw, tokens
        return response


class FleetInterception(InterceptionServer):
    """verifiers' interception server, whose trained model is the run's."""

    def __init__(self, requires_tunnel: bool, state_service_secrets: tuple[str, ...]) -> None:
        super().__init__(None, requires_tunnel, state_service_secrets)
        self.fleet = FleetClient()

    def _client(self, config: BaseClientConfig) -> Client:
        return self.fleet if config.base_url == ADDRESS else super()._client(config)

    def register(self, session: RolloutSession) -> tuple[str, str]:
        if session.ctx.client.base_url == ADDRESS:
            self.fleet.conversations[session.trace.id] = CURRENT.get()
        return super().register(session)

    def unregister(self, model_secret: str, state_secret: str) -> None:
        if session := self.sessions.get(model_secret):
            self.fleet.conversations.pop(session.trace.id, None)
        super().unregister(model_secret, state_secret)
