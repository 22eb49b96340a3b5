"""The flow of rollouts: groups are requested as far ahead as staleness allows, and each step takes its own."""

import asyncio
import logging
import math
import secrets
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from statistics import fmean
from typing import Any

import msgspec

from torchtitan.grpo.config.batch import surplus_groups
from torchtitan.grpo.config.job_config import JobConfig
from torchtitan.grpo.config.share import ALL, Share
from torchtitan.grpo.data.load import Prompts
from torchtitan.grpo.data.samples import Group
from torchtitan.grpo.engines.protocol import EngineError, SamplingParams
from torchtitan.grpo.engines.registry import ENGINES
from torchtitan.grpo.errors import UserError
from torchtitan.grpo.process.random_numbers import prompt_seed, python_state, set_python_state
from torchtitan.grpo.process.stopping import StopRequested
from torchtitan.grpo.rewards.failures import check_failures
from torchtitan.grpo.rollouts.buffer import Entry, StalenessBuffer
from torchtitan.grpo.rollouts.collector import Collector
from torchtitan.grpo.rollouts.group_call import GroupCall
from torchtitan.grpo.rollouts.outage import Outage
from torchtitan.grpo.rollouts.pace import Pace
from torchtitan.grpo.rollouts.places import Cohort
from torchtitan.grpo.rollouts.teachers.teachers import Teachers

logger = logging.getLogger(__name__)

ASKED_MAX = 4
"""Groups that a step asks for, in multiples of its own, if those without a signal are replaced."""
VALIDATION_S = 10.0
"""How long a run that is asked to stop goes on with a validation."""


