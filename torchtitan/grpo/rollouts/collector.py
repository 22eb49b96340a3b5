"""Prompts in, scored groups of answers out."""

import asyncio
import concurrent.futures
import contextlib
import inspect
import secrets
import threading
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass, replace
from typing import Any, Protocol, TypeVar

from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from torchtitan.grpo.config.batch import requests_at_once
from torchtitan.grpo.config.job_config import Rollout
from torchtitan.grpo.data.samples import Group, Prompt
from torchtitan.grpo.engines.fleet_view import FleetView
from torchtitan.grpo.engines.protocol import Completion, EngineError, SamplingParams
from torchtitan.grpo.errors import UserError
from torchtitan.grpo.process.event_loop import LoopThread, all_of, cancel_others
from torchtitan.grpo.process.random_numbers import prompt_seed, seeded_apart
from torchtitan.grpo.process.stopping import StopRequested
from torchtitan.grpo.rewards.runner import RewardRunner
from torchtitan.grpo.rollouts.environment import RolloutClient
from torchtitan.grpo.rollouts.group_call import GroupCall
from torchtitan.grpo.rollouts.guarded_environment import Environments, GuardedEnvironment
from torchtitan.grpo.rollouts.places import Cohort, Places
from torchtitan.grpo.rollouts.router import Router
from torchtitan.grpo.rollouts.teachers.teachers import Teachers

T = TypeVar("T")

SCORING_THREADS = 16
BLOCKED_S = 60.0
"""Longest time that anything may block the event loop."""
_TASKS_SHOWN = 8
_CLEANS_BPE = "clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output"


class Endpoint(Protocol):
    """What environments reach as `client.endpoint`, see `endpoint/server.py`. It is closed with the collector."""

    def metrics(self) -> dict[str, float]: ...

    async def close(self) -> None: ...


@dataclass(frozen=True)
class Ask:
    """The arguments of one `Collector.collect`."""

    prompts: list[Prompt]
    params: SamplingParams
    tag: str
    min_version: int = -1
    held_out: str = ""


