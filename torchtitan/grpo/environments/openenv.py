"""Environments behind an OpenEnv server (https://github.com/meta-pytorch/OpenEnv), over its WebSocket protocol.

    reset(seed) -> observation;  the model's text -> step(action) -> observation, reward, done;  ...

The package itself is not needed: it brings a web interface and servers. On the wire are JSON messages, over one
WebSocket for each episode. `{"type": "reset" | "step" | "close", "data": {...}}` is answered by `{"type":
"observation", "data": {"observation": {...}, "reward": ..., "done": ...}}`, or by an error.
"""

import json
import os
from collections.abc import Mapping
from typing import Any

import aiohttp
import urllib3

from torchtitan.grpo.data.samples import Prompt, Sample
from torchtitan.grpo.endpoint.chat import Chat, characters, off_loop
from torchtitan.grpo.endpoint.requests import TooLong
from torchtitan.grpo.endpoint.sessions import Session
from torchtitan.grpo.engines.whole_replies import pool_of
from torchtitan.grpo.errors import UserError
from torchtitan.grpo.process.addresses import UNSENDABLE, is_sendable
from torchtitan.grpo.rollouts.environment import RolloutClient

REACH_TIMEOUT_S = 10.0
"""Longest wait for the server at the start of the run."""
_ABOUT_THE_STEP = ("reward", "done", "metadata")
"""Fields that observations may repeat. The model does not read them."""


class OpenEnvError(Exception):
    """What the server answered in place of an observation."""


class OpenEnvEnvironment:
    """One server. A sample is one episode, and its reward is the sum of the steps' rewards.

    Args:
        url: The server's address, as in "http://127.0.0.1:8000".
        template_arguments: `[data] chat_template_kwargs`.
        prompt: What each conversation begins with, before the first observation.
        action: The field of an action that takes the model's text, such as "message" or "code".
        action_fields: Further fields of each action.
        observation: The field of an observation that the model reads. "" is the only text, or all of it as JSON.
        episodes: Number of seeds, from 0. Each is a prompt.
        reset: Further arguments of a reset.
        max_steps: Longest episode.
        timeout_seconds: Longest wait for one answer of the server.
        api_key_env: Environment variable with a key, which is sent as a bearer token.

    Raises:
        UserError: The server cannot be reached, or a number is not over 0.
    """

    per_sample = True

    def __init__(
        self,
        url: str,
        template_arguments: Mapping[str, Any],
        /,
        prompt: str = "",
        action: str = "message",
        action_fields: Mapping[str, Any] | None = None,
        observation: str = "",
        episodes: int = 1000,
        reset: Mapping[str, Any] | None = None,
        max_steps: int = 10,
        timeout_seconds: float = 60.0,
        api_key_env: str = "",
    ) -> None:
        for name, value in {"episodes": episodes, "max_steps": max_steps, "timeout_seconds": timeout_seconds}.items():
            if not value > 0:
                raise UserError(f"[rollout] environment_args {name} = {value} must be over 0")
        self._url, self._template_arguments = url.rstrip("/"), template_arguments
        self._prompt, self._action, self._observation = prompt, action, observation
        self._action_fields, self._reset = dict(action_fields or {}), dict(reset or {})
        self._max_steps, self._timeout_s = max_steps, timeout_seconds
        self._headers = {"Authorization": f"Bearer {os.environ[api_key_env]}"} if api_key_env in os.environ else {}
        if api_key_env and not self._headers:
            raise UserError(f'[rollout] environment_args api_key_env = "{api_key_env}" is not set: export it')
        if not is_sendable(os.environ.get(api_key_env, "")):
            raise UserError(f'[rollout] environment_args api_key_env = "{api_key_env}" {UNSENDABLE}')
        question = [{"role": "user", "content": prompt or "?"}]
        self.rows = [{"question": question, "seed": seed} for seed in range(episodes)]
        self._chat: Chat | None = None
        self._check_reachable()

    async def __call__(self, client: RolloutClient, prompt: Prompt) -> list[Sample]:
        """One episode.

        Raises:
            OpenEnvError, aiohttp.ClientError, TimeoutError: The server failed, or took too long for an answer.
        """
        if self._chat is None:
            self._chat = Chat(client.tokenizer, self._template_arguments)
        session = Session(f"openenv-{prompt.index}", self._url, client, prompt, 0)
        async with (
            aiohttp.ClientSession(headers=self._headers) as http,
            http.ws_connect(f"{self._url}/ws") as socket,
        ):
            told = await self._told(socket, "reset", self._reset | {"seed": prompt.columns["seed"]})
            first = "\n".join(filter(None, [self._prompt, self._text(told)]))
            messages, rewards, steps = [{"role": "user", "content": first}], [told.get("reward")], 0
            while not told.get("done") and steps < self._max_steps:
                try:
                    asked = await off_loop(characters(messages), self._chat.asked, session, {"messages": messages})
                except TooLong:  # no tokens are left
                    break
                [(completion, place)] = await session.answer(asked)
                if place is None:  # no tokens are left
                    break
                said = self._chat.choice(session, asked, 0, completion, place)["message"]
                action = self._action_fields | {self._action: said["content"]}
                told = await self._told(socket, "step", action)
                messages += [said, {"role": "user", "content": self._text(told)}]
                rewards.append(told.get("reward"))
                steps += 1
            await socket.send_json({"type": "close"})
        given = [float(reward) for reward in rewards if reward is not None]
        samples = session.samples()
        for sample in samples:
            sample.reward = sum(given) if given else None
            sample.rewards = {"episode_steps": float(steps)}
        return samples

    async def _told(self, socket: aiohttp.ClientWebSocketResponse, kind: str, data: dict[str, Any]) -> dict[str, Any]:
        """What the server answers to one message."""
        await socket.send_json({"type": kind, "data": data})
        answer = await socket.receive(self._timeout_s)
        if answer.type != aiohttp.WSMsgType.TEXT:
            raise OpenEnvError(f"{self._url} ended the connection at {kind} ({answer.type.name}: {answer.data})")
        told = await off_loop(len(answer.data), json.loads, answer.data)
        if told.get("type") != "observation":
            said = told.get("data") or {}
            hint = ": set [rollout] environment_concurrency" if said.get("code") == "CAPACITY_REACHED" else ""
            raise OpenEnvError(f"{self._url} answered {kind} with {said.get('code')}: {said.get('message')}{hint}")
        return told["data"]

    def _text(self, told: dict[str, Any]) -> str:
        """The part of an observation that the model reads."""
        seen = told.get("observation") or {}
        if self._observation:
            if self._observation not in seen:
                raise OpenEnvError(f"observations have {list(seen)}, and no {self._observation!r}")
            return str(seen[self._observation])
        fields = {name: value for name, value in seen.items() if name not in _ABOUT_THE_STEP}
        texts = [value for value in fields.values() if isinstance(value, str)]
        return texts[0] if len(texts) == 1 else json.dumps(fields)

    def _check_reachable(self) -> None:
        where = f'[rollout] environment = "openenv:{self._url}"'
        if not self._url.startswith(("http://", "https://")):
            raise UserError(f"{where} is no address: write openenv:http://host:port")
        try:  # whatever it answers
            path = urllib3.util.parse_url(f"{self._url}/health").request_uri
            timeout = urllib3.Timeout(total=REACH_TIMEOUT_S)
            pool_of(self._url).urlopen("GET", path, headers=self._headers, timeout=timeout)
        except urllib3.exceptions.HTTPError as error:
            raise UserError(f"{where}: no server answers there: {error}") from error
