"""The rollout stream, its collector and buffer against embedded servers that run in this process."""

import asyncio
import contextlib
import math
import random
import re
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import msgspec
import pytest

from tests.helpers import TINY_QWEN3
from tests.helpers.embedded_servers import ServerThread
from torchtitan.grpo.config.job_config import AsyncGrpo, Data, Grpo, JobConfig, Reward, Rollout, Training
from torchtitan.grpo.data.group_arrays import from_bytes
from torchtitan.grpo.data.prompts import PromptSource
from torchtitan.grpo.data.samples import Group, Prompt, Sample
from torchtitan.grpo.data.tokenizer import load_tokenizer
from torchtitan.grpo.engines.fleet import Fleet
from torchtitan.grpo.engines.fleet_view import FleetError
from torchtitan.grpo.engines.protocol import EngineError, SamplingParams
from torchtitan.grpo.engines.server import Server
from torchtitan.grpo.engines.vllm import VllmClient
from torchtitan.grpo.engines.vllm_control import VllmControl
from torchtitan.grpo.errors import UserError
from torchtitan.grpo.process.stopping import StopRequested
from torchtitan.grpo.rollouts.collector import Collector
from torchtitan.grpo.rollouts.environment import Environment, RolloutClient, Turns, single_turn
from torchtitan.grpo.rollouts.group_call import GroupCall
from torchtitan.grpo.rollouts.guarded_environment import Environments, GuardedEnvironment
from torchtitan.grpo.rollouts.pace import LOST_STEPS
from torchtitan.grpo.rollouts.stream import RolloutStream
from torchtitan.grpo.weight_wire.version_names import version_name

B = 4
PARAMS = SamplingParams(n=2, temperature=1.0, max_tokens=6, seed=17, ignore_eos=True)
DATA = Data(source="arithmetic", source_args={"size": 600}, chat_template=False)
REQUEST_TIMEOUT_S = 20.0


class OddIndices:
    """Two answers of a group get different rewards, unless the prompt's index is among the `dull` ones, or none."""

    def __init__(self) -> None:
        self.dull: Callable[[int], bool] = lambda index: False
        self.fails: Callable[[int], bool] = lambda index: False
        self.fails_second = False
        self.takes_s = 0.0

    def score(self, samples: list[Sample]) -> None:
        time.sleep(self.takes_s)
        for number, sample in enumerate(samples):
            sample.reward = 0.0 if self.dull(sample.prompt.index) else float(number)
            if self.fails(sample.prompt.index) or (self.fails_second and number == 1):
                sample.reward, sample.reward_failures = None, {"judge": "raised OSError: down"}


def buffer_of(state: bytes) -> dict[str, Any]:
    return msgspec.msgpack.decode(state)["buffer"]


def has_signal(group: Group) -> bool:
    return len({sample.reward for sample in group}) > 1


class Held:
    """The environment of single answers, which keeps some groups from being complete.

    Attributes:
        before, after: Prompts that are held before they ask, and after their answers came.
        given_up: Prompts whose rollout was cancelled.
    """

    def __init__(self) -> None:
        self.before: Callable[[int], bool] = lambda index: False
        self.after: Callable[[int], bool] = lambda index: False
        self.given_up: set[int] = set()

    async def rollout(self, client: RolloutClient, prompt: Prompt) -> list[Sample]:
        try:
            while self.before(prompt.index):
                await asyncio.sleep(0.01)
            samples = await single_turn(client, prompt)
            while self.after(prompt.index):
                await asyncio.sleep(0.01)
            return samples
        except asyncio.CancelledError:
            self.given_up.add(prompt.index)
            raise


class Run:
    """A stream with all that it needs, over given servers."""

    def __init__(
        self,
        servers: list[ServerThread],
        grpo: Grpo | None = None,
        ahead: AsyncGrpo | None = None,
        environment: Environment = single_turn,
        max_concurrent_requests: int = 64,
        request_timeout_s: float = REQUEST_TIMEOUT_S,
        group_timeout_s: float = 60.0,
        steps: int = 100,
        min_servers: int = 1,
        params: SamplingParams = PARAMS,
        environment_concurrency: int = 0,
        max_failed_fraction: float = 0.5,
        row_tokens: float = math.inf,
    ) -> None:
        def make(url: str) -> Server:
            server = Server(url, VllmControl(url, timeout_s=10))
            server.client = VllmClient(url, None, request_timeout_s, lambda: server.version)
            return server

        self.threads = servers
        self.fleet = Fleet([server.url for server in servers], make, min_servers)
        self.rewards = OddIndices()
        tokenizer = load_tokenizer(str(TINY_QWEN3))
        rollout = Rollout(
            max_concurrent_requests=max_concurrent_requests,
            request_timeout_seconds=request_timeout_s,
            group_timeout_seconds=group_timeout_s,
        )
        config = JobConfig(
            training=Training(steps=steps),
            grpo=grpo or Grpo(prompts_per_step=B, group_size=2),
            async_grpo=ahead or AsyncGrpo(),
            rollout=rollout,
            reward=Reward(max_failed_fraction=max_failed_fraction),
        )
        environments = Environments(GuardedEnvironment(environment, "tests:run", environment_concurrency))
        self.collector = Collector(self.fleet, self.rewards, tokenizer, rollout, environments)
        self.prompts = PromptSource(DATA, tokenizer, seed=3)
        self.order = [prompt.index for prompt in PromptSource(DATA, tokenizer, seed=3).next(500)]
        """Prompts in the order in which they are asked."""
        self.stream = RolloutStream(
            self.collector,
            self.prompts,
            params,
            config,
            has_signal,
            row_tokens=row_tokens,
        )

    def publish(self, version: int) -> None:
        """Every server takes new weights: from the next token on they are of this version."""
        for thread, server in zip(self.threads, self.fleet.servers, strict=True):
            thread.generator.version = version_name(version)
            self.fleet.admit(server, version)

    def count(self, name: str) -> float:
        return self.stream.metrics()[f"rollout/{name}"]

    def rests(self) -> bool:
        return self.count("groups_asked") == self.count("groups_finished")

    def in_flight(self) -> list[int]:
        return [server.in_flight for server in self.fleet.servers]


