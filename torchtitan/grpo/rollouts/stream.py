"""The flow of rollouts: groups are requested as far ahead as staleness allows, and each step takes its own."""

import asyncio
import logging
import math
from collections import Counter
from collections.abc import Callable
from typing import Any

import msgspec

from torchtitan.grpo.config.batch import surplus_groups
from torchtitan.grpo.config.job_config import JobConfig
from torchtitan.grpo.config.share import ALL, Share
from torchtitan.grpo.data.load import Prompts
from torchtitan.grpo.data.samples import Group
from torchtitan.grpo.engines.protocol import EngineError, SamplingParams
from torchtitan.grpo.process.random_numbers import python_state, set_python_state
from torchtitan.grpo.process.stopping import StopRequested
from torchtitan.grpo.rewards.failures import check_failures
from torchtitan.grpo.rollouts.buffer import Entry, StalenessBuffer
from torchtitan.grpo.rollouts.collector import Collector
from torchtitan.grpo.rollouts.groups_under_way import GroupsUnderWay
from torchtitan.grpo.rollouts.pace import Pace
from torchtitan.grpo.rollouts.teachers.teachers import Teachers

logger = logging.getLogger(__name__)

VALIDATION_S = 10.0
"""How long a run that is asked to stop goes on with a validation."""


class RolloutStream:
    """The groups of one step after another. Its state lives on the collector's event loop; nothing polls.

    With `[async_grpo]`, groups are requested while the trainer trains. They run ahead as far as keeps it from waiting
    (`run_ahead`), and never beyond the buffer's bound. Without it, a step's groups are requested when the step starts,
    all at once, from the newest weights.

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
        grpo, ahead, rollout = config.grpo, config.async_grpo, config.rollout
        self._collector, self._prompts, self._share = collector, prompts, share
        self._temperature, self._ahead = params.temperature, ahead.enabled
        self._request_timeout_s = rollout.request_timeout_seconds
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
        self._wanted = 0
        self._stopping = self._promised = False
        self._before_take: tuple[int, Callable[[], bytes]] = -1, bytes
        """The version of the newest `take`, and the state before it."""
        self._changed = asyncio.Event()
        asks = prompts, params, config, has_signal, teachers, share
        self._under_way = GroupsUnderWay(collector, self._buffer, *asks, self._fill, self._changed)
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
            healthy = self._under_way.failure is None and not self._stopping
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
            self._under_way.counts = Counter(state["counts"])
            self._under_way.outage.has_worked = self._under_way.counts["finished"] > 0
            set_python_state(state["random"])

        self._collector.read(load)
        for why, count in unfit.items():
            if why:
                logger.warning("%d groups that the checkpoint holds are requested again: %s", count, why)

    # ------------------------------------------------------------------------------------------ on the event loop

    def _metrics(self) -> dict[str, float]:
        entries, ended = self._buffer.entries.values(), {entry for entry, _ in self._under_way.round}
        # One that an environment answers by itself is complete, and has not begun.
        left = [entry for entry in entries if entry.group is None and entry not in ended]
        begun = sum(entry.begun is not None for entry in left)
        names = ("asked", "finished", "replaced", "late", "timed_out", "failed")
        counts: dict[str, float] = {f"rollout/groups_{name}": self._under_way.counts[name] for name in names}
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
        if temperature != self._temperature:
            return f"sampled at temperature {temperature:g}, and [rollout] temperature = {self._temperature:g}"
        if any(len(sample.prompt.token_ids) + len(sample.token_ids) > self._row_tokens for sample in group):
            return f"longer than a row of {self._row_tokens} tokens ([training] seq_len or tokens_per_microbatch)"
        return "these teachers have not scored them" if self._teachers and not self._teachers.has_scored(group) else ""

    def _state(self) -> Callable[[], bytes]:
        """The state of now, made to bytes when it is called: that takes long, and no other group waits for it then.

        With `[async_grpo]`, a group that is complete by then is whole. Without, only those of now are: a resumed run
        must ask a step's groups together, and not go on with some that were completed in it.
        """
        now = {
            "temperature": self._temperature,
            "prompts": self._prompts.state_dict(),
            "counts": dict(self._under_way.counts),
            "random": python_state(),
        }
        buffer = self._buffer.copy()
        complete = None if self._ahead else {number for number, entry in buffer.entries.items() if entry.group}
        return lambda: msgspec.msgpack.encode(now | {"buffer": buffer.state_dict(complete)})

    async def _take(self, version: int) -> tuple[list[Group], list[Group]]:
        """The step's groups, and those whose failures count: with groups that others replaced since the step before."""
        if version != self._buffer.version:
            raise AssertionError(f"the step at version {version} comes after that at {self._buffer.version - 1}")
        clock, under_way = asyncio.get_running_loop().time, self._under_way
        asked_at, held_s = clock(), 0.0
        self._before_take = version, self._state()
        self._wanted = version + 1
        self._fill()
        while under_way.failure is None and not self._buffer.is_ready() and not self._stopping:
            began, only_scores = clock(), self._buffer.is_ready(but_for_scores=True)
            for_an_old_one = self._buffer.is_held()
            if under_way.tasks or under_way.pause is not None:
                self._changed.clear()
                await self._changed.wait()  # each group has its time limit, and so has an outage
            else:
                await self._wait_for_server()
            self._scores_s += clock() - began if only_scores else 0.0
            held_s += clock() - began if for_an_old_one else 0.0
        if self._stopping and not self._promised:
            raise StopRequested
        if under_way.failure is not None:
            raise under_way.failure
        taken, late = self._buffer.take()
        self._promised = False
        if not self._ahead:  # groups that still wait for a place are requested again when a step wants them
            under_way.cancel([entry for entry in under_way.tasks if entry.begun is None])
        under_way.counts["late"] += len(late)
        under_way.cancel(late)
        replaced, failed = under_way.end_step()
        groups: list[Group] = []
        for entry in taken:
            assert entry.group is not None  # the buffer gives complete groups only
            groups.append(entry.group)
        ended = [*zip(taken, groups, strict=True), *replaced]
        counted = [under_way.outage.counted(entry.number, group) for entry, group in ended] + failed
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
                while not (self._under_way.tasks or self._under_way.failure or self._stopping):
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
        if self._wanted == 0 or self._stopping or not self._under_way.may_grow:
            return
        versions = [server.version for server in self._collector.fleet.eligible(0)]
        if not versions:
            return
        buffer, tasks = self._buffer, self._under_way.tasks
        waiting: list[Entry] = []
        if len(buffer.entries) > buffer.complete + len(tasks):
            waiting = [entry for entry in buffer.entries.values() if entry.group is None and entry not in tasks]
            to_begin = sum(entry.begun is None for entry in tasks)
            waiting = waiting[: max(0, buffer.may_begin(max(versions)) - to_begin)]
        asked = buffer.consumed + len(buffer.entries)
        steps = self._steps if self._ahead else self._wanted
        count = min(buffer.room(max(versions)), steps * self._per_step + self._surplus - asked)
        if self._pace is not None:
            count = min(count, self._pace.room(len(buffer.entries), buffer.answered))
        try:
            new = [buffer.add(prompt) for prompt in self._share.next(self._prompts, count)] if count > 0 else []
        except Exception as error:
            self._under_way.fail(error)
            return
        self._under_way.ask(waiting + new, max(versions))
