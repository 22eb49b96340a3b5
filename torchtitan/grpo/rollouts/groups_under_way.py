"""Groups that are asked, and what becomes of each that ends."""

import asyncio
import logging
import secrets
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from statistics import fmean

from torchtitan.grpo.config.job_config import JobConfig
from torchtitan.grpo.config.share import Share
from torchtitan.grpo.data.load import Prompts
from torchtitan.grpo.data.samples import Group
from torchtitan.grpo.engines.protocol import EngineError, SamplingParams
from torchtitan.grpo.engines.registry import ENGINES
from torchtitan.grpo.errors import UserError
from torchtitan.grpo.process.random_numbers import prompt_seed
from torchtitan.grpo.rollouts.buffer import Entry, StalenessBuffer
from torchtitan.grpo.rollouts.collector import Collector
from torchtitan.grpo.rollouts.group_call import GroupCall
from torchtitan.grpo.rollouts.outage import Outage
from torchtitan.grpo.rollouts.places import Cohort
from torchtitan.grpo.rollouts.teachers.teachers import Teachers

logger = logging.getLogger(__name__)

ASKED_MAX = 4
"""Groups that a step asks for, in multiples of its own, if those without a signal are replaced."""


class GroupsUnderWay:
    """Groups from their first request to their rewards. Then the buffer has them, or they are given up.

    An engine that repeats its answers gets a step's groups in rounds: when all groups of a round have ended, they count
    in the order of their prompts, and those that replace some are asked together. So neither prompts nor batches depend
    on which group ended first.

    Groups that are given up are replaced by other prompts. `counts` has the number of each kind:

    - groups without a signal (`[grpo] zero_variance_groups = "replace"`, DAPO's dynamic sampling, arXiv 2503.14476)
    - groups that took longer than `[rollout] group_timeout_seconds`
    - groups in which no answer has a reward, see `Outage`
    - groups that became too old

    Args:
        more: Called when a group has ended: others may be asked.
        changed: Set when the answers of a group are complete.

    Attributes:
        counts: Groups since the start of the run: asked, finished, replaced, late, timed_out, failed.
        round: Those that have ended, while others of their round are under way.
        pause: No group is requested until its end.
        failure: What ends the run.
    """

    def __init__(
        self,
        collector: Collector,
        buffer: StalenessBuffer,
        prompts: Prompts,
        params: SamplingParams,
        config: JobConfig,
        has_signal: Callable[[Group], bool],
        teachers: Teachers | None,
        share: Share,
        more: Callable[[], None],
        changed: asyncio.Event,
    ) -> None:
        grpo, ahead, rollout = config.grpo, config.async_grpo, config.rollout
        repeats = ENGINES[rollout.engine].repeats_in_flight
        is_seeded = rollout.seeded_requests == "auto" and (repeats or not ahead.enabled)
        self._params = params if is_seeded or rollout.seeded_requests == "always" else replace(params, seed=None)
        self._collector, self._buffer, self._prompts, self._share = collector, buffer, prompts, share
        self._has_signal, self._teachers, self._more, self._changed = has_signal, teachers, more, changed
        self._ahead = ahead.enabled
        self._in_rounds = not ahead.enabled and not grpo.oversampling and repeats
        self._replace = grpo.zero_variance_groups == "replace"
        self._replaced_max = (ASKED_MAX - 1) * grpo.prompts_per_step
        self._per_step, self._timeout_s = grpo.prompts_per_step, rollout.group_timeout_seconds
        self._nonce = secrets.token_hex(4)  # request ids must differ from another run's on the same servers
        self._replaced: list[tuple[Entry, Group]] = []  # in this step
        self._timed_out = 0  # in this step
        self.counts: Counter[str] = Counter()
        self.tasks: dict[Entry, asyncio.Task] = {}
        self.round: list[tuple[Entry, Group]] = []
        self.outage = Outage(self._per_step, config.reward.max_failed_fraction, self._timeout_s)
        self.pause: asyncio.TimerHandle | None = None
        self.failure: BaseException | None = None

    @property
    def may_grow(self) -> bool:
        """Whether others may be asked beside them."""
        return self.failure is None and self.pause is None and not (self._in_rounds and self.tasks)

    def ask(self, entries: list[Entry], version: int) -> None:
        if not entries:
            return
        self.counts["asked"] += len(entries)
        cohorts: list[Cohort | None] = [None] * len(entries)
        if not self._ahead:  # groups that start together repeat to the last bit
            cohorts = self._collector.cohorts(len(entries), f"groups{entries[0].number}-{self._nonce}", version)
        for entry, cohort in zip(entries, cohorts, strict=True):
            task = asyncio.create_task(self._group(entry, cohort))
            self.tasks[entry] = task
            task.add_done_callback(partial(self._ended, entry))

    def cancel(self, entries: Iterable[Entry]) -> None:
        """Those of them that are asked."""
        for entry in entries:
            if entry in self.tasks:
                self.tasks.pop(entry).cancel()

    def end_step(self) -> tuple[list[tuple[Entry, Group]], list[Group]]:
        """Groups of the step that others have replaced, and its failed ones that count."""
        replaced, self._replaced, self._timed_out = self._replaced, [], 0
        return replaced, self.outage.take()

    def fail(self, error: BaseException) -> None:
        """The run ends, by the first error."""
        self.failure = self.failure or error

    async def _group(self, entry: Entry, cohort: Cohort | None) -> Group:
        step = entry.number // self._per_step + 1  # the step that would train on it if none were dropped
        of_share = f"/{self._share.number}" if self._share.number else ""  # another one may ask the same prompt
        seed = prompt_seed(self._params.seed, f"step{step}{of_share}", entry.prompt.index, entry.occurrence)
        params, request_id = replace(self._params, seed=seed), f"group{entry.number:08d}-{self._nonce}"
        async with asyncio.timeout(self._timeout_s) as limit:
            call = GroupCall(
                partial(self._buffer.min_version, entry),
                partial(self._buffer.begin, entry),
                partial(self._answered, entry),
                limit,
                self._timeout_s,
                unbegun=self._buffer.min_version_of_new,
            )
            return await self._collector.group(entry.prompt, params, request_id, call, cohort, self._teachers)

    def _answered(self, entry: Entry) -> None:
        self._buffer.answer(entry)
        self._changed.set()

    def _ended(self, entry: Entry, task: asyncio.Task) -> None:
        if self.tasks.get(entry) is not task:
            return  # it was too old, and cancelled
        del self.tasks[entry]
        if task.cancelled():
            return  # the run ends
        error = task.exception()
        if isinstance(error, TimeoutError):
            self._give_up(entry)
        elif error is not None:
            self.fail(error)
        elif self._in_rounds:
            self.round.append((entry, task.result()))
        else:
            self._finish(entry, task.result())
        if self.round and not self.tasks:
            ended, self.round = sorted(self.round, key=lambda each: each[0].number), []
            for each, group in ended:
                self._finish(each, group)
        self._more()

    def _finish(self, entry: Entry, group: Group) -> None:
        rewards = [sample.reward for sample in group if sample.reward is not None]
        if not rewards:
            self._give_up_failed(entry, group)
            return
        self.counts["finished"] += 1
        self.outage.worked(entry.number, self._next_number(entry), asyncio.get_running_loop().time())
        if self.pause is not None and not self.outage.is_on:
            self.pause.cancel()
            self.pause = None
        self._prompts.record(entry.prompt.index, fmean(rewards))
        if self._replace and len(self._replaced) < self._replaced_max and not self._has_signal(group):
            self._replaced.append((entry, group))
            self.counts["replaced"] += 1
            self._buffer.drop(entry)
        else:
            self._buffer.finish(entry, group)

    def _next_number(self, entry: Entry) -> int:
        """Of the group that is requested behind what is known of this one: in a round they are taken one by one."""
        return entry.number + 1 if self._in_rounds else self._buffer.next_number

    def _give_up(self, entry: Entry) -> None:
        self.counts["timed_out"] += 1
        self._timed_out += 1
        self._buffer.drop(entry)
        what = f"group {entry.number} (prompt {entry.prompt.index}) took longer than [rollout] group_timeout_seconds"
        logger.warning("%s = %g: another prompt replaces it", what, self._timeout_s)
        if self._timed_out > self._per_step:
            self.fail(
                EngineError(
                    f"{what} = {self._timeout_s:g}, like all groups of a step before it: raise the limit "
                    f"({self._collector.fleet.describe()})"
                )
            )

    def _give_up_failed(self, entry: Entry, group: Group) -> None:
        """Let another prompt replace a group without a reward, in an outage after a wait; or end the run."""
        self.counts["failed"] += 1
        self._buffer.drop(entry)
        loop = asyncio.get_running_loop()
        try:
            wait_s = self.outage.failed(group, entry.number, self._next_number(entry), loop.time())
        except UserError as error:
            self.fail(error)
            return
        if wait_s and self.pause is None:
            message = "No group gets a reward. Others are asked in %.2g s, and the run ends after %g s of this: %s"
            logger.warning(message, wait_s, self._timeout_s, self.outage.describe())
            self.pause = loop.call_later(wait_s, self._end_pause)

    def _end_pause(self) -> None:
        self.pause = None
        self._more()