@pytest.fixture(scope="module")
def servers() -> Iterator[list[ServerThread]]:
    servers = [ServerThread(0), ServerThread(0)]
    yield servers
    for server in servers:
        server.close()


@pytest.fixture
def make_run(servers) -> Iterator[Callable[..., Run]]:
    made: list[Run] = []

    def make(admitted: bool = True, **kwargs) -> Run:
        made.append(Run(kwargs.pop("servers", servers), **kwargs))
        if admitted:
            made[-1].publish(0)
        return made[-1]

    yield make
    for run in made:
        run.collector.close()


def ahead_by(max_age: int, **kwargs) -> AsyncGrpo:
    return AsyncGrpo(enabled=True, max_trajectory_age_steps=max_age, **({"run_ahead": "full"} | kwargs))


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def indices(batch: list[Group]) -> list[int]:
    return [group[0].prompt.index for group in batch]


def contents(batch: list[Group]) -> list[list[tuple]]:
    return [
        [(sample.prompt.index, sample.token_ids, sample.logprobs, sample.versions) for sample in group]
        for group in batch
    ]


# Without [async_grpo]


def test_a_step_is_what_the_collector_answers_to_its_prompts_to_the_last_bit(make_run) -> None:
    runs, batches = [make_run(), make_run()], []
    for run in runs:
        taken = []
        for version in range(3):
            run.publish(version)
            taken.append(contents(run.stream.take(version)))
        batches.append(taken)
    assert batches[0] == batches[1]
    collector, prompts = make_run().collector, runs[0].order
    source = PromptSource(DATA, collector.tokenizer, seed=3)
    for version in range(3):
        runs[0].publish(version)  # the servers are the same
        groups = collector.collect(source.next(B), PARAMS, f"step{version + 1}")
        assert contents(groups) == batches[0][version]
        assert indices(groups) == prompts[version * B : version * B + B]
        assert {version for group in groups for sample in group for version in sample.versions} == {version}


def test_groups_that_ask_no_server_are_ready_and_none_is_counted_twice(make_run) -> None:
    async def known(client: RolloutClient, prompt: Prompt) -> list[Sample]:
        if prompt.index in asks:
            return await single_turn(client, prompt)
        return [Sample(prompt, [5], [-0.5], [0], "stop", reward=float(i)) for i in range(2)]

    run = make_run(ahead=ahead_by(1), environment=known)
    asks = {*run.order[2:4], *run.order[8:9]}
    run.stream.take(0)
    wait_until(run.rests)
    counts = [run.count(f"groups_{name}") for name in ("ready", "in_flight", "queued")]
    assert counts == [B, 0, 0], "the groups of the next step"


def test_nothing_is_asked_before_a_step_wants_it(make_run) -> None:
    run = make_run()
    time.sleep(0.2)
    assert run.count("groups_asked") == 0
    for version in range(2):
        run.publish(version)
        run.stream.take(version)
        run.publish(version + 1)
        time.sleep(0.1)
        assert run.count("groups_asked") == run.count("groups_finished") == B * (version + 1)


def test_a_step_waits_for_servers_with_its_weights(make_run) -> None:
    run = make_run()
    run.stream.take(0)
    with_weights = threading.Timer(0.5, run.publish, [1])
    begin = time.monotonic()  # before the timer
    with_weights.start()
    batch = run.stream.take(1)
    assert time.monotonic() - begin >= 0.4
    assert {version for group in batch for sample in group for version in sample.versions} == {1}


def test_steps_come_in_their_order(make_run) -> None:
    with pytest.raises(AssertionError, match="the step at version 2 comes after that at -1"):
        make_run().stream.take(2)


def test_surplus_groups_that_found_no_place_outlast_a_long_step(make_run) -> None:
    grpo = Grpo(prompts_per_step=B, group_size=2, oversampling=1.0)
    run = make_run(grpo=grpo, max_concurrent_requests=1, request_timeout_s=1.0)
    run.stream.take(0)
    assert run.count("groups_queued") > 0
    time.sleep(1.5)  # training and a push take longer than a request may wait for a server
    run.publish(1)
    batch = run.stream.take(1)
    assert {version for group in batch for sample in group for version in sample.versions} == {1}


