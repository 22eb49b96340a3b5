"""Sessions: what was sampled in one conversation through the endpoint, as samples to train on."""

import asyncio
import hashlib
from collections.abc import Coroutine
from dataclasses import dataclass, replace
from typing import Any

from torchtitan.grpo.data.samples import Prompt, Sample
from torchtitan.grpo.endpoint.requests import Asked, BadRequest
from torchtitan.grpo.engines.protocol import Completion, Refused
from torchtitan.grpo.process.random_numbers import prompt_seed
from torchtitan.grpo.rollouts.environment import RolloutClient, Turns


class SessionEnded(Exception):
    """A call came, or was under way, when its session had ended."""


@dataclass(eq=False)
class Branch:
    """One sample in the making.

    Attributes:
        turns: The sample. Its tokens only grow.
        begun: The number of the call that began it, and its number among that call's.
        busy: A call that continues it is under way.
    """

    turns: Turns
    begun: tuple[int, int]
    busy: bool = False


@dataclass(frozen=True, eq=False)
class Place:
    """The end of one sampled turn.

    Attributes:
        branch: The sample.
        tokens: How many tokens of `branch.turns.token_ids` there were.
    """

    branch: Branch
    tokens: int

    @property
    def token_ids(self) -> list[int]:
        return self.branch.turns.token_ids[: self.tokens]


Answers = list[tuple[Completion, Place | None]]
"""Completions, and where each ends. None if it is empty."""


class Texts:
    """Ends of sampled turns by the text up to there. It keeps digests, since each text begins with others."""

    def __init__(self) -> None:
        self._places: dict[bytes, Place] = {}
        self._ends: set[int] = set()

    def add(self, text: str, place: Place) -> None:
        self._places[_text_digest(text).digest()] = place
        self._ends.add(len(text))

    def longest(self, text: str) -> tuple[int, Place | None]:
        """The place of the longest one that this text begins with, and its characters. Reads the text once."""
        found: tuple[int, Place | None] = (0, None)
        digest, at = _text_digest(""), 0
        for end in sorted(self._ends):
            if end > len(text):
                break
            digest.update(text[at:end].encode(errors="surrogatepass"))
            at = end
            if place := self._places.get(digest.digest()):
                found = end, place
        return found


def _text_digest(text: str) -> "hashlib.blake2b":
    return hashlib.blake2b(text.encode(errors="surrogatepass"), digest_size=16)


