"""The collector against embedded servers that run in this process."""

import asyncio
import concurrent.futures
import contextlib
import http.server
import os
import random
import re
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import tokenizers
from transformers import PreTrainedTokenizerFast

from tests.helpers import TINY_QWEN3, Unspeakable
from tests.helpers.embedded_servers import ServerThread
from tests.helpers.files import no_files_left
from torchtitan.grpo.config.job_config import Rollout
from torchtitan.grpo.data.held_out import HeldOut
from torchtitan.grpo.data.samples import Prompt, Sample
from torchtitan.grpo.data.tokenizer import load_tokenizer
from torchtitan.grpo.engines.fleet import Fleet
from torchtitan.grpo.engines.fleet_view import FleetError
from torchtitan.grpo.engines.protocol import EngineError, LocalError, SamplingParams
from torchtitan.grpo.engines.registry import ENGINES
from torchtitan.grpo.engines.server import Server
from torchtitan.grpo.engines.vllm import VllmClient
from torchtitan.grpo.engines.vllm_control import VllmControl
from torchtitan.grpo.environments.load import load_environment
from torchtitan.grpo.errors import UserError
from torchtitan.grpo.process import event_loop
from torchtitan.grpo.process.stopping import StopRequested
from torchtitan.grpo.rollouts.collector import Ask, Collector, decoded
from torchtitan.grpo.rollouts.environment import Environment, RolloutClient, Turns, single_turn
from torchtitan.grpo.rollouts.group_call import GroupCall
from torchtitan.grpo.rollouts.guarded_environment import Environments, GuardedEnvironment
from torchtitan.grpo.rollouts.held_out import answer_held_out
from torchtitan.grpo.rollouts.places import HOLD_S
from torchtitan.grpo.rollouts.silence import LOOK_S, REPLY_S
from torchtitan.grpo.run.rollout_worker import RolloutWorker

VERSION = 4
PARAMS = SamplingParams(n=2, temperature=1.0, max_tokens=6, seed=17, ignore_eos=True)


class CountingClient(VllmClient):
    """The real client, which also counts its requests."""

    def __init__(self, url: str) -> None:
        super().__init__(url, None, 30.0, lambda: VERSION)
        self.started = self.finished = self.most_in_flight = 0
        self.asked: list[tuple[str, tuple[str, int] | None]] = []
        self.first: set[str] = set()

    async def generate(self, prompt_ids, params, request_id, cohort=None):
        self.started += 1
        self.asked.append((request_id, cohort))
        if params.first:
            self.first.add(request_id)
        self.most_in_flight = max(self.most_in_flight, self.started - self.finished)
        try:
            return await super().generate(prompt_ids, params, request_id, cohort)
        finally:
            self.finished += 1


class AnswerLength:
    """Rewards an answer with the length of its text, and remembers how many requests were open at each group."""

    def __init__(self) -> None:
        self.fleet: Fleet | None = None
        self.open_requests: list[int] = []

    def score(self, samples: list[Sample]) -> None:
        self.open_requests.append(sum(s.client.started - s.client.finished for s in self.fleet.servers))
        for sample in samples:
            sample.rewards = {"length": float(len(sample.text))}
            sample.reward = sample.rewards["length"]

    def find_finals(self, samples: list[Sample]) -> None:
        pass


@pytest.fixture(scope="module")
def servers() -> Iterator[list[ServerThread]]:
    servers = [ServerThread(VERSION), ServerThread(VERSION)]
    yield servers
    for server in servers:
        server.close()


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer(str(TINY_QWEN3))


@pytest.fixture
def new_server() -> Iterator[Callable[[], ServerThread]]:
    """Makes servers that a test may pause and close."""
    made: list[ServerThread] = []

    def new() -> ServerThread:
        made.append(ServerThread(VERSION))
        return made[-1]

    yield new
    for server in made:
        server.close()


@pytest.fixture
def dead_urls(new_server) -> list[str]:
    """Addresses where nobody listens any more."""
    servers = [new_server() for _ in range(3)]
    for server in servers:
        server.close()
    return [server.url for server in servers]


@pytest.fixture
def answering() -> Iterator[Callable[[int, bytes], str]]:
    """Starts a server that gives every request this answer."""
    with contextlib.ExitStack() as stack:

        def start(status: int, said: bytes) -> str:
            class Answers(http.server.BaseHTTPRequestHandler):
                def do_POST(self) -> None:
                    self.rfile.read(int(self.headers["Content-Length"]))
                    self.send_response(status)
                    self.send_header("Content-Length", str(len(said)))
                    self.end_headers()
                    self.wfile.write(said)

                def log_message(self, *_: object) -> None:
                    pass

            server = stack.enter_context(http.server.ThreadingHTTPServer(("127.0.0.1", 0), Answers))
            stack.callback(server.shutdown)
            threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
            return f"http://127.0.0.1:{server.server_port}"

        yield start


def make_server(url: str) -> Server:
    return Server(url, VllmControl(url, timeout_s=10), CountingClient(url))


@pytest.fixture
def make_collector(servers, tokenizer):
    made: list[Collector] = []

    def make(
        urls: list[str] | None = None,
        max_concurrent_requests: int = 64,
        request_timeout_s: float = 30.0,
        admitted: bool = True,
        fleet: Fleet | None = None,
        environment: Environment = single_turn,
        of_sets: dict[str, GuardedEnvironment] | None = None,
    ) -> Collector:
        if fleet is None:
            fleet = Fleet(urls or [server.url for server in servers], make_server)
        if admitted:
            for server in fleet.servers:
                fleet.admit(server, VERSION)
        scorer = AnswerLength()
        scorer.fleet = fleet
        made.append(
            Collector(
                fleet,
                scorer,
                tokenizer,
                Rollout(max_concurrent_requests=max_concurrent_requests, request_timeout_seconds=request_timeout_s),
                Environments(GuardedEnvironment(environment, "tests:rollout"), of_sets or {}),
            )
        )
        return made[-1]

    yield make
    for collector in made:
        collector.close()


@pytest.fixture
def in_thread() -> Iterator[Callable]:
    with concurrent.futures.ThreadPoolExecutor(4) as threads:
        yield threads.submit


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def in_flight(collector: Collector) -> list[int]:
    return [server.in_flight for server in collector.fleet.servers]


def prompts_of(count: int) -> list[Prompt]:
    return [Prompt(index=10 + i, token_ids=[3 + i % 9, 4, 5][: 1 + i % 3], text="") for i in range(count)]


def tokens(groups) -> list[list[list[int]]]:
    return [[sample.token_ids for sample in group] for group in groups]


def test_groups_come_complete_and_in_order(make_collector, tokenizer) -> None:
    prompts = prompts_of(12)
    groups = make_collector().collect(prompts, PARAMS, "step-1")
    assert [group[0].prompt for group in groups] == prompts
    for group in groups:
        assert len(group) == 2
        for sample in group:
            assert len(sample.token_ids) == len(sample.logprobs) == 6
            assert sample.versions == [4] * 6
            assert sample.finish_reason == "length"
            assert sample.text == tokenizer.decode(sample.token_ids, skip_special_tokens=True)
            assert sample.reward == len(sample.text)
    assert make_collector().collect([], PARAMS, "step-1") == []


def test_answers_depend_on_seed_tag_and_prompt_only(make_collector, servers) -> None:
    prompts = prompts_of(10)
    first = tokens(make_collector().collect(prompts, PARAMS, "a"))
    assert tokens(make_collector(max_concurrent_requests=1).collect(prompts, PARAMS, "a")) == first
    assert tokens(make_collector([servers[0].url]).collect(prompts, PARAMS, "a")) == first
    assert tokens(make_collector().collect(prompts, PARAMS, "b")) != first
    again = make_collector().collect([prompts[3], prompts[3]], PARAMS, "a")
    assert tokens(again)[0] == first[3]
    assert tokens(again)[1] != first[3]