def test_a_stop_ends_the_wait_for_answers_and_keeps_the_state_of_before(make_run) -> None:
    """The resumed run asks all groups of the step again, together."""
    held = Held()
    run = make_run(environment=held.rollout)
    run.stream.take(0)
    before = run.stream.state_dict(1)
    held.after = lambda index: index == run.order[B]
    run.publish(1)

    def stop_while_one_is_held() -> None:
        wait_until(lambda: run.count("groups_ready") == 3)
        run.stream.stop()

    threading.Thread(target=stop_while_one_is_held).start()
    with pytest.raises(StopRequested):
        run.stream.take(1)
    assert run.count("groups_in_flight") == 1
    assert run.stream.state_dict(1) == before
    assert not run.stream.is_ready()


def test_the_wait_for_scores_alone_is_told_apart(make_run) -> None:
    held = Held()
    run = make_run(environment=held.rollout)
    held.after = lambda index: True
    threading.Timer(0.6, lambda: setattr(held, "after", lambda index: False)).start()
    run.stream.take(0)
    assert run.stream.take_scoring_seconds() < 0.3, "that was a wait for answers"
    run.rewards.takes_s = 0.6
    run.publish(1)
    run.stream.take(1)
    assert 0.3 < run.stream.take_scoring_seconds() < 5
    assert run.stream.take_scoring_seconds() == 0


# Servers that are not there


@pytest.mark.parametrize("ahead", [AsyncGrpo(), ahead_by(1)], ids=["sync", "ahead"])
def test_without_servers_the_wait_is_bounded_whatever_the_fleet_says(make_run, ahead) -> None:
    run = make_run(admitted=False, ahead=ahead, request_timeout_s=1.0)
    stop = threading.Event()

    def rumours() -> None:
        while not stop.wait(0.1):
            run.fleet.withdraw(run.fleet.servers[0], "still loading", lost=False)

    thread = threading.Thread(target=rumours)
    thread.start()
    begin = time.monotonic()
    try:
        with pytest.raises(EngineError, match=r"after 1 s of .*request_timeout_seconds\): http.*still loading"):
            run.stream.take(0)
    finally:
        stop.set()
        thread.join()
    assert 1.0 <= time.monotonic() - begin < 10


def test_servers_with_old_weights_do_not_help_a_step_without_ages(make_run) -> None:
    run = make_run(request_timeout_s=1.0)
    run.stream.take(0)
    with pytest.raises(EngineError, match=r"weights new enough to train version 1 after 1 s .*in traffic, version 0"):
        run.stream.take(1)


def test_too_few_servers_end_a_step(make_run) -> None:
    run = make_run(admitted=False, min_servers=2)
    threading.Timer(0.3, run.fleet.withdraw, [run.fleet.servers[1], "connection refused"]).start()
    with pytest.raises(FleetError, match=r"min_servers = 2: .*connection refused"):
        run.stream.take(0)


# Ahead of the trainer


def test_groups_of_later_steps_are_under_way_while_the_trainer_trains(make_run) -> None:
    held = Held()
    run = make_run(ahead=ahead_by(1), environment=held.rollout)
    assert run.count("groups_asked") == 0
    held.after = lambda index: index in run.order[B:]
    assert indices(run.stream.take(0)) == run.order[:B]
    wait_until(lambda: run.count("groups_in_flight") == B)
    assert run.count("groups_asked") == 2 * B, "no more may begin at version 0"
    wait_until(lambda: run.in_flight() == [0, 0])
    run.publish(1)
    wait_until(lambda: run.count("groups_in_flight") == 2 * B)
    assert not run.stream.is_ready()
    held.after = lambda index: False
    wait_until(run.stream.is_ready)
    batch = run.stream.take(1)
    assert indices(batch) == run.order[B : 2 * B]
    assert {version for group in batch for sample in group for version in sample.versions} == {0}


def test_no_group_is_asked_beyond_the_last_step(make_run) -> None:
    run = make_run(ahead=ahead_by(1), steps=3)
    for version in range(3):
        run.publish(version)
        run.stream.take(version)
    time.sleep(0.1)
    assert run.count("groups_asked") == run.count("groups_finished") == 3 * B


def test_groups_are_asked_no_further_ahead_than_the_trainer_needs(make_run) -> None:
    held = Held()
    outstanding = {}
    for run_ahead in ("full", "auto"):
        run = make_run(ahead=ahead_by(3, run_ahead=run_ahead), environment=held.rollout)
        for version in range(14):
            run.publish(version)
            batch = run.stream.take(version)
            wait_until(run.rests)
        outstanding[run_ahead] = run.count("groups_ready")
    assert outstanding["full"] == 3 * B
    assert outstanding["auto"] <= B + B // 4, "a step's groups are there in time without any more"
    longest = [max(len(sample.token_ids) for sample in group) for group in batch]
    assert min(longest) == max(longest) > 0
    assert run.stream._pace.under_way == math.ceil((3 - LOST_STEPS) * B), "it knows the lengths of answers"
    held.after = lambda index: True
    for version in range(14, 17):  # now each step has to wait
        run.publish(version)
        threading.Timer(0.3, lambda: setattr(held, "after", lambda index: False)).start()
        run.stream.take(version)
        held.after = lambda index: True
    assert run.count("groups_in_flight") + run.count("groups_ready") > B + B // 4


