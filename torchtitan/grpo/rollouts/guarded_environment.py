"""The environments of a run. One that fails, or hangs, costs its group or its sample, and not the run."""

import asyncio
import contextlib
import inspect
import logging
import math
import re
import sysconfig
import traceback
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torchtitan.grpo.data.samples import Group, Prompt, Sample
from torchtitan.grpo.engines.fleet_view import FleetError
from torchtitan.grpo.engines.protocol import EngineError, Refused, SamplingParams
from torchtitan.grpo.errors import UserError, renamed, said
from torchtitan.grpo.process.event_loop import all_of, left_if_cancelled
from torchtitan.grpo.process.import_path import source
from torchtitan.grpo.rollouts.environment import KEY, Environment, RolloutClient, checked, rows_of, single_turn
from torchtitan.grpo.rollouts.group_call import GroupCall

logger = logging.getLogger(__name__)

MakeClient = Callable[[SamplingParams, str, GroupCall], RolloutClient]
"""(parameters, name within the group, call) -> the servers, for a group or one of its samples."""
_SEED_STRIDE = 2**40
"""Between the seeds of a group's samples. Each of their answers adds one."""
_NOT_OWN = re.compile(
    f"<|{re.escape(__file__)}|{re.escape(sysconfig.get_paths()['stdlib'])}|.*/(site|dist)-packages/", re.DOTALL
)
"""Files that a user does not write: Python's, installed packages, and this one."""


class GuardedEnvironment:
    """Runs an environment for one group after another, at most `concurrency` at once.

    An exception of the environment, or an exit, gives up its group, or its sample if it works on each by itself. So
    does the time limit of a sample, and a result that no step can use. Once a result was right, one of a wrong type
    does so too, and a request that every server refuses: before, they end the run. What is given up is a sample of no
    tokens and no reward, whose `reward_failures` name the environment and what went wrong. `outage.py` and
    `rewards/failures.py` say when there are too many of these. Errors of the servers, and a `UserError`, pass.

    Everything happens on one event loop.

    Attributes:
        name: What the configuration calls it.
        key: The key that does so. Messages name it.
        running: Groups or samples that it works on. Any thread may read it.
    """

    def __init__(self, environment: Environment, name: str, concurrency: int = 0, key: str = KEY) -> None:
        self.name, self.key = name, key
        self.running = 0
        self.rows = rows_of(environment, key)
        self.is_single_turn = environment is single_turn
        self._environment = environment
        self._per_sample = bool(getattr(environment, "per_sample", False))
        self._places = asyncio.Semaphore(concurrency) if concurrency else None
        self._failures = 0
        self._has_worked = False

    async def group(self, client: MakeClient, prompt: Prompt, params: SamplingParams, call: GroupCall) -> Group:
        """The samples of one prompt.

        Raises:
            EngineError, FleetError, UserError: See `Collector.collect`.
            TimeoutError: The group's time limit has passed.
        """
        tokens = len(prompt.token_ids)
        group = await self._samples(client, prompt, params, call)
        if len(prompt.token_ids) == tokens:
            return group
        del prompt.token_ids[tokens:]  # a held-out prompt is asked again
        why = "changed the length of prompt.token_ids, which all samples share: change a copy, list(prompt.token_ids)"
        return self._give_up(prompt, params.n, why)

    async def _samples(self, client: MakeClient, prompt: Prompt, params: SamplingParams, call: GroupCall) -> Group:
        if not self._per_sample:
            return await self._run(client(params, "", call), prompt, call)
        timeout_s = call.unlimited()
        samples = [self._sample(number, client, prompt, params, call, timeout_s) for number in range(params.n)]
        return [sample for own in await all_of(samples) for sample in own]

    async def _sample(
        self,
        number: int,
        client: MakeClient,
        prompt: Prompt,
        params: SamplingParams,
        group: GroupCall,
        timeout_s: float,
    ) -> Group:
        seed = None if params.seed is None else (params.seed + number * _SEED_STRIDE) % 2**56
        own = replace(params, n=1, seed=seed)
        try:
            async with asyncio.timeout(timeout_s or None) as limit:
                own_limit = limit if timeout_s else None
                call = GroupCall(
                    group.oldest, group.begun, limit=own_limit, timeout_s=timeout_s, first=group.first, group=group
                )
                return await self._run(client(own, f"-sample{number}", call), prompt, call)
        except TimeoutError:
            return self._give_up(prompt, 1, f"took longer than [rollout] group_timeout_seconds = {timeout_s:g}")

    async def _run(self, client: RolloutClient, prompt: Prompt, call: GroupCall) -> Group:
        return await left_if_cancelled(self._play(client, prompt, call))

    async def _play(self, client: RolloutClient, prompt: Prompt, call: GroupCall) -> Group:
        try:
            async with self._place(call):  # also while it is left, and cleans up
                with renamed(KEY, self.key), self._counted(), _ungrouped():
                    returned = self._environment(client, prompt)
                    samples = await returned if inspect.isawaitable(returned) else returned
        except (EngineError, FleetError, UserError) as error:
            if not isinstance(error, Refused) or self.is_single_turn or not self._has_worked:
                raise
            return self._give_up(prompt, client.params.n, f"asked what no server takes: {error}")
        except GeneratorExit:  # the coroutine is closed
            raise
        except BaseException as error:  # math_verify's TimeoutException is one, for example
            task = asyncio.current_task()
            if isinstance(error, asyncio.CancelledError) and task is not None and task.cancelling():
                raise  # not the environment's own error: its group was given up
            if isinstance(error, MemoryError) and self.is_single_turn:
                raise  # nor is it the data's
            where = vars(error).get("place") or place(error)
            return self._give_up(prompt, client.params.n, f"raised {type(error).__name__}: {said(error)} ({where})")
        oldest = -1 if self.is_single_turn else call.oldest()
        try:
            with renamed(KEY, self.key):
                if samples is returned:  # not awaited: it would stop every other group meanwhile
                    where = f"{KEY} = {self.name!r} ({source(self._environment)})"
                    raise UserError(f"{where} gives no coroutine: write it as `async def`")
                group = checked(samples, self.name, prompt, client.params, oldest, self.is_single_turn)
        except Exception as error:  # what it returned may be any objects
            if isinstance(error, MemoryError) or (isinstance(error, UserError) and not self._has_worked):
                raise
            return self._give_up(prompt, client.params.n, f"returned what no step can use: {said(error)}")
        self._has_worked = True
        return group

    @contextlib.contextmanager
    def _counted(self) -> Iterator[None]:
        self.running += 1
        try:
            yield
        finally:
            self.running -= 1

    @contextlib.asynccontextmanager
    async def _place(self, call: GroupCall) -> AsyncIterator[None]:
        """One of `concurrency` places. The wait for it does not count as the group's time."""
        if self._places is None:
            yield
            return
        call.waits()
        async with self._places:
            call.restarts()
            yield

    def _give_up(self, prompt: Prompt, samples: int, failure: str) -> Group:
        self._failures += 1
        if math.log10(self._failures).is_integer():  # 1st, 10th, 100th ...: a broken one does not flood the log
            message = "%s = %r failed (%d times so far), and prompt %d is given up: it %s"
            logger.warning(message, self.key, self.name, self._failures, prompt.index, failure)
        return [Sample(prompt, [], [], [], "abort", reward_failures={self.name: failure}) for _ in range(samples)]


