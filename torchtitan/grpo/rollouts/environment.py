"""How a prompt becomes a group of samples: one answer each, or several turns of a user's environment.

`[rollout] environment = "module:function"` names an `async def rollout(client, prompt)` that returns the samples of one
group. It calls the servers through its `RolloutClient`. `Turns` builds a sample. `environments/load.py` finds it.
"""

import itertools
import math
import numbers
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from typing import Any, Protocol

import numpy as np
from transformers import PreTrainedTokenizerBase

from torchtitan.grpo.data.kept_tokens import KeptTokens
from torchtitan.grpo.data.routes import RouteShape
from torchtitan.grpo.data.samples import IMPOSSIBLE, REWARD_MAX, Group, Prompt, Sample, TopTokens
from torchtitan.grpo.engines.protocol import Completion, SamplingParams
from torchtitan.grpo.engines.stop_strings import cut_at_stop
from torchtitan.grpo.errors import UserError, in_words, shown
from torchtitan.grpo.process.random_numbers import prompt_seed

ENDPOINT = "endpoint"
"""The `[rollout] environment` that is a harness outside, see `endpoint/episodes.py`."""
KEY = "[rollout] environment"
"""The key that names the environment of a run, in messages."""
Ask = Callable[[list[int], SamplingParams, str, str], Awaitable[list[Completion]]]
"""(token ids, parameters, suffix of the request id, session) -> completions."""