@pytest.mark.parametrize("late", ["wait", "drop"])
def test_a_group_that_would_be_too_old(make_run, late) -> None:
    held = Held()
    run = make_run(ahead=ahead_by(1, late_groups=late), environment=held.rollout)
    stuck = run.order[B]
    held.after = lambda index: index in run.order[B:]
    run.stream.take(0)
    held.after = lambda index: index == stuck
    run.publish(1)
    wait_until(lambda: run.count("groups_ready") == 2 * B - 1)
    release = threading.Timer(1.0 if late == "wait" else 20.0, lambda: setattr(held, "after", lambda index: False))
    begin = time.monotonic()
    release.start()
    batch = run.stream.take(1)
    if late == "wait":
        assert time.monotonic() - begin >= 0.8
        assert indices(batch) == run.order[B : 2 * B]
        assert (run.count("groups_late"), held.given_up) == (0, set())
    else:
        assert held.after(stuck), "nobody waited for it"
        assert indices(batch) == run.order[B + 1 : 2 * B + 1]
        wait_until(lambda: held.given_up == {stuck})
        assert run.count("groups_late") == 1
        release.cancel()
        held.after = lambda index: False
    release.join()
    run.publish(2)
    assert stuck not in indices(run.stream.take(2))


# Groups that are replaced


@pytest.mark.parametrize("ahead", [AsyncGrpo(), ahead_by(2)], ids=["sync", "ahead"])
def test_groups_without_a_signal_are_replaced(make_run, ahead) -> None:
    run = make_run(grpo=replacing(), ahead=ahead)
    run.rewards.dull = lambda index: index % 2 == 0
    trained = []
    for version in range(4):
        run.publish(version)
        batch = run.stream.take(version)
        assert len(batch) == B and all(has_signal(group) for group in batch)
        assert indices(batch) == sorted(indices(batch), key=run.order.index)
        trained += indices(batch)
    assert len(set(trained)) == len(trained)
    asked = int(run.count("groups_asked"))
    dull = sum(index % 2 == 0 for index in run.order[:asked])
    assert 0 < run.count("groups_replaced") <= dull
    if not ahead.enabled:
        assert run.count("groups_replaced") == dull == asked - 4 * B
        assert trained == [index for index in run.order[:asked] if index % 2]


def test_nothing_depends_on_which_group_ends_first(make_run) -> None:
    """Not what is recorded for a curriculum, what replaces groups, or which of them stay at the limit."""
    seen = []
    for last in (0, 2, 5):

        async def late(client: RolloutClient, prompt: Prompt) -> list[Sample]:
            samples = await single_turn(client, prompt)
            await asyncio.sleep(0.3 * (run.order.index(prompt.index) == last))  # noqa: B023
            return samples

        run = make_run(grpo=replacing(), environment=late)
        run.rewards.dull = lambda index, run=run: run.order.index(index) < B or index % 4
        recorded: list[tuple[int, float]] = []
        run.prompts.record = lambda index, mean, to=recorded: to.append((index, mean))
        batch = run.stream.take(0)
        seen.append((indices(batch), recorded, run.count("groups_asked"), run.count("groups_replaced")))
        assert [index for index, _ in recorded] == run.order[: len(recorded)]
    assert seen[0] == seen[1] == seen[2] and len(seen[0][1]) > 2 * B


@pytest.mark.parametrize("ahead", [AsyncGrpo(), ahead_by(1)], ids=["sync", "ahead"])
def test_replacing_ends_at_its_limit(make_run, ahead) -> None:
    run = make_run(grpo=replacing(), ahead=ahead)
    run.rewards.dull = lambda index: True
    for version in range(3):
        run.publish(version)
        assert len(run.stream.take(version)) == B
    replaced, asked = run.count("groups_replaced"), run.count("groups_asked")
    if ahead.enabled:
        # Groups of a step to come may have ended by now, and some that this step did not replace serve the next one.
        assert 12 <= replaced <= 4 * 12
    else:
        assert (replaced, asked) == (3 * 12, 3 * 16)


@pytest.mark.parametrize("ahead", [AsyncGrpo(), ahead_by(1)], ids=["sync", "ahead"])
def test_a_step_ends_the_run_if_too_many_of_its_answers_have_no_reward(make_run, ahead) -> None:
    """One of two answers has none, in every group, and the limit is lower."""
    run = make_run(ahead=ahead, max_failed_fraction=0.45)
    run.stream.take(0)
    run.rewards.fails_second = True
    with pytest.raises(UserError, match=r'[4-8] of 8 answers.*= 0\.45: "judge" failed on [4-8], .* OSError: down'):
        for version in range(1, 4):
            run.publish(version)
            run.stream.take(version)


def test_failures_in_groups_that_were_replaced_end_the_run_too(make_run) -> None:
    run = make_run(grpo=replacing(), max_failed_fraction=0.45)
    run.rewards.dull, run.rewards.fails_second = (lambda index: index not in run.order[:B]), True
    with pytest.raises(UserError, match="4 of 8 answers have no reward"):
        run.stream.take(0)


def replacing() -> Grpo:
    return Grpo(prompts_per_step=B, group_size=2, zero_variance_groups="replace")