@contextlib.contextmanager
def _ungrouped() -> Iterator[None]:
    """Raise the first error of an `asyncio.TaskGroup` in its place: a server's passes, and others say what failed."""
    try:
        yield
    except BaseExceptionGroup as raised:
        error: BaseException = raised
        while isinstance(error, BaseExceptionGroup):
            error = error.exceptions[0]
        raise error from None


@dataclass(frozen=True)
class Environments:
    """The environment of a run, and those that held-out sets have in its place.

    Attributes:
        own: The run's.
        of_sets: By the names of the sets.
    """

    own: GuardedEnvironment = field(default_factory=lambda: GuardedEnvironment(single_turn, ""))
    of_sets: Mapping[str, GuardedEnvironment] = field(default_factory=dict)

    def answering(self, held_out: str = "") -> GuardedEnvironment:
        """What answers the prompts of this held-out set, or those that are trained on."""
        return self.of_sets.get(held_out, self.own)

    @property
    def rows(self) -> dict[str, Sequence[dict[str, Any]] | None]:
        """The data that each brings: of the run's by "", of a set's by its name. None if it brings none."""
        return {"": self.own.rows} | {name: each.rows for name, each in self.of_sets.items()}

    def describe_running(self) -> str:
        """Those at work, as messages name them."""
        running = [each for each in (self.own, *self.of_sets.values()) if each.running] or [self.own]
        return " or ".join(f"{each.key} = {each.name!r}" for each in running)


def place(error: BaseException) -> str:
    """Where an error was raised: file, line and function of the innermost frame that is not of an installed package."""
    frames = traceback.extract_tb(error.__traceback__)
    return innermost([(frame.filename, frame.lineno or 0, frame.name) for frame in frames])


def innermost(frames: list[tuple[str, int, str]]) -> str:
    """The same of frames as (file, line, function), outermost first."""
    own = [frame for frame in frames if not _NOT_OWN.match(frame[0])]
    file, line, function = (own or frames)[-1]
    return f"{file}:{line} in {function}"
