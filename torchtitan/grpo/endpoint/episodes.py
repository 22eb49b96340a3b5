"""`[rollout] environment = "endpoint"`: a harness outside takes episodes, plays them, and posts their rewards."""

import asyncio
import contextlib
import logging
import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any

import msgspec

from torchtitan.grpo.config.job_config import Data
from torchtitan.grpo.data.prompts import chat_messages
from torchtitan.grpo.data.samples import REWARD_MAX, Prompt, Sample
from torchtitan.grpo.endpoint.sessions import Session
from torchtitan.grpo.errors import UserError
from torchtitan.grpo.process.event_loop import all_of
from torchtitan.grpo.rollouts.environment import ENDPOINT, RolloutClient

logger = logging.getLogger(__name__)

if TYPE_CHECKING:
    from torchtitan.grpo.endpoint.server import Endpoint

TAKEN_MAX = 3
"""How often an episode is handed out before it has failed."""
_ERROR_CHARS = 2000
"""Of a posted error, which goes to logs."""
WAIT_MAX_S = 60.0
"""Longest that a harness may wait for an episode in one request."""


_Number = Annotated[float, msgspec.Meta(ge=-REWARD_MAX, le=REWARD_MAX)]
_Name = Annotated[str, msgspec.Meta(max_length=128)]