@pytest.mark.parametrize("ahead", [AsyncGrpo(), ahead_by(1)], ids=["sync", "ahead"])
def test_surplus_groups_are_taken_or_given_up_when_too_old(make_run, ahead) -> None:
    held = Held()
    run = make_run(grpo=Grpo(prompts_per_step=B, group_size=2, oversampling=0.5), ahead=ahead, environment=held.rollout)
    stuck = {run.order[0], run.order[2]}
    held.after = lambda index: index in stuck or index in run.order[B + 2 :]
    trained = []
    for version in range(4):
        run.publish(version)
        batch = run.stream.take(version)
        held.after = stuck.__contains__
        assert all(version - min(sample.versions) <= run.stream._buffer.max_age for group in batch for sample in group)
        trained += indices(batch)
    wait_until(lambda: held.given_up >= stuck)
    assert trained[:B] == [index for index in run.order[: B + 2] if index not in stuck]
    assert len(set(trained)) == 4 * B and not stuck & set(trained)
    assert 2 <= run.count("groups_late") <= 2 * 4, "the surplus of each step"
    wait_until(lambda: run.in_flight() == [0, 0])


def test_a_group_that_takes_too_long_is_given_up_and_replaced(make_run) -> None:
    held = Held()
    run = make_run(environment=held.rollout, group_timeout_s=1.0)
    held.before, held.after = (lambda index: index == run.order[0]), (lambda index: index == run.order[2])
    batch = run.stream.take(0)
    assert set(indices(batch)) == {run.order[i] for i in (1, 3, 4, 5)}
    assert held.given_up == {run.order[0], run.order[2]}
    assert run.count("groups_timed_out") == 2
    assert run.in_flight() == [0, 0]


@pytest.mark.parametrize("ahead", [AsyncGrpo(), ahead_by(1)], ids=["sync", "ahead"])
def test_when_every_group_takes_too_long_the_run_is_told(make_run, ahead) -> None:
    held = Held()
    held.before = lambda index: True
    run = make_run(ahead=ahead, environment=held.rollout, group_timeout_s=0.5)
    with pytest.raises(EngineError, match=r"\[rollout\] group_timeout_seconds = 0.5, like all groups of a step"):
        run.stream.take(0)


def test_the_time_of_a_group_begins_with_its_first_request(make_run, servers) -> None:
    run = make_run(servers=servers[:1], group_timeout_s=1.0, max_concurrent_requests=1)

    async def occupy() -> None:
        server = await run.collector.router.places.acquire(GroupCall())
        asyncio.get_running_loop().call_later(1.5, run.collector.router.places.release, server)

    begin = time.monotonic()
    run.collector.call(occupy())
    assert indices(run.stream.take(0)) == run.order[:B]
    assert time.monotonic() - begin >= 1.4
    assert run.count("groups_timed_out") == 0


@pytest.mark.parametrize("ahead", [AsyncGrpo(), ahead_by(1)], ids=["sync", "ahead"])
def test_an_environment_that_always_fails_ends_the_step(make_run, ahead) -> None:
    async def failing(client: RolloutClient, prompt: Prompt) -> list[Sample]:
        raise KeyError("tool")

    run = make_run(ahead=ahead, environment=failing)
    said = (
        r"10 of 10 answers have no reward.*\"tests:run\" failed on 10, for example on prompt \d+: it raised KeyError: "
    )
    with pytest.raises(UserError, match=said + r"'tool' \(.*test_stream.py:\d+ in failing\)"):
        run.stream.take(0)
    assert run.count("groups_failed") >= 5


@pytest.mark.parametrize("ahead", [AsyncGrpo(), ahead_by(1)], ids=["sync", "ahead"])
def test_groups_on_which_the_environment_fails_are_replaced(make_run, ahead) -> None:
    broken: set[int] = set()

    async def flaky(client: RolloutClient, prompt: Prompt) -> list[Sample]:
        samples = await single_turn(client, prompt)
        if prompt.index in broken:
            raise SystemExit("exits" if prompt.index % 2 else "leaves")
        return samples

    run = make_run(ahead=ahead, environment=flaky)
    broken |= {run.order[0], run.order[2], run.order[5]}
    trained = indices(run.stream.take(0))
    run.publish(1)
    trained += indices(run.stream.take(1))
    assert len(trained) == 2 * B and not broken & set(trained)
    assert run.count("groups_failed") == 3


class Tool:
    """An environment whose tool is away until `back_at`, and which counts its episodes."""

    def __init__(self, back_at: float = 0.0) -> None:
        self.back_at, self.episodes = back_at, 0

    async def rollout(self, client: RolloutClient, prompt: Prompt) -> list[Sample]:
        self.episodes += 1
        samples = await single_turn(client, prompt)
        if time.monotonic() < self.back_at:
            raise ConnectionError("the tool is away")
        return samples