class Collector:
    """Turns prompts into groups of decoded and scored answers, through a `Router`.

    Everything happens on one event loop in a thread of its own; nothing polls.

    If there is a place for every prompt of a `collect`, each eligible server is told of its prompts as one cohort. The
    embedded server starts a cohort as one batch. Then results do not depend on arrival times, even in the last bit, as
    long as no request must go elsewhere.

    Args:
        rollout: `[rollout]`. A `collect` bounds the time of a group from its first request to its rewards.
        environments: How a prompt becomes samples: the default is one answer each.

    Attributes:
        endpoint: With `[rollout] serve_port`, set by `endpoint.server.serve`.
        ended: Groups that have their rewards, whoever gave them.
    """

    def __init__(
        self,
        fleet: FleetView,
        rewards: RewardRunner,
        tokenizer: PreTrainedTokenizerBase,
        rollout: Rollout,
        environments: Environments | None = None,
    ) -> None:
        self.fleet = fleet
        self.rewards = rewards
        self.tokenizer = tokenizer
        self.group_timeout_s = rollout.group_timeout_seconds
        self.environments = environments or Environments()
        self.endpoint: Endpoint | None = None
        self.ended = 0
        self._listeners: list[Callable[[], None]] = []
        self.to_close: list[Callable[[], Awaitable[None]]] = []
        """Called on the event loop when it ends."""
        self._given_up = False
        self._collecting: set[asyncio.Task] = set()
        self._thread = LoopThread("collector")
        self._loop = self._thread.loop
        limits = requests_at_once(rollout), rollout.request_timeout_seconds
        self.router = Router(Places(fleet, *limits, self._loop))
        self._scoring = concurrent.futures.ThreadPoolExecutor(SCORING_THREADS, thread_name_prefix="scoring")
        fleet.add_listener(self._on_fleet_change)

    # ------------------------------------------------------------------------------------------- from any thread

    def collect(
        self, prompts: list[Prompt], params: SamplingParams, tag: str, min_version: int = -1, held_out: str = ""
    ) -> list[Group]:
        """Answer every prompt `params.n` times. Blocks; the time limits of requests bound the wait.

        Args:
            tag: Names this call in request ids and seeds. A prompt's seed depends on `params.seed`, its index, the tag,
                and how often it came before in the same call.
            min_version: Only servers that have acknowledged this weight version or a newer one get requests.
            held_out: The name of the held-out set that the prompts are of. It may have an environment of its own.

        Returns:
            One scored group per prompt, in the order of the prompts.

        Raises:
            EngineError, UserError: A request failed for good. The message names server and prompt, or every server if
                none became eligible in time. The other requests are cancelled.
            FleetError: Too few servers are left.
            StopRequested: `give_up_after` has given it up.
        """
        return self.collect_all([Ask(prompts, params, tag, min_version, held_out)])[0]

    def collect_all(self, asks: list[Ask], alone: bool = False) -> list[list[Group]]:
        """The groups of each `collect`. They are asked at the same time, unless an engine repeats its answers: which
        requests it computes together must then not depend on their arrival.

        Args:
            alone: Nothing else is asked meanwhile. Then what environments draw from Python's and NumPy's generators
                follows from the call, and leaves no trace.
        """
        try:
            return self.call(self._collect_all(asks, alone))
        except concurrent.futures.CancelledError:
            if not self._given_up:
                raise
            raise StopRequested from None

    def give_up_after(self, seconds: float) -> None:
        """From any thread: let a `collect` go on for so long, and have every later one raise StopRequested."""
        self._loop.call_soon_threadsafe(self._loop.call_later, seconds, self._give_up)
        self._on_fleet_change()  # listeners look again

    def call(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine on the collector's event loop and wait for it. An interrupt cancels it.

        Raises:
            UserError: The event loop was blocked for BLOCKED_S. No coroutine's time limit holds then.
        """
        future = asyncio.run_coroutine_threadsafe(self.router.silence.during(coroutine), self._loop)
        try:
            while not concurrent.futures.wait([future], BLOCKED_S).done:
                self._check_loop()
            return future.result()
        finally:
            future.cancel()  # only an interrupt or a blocked loop leaves it unfinished

    def read(self, call: Callable[[], T]) -> T:
        """What `call`, which does not wait, gives on the event loop. See `call`."""

        async def run() -> T:
            return call()

        return self.call(run())

    def on_loop(self, call: Callable[[], object]) -> None:
        """Have it called on the event loop, behind what was asked before. For any thread; nobody waits."""
        self._loop.call_soon_threadsafe(call)

    def _check_loop(self) -> None:
        turned = threading.Event()
        self._loop.call_soon_threadsafe(turned.set)
        if not turned.wait(BLOCKED_S):
            raise UserError(
                f"{self.environments.describe_running()} has blocked the event loop for over {BLOCKED_S:g} s: await "
                "slow calls, or run them with asyncio.to_thread"
            )

    def add_listener(self, call: Callable[[], None]) -> None:
        """Call `call` on the event loop after every change of the fleet."""
        self._listeners.append(call)

    def take_busy_spans(self) -> dict[str, list[tuple[float, float]]]:
        """See `Places.take_busy_spans`."""
        return self.read(self.router.places.take_busy_spans)

    def describe(self) -> str:
        """What requests and groups wait for. Takes no lock: for a report of a run that hangs."""
        lines = [f"{self.router.places.waiting} requests wait for a server"]
        lines += [f"{server.in_flight} requests in flight at {server.url}" for server in self.fleet.servers]
        waits = Counter(_awaits(task) for task in asyncio.all_tasks(self._loop))
        return "\n  ".join(lines + [f"{count} tasks in {where}" for where, count in waits.most_common(_TASKS_SHOWN)])

    def close(self) -> None:
        """Cancel requests in flight and close the connections. Bounded."""
        try:
            self._thread.close(self._shut_down)
        finally:
            self._scoring.shutdown(wait=False, cancel_futures=True)

    # ------------------------------------------------------------------------------------------ on the event loop

    def cohorts(
        self, count: int, name: str, min_version: int, environment: GuardedEnvironment | None = None
    ) -> list[Cohort | None]:
        """Cohorts for groups that start together; see `Places.cohorts`.

        None with an environment: nobody knows when and how often it sends requests, and a cohort waits for all.
        """
        if not (environment or self.environments.own).is_single_turn:
            return [None] * count
        return self.router.places.cohorts(count, name, min_version)

    async def group(
        self,
        prompt: Prompt,
        params: SamplingParams,
        request_id: str,
        call: GroupCall,
        cohort: Cohort | None = None,
        teachers: Teachers | None = None,
        environment: GuardedEnvironment | None = None,
    ) -> Group:
        """One scored group: the environment's rollout of the prompt, the run's if none is given. Rewards and `teachers`
        score it at the same time.

        Samples on which the environment failed have no reward, see `GuardedEnvironment`.
        """

        last_server = ""
        servers: dict[tuple[str, str], str] = {}  # that answered the last turn of each sample's sessions

        def client(params: SamplingParams, name: str, call: GroupCall) -> RolloutClient:
            async def ask(token_ids: list[int], params: SamplingParams, suffix: str, session: str) -> list[Completion]:
                nonlocal last_server
                if call.is_under_way:
                    params = replace(params, first=True)
                first = None if name or suffix else cohort
                before = servers.get((name, session), servers.get((name, ""), "")) if session else ""
                own_id = request_id + name + suffix
                completions = await self.router.answer(prompt, token_ids, params, own_id, call, first, before)
                last_server = servers[name, session] = completions[-1].server
                return completions

            return RolloutClient(self.tokenizer, params, prompt, ask, self.endpoint, call.waits)

        group = await (environment or self.environments.own).group(client, prompt, params, call)
        for sample in group:
            sample.servers = sample.servers or [(0, last_server)]
        call.on_answered()
        unrewarded = 0.0 if teachers and teachers.alone else None
        rewarded = self._loop.run_in_executor(self._scoring, self._score, group, unrewarded)
        group = await (teachers.scored(group, rewarded) if teachers else rewarded)
        self.ended += 1
        return group

    async def _collect_all(self, asks: list[Ask], alone: bool) -> list[list[Group]]:
        if any(server.engine is None or server.engine.repeats_in_flight for server in self.fleet.servers):
            return [await self._collect_apart(ask) if alone else await self._collect(ask) for ask in asks]
        # Each cohort takes its places before any is occupied: several would take the same ones.
        return await all_of([self._collect(ask, cohort=len(asks) == 1) for ask in asks])

    async def _collect_apart(self, ask: Ask) -> list[Group]:
        with seeded_apart((prompt_seed(ask.params.seed or 0, ask.tag, 0, 0) or 0) % 2**32):
            return await self._collect(ask)

    async def _collect(self, ask: Ask, cohort: bool = True) -> list[Group]:
        prompts, params, tag, min_version = ask.prompts, ask.params, ask.tag, ask.min_version
        environment = self.environments.answering(ask.held_out)
        if self._given_up:
            raise StopRequested
        task = asyncio.current_task()
        assert task is not None
        self._collecting.add(task)
        task.add_done_callback(self._collecting.discard)
        if not prompts:
            return []
        await self.router.places.until_served(GroupCall(lambda: min_version, first=params.first))
        # A tag may come again (another run on the same server, a repeated step); a request id must not.
        nonce = secrets.token_hex(4)
        cohorts: list[Cohort | None] = [None] * len(prompts)
        if cohort:
            cohorts = self.cohorts(len(prompts), f"{tag}-{nonce}", min_version, environment)
        seen: Counter[int] = Counter()
        groups = []
        for i, prompt in enumerate(prompts):
            own = replace(params, seed=prompt_seed(params.seed, tag, prompt.index, seen[prompt.index]))
            seen[prompt.index] += 1
            group = self._timed_group(prompt, own, f"{tag}-{i:06d}-{nonce}", min_version, cohorts[i], environment)
            groups.append(group)
        return await all_of(groups)

    async def _timed_group(
        self,
        prompt: Prompt,
        params: SamplingParams,
        request_id: str,
        min_version: int,
        cohort: Cohort | None,
        environment: GuardedEnvironment,
    ) -> Group:
        try:
            async with asyncio.timeout(self.group_timeout_s) as limit:
                call = GroupCall(lambda: min_version, limit=limit, timeout_s=self.group_timeout_s, first=params.first)
                return await self.group(prompt, params, request_id, call, cohort, environment=environment)
        except TimeoutError as error:
            raise EngineError(
                f"prompt {prompt.index} took longer than [rollout] group_timeout_seconds = {self.group_timeout_s:g} "
                f"({self.fleet.describe()})"
            ) from error

    def _give_up(self) -> None:
        self._given_up = True
        for task in self._collecting:
            task.cancel()

    def _on_fleet_change(self) -> None:
        """The fleet's listener, on any thread."""
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits
            self._loop.call_soon_threadsafe(self._look_at_fleet)

    def _look_at_fleet(self) -> None:
        self.router.look_at_fleet()
        for listener in self._listeners:
            listener()

    def _score(self, group: Group, unrewarded: float | None) -> Group:
        """Give each sample its text, and a reward if it lacks one: `unrewarded`, or what the functions say."""
        for sample, text in zip(group, decoded(self.tokenizer, [sample.token_ids for sample in group]), strict=True):
            sample.text = text
        left = [sample for sample in group if sample.reward is None and not sample.reward_failures]
        if unrewarded is None:
            self.rewards.score(left)
        else:
            for sample in left:
                sample.reward = unrewarded
        return group

    async def _shut_down(self) -> None:
        if self.endpoint is not None:
            await self.endpoint.close()
        await cancel_others()
        await self.router.close()
        for close in self.to_close:
            await close()


def _awaits(task: asyncio.Task) -> str:
    """The coroutines that wait for each other in a task, outermost first."""
    names: list[str] = []
    awaited: Any = task.get_coro()
    while inspect.iscoroutine(awaited):
        names.append(awaited.__qualname__)
        awaited = awaited.cr_await
    return " > ".join(names)


def decoded(tokenizer: PreTrainedTokenizerBase, answers: list[list[int]]) -> list[str]:
    """What `tokenizer.decode` makes of each. A backend decodes them together, and lets other threads run meanwhile."""
    fast, own = PreTrainedTokenizerFast, type(tokenizer)
    if not isinstance(tokenizer, fast) or (own.decode, own._decode) != (fast.decode, fast._decode):
        return [tokenizer.decode(token_ids, skip_special_tokens=True) for token_ids in answers]
    texts = tokenizer.backend_tokenizer.decode_batch(answers, skip_special_tokens=True)
    if not tokenizer.clean_up_tokenization_spaces:
        return texts
    is_bpe = type(tokenizer.backend_tokenizer.model).__name__ == "BPE"
    if is_bpe and getattr(tokenizer, _CLEANS_BPE, True) is False:  # versions without it clean BPE too
        return texts
    return [tokenizer.clean_up_tokenization(text) for text in texts]