class Outcome(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a harness says of an episode: its reward, others by name, each of which is a metric, and what failed."""

    reward: _Number | None = None
    rewards: Annotated[dict[_Name, _Number], msgspec.Meta(max_length=64)] | None = None
    error: str | None = None


@dataclass(eq=False)
class Episode:
    """One sample of a group, in the hands of a harness or waiting for one.

    Attributes:
        taken: Done once a harness has it.
        taken_at: The event loop's time then.
        outcome: What the harness posts.
    """

    session: Session
    taken: asyncio.Future[None] = field(default_factory=lambda: asyncio.get_running_loop().create_future())
    taken_at: float = 0.0
    outcome: asyncio.Future[Outcome] = field(default_factory=lambda: asyncio.get_running_loop().create_future())


class Episodes:
    """Hands out the samples of groups as episodes, in the order in which they were requested.

    A group's time limit begins with its first model call. Before that, the wait for a harness is bounded: the run ends
    if none has asked or posted for `harness_timeout_s`, and none had an episode whose lease went on. An episode whose
    harness gives no sign of life for `lease_s` is handed out again, in a new session; what was sampled in the old one
    is dropped. A sign of life is a model call. Everything happens on the collector's event loop; nothing polls.

    Args:
        sources: The data of each source by name, "" if there is one, to give messages.
    """

    def __init__(self, endpoint: "Endpoint", lease_s: float, harness_timeout_s: float, sources: Mapping[str, Data]):
        self._endpoint, self._sources = endpoint, sources
        self._lease_s, self._harness_timeout_s = lease_s, harness_timeout_s
        self._offered: deque[Episode] = deque()
        self._taken: dict[str, Episode] = {}
        self._news = asyncio.Event()
        self._closed = False
        self._asking = self._lost = 0
        self._seen_at = -math.inf

    async def play(self, client: RolloutClient, prompt: Prompt) -> list[Sample]:
        """One group: `client.params.n` episodes.

        Raises:
            UserError: No harness asks for them.
        """
        client.waits()
        episodes = [self._episode(client, prompt) for _ in range(client.params.n)]
        return [sample for own in await all_of(episodes) for sample in own]

    async def next(self, wait_s: float) -> Episode | None:
        """The next episode for a harness; None if there is none within `wait_s`, or if the run ends."""
        loop = asyncio.get_running_loop()
        self._asking += 1
        try:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(wait_s):
                    while not self._offered and not self._closed:
                        self._news.clear()
                        await self._news.wait()
        finally:
            self._asking -= 1
            self._seen_at = loop.time()
        if not self._offered or self._closed:
            return None
        episode = self._offered.popleft()
        episode.taken_at = loop.time()
        episode.taken.set_result(None)
        self._taken[episode.session.id] = episode
        return episode

    def end(self, id: str, outcome: Outcome) -> bool:
        """A harness posts the outcome of an episode. Whether it is still wanted."""
        self._seen_at = asyncio.get_running_loop().time()
        episode = self._taken.pop(id, None)
        if episode is None or episode.outcome.done():
            return False
        episode.outcome.set_result(outcome)
        return True

    def close(self) -> None:
        """Harnesses that wait are told that the run has ended."""
        self._closed = True
        self._news.set()

    @property
    def is_closed(self) -> bool:
        return self._closed

    def describe(self, episode: Episode, base_url: str) -> dict[str, Any]:
        """What a harness gets, as JSON values."""
        session, params = episode.session, episode.session.client.params
        prompt = session.prompt
        return {
            "id": session.id,
            "base_url": base_url,
            "prompt": prompt.text,
            "messages": self._messages(prompt),
            "answer": prompt.answer,
            "columns": prompt.columns,
            "source": prompt.source,
            "sampling": {
                "temperature": params.temperature,
                "top_p": params.top_p,
                "max_tokens": params.max_tokens,
                "stop": list(params.stop),
            },
            "lease_seconds": self._lease_s,
        }

    def _messages(self, prompt: Prompt) -> list[dict[str, str]] | None:
        """The messages that are rendered to this prompt; None if it is plain text."""
        data = self._sources.get(prompt.source) or self._sources[""]
        if not data.chat_template or data.prompt_column not in prompt.columns:
            return None
        messages = chat_messages(prompt.columns[data.prompt_column], data, f"prompt {prompt.index}")
        return messages if self._endpoint.chat.render(messages) == prompt.text else None

    async def _episode(self, client: RolloutClient, prompt: Prompt) -> list[Sample]:
        for taken in range(TAKEN_MAX):
            episode = Episode(self._endpoint.open(client, prompt))
            # Its group is under way if it was handed out before.
            (self._offered.appendleft if taken else self._offered.append)(episode)
            self._news.set()
            try:
                outcome = await self._outcome(episode)
            finally:
                self._endpoint.end(episode.session)
                self._taken.pop(episode.session.id, None)
                if not episode.taken.done():
                    self._offered.remove(episode)
            if outcome is not None:
                return _samples(episode.session, outcome)
            self._seen_at = asyncio.get_running_loop().time()
            self._lost += 1
            if taken + 1 < TAKEN_MAX and math.log10(self._lost).is_integer():  # 1st, 10th, 100th ...
                what = f"{self._lease_s:g} s, a quarter of [rollout] group_timeout_seconds,"
                logger.warning(f"An episode had no model call for {what} and is handed out again ({self._lost} so far)")
        lost = f"was lost by {TAKEN_MAX} harnesses: each gave no sign of life for {self._lease_s:g} s"
        return [_failed(prompt, f"{lost}, a quarter of [rollout] group_timeout_seconds")]

    async def _outcome(self, episode: Episode) -> Outcome | None:
        """What the harness posts; None if it gives no sign of life.

        Raises:
            UserError: There is no harness.
        """
        loop = asyncio.get_running_loop()
        began = loop.time()
        while not episode.taken.done():
            left_s = max(began, self._seen_at, self._leased_until()) + self._harness_timeout_s - loop.time()
            if self._asking:
                left_s = self._harness_timeout_s
            if left_s <= 0:
                raise UserError(
                    f'[rollout] environment = "{ENDPOINT}": no harness has asked for an episode for '
                    f"{self._harness_timeout_s:g} s ([rollout] start_timeout_seconds): start one that posts to "
                    f"{self._endpoint.url}/episodes/next, as in docs/endpoint.md"
                )
            await asyncio.wait([episode.taken], timeout=left_s)
        while not episode.outcome.done():
            left_s = self._lease_ends(episode) - loop.time()
            if left_s <= 0:
                return None
            await asyncio.wait([episode.outcome], timeout=left_s)
        return episode.outcome.result()

    def _lease_ends(self, episode: Episode) -> float:
        """When, unless its harness calls the model before. A harness is busy with it until then."""
        session, now = episode.session, asyncio.get_running_loop().time()
        return (now if session.is_busy else max(episode.taken_at, session.last_used)) + self._lease_s

    def _leased_until(self) -> float:
        """When the last lease ends."""
        return max(map(self._lease_ends, self._taken.values()), default=-math.inf)


async def rollout(client: RolloutClient, prompt: Prompt) -> list[Sample]:
    """The environment that `[rollout] environment = "endpoint"` is."""
    return await client.endpoint.episodes.play(client, prompt)


def _samples(session: Session, outcome: Outcome) -> list[Sample]:
    """The samples of a session, each with the episode's reward."""
    samples, error = session.samples(), (outcome.error or "")[:_ERROR_CHARS]
    if not samples:
        return [_failed(session.prompt, f"ended without a model call{error and f': {error}'}")]
    for sample in samples:
        if error:
            sample.reward_failures = {ENDPOINT: f"ended in an error: {error}"}
        else:
            sample.reward, sample.rewards = outcome.reward, dict(outcome.rewards or {})
    return samples


def _failed(prompt: Prompt, failure: str) -> Sample:
    return Sample(prompt, [], [], [], "abort", reward_failures={ENDPOINT: failure})