def test_repeated_collections_are_equal_to_the_last_bit(make_collector) -> None:
    collector = make_collector()
    logprobs = [
        [[sample.logprobs for sample in group] for group in collector.collect(prompts_of(16), PARAMS, "a")]
        for _ in range(3)
    ]
    assert logprobs[0] == logprobs[1] == logprobs[2]


def test_several_collections_are_asked_together_unless_an_engine_repeats_its_answers(make_collector) -> None:
    asks = [Ask(prompts_of(count), PARAMS, tag) for count, tag in ((5, "a"), (3, "b"))]
    for engine, most in (("embedded", 5), ("vllm", 8)):
        collector = make_collector()
        for server in collector.fleet.servers:
            server.engine = ENGINES[engine]
        groups = collector.collect_all(asks)
        assert tokens(groups[0]) == tokens(collector.collect(prompts_of(5), PARAMS, "a"))
        assert tokens(groups[1]) == tokens(collector.collect(prompts_of(3), PARAMS, "b"))
        assert sum(server.client.most_in_flight for server in collector.fleet.servers) == most
    assert collector.collect_all([]) == []


def test_collections_that_are_asked_together_keep_the_limit_of_requests(make_collector) -> None:
    collector = make_collector(max_concurrent_requests=3)
    for server in collector.fleet.servers:
        server.engine = ENGINES["vllm"]
    collector.collect_all([Ask(prompts_of(3), PARAMS, tag) for tag in "abcd"])
    assert [server.client.most_in_flight for server in collector.fleet.servers] == [3, 3]


def collect_behind_others(collector: Collector, in_thread: Callable, count: int, waiting: int = 29) -> CountingClient:
    """30 groups ask the one server, and so many requests wait. Then groups come that are first, `count` of them.

    Returns:
        The server's client, when all have been answered.
    """
    (server,) = collector.fleet.servers
    server.control.pause()
    others = in_thread(collector.collect, prompts_of(30), PARAMS, "others")
    wait_until(lambda: (server.in_flight, collector.router.places.waiting) == (1, waiting))
    first = in_thread(collector.collect, prompts_of(count), replace(PARAMS, first=True), "first")
    wait_until(lambda: collector.router.places.waiting == waiting + 1)  # for a place; then they ask
    server.control.resume()
    for future in (first, others):
        future.result(30)
    return server.client


def test_what_comes_first_does_not_wait_behind_others(make_collector, new_server, in_thread) -> None:
    collector = make_collector([new_server().url], max_concurrent_requests=1)
    client = collect_behind_others(collector, in_thread, 2)
    order = [request_id.partition("-")[0] for request_id, _ in client.asked]
    assert order.count("first") == 2 and order.index("first") < 15


def test_requests_are_spread_and_limited(make_collector) -> None:
    collector = make_collector(max_concurrent_requests=4)
    collector.collect(prompts_of(40), PARAMS, "a")
    clients = [server.client for server in collector.fleet.servers]
    started = [client.started for client in clients]
    assert sum(started) == 40
    assert min(started) >= 8
    assert [client.most_in_flight for client in clients] == [4, 4]
    assert in_flight(collector) == [0, 0]
    assert max(collector.rewards.open_requests) > 0  # groups were scored while others were still being sampled


async def exits() -> None:
    raise SystemExit(2)


def put(**columns: object) -> Callable[[list[Sample]], None]:
    return lambda samples: [setattr(samples[0], name, value) for name, value in columns.items()]


def raises(error: BaseException) -> Callable[[list[Sample]], None]:
    def fail(samples: list[Sample]) -> None:
        raise error

    return fail


class Fields(Exception):
    def __getattr__(self, name: str) -> str:
        return {"__notes__": []}[name]  # which tracebacks read


class Hollow(list):
    def __len__(self) -> int:
        raise Unspeakable

    __iter__ = __repr__ = __len__


ODD = {
    "an exit in a task": lambda samples: asyncio.gather(exits(), asyncio.sleep(0)),
    "an error that cannot say what it is": raises(Unspeakable()),
    "an error with attributes of its own": raises(Fields()),
    "a timeout that is no Exception": raises(type("Timeout", (BaseException,), {})()),
    "an error that says much": lambda samples: [][("x" * 10**7)],
    "no token": put(token_ids=[None] * 6),
    "a token under 0": put(token_ids=[-1] * 6),
    "a fraction": put(token_ids=[3.5] * 6),
    "no rewards": put(rewards=None),
    "a name that is none": put(rewards={("a", 1): 0.5}),
    "no version": put(versions=[None] * 6),
    "a log-probability that is none": put(logprobs=[float("nan")] * 6),
    "no log-probabilities": put(logprobs=None),
    "a log-probability that is too large": put(logprobs=[-(10**400)] * 6),
    "tokens that cannot be counted": put(token_ids=Hollow([1] * 6)),
    "a reward that cannot be shown": put(reward=Hollow()),
    "a failure that is an error": put(reward_failures={"tool": ValueError("away")}),
    "an end that is no text": put(finish_reason=Hollow()),
    "a log-probability that no token has": put(logprobs=[-9999.0] * 6),
    "a version that no server has": put(versions=[10**12] * 6),
    "a prompt whose text is none": lambda samples: put(prompt=replace(samples[0].prompt, text=b"?"))(samples),
    "a prompt with a number of NumPy's": lambda samples: put(prompt=replace(samples[0].prompt, index=np.int64(3)))(
        samples
    ),
    "a version far below 0 of a given token": put(versions=[-(2**40)] + [2] * 5, loss_mask=[False] + [True] * 5),
    "a prompt that grows": lambda samples: samples[0].prompt.token_ids.extend([1, 2]),
    "servers that are none": put(servers=[(0,)]),
    "servers in an array": put(servers=np.arange(6)),
}


@pytest.mark.parametrize("what", ODD)
def test_what_an_environment_does_costs_its_group_once_it_has_worked(make_collector, what) -> None:
    async def odd(client: RolloutClient, prompt: Prompt) -> list[Sample]:
        samples = await single_turn(client, prompt)
        if prompt.index == 11:
            done = ODD[what](samples)
            await (done if isinstance(done, asyncio.Future) else asyncio.sleep(0))
        return samples

    collector = make_collector(environment=odd)
    collector.collect(prompts_of(1), PARAMS, "a")
    good, bad = collector.collect(prompts_of(2), PARAMS, "b")
    assert all(sample.reward is not None for sample in good) and all(sample.reward is None for sample in bad)
    assert all(0 < len(why) < 1000 for sample in bad for why in sample.reward_failures.values())
    assert [len(group[0].prompt.token_ids) for group in (good, bad)] == [1, 2]


def test_draws_of_environments_in_a_validation_follow_from_it_and_leave_no_trace(make_collector) -> None:
    drawn: list[float] = []

    async def draws(client: RolloutClient, prompt: Prompt) -> list[Sample]:
        drawn.append(random.random())
        return await single_turn(client, prompt)

    collector = make_collector(environment=draws)
    before = random.getstate()
    ask = Ask(prompts_of(3), PARAMS, "validation")
    collector.collect_all([ask], alone=True)
    assert random.getstate() == before
    random.random()
    collector.collect_all([ask], alone=True)
    assert len(set(drawn)) == 3 and drawn[:3] == drawn[3:]
    collector.collect_all([ask])
    assert random.getstate() != before and drawn[6:] != drawn[:3]