class RolloutStream:
    """The groups of one step after another. Its state lives on the collector's event loop; nothing polls.

    With `[async_grpo]`, groups are requested while the trainer trains. They run ahead as far as keeps it from waiting
    (`run_ahead`), and never beyond the buffer's bound. Without it, a step's groups are requested when the step starts,
    all at once, from the newest weights.

    An engine that repeats its answers gets a step's groups in rounds: when all groups of a round have ended, they count
    in the order of their prompts, and those that replace some are asked together. So neither prompts nor batches depend
    on which group ended first.

    Groups that are given up are replaced by other prompts. `counts` has the number of each kind:

    - groups without a signal (`[grpo] zero_variance_groups = "replace"`, DAPO's dynamic sampling, arXiv 2503.14476)
    - groups that took longer than `[rollout] group_timeout_seconds`
    - groups in which no answer has a reward, see `Outage`
    - groups that became too old

    Args:
        params: How each prompt is answered; its seed is the run's.
        config: No group is requested for a step after `[training] steps`. `[reward] max_failed_fraction` bounds a
            step's answers without a reward. Replaced groups count too, and those of an `Outage` do not.
        has_signal: Whether a group teaches anything. If not, it is replaced if `[grpo]` says so.
        teachers: They score each group too.
        row_tokens: Longest prompt and answer that a step can train on.
        share: Of the prompts, of which `[grpo] prompts_per_step` is the part for a step.
    """

    def __init__(
        self,
        collector: Collector,
        prompts: Prompts,
        params: SamplingParams,
        config: JobConfig,
        has_signal: Callable[[Group], bool],
        teachers: Teachers | None = None,
        row_tokens: float = math.inf,
        share: Share = ALL,
    ) -> None:
        self.counts: Counter[str] = Counter()
        """Groups since the start of the run: asked, finished, replaced, late, timed_out, failed."""
        grpo, ahead, rollout = config.grpo, config.async_grpo, config.rollout
        repeatable = ENGINES[rollout.engine].repeats_in_flight or not ahead.enabled
        seeded = rollout.seeded_requests == "always" or (rollout.seeded_requests == "auto" and repeatable)
        self._collector, self._prompts, self._share = collector, prompts, share
        self._params = params if seeded else replace(params, seed=None)
        self._ahead = ahead.enabled
        self._in_rounds = not ahead.enabled and not grpo.oversampling and ENGINES[rollout.engine].repeats_in_flight
        self._round: list[tuple[Entry, Group]] = []  # ended, while others of their round are under way
        self._replace = grpo.zero_variance_groups == "replace"
        self._replaced_max = (ASKED_MAX - 1) * grpo.prompts_per_step
        self._timeout_s, self._request_timeout_s = rollout.group_timeout_seconds, rollout.request_timeout_seconds
        self._has_signal = has_signal
        self._max_failed_fraction = config.reward.max_failed_fraction
        self._teachers, self._row_tokens = teachers, row_tokens
        if teachers:
            collector.to_close.append(teachers.close)
        per_step, surplus = grpo.prompts_per_step, surplus_groups(grpo)
        self._buffer = StalenessBuffer(
            per_step,
            ahead.max_age,
            (ahead.order_window or (ahead.max_age + 1) * per_step + surplus) if ahead.enabled else per_step + surplus,
            ahead.late_groups if ahead.enabled else "wait",
            surplus,
        )
        self._per_step, self._surplus, self._steps = per_step, surplus, config.training.steps
        self._pace = None
        if ahead.enabled and ahead.run_ahead == "auto":
            self._pace = Pace(per_step, ahead.max_age, surplus)
        self._taken_at: float | None = None
        self._scores_s = 0.0
        self._nonce = secrets.token_hex(4)  # request ids must differ from another run's on the same servers
        self._wanted = 0
        self._replaced: list[tuple[Entry, Group]] = []  # in this step
        self._outage = Outage(per_step, self._max_failed_fraction, rollout.group_timeout_seconds)
        self._pause: asyncio.TimerHandle | None = None  # no group is requested until its end
        self._timed_out_this_step = 0
        self._tasks: dict[Entry, asyncio.Task] = {}
        self._failure: BaseException | None = None
        self._stopping = self._promised = False
        self._before_take: tuple[int, Callable[[], bytes]] = -1, bytes
        """The version of the newest `take`, and the state before it."""
        self._changed = asyncio.Event()
        collector.add_listener(self._fill)

    # --------------------------------------------------------------------------------------- from the main thread

    def take(self, version: int) -> list[Group]:
        """The groups of the step that trains weights of `version`, in the order of their prompts. Blocks.

        The time limits of groups, and of requests that find no server, bound the wait.

        Raises:
            EngineError, UserError: A request failed for good, no server was eligible, or every group took too long. Or
                the environment or reward functions failed on too many answers, or for too long.
            FleetError: Too few servers are left.
            StopRequested: `stop` was called.
        """
        groups, counted = self._collector.call(self._take(version))
        check_failures(counted, self._max_failed_fraction)
        return groups

    def stop(self) -> None:
        """From any thread: no step takes groups from now on. A validation under way has VALIDATION_S to finish."""
        self._stopping = True
        self._collector.give_up_after(VALIDATION_S)

    def take_scoring_seconds(self) -> float:
        """Seconds in which `take` waited for scores only, since the last call."""

        def take() -> float:
            seconds, self._scores_s = self._scores_s, 0.0
            return seconds

        return self._collector.read(take)

    def is_ready(self) -> bool:
        """Whether `take` returns the next step's groups at once. Then it does so even after a `stop`."""

        def promise() -> bool:
            healthy = self._failure is None and not self._stopping
            self._promised = healthy and self._buffer.is_ready()
            return self._promised

        return self._collector.read(promise)

    def metrics(self) -> dict[str, float]:
        """Counts since the start, and where the groups are now. `docs/metrics.md` explains the names. Those of all
        shares are summed, but for `TEACHER_S`."""
        return self._collector.read(self._metrics)

    def state_dict(self, version: int) -> bytes:
        """What a resumed run continues from, as MessagePack: the place in the data, and the groups not trained on.

        If the groups of the next step are taken already, it is the state from before. After a `take` that was stopped,
        in sync mode, it is that too: the resumed run requests all groups of the step together, as a run that was not
        stopped does. Their log-probabilities then agree to the last bit.

        Args:
            version: Of the weights that are saved with it.
        """

        def state() -> Callable[[], bytes]:
            taking, before = self._before_take
            taken = taking == version and (self._buffer.version > version or not self._ahead)
            return before if taken else self._state()

        return self._collector.read(state)()

    def state_now(self) -> bytes:
        """The same as of now. After a `take`: what a run continues from that resumes after this step."""
        return self._collector.read(self._state)()

    def load_state_dict(self, saved: bytes | memoryview) -> None:
        """Continue from `state_dict`. Groups that were under way are requested again, and those that do not fit this
        run: of another temperature, longer than a row, or scored by other teachers or none."""
        state: dict[str, Any] = msgspec.msgpack.decode(saved)
        unfit: Counter[str] = Counter()

        def fits(group: Group) -> bool:
            unfit[why := self._unfit(group, state["temperature"])] += 1
            return not why

        def load() -> None:
            self._prompts.load_state_dict(state["prompts"])
            self._buffer.load_state_dict(state["buffer"], self._prompts.at, fits)
            self.counts = Counter(state["counts"])
            self._outage.has_worked = self.counts["finished"] > 0
            set_python_state(state["random"])

        self._collector.read(load)
        for why, count in unfit.items():
            if why:
                logger.warning("%d groups that the checkpoint holds are requested again: %s", count, why)

    # ------------------------------------------------------------------------------------------ on the event loop

    def _metrics(self) -> dict[str, float]:
        entries, ended = self._buffer.entries.values(), {entry for entry, _ in self._round}
        # One that an environment answers by itself is complete, and has not begun.
        left = [entry for entry in entries if entry.group is None and entry not in ended]
        begun = sum(entry.begun is not None for entry in left)
        names = ("asked", "finished", "replaced", "late", "timed_out", "failed")
        counts: dict[str, float] = {f"rollout/groups_{name}": self.counts[name] for name in names}
        if (endpoint := self._collector.endpoint) is not None:
            counts |= endpoint.metrics()
        return (
            counts
            | {name: passes / self._share.of for name, passes in self._prompts.epochs().items()}
            | (self._teachers.metrics() if self._teachers else {})
            | {
                "rollout/retried": self._collector.router.retried,
                "rollout/groups_ready": len(entries) - len(left),
                "rollout/groups_in_flight": begun,
                "rollout/groups_queued": len(left) - begun,
            }
        )

    def _unfit(self, group: Group, temperature: float) -> str:
        """Why a step cannot train on a group of an earlier run, which sampled at this temperature; "" if it can."""
        if temperature != self._params.temperature:
            return f"sampled at temperature {temperature:g}, and [rollout] temperature = {self._params.temperature:g}"
        if any(len(sample.prompt.token_ids) + len(sample.token_ids) > self._row_tokens for sample in group):
            return f"longer than a row of {self._row_tokens} tokens ([training] seq_len or tokens_per_microbatch)"
        return "these teachers have not scored them" if self._teachers and not self._teachers.has_scored(group) else ""

    def _state(self) -> Callable[[], bytes]:
        """The state of now, made to bytes when it is called: that takes long, and no other group waits for it then.

        With `[async_grpo]`, a group that is complete by then is whole. Without, only those of now are: a resumed run
        must ask a step's groups together, and not go on with some that were completed in it.
        """
        now = {
            "temperature": self._params.temperature,
            "prompts": self._prompts.state_dict(),
            "counts": dict(self.counts),
            "random": python_state(),
        }
        buffer = self._buffer.copy()
        complete = None if self._ahead else {number for number, entry in buffer.entries.items() if entry.group}
        return lambda: msgspec.msgpack.encode(now | {"buffer": buffer.state_dict(complete)})

    async def _take(self, version: int) -> tuple[list[Group], list[Group]]:
        """The step's groups, and those whose failures count: with groups that others replaced since the step before."""
        if version != self._buffer.version:
            raise AssertionError(f"the step at version {version} comes after that at {self._buffer.version - 1}")
        clock = asyncio.get_running_loop().time
        asked_at, held_s = clock(), 0.0
        self._before_take = version, self._state()
        self._wanted = version + 1
        self._fill()
        while self._failure is None and not self._buffer.is_ready() and not self._stopping:
            began, only_scores = clock(), self._buffer.is_ready(but_for_scores=True)
            for_an_old_one = self._buffer.is_held()
            if self._tasks or self._pause is not None:
                self._changed.clear()
                await self._changed.wait()  # each group has its time limit, and so has an outage
            else:
                await self._wait_for_server()
            self._scores_s += clock() - began if only_scores else 0.0
            held_s += clock() - began if for_an_old_one else 0.0
        if self._stopping and not self._promised:
            raise StopRequested
        if self._failure is not None:
            raise self._failure
        taken, late = self._buffer.take()
        self._promised = False
        if not self._ahead:  # groups that still wait for a place are requested again when a step wants them
            for entry in [entry for entry in self._tasks if entry.begun is None]:
                self._tasks.pop(entry).cancel()
        for entry in late:
            self.counts["late"] += 1
            if entry in self._tasks:
                self._tasks.pop(entry).cancel()
        replaced, failed = self._replaced, self._outage.take()
        self._replaced, self._timed_out_this_step = [], 0
        groups: list[Group] = []
        for entry in taken:
            assert entry.group is not None  # the buffer gives complete groups only
            groups.append(entry.group)
        ended = [*zip(taken, groups, strict=True), *replaced]
        counted = [self._outage.counted(entry.number, group) for entry, group in ended] + failed
        now = clock()
        if self._pace is not None:
            longest = [max((len(sample.token_ids) for sample in group), default=0) for group in groups]
            self._pace.taken(longest, replaced=len(replaced) + len(failed))
            if self._taken_at is not None:
                self._pace.step(now - asked_at, now - self._taken_at, self._buffer.complete, held_s)
        self._taken_at = now
        self._fill()
        return groups, counted

    async def _wait_for_server(self) -> None:
        """Wait, bounded, while nothing is under way and no group can be requested.

        Other changes of the fleet do not extend the time limit.
        """
        fleet = self._collector.fleet
        try:
            async with asyncio.timeout(self._request_timeout_s):
                while not (self._tasks or self._failure or self._stopping):
                    fleet.check()
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError as error:
            raise EngineError(
                f"no server in traffic with weights new enough to train version {self._buffer.version} after "
                f"{self._request_timeout_s:g} s of waiting ([rollout] request_timeout_seconds): {fleet.describe()}"
            ) from error

    def _fill(self) -> None:
        """Request as many groups as allowed now."""
        self._changed.set()
        if self._wanted == 0 or self._failure is not None or self._stopping or self._pause is not None:
            return
        if self._in_rounds and self._tasks:
            return
        versions = [server.version for server in self._collector.fleet.eligible(0)]
        if not versions:
            return
        buffer = self._buffer
        waiting: list[Entry] = []
        if len(buffer.entries) > buffer.complete + len(self._tasks):
            waiting = [entry for entry in buffer.entries.values() if entry.group is None and entry not in self._tasks]
            to_begin = sum(entry.begun is None for entry in self._tasks)
            waiting = waiting[: max(0, buffer.may_begin(max(versions)) - to_begin)]
        asked = buffer.consumed + len(buffer.entries)
        steps = self._steps if self._ahead else self._wanted
        count = min(buffer.room(max(versions)), steps * self._per_step + self._surplus - asked)
        if self._pace is not None:
            count = min(count, self._pace.room(len(buffer.entries), buffer.answered))
        try:
            new = [buffer.add(prompt) for prompt in self._share.next(self._prompts, count)] if count > 0 else []
        except Exception as error:
            self._fail(error)
            return
        self._ask(waiting + new, max(versions))

    def _ask(self, entries: list[Entry], version: int) -> None:
        if not entries:
            return
        self.counts["asked"] += len(entries)
        cohorts: list[Cohort | None] = [None] * len(entries)
        if not self._ahead:  # groups that start together repeat to the last bit
            cohorts = self._collector.cohorts(len(entries), f"groups{entries[0].number}-{self._nonce}", version)
        for entry, cohort in zip(entries, cohorts, strict=True):
            task = asyncio.create_task(self._group(entry, cohort))
            self._tasks[entry] = task
            task.add_done_callback(partial(self._ended, entry))

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
        if self._tasks.get(entry) is not task:
            return  # it was too old, and cancelled
        del self._tasks[entry]
        if task.cancelled():
            return  # the run ends
        error = task.exception()
        if isinstance(error, TimeoutError):
            self._give_up(entry)
        elif error is not None:
            self._fail(error)
        elif self._in_rounds:
            self._round.append((entry, task.result()))
        else:
            self._finish(entry, task.result())
        if self._round and not self._tasks:
            ended, self._round = sorted(self._round, key=lambda each: each[0].number), []
            for each, group in ended:
                self._finish(each, group)
        self._fill()

    def _finish(self, entry: Entry, group: Group) -> None:
        rewards = [sample.reward for sample in group if sample.reward is not None]
        if not rewards:
            self._give_up_failed(entry, group)
            return
        self.counts["finished"] += 1
        self._outage.worked(entry.number, self._next_number(entry), asyncio.get_running_loop().time())
        if self._pause is not None and not self._outage.is_on:
            self._pause.cancel()
            self._pause = None
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
        self._timed_out_this_step += 1
        self._buffer.drop(entry)
        what = f"group {entry.number} (prompt {entry.prompt.index}) took longer than [rollout] group_timeout_seconds"
        logger.warning("%s = %g: another prompt replaces it", what, self._timeout_s)
        if self._timed_out_this_step > self._per_step:
            self._fail(
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
            wait_s = self._outage.failed(group, entry.number, self._next_number(entry), loop.time())
        except UserError as error:
            self._fail(error)
            return
        if wait_s and self._pause is None:
            message = "No group gets a reward. Others are asked in %.2g s, and the run ends after %g s of this: %s"
            logger.warning(message, wait_s, self._timeout_s, self._outage.describe())
            self._pause = loop.call_later(wait_s, self._end_pause)

    def _end_pause(self) -> None:
        self._pause = None
        self._fill()

    def _fail(self, error: BaseException) -> None:
        self._failure = self._failure or error
        self._changed.set()