class RolloutClient:
    """The servers, as the rollout of one group sees them. Routing and retries happen behind it.

    Attributes:
        tokenizer: The model's tokenizer.
        params: The group's parameters: `n` samples wanted, `max_tokens` the longest answer over all turns together.
        endpoint: The run's `endpoint.server.Endpoint`; None if `[rollout] serve_port` is 0.
        waits: Call it before a wait that is bounded otherwise: the group's time limit then begins at its first request.
        sessions: How many sessions of the endpoint the group has had.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        params: SamplingParams,
        prompt: Prompt,
        ask: Ask,
        endpoint: Any = None,
        waits: Callable[[], None] = lambda: None,
    ) -> None:
        self.tokenizer = tokenizer
        self.params = params
        self.endpoint = endpoint
        self.waits = waits
        self.sessions = 0
        self._index, self._prompt_tokens = prompt.index, len(prompt.token_ids)
        self._ask = ask
        self._calls: Counter[str] = Counter()
        self._seeds = 0

    async def generate(
        self,
        token_ids: list[int],
        *,
        n: int = 1,
        max_tokens: int | None = None,
        stop_token_ids: tuple[int, ...] = (),
        stop: tuple[str, ...] | str = (),
        seed: int | None = None,
        session: str = "",
    ) -> list[Completion]:
        """Continue `token_ids` `n` times. Several calls may run at once (`asyncio.gather`).

        Args:
            max_tokens: Longest completion. The group's `max_tokens`, less the tokens beyond the prompt, bounds it too.
                If nothing is left, the completions are empty and their finish_reason is "length".
            stop_token_ids, stop: Tokens and texts that end this turn, besides those that end an answer.
            seed: None derives one from the group's seed and the calls of this session before this one.
            session: Names a conversation of the group. Its turns go to the same server, which has its prefix cached,
                while that is in traffic with new enough weights and has a place. Its first turn goes where the group's
                last call without a session was answered.
        """
        turn, call = self._calls[session], self._calls.total()
        self._calls[session] += 1
        derived = self._seed(session, turn, n)
        left = self.params.max_tokens - (len(token_ids) - self._prompt_tokens)
        left = left if max_tokens is None else min(left, max_tokens)
        if left <= 0:
            return [Completion([], [], "length", []) for _ in range(n)]
        seed = derived if seed is None else seed
        tokens, texts = (*self.params.stop_token_ids, *stop_token_ids), self.params.stop
        texts += (stop,) if isinstance(stop, str) else tuple(stop)  # OpenAI's clients take one text, too
        params = replace(self.params, n=n, max_tokens=left, stop_token_ids=tokens, stop=texts, seed=seed)
        completions = await self._ask(token_ids, params, f"-turn{call}" if call else "", session)
        return [cut_at_stop(completion, texts, self._decode) for completion in completions] if texts else completions

    def _seed(self, session: str, turn: int, n: int) -> int | None:
        if self.params.seed is None:
            return None
        if session:  # sessions overtake each other, so a count of all calls would depend on timing
            return prompt_seed(self.params.seed, f"turns/{session}", self._index, turn)
        first, self._seeds = self._seeds, self._seeds + max(n, self.params.n)  # servers add the sample's number
        return self.params.seed + first

    def _decode(self, token_ids: list[int]) -> str:
        return self.tokenizer.decode(token_ids, skip_special_tokens=True)


class Environment(Protocol):
    """What turns a prompt into samples: a function, or an object with more to it.

    It may also have these attributes:

    - `per_sample`, true if it makes one sample, or the parts of one: it is called `n` times, with `params.n` = 1. Then
      one that fails costs that sample alone.
    - `rows`, its data as a list of dicts: `[data] source = "environment"` reads them.
    - `close()`, called at the end of the run from any thread, and bounded.
    """

    def __call__(self, client: RolloutClient, prompt: Prompt, /) -> Awaitable[list[Sample]]: ...


class Turns:
    """One sample over several turns. The model's tokens are trained on, the environment's are masked."""

    def __init__(self, prompt: Prompt) -> None:
        self._loss_mask: list[bool] = []
        self._sample = Sample(prompt, [], [], [], "length", loss_mask=self._loss_mask)

    @property
    def token_ids(self) -> list[int]:
        """The prompt and everything since. The next turn continues it."""
        return self._sample.prompt.token_ids + self._sample.token_ids

    def sampled(self, completion: Completion) -> None:
        """Append the model's tokens.

        Raises:
            ValueError: The completion has routes, and did not continue `token_ids`.
        """
        self._route(completion)
        self._add_top(completion.top)
        self._sample.servers.append((len(self._sample.token_ids), completion.server))
        self._keep(completion.kept, len(completion.token_ids))
        self._append(completion.token_ids, completion.logprobs, completion.versions, True)
        self._sample.finish_reason = completion.finish_reason

    def given(self, token_ids: list[int]) -> None:
        """Append the environment's tokens.

        Raises:
            TypeError: It is a text.
        """
        if isinstance(token_ids, str):
            raise TypeError(
                'Turns.given takes token ids, not a text: client.tokenizer(text, add_special_tokens=False)["input_ids"]'
            )
        if (top := self._sample.top) is not None:
            self._add_top(TopTokens.none(len(token_ids), top.ids.shape[1]))
        version = self._sample.versions[-1:] or [0]
        self._keep(None, len(token_ids))
        self._append(token_ids, [0.0] * len(token_ids), version * len(token_ids), False)

    def sample(self) -> Sample:
        return self._sample

    def _route(self, completion: Completion) -> None:
        """Each position keeps the routes that came first. A token's are then those of the weights that sampled on."""
        sample, routes = self._sample, completion.routes
        if routes is None:
            return
        positions = len(sample.prompt.token_ids) + len(sample.token_ids) + len(completion.token_ids) - 1
        if len(routes) != positions:
            raise ValueError(
                f"an answer has the routing of {len(routes)} positions, and with it its sample "
                f"has {positions}: [grpo] routing_replay needs each turn to continue `Turns.token_ids`"
            )
        known = sample.routes
        sample.routes = routes if known is None else np.concatenate([known, routes[len(known) :]])

    def _keep(self, kept: KeptTokens | None, tokens: int) -> None:
        """What could be drawn in place of the tokens that are appended next; None: they need none."""
        before = self._sample.kept
        if kept is not None or before is not None:
            parts = before or KeptTokens.all(len(self._sample.token_ids)), kept or KeptTokens.all(tokens)
            self._sample.kept = KeptTokens.joined(parts)

    def _add_top(self, top: TopTokens | None) -> None:
        """None outside what the model sampled."""
        if top is not None:
            known = self._sample.top or TopTokens.none(len(self._sample.token_ids), top.ids.shape[1])
            self._sample.top = known.followed_by(top)

    def _append(self, token_ids: list[int], logprobs: list[float], versions: list[int], sampled: bool) -> None:
        self._sample.token_ids += token_ids
        self._sample.logprobs += logprobs
        self._sample.versions += versions
        self._loss_mask += [sampled] * len(token_ids)