def test_a_dead_server_is_suspected_and_the_others_answer(make_collector, servers, dead_urls) -> None:
    expected = tokens(make_collector([servers[0].url]).collect(prompts_of(4), PARAMS, "a"))
    collector = make_collector([servers[0].url, dead_urls[0]])
    alive, dead = collector.fleet.servers
    assert tokens(collector.collect(prompts_of(4), PARAMS, "a")) == expected  # the same seeds
    assert collector.router.retried == dead.client.started == 2
    assert dead.suspected and not dead.in_traffic and not dead.lost
    assert f"a request failed: {dead.url}: request a-00000" in dead.reason
    assert alive.in_traffic
    first, repeated = alive.client.asked[:2], alive.client.asked[2:]
    assert [cohort[1] for _, cohort in first] == [2, 2]
    assert [cohort for _, cohort in repeated] == [None, None]
    assert {name for name, _ in repeated} == {f"{name}-retry-1" for name, _ in dead.client.asked}
    assert in_flight(collector) == [0, 0]
    collector.collect(prompts_of(4), PARAMS, "b")
    assert dead.client.started == 2


def test_a_healthy_server_answers_what_three_dead_ones_failed(make_collector, servers, dead_urls) -> None:
    collector = make_collector([*dead_urls, servers[0].url])
    assert len(collector.collect(prompts_of(1), PARAMS, "a")) == 1
    assert [server.client.started for server in collector.fleet.servers] == [1, 1, 1, 1]
    assert [server.suspected for server in collector.fleet.servers] == [True, True, True, False]
    assert collector.router.retried == 3
    assert in_flight(collector) == [0] * 4


@pytest.mark.parametrize("end", [ServerThread.kill, ServerThread.close])  # SIGTERM: it answers, with what it has
def test_a_server_that_dies_mid_request(make_collector, servers, new_server, in_thread, end) -> None:
    expected = tokens(make_collector([servers[0].url]).collect(prompts_of(6), PARAMS, "a"))
    dying = new_server()
    collector = make_collector([dying.url, servers[0].url])
    first, second = collector.fleet.servers
    first.control.pause()
    future = in_thread(collector.collect, prompts_of(6), PARAMS, "a")
    wait_until(lambda: second.client.finished == 3 and in_flight(collector) == [3, 0])
    end(dying)
    assert tokens(future.result(20)) == expected
    assert first.suspected and not first.in_traffic
    assert second.in_traffic and second.client.started == 6
    assert collector.router.retried == 3


def test_requests_on_a_withdrawn_server_are_left_alone(make_collector, new_server, servers, in_thread) -> None:
    collector = make_collector([new_server().url, servers[0].url])
    slow, other = collector.fleet.servers
    slow.control.pause()
    future = in_thread(collector.collect, prompts_of(2), PARAMS, "a")
    wait_until(lambda: other.client.finished == 1)
    collector.fleet.withdraw(slow, "takes too long", lost=False)
    collector.collect(prompts_of(3), PARAMS, "b")
    assert not future.done()
    slow.control.resume()
    assert len(future.result(20)) == 2
    assert (slow.client.started, other.client.started, collector.router.retried) == (1, 4, 0)


def test_an_assigned_server_that_leaves_before_it_is_asked(make_collector) -> None:
    collector = make_collector()
    first, second = collector.fleet.servers

    async def collect() -> None:
        cohorts = collector.cohorts(4, "a", VERSION)
        collector.fleet.withdraw(second, "takes too long", lost=False)
        groups = zip(prompts_of(4), cohorts, strict=True)
        await asyncio.gather(
            *[collector.group(p, PARAMS, f"a-{p.index}", GroupCall(), cohort) for p, cohort in groups],
        )

    collector.call(collect())
    assert (first.client.started, second.client.started, collector.router.retried) == (4, 0, 0)
    assert [cohort and cohort[1] for _, cohort in first.client.asked] == [2, None, 2, None]


def test_requests_at_a_lost_server_are_sent_again_at_once(make_collector, new_server, servers, in_thread) -> None:
    expected = tokens(make_collector([servers[0].url]).collect(prompts_of(6), PARAMS, "a"))
    hung = new_server()
    collector = make_collector([hung.url, servers[0].url])
    first, second = collector.fleet.servers
    first.control.pause()  # it answers nothing, and resets no connection
    future = in_thread(collector.collect, prompts_of(6), PARAMS, "a")
    wait_until(lambda: second.client.finished == 3)
    begin = time.monotonic()
    collector.fleet.withdraw(first, "no answer to a control request")
    assert tokens(future.result(20)) == expected
    assert time.monotonic() - begin < 5, "request_timeout_s is 30"
    assert (second.client.started, collector.router.retried) == (6, 3)
    assert first.client.finished == 3
    assert (first.lost, first.suspected, first.reason) == (True, False, "no answer to a control request")
    assert in_flight(collector) == [0, 0]


@contextlib.contextmanager
def frozen(server: ServerThread) -> Iterator[None]:
    """As SIGSTOP does: it takes connections and says nothing, and then goes on."""
    thaw = threading.Event()
    server.loop.call_soon_threadsafe(thaw.wait, 60)
    try:
        yield
    finally:
        thaw.set()


def test_requests_at_a_frozen_server_are_asked_elsewhere_too(make_collector, new_server, servers, in_thread) -> None:
    expected = tokens(make_collector([servers[0].url]).collect(prompts_of(6), PARAMS, "a"))
    freezes = new_server()
    collector = make_collector([freezes.url, servers[0].url])
    first, second = collector.fleet.servers
    first.control.pause()
    future = in_thread(collector.collect, prompts_of(6), PARAMS, "a")
    wait_until(lambda: second.client.finished == 3)
    with frozen(freezes):
        begin = time.monotonic()
        assert tokens(future.result(20)) == expected
        assert time.monotonic() - begin < 10, "request_timeout_s is 30"
        assert (first.silent, first.suspected, first.lost, first.in_traffic) == (True, True, False, False)
        assert (second.client.started, collector.router.retried, in_flight(collector)) == (6, 3, [0, 0])
    assert first.client.finished == 3, "its answers will not be read"


def test_a_server_that_is_busy_for_a_second_keeps_its_requests(make_collector, new_server, servers, in_thread) -> None:
    blocked = new_server()
    collector = make_collector([blocked.url, servers[0].url])
    first, second = collector.fleet.servers
    blocked.loop.call_soon_threadsafe(time.sleep, 1.0)
    assert len(collector.collect(prompts_of(6), PARAMS, "a")) == 6
    assert (first.client.started, second.client.started, collector.router.retried) == (3, 3, 0)
    assert first.in_traffic and first.suspicions == 0


def test_a_server_that_goes_on_answers_what_it_has(make_collector, new_server, in_thread) -> None:
    freezes, busy = new_server(), new_server()
    collector = make_collector([freezes.url, busy.url], max_concurrent_requests=1)
    first, second = collector.fleet.servers
    first.control.pause()
    second.control.pause()
    future = in_thread(collector.collect, prompts_of(2), PARAMS, "a")
    wait_until(lambda: in_flight(collector) == [1, 1])
    with frozen(freezes):
        wait_until(lambda: first.silent and collector.router.places.waiting == 1)
    wait_until(lambda: not first.silent and collector.router.places.waiting == 0)
    first.control.resume()
    wait_until(lambda: first.client.finished == 1)
    second.control.resume()
    assert len(future.result(20)) == 2
    assert (first.client.started, second.client.started) == (1, 1)