@pytest.mark.parametrize(
    ("ahead", "what"), [(AsyncGrpo(), "environment"), (ahead_by(1), "reward")], ids=["sync", "ahead"]
)
def test_an_outage_is_waited_for_and_counts_for_nothing(make_run, caplog, ahead, what) -> None:
    tool = Tool()
    run = make_run(ahead=ahead, environment=tool.rollout)
    run.stream.take(0)
    wait_until(run.rests)
    back_at = time.monotonic() + 2.5
    if what == "environment":
        tool.back_at = back_at
    else:
        run.rewards.fails = lambda index: time.monotonic() < back_at
    tool.episodes = 0
    for version in (1, 2, 3):
        run.publish(version)
        assert len(run.stream.take(version)) == B
    assert back_at < time.monotonic() < back_at + 15
    assert run.count("groups_failed") > B and tool.episodes < 15 * B, "it is asked at longer and longer intervals"
    said = [record.getMessage() for record in caplog.records if "Others are asked in" in record.getMessage()]
    assert 2 <= len(said) <= 5 and all("failed on" in each for each in said)


def test_a_group_that_fails_after_an_outage_is_one_of_a_step_whose_groups_were_under_way_in_it(make_run) -> None:
    worked = 0

    async def tool(client: RolloutClient, prompt: Prompt) -> list[Sample]:
        nonlocal worked
        samples = await single_turn(client, prompt)
        if time.monotonic() < back_at:
            raise ConnectionError("the tool is away")
        worked += 1
        if worked == 2 * B + 1:  # the first group that is requested after the outage
            raise ValueError("once")
        return samples

    back_at = -math.inf
    run = make_run(ahead=ahead_by(1), environment=tool)
    run.stream.take(0)
    wait_until(run.rests)
    back_at, worked = time.monotonic() + 0.5, 0
    for version in (1, 2):
        run.publish(version)
        run.stream.take(version)
    run.publish(3)
    wait_until(lambda: worked > 2 * B + 1)
    assert len(run.stream.take(3)) == B, "1 of the step's groups failed, not 1 of 1"


@pytest.mark.parametrize("what", ["environment", "reward"])
def test_what_never_works_again_ends_the_run_by_time_and_is_named(make_run, what) -> None:
    tool = Tool()
    run = make_run(environment=tool.rollout, group_timeout_s=1.5)
    run.stream.take(0)
    run.publish(1)
    if what == "environment":
        tool.back_at, said = math.inf, '"tests:run" failed on .* it raised ConnectionError: the tool is away'
    else:
        run.rewards.fails, said = (lambda index: True), '"judge" failed on .* it raised OSError: down'
    begin = time.monotonic()
    with pytest.raises(
        UserError, match=rf"no group has got a reward for \d s in all, over .*group_timeout_seconds = 1.5: {said}"
    ):
        run.stream.take(1)
    assert 1.5 <= time.monotonic() - begin < 10


def test_a_stop_is_heard_in_an_outage_and_keeps_the_state_of_before(make_run) -> None:
    tool = Tool()
    run = make_run(environment=tool.rollout)
    run.stream.take(0)
    before = run.stream.state_dict(1)
    run.publish(1)
    tool.back_at, stopped_at = math.inf, []

    def stop() -> None:
        stopped_at.append(time.monotonic())
        run.stream.stop()

    threading.Timer(2.6, stop).start()
    with pytest.raises(StopRequested):
        run.stream.take(1)
    assert time.monotonic() - stopped_at[0] < 1, "the wait goes on until 4 s after the first failure"
    assert run.stream.state_dict(1) == before


class OneByOne:
    """Makes each sample by itself. The second one of a prompt among `ways` crashes, hangs or is slow."""

    per_sample = True

    def __init__(self) -> None:
        self.ways: dict[int, str] = {}
        self.seen: dict[int, int] = {}
        self.at_once = self.most = 0

    async def __call__(self, client: RolloutClient, prompt: Prompt) -> list[Sample]:
        assert client.params.n == 1
        number = self.seen[prompt.index] = self.seen.get(prompt.index, -1) + 1
        self.at_once += 1
        self.most = max(self.most, self.at_once)
        try:
            samples = await single_turn(client, prompt)
            match self.ways.get(prompt.index) if number else None:
                case "crash":
                    raise ConnectionError("the tool is gone")
                case "hang":
                    await asyncio.Event().wait()
                case "slow":
                    await asyncio.sleep(0.3)
        finally:
            self.at_once -= 1
        samples[0].reward = float(number)
        return samples


@pytest.mark.parametrize("concurrency", [0, 3])
def test_an_environment_of_single_samples_loses_those_that_crash_or_hang(make_run, concurrency) -> None:
    environment = OneByOne()
    run = make_run(environment=environment, group_timeout_s=1.0, environment_concurrency=concurrency)
    environment.ways = dict(zip(run.order, ("crash", "hang", "slow"), strict=False))
    begin = time.monotonic()
    groups = {group[0].prompt.index: group for group in run.stream.take(0)}
    assert time.monotonic() - begin < 10
    assert list(groups) == run.order[:B]
    lost = [groups[index][1] for index in run.order[:2]]
    for sample, said in zip(
        lost, ("raised ConnectionError: the tool is gone (", "took longer than [rollout] "), strict=True
    ):
        assert sample.reward is None and not sample.token_ids and sample.finish_reason == "abort"
        assert sample.reward_failures["tests:run"].startswith(said)
    others = [sample for group in groups.values() for sample in group if sample not in lost]
    assert [sample.reward for sample in others] == [0.0, 0.0, 0.0, 1.0, 0.0, 1.0]
    assert len({tuple(sample.token_ids) for sample in others}) > 4, "each sample has a seed of its own"
    assert environment.at_once == 0 and environment.most == (concurrency or 2 * B)
    assert run.count("groups_failed") == run.count("groups_timed_out") == 0