async def single_turn(client: RolloutClient, prompt: Prompt) -> list[Sample]:
    """The default: each sample is one answer."""
    completions = await client.generate(prompt.token_ids, n=client.params.n, seed=client.params.seed)
    return [
        Sample(
            *(prompt, c.token_ids, c.logprobs, c.versions, c.finish_reason),
            servers=[(0, c.server)],
            routes=c.routes,
            kept=c.kept,
            top=c.top,
        )
        for c in completions
    ]


def rows_of(environment: Environment, key: str = KEY) -> Sequence[dict[str, Any]] | None:
    """The data that an environment brings; None if it brings none.

    Raises:
        UserError: Its `rows` fail. The message names the key that has the environment.
    """
    try:
        return getattr(environment, "rows", None)
    except Exception as error:  # the user's code may raise anything
        raise UserError(f"{key}: its `rows` cannot be read: {in_words(error)}") from error


def checked(
    samples: list[Sample], name: str, prompt: Prompt, params: SamplingParams, oldest: int = -1, ours: bool = False
) -> Group:
    """Check what an environment returned and cut each sample to `params.max_tokens`, which given tokens may exceed.

    A number in `rewards` that is not finite is left out: it only informs. A sample that ends at its last turn's own
    limit, and had tokens left, has stopped.

    Args:
        prompt: The group's. What a sample's own prompt has beyond it counts to `max_tokens`.
        params: What the group was asked for.
        oldest: The weight version of the server at the group's first request. -1: nothing to check.
        ours: They are as `single_turn` made them, of values that the client has checked.

    Raises:
        UserError: It is not a list of samples, or a sample's columns differ in length from its tokens. Or it was
            sampled before the group began.
        ValueError: An episode may be so: there is no sample, a reward is no number that a step can use, or a text had a
            token that the model has no embedding for, or none.
    """
    where = f"{KEY} = {name!r}"
    if not isinstance(samples, list) or not all(isinstance(sample, Sample) for sample in samples):
        raise UserError(f"{where} must return a list of one Sample or more, not {repr(samples)[:100]}")
    if not samples:
        raise ValueError("no sample")
    for sample in samples:
        own = [] if sample.prompt is prompt else sample.prompt.token_ids  # those of the data are checked at the start
        if not ours:
            _check_values(sample, own, where)
        columns: list[list[Any]] = [sample.logprobs, sample.versions]
        columns += [] if sample.loss_mask is None else [sample.loss_mask]
        tokens = len(sample.token_ids)
        if any(len(column) != tokens for column in columns):
            entries = [len(column) for column in columns]
            raise UserError(f"{where}: a sample of {tokens} tokens has {entries} log-probabilities, versions and masks")
        rewards = {"reward": sample.reward} if sample.reward is not None else {}
        for what, value in (rewards | sample.rewards).items():
            if not isinstance(value, numbers.Real):  # NumPy's are, too
                raise UserError(f"{where}: {what} = {shown(value)} of a sample is no number")
        if sample.reward is not None and not abs(sample.reward) <= REWARD_MAX:
            raise ValueError(f"a sample with the reward {sample.reward!r}, which is over {REWARD_MAX:g} or no number")
        sample.reward = None if sample.reward is None else float(sample.reward)
        sample.rewards = {what: float(value) for what, value in sample.rewards.items() if abs(value) <= REWARD_MAX}
        if oldest >= 0 and min(sample.sampled_versions, default=oldest) < oldest:
            raise UserError(
                f"{where}: a sample has a token of weight version {min(sample.sampled_versions)}, and its group began "
                f"at {oldest}: return what `client.generate` answered for this prompt, with its versions"
            )
        if params.routes is not None and tokens:
            _check_routes(sample, params.routes, where)
        if params.kept:
            _check_kept(sample, where)
        told = None if sample.top is None else sample.top.ids.shape
        if params.top_tokens and sample.sampled_tokens and told != (tokens, params.top_tokens):
            raise UserError(
                f"{where}: a sample has not the {params.top_tokens} likeliest tokens in place of each of its {tokens}, "
                "which [grpo] score_centering needs: make samples with `Turns`, or pass on `Completion.top`"
            )
        if not sample.prompt.token_ids:
            raise ValueError("a sample with an empty prompt")
        ids = own + sample.token_ids
        if ids and not (min(ids) >= 0 and max(ids) < params.vocab_size):
            wrong = min(ids) if min(ids) < 0 else max(ids)
            raise ValueError(f"a sample with token {wrong}, and the model has {params.vocab_size}")
        sample.beyond = max(0, len(sample.prompt.token_ids) - len(prompt.token_ids))
        most = max(0, params.max_tokens - sample.beyond)
        if tokens > most:
            sample.finish_reason = "length"
            for column in (sample.token_ids, *columns):
                del column[most:]
            sample.kept = sample.kept and sample.kept.first(most)
            sample.top = sample.top and sample.top.cut(most)
        if sample.finish_reason == "length" and tokens < most:
            sample.finish_reason = "stop"
    return samples