def test_the_last_server_in_traffic_is_waited_for(make_collector, new_server, in_thread) -> None:
    freezes = new_server()
    collector = make_collector([freezes.url])
    (server,) = collector.fleet.servers
    with frozen(freezes):
        future = in_thread(collector.collect, prompts_of(2), PARAMS, "a")
        time.sleep(LOOK_S + REPLY_S + 0.5)
        assert server.in_traffic and not server.silent
    assert len(future.result(20)) == 2 and server.client.started == 2


def test_those_who_wait_keep_their_order(make_collector, new_server, in_thread) -> None:
    collector = make_collector([new_server().url], max_concurrent_requests=1)
    server = collector.fleet.servers[0]
    server.control.pause()
    futures = []
    for tag in "abcd":
        futures.append(in_thread(collector.collect, prompts_of(1), PARAMS, tag))
        wait_until(lambda: server.in_flight + collector.router.places.waiting == len(futures))
    server.control.resume()
    for future in futures:
        future.result(20)
    assert [name[0] for name, _ in server.client.asked] == list("abcd")
    assert server.client.most_in_flight == 1


def test_later_turns_go_before_groups_that_have_not_begun(make_collector) -> None:
    async def two_turns(client: RolloutClient, prompt: Prompt) -> list[Sample]:
        await client.generate(prompt.token_ids)
        return await single_turn(client, prompt)

    collector = make_collector(max_concurrent_requests=1, environment=two_turns)
    server = collector.fleet.servers[0]
    collector.fleet.withdraw(collector.fleet.servers[1], "not yet", lost=False)
    collector.collect(prompts_of(5), PARAMS, "a")
    turns = [(name.split("-")[1], name.endswith("-turn1")) for name, _ in server.client.asked]
    # A turn ends and gives its place to the next group before its own second turn can wait for one.
    assert max(turns.index((f"{i:06d}", True)) - turns.index((f"{i:06d}", False)) for i in range(5)) <= 2


@pytest.mark.parametrize("per_sample", [False, True])
def test_what_comes_first_does_not_delay_turns_under_way(make_collector, new_server, in_thread, per_sample) -> None:
    async def two_turns(client: RolloutClient, prompt: Prompt) -> list[Sample]:
        await client.generate(prompt.token_ids)
        return await single_turn(client, prompt)

    two_turns.per_sample = per_sample
    collector = make_collector([new_server().url], max_concurrent_requests=1, environment=two_turns)
    client = collect_behind_others(collector, in_thread, 8, waiting=30 * (PARAMS.n if per_sample else 1) - 1)
    asked = [request_id for request_id, _ in client.asked]
    first = [number for number, name in enumerate(asked) if name.startswith("first")]
    between = [name for name in asked[first[0] : first[-1]] if name.startswith("others")]
    assert all(name.endswith("-turn1") for name in between), "no new group"
    assert len(asked) - first[-1] > 10, "those that waited come later"
    assert client.first == {name for name in asked if name.startswith("first") or name.endswith("-turn1")}
    # A turn ends and gives its place to the next one before its own second turn can wait for one.
    apart = [asked.index(name + "-turn1") - asked.index(name) for name in asked if name + "-turn1" in asked]
    assert len(apart) == len(asked) / 2 and max(apart) <= 3, "neither theirs nor their own"


def test_what_a_group_asks_at_once_gets_its_places_before_the_next_group(make_collector, new_server) -> None:
    async def at_once(client: RolloutClient, prompt: Prompt) -> list[Sample]:
        answers = await asyncio.gather(*[client.generate(prompt.token_ids) for _ in range(4)])
        return [Sample(prompt, a.token_ids, a.logprobs, a.versions, a.finish_reason) for (a,) in answers[:2]]

    url = new_server().url
    collector = make_collector([url], environment=at_once, max_concurrent_requests=3)
    collected = collector.collect(prompts_of(6), PARAMS, "a")
    assert all(sample.servers == [(0, url)] for group in collected for sample in group)
    groups = [name.split("-")[1] for name, _ in collector.fleet.servers[0].client.asked]
    assert groups == sorted(groups)


def test_the_wait_for_a_place_is_no_wait_for_a_server(make_collector, new_server, in_thread) -> None:
    collector = make_collector([new_server().url], max_concurrent_requests=1, request_timeout_s=0.6)
    server = collector.fleet.servers[0]
    server.control.pause()
    in_thread(collector.collect, prompts_of(1), PARAMS, "a")
    wait_until(lambda: server.in_flight == 1)
    future = in_thread(collector.collect, prompts_of(1), PARAMS, "b")
    time.sleep(0.9)  # over the limit, but it may have a place any time
    assert not future.done()
    begin = time.monotonic()
    collector.fleet.withdraw(server, "takes too long", lost=False)
    with pytest.raises(EngineError, match=r"no server in traffic after 0.6 s"):
        future.result(20)
    assert time.monotonic() - begin >= 0.6
    server.control.resume()  # or the first answer would be waited for


def test_a_request_given_up_while_it_waits_takes_no_place(make_collector, new_server) -> None:
    collector = make_collector([new_server().url], max_concurrent_requests=1)
    server = collector.fleet.servers[0]

    async def give_up(given_a_place: bool) -> int:
        await collector.router.places.acquire(GroupCall())
        waiting = asyncio.create_task(collector.router.places.acquire(GroupCall()))
        await asyncio.sleep(0)
        if given_a_place:
            collector.router.places.release(server)
            assert server.in_flight == 1, "it is the waiting one's, which does not know yet"
        waiting.cancel()
        await asyncio.wait([waiting])
        assert waiting.cancelled() and not collector.router.places.waiting
        if not given_a_place:
            collector.router.places.release(server)
        return server.in_flight

    assert collector.call(give_up(given_a_place=False)) == 0
    assert collector.call(give_up(given_a_place=True)) == 0
    assert len(collector.collect(prompts_of(2), PARAMS, "a")) == 2


def test_a_request_given_up_under_way_gives_its_place_back(make_collector, new_server) -> None:
    collector = make_collector([new_server().url], max_concurrent_requests=1)
    server = collector.fleet.servers[0]
    server.control.pause()

    async def impatient() -> None:
        async with asyncio.timeout(0.2):
            await collector.group(prompts_of(1)[0], PARAMS, "a", GroupCall())

    with pytest.raises(TimeoutError):
        collector.call(impatient())
    assert (server.in_flight, server.client.finished, server.in_traffic) == (0, 1, True)
    server.control.resume()
    assert len(collector.collect(prompts_of(2), PARAMS, "b")) == 2


@pytest.mark.parametrize("error", [KeyError("tool"), TimeoutError("tool"), asyncio.CancelledError("tool")])
def test_an_environment_that_fails_costs_its_group_and_is_named(make_collector, error) -> None:
    async def failing(client: RolloutClient, prompt: Prompt) -> list[Sample]:
        if prompt.index == 12:
            raise error
        return await single_turn(client, prompt)

    collector = make_collector(environment=failing)
    groups = collector.collect(prompts_of(4), PARAMS, "a")
    failed = {group[0].prompt.index: [s.reward_failures for s in group if s.reward is None] for group in groups}
    [(index, failures)] = [(index, failures) for index, failures in failed.items() if failures]
    assert index == 12 and len(failures) == PARAMS.n
    said = failures[0]["tests:rollout"]
    assert said.startswith(f"raised {type(error).__name__}: ") and "tool" in said and "in failing)" in said
    assert in_flight(collector) == [0, 0]