# Resumes


@pytest.mark.parametrize("ahead", [AsyncGrpo(), ahead_by(2)], ids=["sync", "ahead"])
def test_a_resumed_run_loses_and_repeats_no_group(make_run, ahead) -> None:
    held = Held()
    first = make_run(ahead=ahead, environment=held.rollout)
    held.after = lambda index: index in first.order[B:]
    trained = indices(first.stream.take(0))
    held.after = lambda index: index in first.order[B + 1 : 2 * B : 2]
    if ahead.enabled:
        wait_until(lambda: first.count("groups_ready") == 2 * B - 2)
        assert first.count("groups_in_flight") == 2
    state = first.stream.state_dict(1)
    assert first.stream.state_now() == state
    first.collector.close()

    second = make_run(ahead=ahead, environment=Held().rollout, admitted=False)
    second.stream.load_state_dict(state)
    assert second.count("groups_ready") == (2 * B - 2 if ahead.enabled else 0)
    complete = [contents([entry.group]) for entry in second.stream._buffer.entries.values() if entry.group]
    batches = []
    for version in range(1, 5):
        second.publish(version)
        batches.append(second.stream.take(version))
        trained += indices(batches[-1])
    assert sorted(trained, key=second.order.index) == second.order[: 5 * B]
    taken = [contents([group]) for batch in batches for group in batch]
    assert all(group in taken for group in complete), "what was complete is trained on as it was"


@pytest.mark.parametrize("ahead", [AsyncGrpo(), ahead_by(2)], ids=["sync", "ahead"])
def test_the_state_right_after_a_take_is_what_the_next_step_resumes_from(make_run, ahead) -> None:
    run = make_run(ahead=ahead)
    trained = set(indices(run.stream.take(0)))
    now = run.stream.state_now()
    wait_until(run.rests)
    saved = buffer_of(run.stream.state_dict(1))
    for state in (buffer_of(now), saved):
        pending = [entry["prompt"] for entry in state["entries"]]
        assert state["version"] == 1 and state["next_number"] == B + len(pending)
        assert trained | set(pending) == set(run.order[: B + len(pending)]) and not trained & set(pending)
    whole = [entry["group"] for entry in saved["entries"] if entry["group"]]
    assert len(whole) == (2 * B if ahead.enabled else 0)
    run.publish(1)
    taken = run.stream.take(1)
    failed = buffer_of(run.stream.state_dict(1))  # of a run that fails before it trains on what it has taken
    assert [entry["group"] for entry in failed["entries"] if entry["group"]][: len(whole)] == whole
    assert failed["version"] == 1 and buffer_of(run.stream.state_now())["version"] == 2
    if ahead.enabled:
        assert contents(map(from_bytes, whole[:B])) == contents(taken)


def test_a_resumed_run_asks_again_for_groups_that_do_not_fit_it(make_run, caplog) -> None:
    first = make_run(ahead=ahead_by(2))
    first.stream.take(0)
    wait_until(lambda: first.rests() and first.count("groups_ready") == 2 * B)
    state = first.stream.state_dict(1)
    first.collector.close()
    lengths = [len(e.prompt.token_ids) for e in first.stream._buffer.entries.values()]
    row = max(lengths) + PARAMS.max_tokens - 1
    too_long = lengths.count(max(lengths))
    for left, changed, said in (
        (2 * B, {}, ""),
        (0, {"params": replace(PARAMS, temperature=0.7)}, "8 groups .* again: sampled at temperature 1, and .* = 0.7"),
        (2 * B - too_long, {"row_tokens": row}, f"{too_long} groups .* longer than a row of {row} tokens"),
    ):
        second = make_run(ahead=ahead_by(2), admitted=False, **changed)
        caplog.clear()
        second.stream.load_state_dict(state)
        assert second.count("groups_ready") == left
        assert [record.levelname for record in caplog.records if re.search(said, record.getMessage())] or not said
        second.publish(1)
        assert len(second.stream.take(1)) == B


# All at once


class World:
    """Servers get new weights when they get them; they are withdrawn, suspected, silent and killed, and come back.

    Of several servers at most one is away at a time, so that no request fails three times for no fault of its own.
    """

    def __init__(self, run: Run, seed: int) -> None:
        self.run, self.random = run, random.Random(seed)
        self.newest = 0
        self.events = {"withdrawn": 0, "suspected": 0, "silent": 0, "killed": 0}
        self._next: list[str] = []
        self._stop = threading.Event()
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> "World":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join(30)
        if self._error is not None:
            raise self._error

    def _run(self) -> None:
        try:
            self._turn()
        except BaseException as error:
            self._error = error

    def _turn(self) -> None:
        away, back_at = None, 0.0
        while not self._stop.wait(0.03):
            for i, server in enumerate(self.run.fleet.servers):
                if i != away and server.version < self.newest and self.random.random() < 0.15:
                    self._update(i)
            if away is not None and time.monotonic() >= back_at:
                with contextlib.suppress(OSError):  # its port is a client's for the moment: it comes back later
                    self._update(away)
                    away = None
            elif away is None and self.random.random() < 0.05:
                away, back_at = self.random.randrange(len(self.run.threads)), time.monotonic() + self.random.random()
                self._break(away)

    def _update(self, i: int) -> None:
        version = self.newest
        if not self.run.threads[i].loop.is_running():
            self.run.threads[i] = ServerThread(version, self.run.threads[i].port)
        self.run.threads[i].generator.version = version_name(version)
        self.run.fleet.admit(self.run.fleet.servers[i], version)

    def _break(self, i: int) -> None:
        if not self._next:  # all of them, before any comes again
            self._next = self.random.sample(list(self.events), len(self.events))
        event = self._next.pop()
        self.events[event] += 1
        server = self.run.fleet.servers[i]
        if event == "withdrawn":
            self.run.fleet.withdraw(server, "no answer", lost=self.random.random() < 0.5)
        elif event == "suspected":
            self.run.fleet.suspect(server, EngineError("a rumour"))
        elif event == "silent":
            self.run.fleet.fall_silent(server, "no reply")
        else:
            self.run.threads[i].kill()