class Session:
    """The model calls of one episode. Everything happens on the collector's event loop.

    A call whose prompt begins with all the tokens of a sample continues that sample, with the new tokens of the prompt
    masked. Any other call begins another sample of the session: after its context was compacted, in a parallel branch,
    or with a system prompt of its own. So each sampled token is in one sample, and is trained on once.

    Calls go through `client.generate`. Its answer budget holds for each sample: all tokens beyond the row's prompt are
    at most `[rollout] max_answer_tokens`.

    Args:
        number: Of the group's sessions. Seeds follow from it, and from the number of the call.

    Attributes:
        id: Names it in addresses.
        base_url: What an OpenAI client gets, before "/v1".
        calls: Model calls so far.
        last_used: The event loop's time when a call last began or ended.
        order: Held while a call is read and begins, so that calls begin in the order in which they came.
        texts: Ends of sampled turns by the text up to there, for `/v1/completions`.
        said: Ends of sampled turns by a digest of the messages up to there, for `/v1/chat/completions`.
    """

    def __init__(self, id: str, base_url: str, client: RolloutClient, prompt: Prompt, number: int) -> None:
        self.id, self.base_url = id, base_url
        self.client, self.prompt = client, prompt
        self.calls = 0
        self.last_used = asyncio.get_running_loop().time()
        self.order = asyncio.Lock()
        self.texts = Texts()
        self.said: dict[str, Place] = {}
        self._number = number
        self._branches: list[Branch] = []
        self._under_way: set[asyncio.Task] = set()
        self._failure: Exception | None = None
        self._ended = False

    @property
    def is_busy(self) -> bool:
        """Whether a model call is under way, or is being read."""
        return bool(self._under_way) or self.order.locked()

    @property
    def longest_tokens(self) -> int:
        """Beyond so many tokens of a conversation, nothing is sampled."""
        return len(self.prompt.token_ids) + self.client.params.max_tokens

    def samples(self) -> list[Sample]:
        """A sample for each branch, in the order in which they began. None if nothing was sampled.

        Raises:
            Exception: The failure of a model call, which ends the run as in any environment.
        """
        if self._failure is not None:
            raise self._failure
        begun = sorted(self._branches, key=lambda branch: branch.begun)  # `_branches` is in the order of their answers
        return [branch.turns.sample() for branch in begun if branch.turns.sample().token_ids]

    def answer(self, asked: Asked) -> Coroutine[Any, Any, Answers]:
        """`generate`, for a request that was read."""
        call = asked.call
        return self.generate(
            asked.token_ids, n=call.n, max_tokens=call.max_tokens, stop_token_ids=call.stop_token_ids, stop=call.stop
        )

    def generate(
        self,
        token_ids: list[int],
        *,
        n: int = 1,
        max_tokens: int | None = None,
        stop_token_ids: tuple[int, ...] = (),
        stop: tuple[str, ...] = (),
    ) -> Coroutine[Any, Any, Answers]:
        """`RolloutClient.generate`, recorded.

        It has its number, its seed and the sample that it continues at once, before it is awaited.

        Raises:
            SessionEnded: It had ended, or ended during the call.
            BadRequest: The servers refuse the call.
            Exception: The call failed. `samples` raises this too.
        """
        if self._ended:
            raise SessionEnded
        call, self.calls = self.calls, self.calls + 1
        continued = self._continued(token_ids)
        branches = [continued] if continued else []
        branches += [Branch(Turns(self._begin(token_ids)), (call, i)) for i in range(n - len(branches))]
        answer = len(token_ids) - len(branches[0].turns.sample().prompt.token_ids)
        left = self.client.params.max_tokens - answer
        for each in branches:
            each.busy = True
        completions = self.client.generate(
            token_ids,
            n=n,
            max_tokens=left if max_tokens is None else min(left, max_tokens),
            stop_token_ids=stop_token_ids,
            stop=stop,
            seed=prompt_seed(self.client.params.seed, f"session{self._number}", self.prompt.index, call),
            session=self.id,
        )
        return self._recorded(branches, token_ids, completions)

    async def _recorded(
        self, branches: list[Branch], token_ids: list[int], call: Coroutine[Any, Any, list[Completion]]
    ) -> Answers:
        try:
            completions = await self._bounded(call)
            if self._ended:  # its samples are taken
                raise SessionEnded
        finally:
            for each in branches:
                each.busy = False
        return [(c, self._record(each, token_ids, c)) for c, each in zip(completions, branches, strict=True)]

    def end(self) -> None:
        """Cancel calls under way. Later ones raise SessionEnded."""
        self._ended = True
        for task in self._under_way:
            task.cancel()

    async def _bounded(self, call: Coroutine[Any, Any, list[Completion]]) -> list[Completion]:
        """The call as a task of its own, which the end of the session cancels. So does the end of its request."""
        task = asyncio.create_task(call)
        self._under_way.add(task)
        self._touch()
        try:
            return await task
        except asyncio.CancelledError:
            if self._ended and not asyncio.current_task().cancelling():
                raise SessionEnded from None
            raise
        except Refused as error:
            raise BadRequest("request", str(error)) from error
        except Exception as error:
            self._failure = self._failure or error
            raise
        finally:
            self._under_way.discard(task)
            task.cancel()
            self._touch()

    def _touch(self) -> None:
        self.last_used = asyncio.get_running_loop().time()

    def _continued(self, token_ids: list[int]) -> Branch | None:
        """The longest sample that these tokens continue, among those that no call continues now."""
        found, longest = None, -1
        for branch in self._branches:
            sample = branch.turns.sample()
            prompt, own = sample.prompt.token_ids, sample.token_ids
            end = len(prompt) + len(own)
            if branch.busy or not longest < end <= len(token_ids) or token_ids[end - 1] != own[-1]:
                continue  # without a look at all tokens, since there may be many branches
            if token_ids[: len(prompt)] == prompt and token_ids[len(prompt) : end] == own:
                found, longest = branch, end
        return found

    def _begin(self, token_ids: list[int]) -> Prompt:
        """The prompt of a new sample: the row's if the tokens begin with it, else the tokens themselves."""
        own = self.prompt.token_ids
        if token_ids[: len(own)] == own:
            return self.prompt
        samples = len(token_ids) < self.longest_tokens
        text = self.client.tokenizer.decode(token_ids) if samples else ""
        return replace(self.prompt, token_ids=list(token_ids), text=text)

    def _record(self, branch: Branch, token_ids: list[int], completion: Completion) -> Place | None:
        turns = branch.turns
        if not completion.token_ids:  # no answer tokens were left
            turns.sample().finish_reason = completion.finish_reason
            return None
        if new := token_ids[len(turns.token_ids) :]:
            turns.given(new)
        turns.sampled(completion)
        if branch not in self._branches:
            self._branches.append(branch)
        return Place(branch, len(turns.token_ids))