@pytest.mark.parametrize("error", [KeyError("tool"), FleetError("too few servers")])
def test_of_a_task_group_of_an_environment_the_first_error_counts(make_collector, error) -> None:
    async def tool() -> None:
        raise error

    async def failing(client: RolloutClient, prompt: Prompt) -> list[Sample]:
        async with asyncio.TaskGroup() as tools:
            tools.create_task(tool())
        return []

    collector = make_collector(environment=failing)
    if isinstance(error, FleetError):
        with pytest.raises(FleetError, match="too few servers"):
            collector.collect(prompts_of(1), PARAMS, "a")
    else:
        [[sample, *_]] = collector.collect(prompts_of(1), PARAMS, "a")
        said = sample.reward_failures["tests:rollout"]
        assert said.startswith("raised KeyError: 'tool' (") and said.endswith(" in tool)")


@pytest.mark.parametrize(
    ("result", "said"),
    [
        ([], "no sample"),
        ([Sample(Prompt(12, [3], ""), [1], [-0.5], [VERSION], "stop", reward=float("nan"))], "the reward nan"),
        (None, "must return a list of one Sample or more, not None"),
        ([Sample(Prompt(12, [3], ""), [1], [], [VERSION], "stop")], "a sample of 1 tokens has [0, 1]"),
        ("refused", "asked what no server takes: prompt 12 at http://"),
    ],
)
@pytest.mark.parametrize("per_sample", [False, True])
def test_one_episode_costs_no_more_than_itself_once_the_environment_has_worked(
    make_collector, per_sample, result, said
) -> None:
    async def mostly(client: RolloutClient, prompt: Prompt) -> list[Sample]:
        if prompt.index != 12:
            return await single_turn(client, prompt)
        return await client.generate([10**6]) if result == "refused" else result

    mostly.per_sample = per_sample
    collector = make_collector(environment=mostly)
    [group] = collector.collect(prompts_of(1), PARAMS, "first")
    assert all(sample.token_ids for sample in group)
    groups = collector.collect(prompts_of(4), PARAMS, "a")
    lost = [sample for group in groups for sample in group if sample.reward is None]
    assert len(lost) == PARAMS.n and {sample.prompt.index for sample in lost} == {12}
    assert all(said in sample.reward_failures["tests:rollout"] for sample in lost)


def undecorated(function: Callable) -> Callable:
    return lambda *arguments: function(*arguments)


class Forwarding:
    def __call__(self, client: RolloutClient, prompt: Prompt) -> Awaitable[list[Sample]]:
        return single_turn(client, prompt)


class Synchronous:
    def __call__(self, client: RolloutClient, prompt: Prompt) -> list[Sample]:
        return []


def synchronous(client: RolloutClient, prompt: Prompt, depth: int = 1) -> list[Sample]:
    return []


forwarding = undecorated(single_turn)


@pytest.mark.parametrize(
    ("name", "arguments"), [("forwarding", {}), ("Forwarding", {}), ("synchronous", {}), ("synchronous", {"depth": 3}),
                            ("Synchronous", {})]
)  # fmt: skip
def test_what_gives_a_coroutine_is_awaited_and_else_named_by_its_place(make_collector, name, arguments) -> None:
    environment = load_environment(f"{__name__}:{name}", arguments, {})
    collector = make_collector(environment=environment)
    if name.lower() == "forwarding":
        assert collector.collect(prompts_of(1), PARAMS, "a")[0][0].token_ids
        return
    said = r"environment = 'tests:rollout' \(.*test_collector.py:\d+\) gives no coroutine: write it as `async def`"
    with pytest.raises(UserError, match=said):
        collector.collect(prompts_of(1), PARAMS, "a")


@pytest.mark.parametrize("of_a_set", [False, True])
def test_an_environment_that_blocks_is_named_and_does_not_keep_the_end(make_collector, monkeypatch, of_a_set) -> None:
    over = threading.Event()

    async def blocking(client: RolloutClient, prompt: Prompt) -> list[Sample]:
        over.wait(30)
        return await single_turn(client, prompt)

    table = '[[validation.sets]] "b" environment'
    of_sets = {"b": GuardedEnvironment(blocking, "tests:blocking", key=table)} if of_a_set else {}
    collector = make_collector(environment=single_turn if of_a_set else blocking, of_sets=of_sets)
    monkeypatch.setattr("torchtitan.grpo.rollouts.collector.BLOCKED_S", 0.3)
    monkeypatch.setattr("torchtitan.grpo.process.event_loop.CLOSE_TIMEOUT_S", 0.3)
    who = f"{table} = 'tests:blocking'" if of_a_set else "[rollout] environment = 'tests:rollout'"
    with pytest.raises(UserError, match=rf"^{re.escape(who)} has blocked the event loop .* 0.3 s: await slow calls"):
        collector.collect(prompts_of(1), PARAMS, "t", held_out="b")
    with pytest.raises(UserError, match="has blocked the event loop"):
        collector.take_busy_spans()
    begin = time.monotonic()
    collector.close()
    assert time.monotonic() - begin < 5, "it blocks for 30 s"
    over.set()


def test_a_held_out_set_is_answered_by_its_own_environment(make_collector) -> None:
    async def twice(client: RolloutClient, prompt: Prompt) -> list[Sample]:
        turns = Turns(prompt)
        turns.sampled((await client.generate(prompt.token_ids, max_tokens=2))[0])
        turns.given([5])
        turns.sampled((await client.generate(turns.token_ids, max_tokens=2))[0])
        return [turns.sample()]

    async def wrong(client: RolloutClient, prompt: Prompt) -> list[Sample]:
        return None

    def of(table: str, environment: Environment) -> GuardedEnvironment:
        return GuardedEnvironment(environment, f"tests:{table}", key=f'[[validation.sets]] "{table}" environment')

    of_sets = {"twice": of("twice", twice), "none": of("none", single_turn), "wrong": of("wrong", wrong)}
    by_default, both = make_collector(), make_collector(environment=twice, of_sets=of_sets)

    def answers(collector: Collector, held_out: str) -> list[tuple[list[int], list[bool] | None]]:
        groups = collector.collect(prompts_of(3), PARAMS, "t", held_out=held_out)
        return [(sample.token_ids, sample.loss_mask) for group in groups for sample in group]

    masks = [mask for _, mask in answers(both, "twice")]
    assert masks == [[True, True, False, True, True]] * 3
    assert answers(both, "another") == answers(both, "") == answers(both, "twice"), "the run's answers the others"
    assert answers(both, "none") == answers(by_default, ""), "as a run without an environment, in the same cohorts"
    assert {cohort is None for _, cohort in both.fleet.servers[0].client.asked[-1:]} == {False}
    with pytest.raises(UserError, match=r"^\[\[validation.sets\]\] \"wrong\" environment = 'tests:wrong' must return"):
        answers(both, "wrong")


def test_what_an_environment_writes_into_a_held_out_row_is_for_one_group(make_collector) -> None:
    async def plays(client: RolloutClient, prompt: Prompt) -> list[Sample]:
        prompt.columns["state"].append("moved")
        samples = await single_turn(client, prompt)
        for sample in samples:
            sample.reward = float(len(prompt.columns["state"]))
        return samples

    collector = make_collector(environment=plays)
    prompts = [replace(prompt, columns={"state": []}) for prompt in prompts_of(2)]
    for _ in range(2):
        [answers] = answer_held_out(collector, [HeldOut("", prompts, 2, 1.0, 4)], PARAMS)
        assert {sample.reward for group in answers.groups for sample in group} == {1.0}
    assert [prompt.columns for prompt in prompts] == [{"state": []}] * 2