async def wavering(client: RolloutClient, prompt: Prompt) -> list[Sample]:
    """Three turns with pauses, a few of them long, so that answers grow over several weight versions."""

    async def sample(seed: int) -> Sample:
        chance, turns = random.Random(seed), Turns(prompt)
        for turn in range(3):
            (completion,) = await client.generate(turns.token_ids, max_tokens=2)
            turns.sampled(completion)
            if turn < 2:
                await asyncio.sleep(chance.random() * (1.2 if chance.random() < 0.1 else 0.1))
                turns.given([5])
        return turns.sample()

    return list(await asyncio.gather(*[sample(prompt.index * 10 + i) for i in range(client.params.n)]))


@pytest.mark.parametrize(
    ("max_age", "late", "oversampling", "run_ahead"),
    [(1, "wait", 0.0, "full"), (3, "wait", 0.0, "auto"), (1, "drop", 0.5, "full")],
    ids=str,
)
def test_no_weather_ages_loses_or_repeats_a_group(max_age: int, late: str, oversampling: float, run_ahead: str) -> None:
    chance = random.Random(max_age)
    threads = [ServerThread(0) for _ in range(3)]
    run = Run(
        threads,
        Grpo(prompts_per_step=B, group_size=2, oversampling=oversampling),
        ahead_by(max_age, late_groups=late, run_ahead=run_ahead),
        environment=wavering,
        max_concurrent_requests=12,
        params=SamplingParams(n=2, temperature=1.0, max_tokens=8, seed=17, ignore_eos=True),
    )
    run.publish(0)
    trained: list[int] = []
    ages: set[int] = set()
    mixed = 0
    start, version = time.monotonic(), 0
    with World(run, seed=max_age) as world:
        # Longer where a busy machine makes the weather slow.
        while version < 20 or (min(world.events.values()) < 1 and time.monotonic() < start + 50):
            batch = run.stream.take(version)
            assert len(batch) == B
            for sample in (sample for group in batch for sample in group):
                assert max(sample.versions) <= version
                ages |= {version - v for v in sample.versions}
                mixed += len(set(sample.versions)) > 1
            trained += indices(batch)
            time.sleep(chance.random() * 0.3)
            version += 1
            world.newest = version

    async def at_once() -> tuple[list[int], int]:
        buffer = run.stream._buffer  # groups that end may have others asked in between
        return [entry.prompt.index for entry in buffer.entries.values()], buffer.next_number

    counts = run.stream.metrics()
    pending, asked = run.collector.call(at_once())
    run.collector.close()
    for thread in run.threads:
        thread.close()
    assert min(world.events.values()) >= 1, (version, world.events)
    assert max(ages) <= max_age
    if run_ahead == "full":
        assert ages == set(range(max_age + 1)), "the bound was never reached"
    assert mixed > 0, "no answer saw an update"
    assert len(set(trained)) == len(trained) == version * B
    assert not set(trained) & set(pending)
    assert set(trained) | set(pending) <= set(run.order[:asked])
    assert counts["rollout/groups_timed_out"] == 0
    assert len(trained) + len(pending) + counts["rollout/groups_late"] == asked
    if late == "wait":
        assert counts["rollout/groups_late"] == 0
    print({"steps": version, "retried": counts["rollout/retried"], "ages": ages, "mixed": mixed} | world.events)


def test_a_stop_does_not_take_back_that_a_step_is_ready(make_run) -> None:
    run = make_run(ahead=ahead_by(2))
    run.stream.take(0)
    wait_until(run.stream.is_ready)
    run.stream.stop()
    taken = indices(run.stream.take(1))
    assert len(taken) == B and not run.stream.is_ready()
    saved = buffer_of(run.stream.state_dict(2))
    assert saved["version"] == 2 and saved["entries"], "groups that wait for a later step are saved"
    before = buffer_of(run.stream.state_dict(1))  # of a run that fails before it trains on what it has taken
    whole = [entry["prompt"] for entry in before["entries"] if entry["group"]]
    assert before["version"] == 1 and set(taken) <= set(whole)
    with pytest.raises(StopRequested):
        run.stream.take(2)
    assert buffer_of(run.stream.state_dict(2))["version"] == 2