def _check_values(sample: Sample, own: list[int], where: str) -> None:
    """What an environment may have written itself, with the prompt's ids if it is its own: arrays become lists."""
    firsts, servers = zip(*sample.servers, strict=True) if len(sample.servers) else ((), ())
    numbers = [*own, *sample.token_ids, *sample.versions, *firsts, sample.prompt.index]
    if not set(map(type, numbers)) <= {int} or not -(2**31) <= min(numbers) <= max(numbers) < 2**31:
        raise UserError(f"{where}: token ids and versions of a sample must be whole numbers of 32 bits")
    sample.logprobs = list(map(float, sample.logprobs))
    sample.loss_mask = None if sample.loss_mask is None else list(map(bool, sample.loss_mask))
    sampled = itertools.compress(sample.logprobs, sample.loss_mask or itertools.repeat(True))
    if not all(map(math.isfinite, sample.logprobs)) or max(map(abs, sampled), default=0.0) >= -IMPOSSIBLE:
        raise ValueError("a sample with a log-probability that is not finite, or that no token has")
    texts = [sample.finish_reason, *servers, *sample.rewards, *itertools.chain(*sample.reward_failures.items())]
    texts += [sample.prompt.text, sample.prompt.answer, sample.prompt.source, *sample.prompt.functions]
    if wrong := [text for text in texts if not isinstance(text, str)]:
        raise UserError(
            f"{where}: finish_reason, names of rewards, and what reward_failures, servers and prompt of a sample say "
            f"must be texts, not {shown(wrong[0])}"
        )


def _check_kept(sample: Sample, where: str) -> None:
    if sample.sampled_tokens and (sample.kept is None or len(sample.kept) != len(sample.token_ids)):
        raise UserError(
            f"{where}: a sample of {len(sample.token_ids)} tokens says of {len(sample.kept or ())} which tokens were "
            "kept, and [rollout] top_k needs all: make samples with `Turns`, or pass on `Completion.kept`"
        )


def _check_routes(sample: Sample, shape: RouteShape, where: str) -> None:
    mask = sample.loss_mask or [True] * len(sample.token_ids)
    sampled = max(itertools.compress(itertools.count(1), mask), default=0)
    needed = len(sample.prompt.token_ids) + sampled - 1
    routes = sample.routes
    if not isinstance(routes, np.ndarray) or routes.dtype != shape.dtype:
        fits, found = False, "no routing" if routes is None else f"routing that is no array of {shape.dtype}"
    else:
        fits = len(routes) >= needed and routes.shape[1:] == (shape.layers, shape.top_k)
        found = f"routing of shape {list(routes.shape)}"
    if sampled and not fits:
        raise UserError(
            f"{where}: a sample has {found}, and [grpo] routing_replay needs {needed} positions of {shape.layers} "
            "layers: make samples with `Turns`, or pass on `Completion.routes`"
        )