def test_an_environment_may_ask_several_times_at_once(make_collector, tokenizer) -> None:
    async def pairs(client: RolloutClient, prompt: Prompt) -> list[Sample]:
        assert client.tokenizer is tokenizer
        answers = await asyncio.gather(*[client.generate(prompt.token_ids) for _ in range(client.params.n)])
        return [Sample(prompt, a.token_ids, a.logprobs, a.versions, a.finish_reason) for (a,) in answers]

    collector = make_collector(environment=pairs, max_concurrent_requests=3)
    groups = collector.collect(prompts_of(5), PARAMS, "a")
    assert [len(group) for group in groups] == [2] * 5
    assert all(group[0].token_ids != group[1].token_ids for group in groups)
    names = [name for server in collector.fleet.servers for name, _ in server.client.asked]
    assert len(set(names)) == 10
    assert sum(name.endswith("-turn1") for name in names) == 5
    assert tokens(collector.collect(prompts_of(5), PARAMS, "a")) == tokens(groups)


def test_seconds_with_a_request_are_counted_by_server(make_collector, new_server, in_thread) -> None:
    collector = make_collector([new_server().url, new_server().url])
    busy, idle = collector.fleet.servers
    collector.fleet.withdraw(idle, "not yet", lost=False)
    busy.control.pause()

    def taken() -> dict[str, float]:
        spans = collector.take_busy_spans()
        return {url: sum(until - since for since, until in own) for url, own in spans.items()}

    begin = time.monotonic()
    future = in_thread(collector.collect, prompts_of(3), PARAMS, "a")
    wait_until(lambda: busy.in_flight == 3)
    time.sleep(0.3)
    first = taken()
    busy.control.resume()
    future.result(20)
    second = taken()
    assert set(first) == set(second) == {busy.url}
    assert first[busy.url] >= 0.3
    assert first[busy.url] + second[busy.url] <= time.monotonic() - begin
    assert collector.take_busy_spans() == {}


def test_the_least_busy_server_is_asked(make_collector, new_server, servers, in_thread) -> None:
    collector = make_collector([new_server().url, servers[0].url], max_concurrent_requests=8)
    busy, other = collector.fleet.servers
    collector.fleet.withdraw(other, "not yet", lost=False)
    busy.control.pause()
    future = in_thread(collector.collect, prompts_of(8), PARAMS, "a")
    wait_until(lambda: busy.in_flight == 8)
    collector.fleet.admit(other, VERSION)
    collector.collect(prompts_of(6), PARAMS, "b")  # assigned up front
    assert (busy.client.started, other.client.started) == (8, 6)
    collector.collect(prompts_of(100), PARAMS, "c")  # more than may be in flight
    assert (busy.client.started, other.client.started) == (8, 106)
    busy.control.resume()
    assert len(future.result(20)) == 8


def test_nobody_in_traffic_then_admitted_from_another_thread(make_collector, in_thread) -> None:
    for limit in (64, 2):
        collector = make_collector(admitted=False, max_concurrent_requests=limit)
        future = in_thread(collector.collect, prompts_of(8), PARAMS, "a")
        time.sleep(0.2)
        assert not future.done()
        admitted = collector.fleet.servers[1]
        collector.fleet.admit(admitted, VERSION)
        assert len(future.result(10)) == 8
        assert [server.client.started for server in collector.fleet.servers] == [0, 8]


def test_min_version_is_respected(make_collector, in_thread) -> None:
    collector = make_collector()
    old, new = collector.fleet.servers
    collector.fleet.admit(new, VERSION + 1)
    collector.collect(prompts_of(10), PARAMS, "a", min_version=VERSION + 1)
    collector.collect(prompts_of(100), PARAMS, "b", min_version=VERSION + 1)
    assert (old.client.started, new.client.started) == (0, 110)
    future = in_thread(collector.collect, prompts_of(4), PARAMS, "c", VERSION + 2)
    time.sleep(0.1)
    collector.fleet.admit(new, VERSION + 1)
    time.sleep(0.1)
    assert not future.done()
    collector.fleet.admit(old, VERSION + 2)
    future.result(10)
    assert (old.client.started, new.client.started) == (4, 110)


def test_waiting_is_bounded_and_names_every_server(make_collector, servers) -> None:
    collector = make_collector(request_timeout_s=0.3)
    first, second = collector.fleet.servers
    collector.fleet.withdraw(second, "connection refused")
    begin = time.monotonic()
    with pytest.raises(EngineError) as raised:
        collector.collect(prompts_of(3), PARAMS, "a", min_version=9)
    assert 0.3 <= time.monotonic() - begin < 5
    assert str(raised.value) == (
        "no server in traffic with weights of version 9 or newer after 0.3 s of waiting "
        "([rollout] request_timeout_seconds): "
        f"{first.url}: in traffic, version 4; {second.url}: lost, version 4, connection refused"
    )
    assert first.client.started == second.client.started == 0


def test_a_retry_waits_no_longer_than_any_request(make_collector, dead_urls) -> None:
    collector = make_collector(dead_urls[:1], request_timeout_s=0.3)
    with pytest.raises(EngineError, match=rf"^no server in traffic after 0.3 s .*{dead_urls[0]}: .*request failed"):
        collector.collect(prompts_of(2), PARAMS, "a")


@pytest.fixture
def no_backoff(monkeypatch) -> None:
    monkeypatch.setattr("torchtitan.grpo.engines.fleet.BACKOFF_S", 0.0)


@pytest.mark.usefixtures("no_backoff")
def test_a_server_that_stays_healthy_may_fail_a_request_three_times(make_collector, dead_urls, in_thread) -> None:
    collector = make_collector(dead_urls[:1])
    server = collector.fleet.servers[0]
    future = in_thread(collector.collect, prompts_of(1), PARAMS, "a")
    for failures in (1, 2, 3):
        wait_until(lambda: server.suspected)
        assert server.client.started == failures
        assert not future.done()  # it may yet be found lost
        collector.fleet.admit(server, VERSION)
    with pytest.raises(EngineError, match=f"prompt 10 at {dead_urls[0]}: .*Cannot connect"):
        future.result(10)
    names = [name for name, _ in server.client.asked]
    assert names == [names[0], f"{names[0]}-retry-1", f"{names[0]}-retry-2"]


def test_a_server_that_crashes_again_and_again_ends_nothing(make_collector, dead_urls, new_server, in_thread) -> None:
    collector = make_collector([new_server().url, dead_urls[0]], max_concurrent_requests=1)
    busy, crashing = collector.fleet.servers
    busy.control.pause()
    futures = [in_thread(collector.collect, prompts_of(1), PARAMS, "a")]
    wait_until(lambda: busy.in_flight == 1)
    futures.append(in_thread(collector.collect, prompts_of(1), PARAMS, "b"))
    for failures in range(1, 6):
        wait_until(lambda: crashing.suspected)
        assert crashing.client.started == failures
        collector.fleet.withdraw(crashing, "nobody listens there")
        collector.fleet.admit(crashing, VERSION)  # it was started again
    busy.control.resume()
    for future in futures:
        assert len(future.result(20)) == 1
    assert busy.client.started == 2


@pytest.mark.usefixtures("no_backoff")
def test_failures_are_counted_by_server(make_collector, servers, dead_urls, in_thread) -> None:
    """One that failed a request for good does not get it again; another one may come back."""
    collector = make_collector([dead_urls[0], servers[0].url])
    bad, back = collector.fleet.servers
    collector.fleet.withdraw(back, "nobody listens there")
    future = in_thread(collector.collect, prompts_of(1), PARAMS, "a")
    for _ in range(4):
        wait_until(lambda: bad.suspected or bad.client.started == 3)
        collector.fleet.admit(bad, VERSION)
    time.sleep(0.1)
    assert bad.client.started == 3 and not future.done()
    collector.fleet.admit(back, VERSION)
    assert len(future.result(20)) == 1


def test_a_trainer_without_files_left_blames_no_server(make_collector, in_thread) -> None:
    collector = make_collector()
    with no_files_left(), pytest.raises(LocalError, match="the trainer ran out of file descriptors"):
        collector.collect(prompts_of(4), PARAMS, "a")
    assert all(server.in_traffic for server in collector.fleet.servers)
    assert in_flight(collector) == [0, 0]
    assert len(collector.collect(prompts_of(4), PARAMS, "a")) == 4


@pytest.mark.parametrize("status", [200, 400, 401])
def test_one_bad_server_ends_nothing_and_is_named(make_collector, servers, answering, status, caplog) -> None:
    bad = answering(status, b'{"choices": []}')
    collector = make_collector([bad, servers[0].url])
    first, second = collector.fleet.servers
    collector.fleet.add_listener(lambda: first.suspected and collector.fleet.admit(first, VERSION))  # it is healthy
    assert len(collector.collect(prompts_of(8), PARAMS, "a")) == 8
    assert 4 <= first.client.started <= 3 * 8 and second.client.started == 8
    assert f"{bad} is out of traffic: a request failed: {bad}" in caplog.text.replace("refuses", "")


def test_too_few_servers_end_a_waiting_collection(make_collector, servers, in_thread) -> None:
    fleet = Fleet([server.url for server in servers], make_server, min_servers=2)
    collector = make_collector(fleet=fleet, admitted=False)
    future = in_thread(collector.collect, prompts_of(3), PARAMS, "a")
    time.sleep(0.1)
    assert not future.done()
    begin = time.monotonic()
    fleet.withdraw(fleet.servers[1], "connection refused")
    with pytest.raises(FleetError, match=rf"min_servers = 2: {servers[1].url}: lost, version -1, connection refused"):
        future.result(10)
    with pytest.raises(FleetError):
        collector.collect(prompts_of(3), PARAMS, "a")
    assert time.monotonic() - begin < 5


def test_too_few_servers_end_a_retry(make_collector, dead_urls, in_thread) -> None:
    collector = make_collector(dead_urls[:1])
    server = collector.fleet.servers[0]
    future = in_thread(collector.collect, prompts_of(3), PARAMS, "a")
    wait_until(lambda: server.suspected)
    collector.fleet.withdraw(server, "connection refused")
    with pytest.raises(FleetError, match="0 of 1 servers left"):
        future.result(10)


def test_a_request_that_waits_holds_no_slot(make_collector, new_server, in_thread) -> None:
    collector = make_collector([new_server().url], max_concurrent_requests=1)
    server = collector.fleet.servers[0]
    collector.fleet.admit(server, VERSION + 1)
    server.control.pause()
    needy = in_thread(collector.collect, prompts_of(3), PARAMS, "a", VERSION + 1)
    wait_until(lambda: server.client.started == 1)
    server.version = VERSION  # as if a restarted server had come back with older weights
    server.control.resume()
    wait_until(lambda: server.client.finished == 1)
    assert len(collector.collect(prompts_of(5), PARAMS, "b")) == 5
    assert not needy.done()
    collector.fleet.admit(server, VERSION + 1)
    assert len(needy.result(10)) == 3


def test_a_removed_server_gets_nothing_more_and_is_closed(make_collector, servers, new_server, tmp_path) -> None:
    path = tmp_path / "servers.txt"
    leaving = new_server()
    path.write_text(f"{servers[0].url}\n{leaving.url}\n")
    collector = make_collector(fleet=Fleet([], make_server, urls_file=str(path)))
    kept, removed = collector.fleet.servers
    collector.collect(prompts_of(6), PARAMS, "a")
    assert (kept.client.started, removed.client.started) == (3, 3)
    (tmp_path / "new.txt").write_text(f"{servers[0].url}\n{servers[1].url}\n")
    os.replace(tmp_path / "new.txt", path)
    (added,), _ = collector.fleet.reread()
    collector.collect(prompts_of(6), PARAMS, "b")
    assert (kept.client.started, removed.client.started, added.client.started) == (9, 3, 0)
    collector.fleet.admit(added, VERSION)
    collector.collect(prompts_of(6), PARAMS, "c")
    assert (kept.client.started, removed.client.started, added.client.started) == (12, 3, 3)
    collector.close()
    assert [server.client._session.closed for server in (kept, removed, added)] == [True] * 3
    collector.fleet.admit(added, VERSION + 1)  # the fleet outlives its collector


def test_a_prompt_that_every_server_refuses_is_named(make_collector) -> None:
    long = Prompt(index=77, token_ids=[3] * 128, text="")
    collector = make_collector()
    with pytest.raises(UserError) as raised:
        collector.collect([*prompts_of(3), long], PARAMS, "a")
    for server in collector.fleet.servers:
        assert f"at {server.url}: {server.url} refuses request a-000003" in str(raised.value)
        assert server.in_traffic and not server.suspected
    assert str(raised.value).startswith("prompt 77 at ") and "--max-model-len is 128" in str(raised.value)
    assert sum(server.client.started for server in collector.fleet.servers) == 5
    assert collector.router.retried == 1


def test_two_threads_may_collect(make_collector) -> None:
    collector = make_collector(max_concurrent_requests=8)
    with concurrent.futures.ThreadPoolExecutor(2) as threads:
        futures = [threads.submit(collector.collect, prompts_of(10), PARAMS, tag) for tag in "ab"]
        results = [tokens(future.result(30)) for future in futures]
    assert results == [tokens(collector.collect(prompts_of(10), PARAMS, tag)) for tag in "ab"]


def test_close_ends_a_collection_under_way(make_collector, servers) -> None:
    collector = make_collector()
    long = SamplingParams(n=32, temperature=1.0, max_tokens=120, seed=0, ignore_eos=True)
    with concurrent.futures.ThreadPoolExecutor(1) as threads:
        future = threads.submit(collector.collect, prompts_of(60), long, "a")
        while not servers[0].generator.busy:
            time.sleep(0.01)
        begin = time.monotonic()
        collector.close()
        with pytest.raises(concurrent.futures.CancelledError):
            future.result(10)
    assert time.monotonic() - begin < 5


def test_close_ends_a_wait_for_a_server(make_collector, in_thread) -> None:
    collector = make_collector(admitted=False)
    future = in_thread(collector.collect, prompts_of(3), PARAMS, "a")
    wait_until(lambda: collector.router.places.waiting)
    collector.close()
    with pytest.raises(concurrent.futures.CancelledError):
        future.result(10)


def test_a_run_that_stops_gives_a_collection_up_after_a_while(make_collector, in_thread) -> None:
    collector = make_collector(admitted=False)
    future = in_thread(collector.collect, prompts_of(3), PARAMS, "a")
    begin = time.monotonic()
    collector.give_up_after(0.3)
    with pytest.raises(StopRequested):
        future.result(10)
    assert time.monotonic() - begin >= 0.2
    with pytest.raises(StopRequested):
        collector.collect(prompts_of(3), PARAMS, "b")


def test_a_group_that_takes_too_long_ends_its_collection(make_collector) -> None:
    async def stuck(client: RolloutClient, prompt: Prompt) -> list[Sample]:
        if prompt.index == 12:
            await asyncio.sleep(60)
        return await single_turn(client, prompt)

    collector = make_collector(environment=stuck)
    collector.group_timeout_s = 0.5
    begin = time.monotonic()
    with pytest.raises(EngineError, match=r"^prompt 12 took longer than \[rollout\] group_timeout_seconds = 0.5"):
        collector.collect(prompts_of(4), PARAMS, "a")
    assert time.monotonic() - begin < 10
    assert in_flight(collector) == [0, 0]


def test_a_group_whose_environment_does_not_let_itself_be_cancelled_is_given_up_too(make_collector) -> None:
    over, ended = threading.Event(), threading.Event()

    async def stubborn(client: RolloutClient, prompt: Prompt) -> list[Sample]:
        while not over.is_set():
            with contextlib.suppress(BaseException):  # as `except:` in a loop of retries does
                await asyncio.sleep(0.05)
        samples = await single_turn(client, prompt)  # its group may have ended
        ended.set()
        return samples

    collector = make_collector(environment=undecorated(stubborn))
    collector.group_timeout_s = 0.3
    with pytest.raises(EngineError, match=r"^prompt 10 took longer than \[rollout\] group_timeout_seconds = 0.3"):
        collector.collect(prompts_of(1), PARAMS, "a")
    stubborn.per_sample = True
    collector = make_collector(environment=stubborn)
    collector.group_timeout_s = 0.3
    [group] = collector.collect(prompts_of(1), PARAMS, "a")
    assert tokens([group]) == [[[], []]] and "took longer than" in group[0].reward_failures["tests:rollout"]
    over.set()
    assert ended.wait(10)
    wait_until(lambda: in_flight(collector) == [0, 0])
    collector.group_timeout_s = 30
    assert tokens(collector.collect(prompts_of(1), PARAMS, "b")) != [[[], []]]


def test_an_environment_that_cleans_up_for_long_keeps_its_place(monkeypatch) -> None:
    monkeypatch.setattr(event_loop, "CANCEL_S", 0.01)
    running: list[int] = []
    most = 0

    async def slow_to_end(client: RolloutClient, prompt: Prompt) -> list[Sample]:
        nonlocal most
        running.append(0)
        most = max(most, len(running))
        try:
            await asyncio.sleep(60)
        finally:
            await asyncio.sleep(0.2)  # as a container that is removed
            running.pop()
        return []

    environment = GuardedEnvironment(slow_to_end, "tests:rollout", concurrency=1)

    async def group() -> None:
        async with asyncio.timeout(0.05) as limit:
            call = GroupCall(limit=limit, timeout_s=0.05)
            await environment.group(lambda *_: SimpleNamespace(params=PARAMS), prompts_of(1)[0], PARAMS, call)

    async def two_groups() -> None:
        ended = await asyncio.gather(group(), group(), return_exceptions=True)
        assert [type(error) for error in ended] == [TimeoutError, TimeoutError]

    asyncio.run(two_groups())
    assert most == 1


def test_a_group_that_has_ended_has_no_limit() -> None:
    async def ended() -> GroupCall:
        async with asyncio.timeout(10) as limit:
            return GroupCall(limit=limit, timeout_s=10)

    async def asks_all_the_same() -> None:
        call = await ended()
        call.waits()
        call.begun(3)

    asyncio.run(asks_all_the_same())


def test_the_first_server_with_new_weights_gets_its_share_only(make_collector, new_server, servers, in_thread) -> None:
    collector = make_collector([servers[0].url, servers[1].url])
    first, second = collector.fleet.servers
    first.control.pause()  # nothing ends there before the other has the weights, too
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("torchtitan.grpo.rollouts.places.HOLD_S", 20.0)
        future = in_thread(collector.collect, prompts_of(8), PARAMS, "a", VERSION + 1)
        time.sleep(0.1)
        collector.fleet.admit(first, VERSION + 1)
        time.sleep(0.1)
        collector.fleet.admit(second, VERSION + 1)
        wait_until(lambda: second.client.finished >= 4)
    first.control.resume()
    assert len(future.result(10)) == 8
    assert (first.client.started, second.client.started) == (4, 4)

    # One that does not follow holds nobody up for long.
    future = in_thread(collector.collect, prompts_of(8), PARAMS, "b", VERSION + 2)
    time.sleep(0.1)
    asked = second.client.started
    begin = time.monotonic()
    collector.fleet.admit(first, VERSION + 2)
    assert len(future.result(10)) == 8
    assert time.monotonic() - begin < HOLD_S + 5 and second.client.started == asked


def test_answers_with_a_reward_of_the_environment_are_not_scored(make_collector) -> None:
    async def judged(client: RolloutClient, prompt: Prompt) -> list[Sample]:
        first, second = await single_turn(client, prompt)
        first.reward = -3.0
        return [first, second]

    collector = make_collector(environment=judged)
    [group] = collector.collect(prompts_of(1), PARAMS, "judged")
    assert [sample.rewards for sample in group] == [{}, {"length": float(len(group[1].text))}]
    assert group[0].reward == -3.0 and group[0].text
    worker = RolloutWorker.__new__(RolloutWorker)
    worker.rewards, worker.stream, worker.collector = SimpleNamespace(scored=2), object(), collector
    assert worker.scored == 3, "or a step in which the environment gives all rewards would not count as progress"


def test_the_answers_of_a_group_are_decoded_together(make_collector, tokenizer, monkeypatch) -> None:
    async def judged(client: RolloutClient, prompt: Prompt) -> list[Sample]:
        first, second = await single_turn(client, prompt)
        first.reward = -3.0
        return [first, second]

    decode, alone = type(tokenizer).decode, []
    collector = make_collector(environment=judged)
    monkeypatch.setattr(tokenizer, "decode", lambda ids, **kw: alone.append(ids) or decode(tokenizer, ids, **kw))
    [group] = collector.collect(prompts_of(1), PARAMS, "judged")
    assert not alone
    texts = [decode(tokenizer, sample.token_ids, skip_special_tokens=True) for sample in group]
    assert [sample.text for sample in group] == texts


class OwnDecoding(PreTrainedTokenizerFast):
    def _decode(self, *args, **kwargs) -> str:
        return "own: " + super()._decode(*args, **kwargs)


@pytest.mark.parametrize("kind", [PreTrainedTokenizerFast, OwnDecoding])
@pytest.mark.parametrize("clean_up", [False, True])
@pytest.mark.parametrize("model", ["tiny", "WordPiece"])
def test_texts_are_those_that_the_tokenizer_gives(tokenizer, model, clean_up, kind) -> None:
    backend = tokenizer.backend_tokenizer
    if model == "WordPiece":
        vocabulary = {"[UNK]": 0, "is": 1, "n't": 2, "it": 3, "?": 4, ",": 5, "##s": 6}
        backend = tokenizers.Tokenizer(tokenizers.models.WordPiece(vocabulary, unk_token="[UNK]"))
        backend.decoder = tokenizers.decoders.WordPiece(cleanup=False)
    own = kind(tokenizer_object=backend, clean_up_tokenization_spaces=clean_up, unk_token="[UNK]")
    chance = random.Random(0)
    answers = [[], *[[chance.randrange(9) for _ in range(chance.randrange(20))] for _ in range(50)]]
    texts = decoded(own, answers)
    assert texts == [own.decode(ids, skip_special_tokens=True) for ids in answers]
    raw = own.backend_tokenizer.decode_batch(answers, skip_special_tokens=True)
    assert (texts != raw) is (kind is OwnDecoding or (clean_up and model == "WordPiece"))
    assert decoded(own, []) == []
