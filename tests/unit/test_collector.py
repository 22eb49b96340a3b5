"""The collector against embedded servers that run in this process."""

import asyncio
import concurrent.futures
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from aiohttp import web

from torchtitan.grpo.engines.embedded.generator import Generator
from torchtitan.grpo.engines.embedded.model import load_model
from torchtitan.grpo.engines.embedded.server import EmbeddedApp
from torchtitan.grpo.engines.protocol import EngineError, SamplingParams
from torchtitan.grpo.engines.vllm import VllmClient
from torchtitan.grpo.errors import UserError
from torchtitan.grpo.prompts import load_tokenizer
from torchtitan.grpo.rollouts.collector import Collector, prompt_seed
from torchtitan.grpo.rollouts.samples import Prompt, Sample

MODEL_DIR = Path(__file__).parents[2] / "train_configs" / "tiny_qwen3"
PARAMS = SamplingParams(n=2, temperature=1.0, max_tokens=6, seed=17, ignore_eos=True)


class ServerThread:
    """An embedded server on an event loop of its own."""

    def __init__(self) -> None:
        model = load_model(MODEL_DIR, torch.device("cpu"), torch.float32)
        self.generator = Generator(model, max_sequences=64, max_model_len=128)
        self.loop = asyncio.new_event_loop()
        threading.Thread(target=self.loop.run_forever, daemon=True).start()
        self.call(self._start())

    def call(self, coroutine):
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop).result(30)

    async def _start(self) -> None:
        app = EmbeddedApp(self.generator, "tiny").application()
        self.runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=1.0)
        await self.runner.setup()
        await web.TCPSite(self.runner, "127.0.0.1", 0).start()
        self.url = f"http://127.0.0.1:{self.runner.addresses[0][1]}"

    def close(self) -> None:
        self.call(self.runner.cleanup())
        self.loop.call_soon_threadsafe(self.loop.stop)


class CountingClient(VllmClient):
    """The real client, which also counts its requests."""

    def __init__(self, url: str) -> None:
        super().__init__(url, None, 30.0, lambda: 4)
        self.started = self.finished = self.most_in_flight = 0

    async def generate(self, *args, **kwargs):
        self.started += 1
        self.most_in_flight = max(self.most_in_flight, self.started - self.finished)
        try:
            return await super().generate(*args, **kwargs)
        finally:
            self.finished += 1


class AnswerLength:
    """Rewards an answer with the length of its text, and remembers how many requests were open at each group."""

    def __init__(self) -> None:
        self.clients: list[CountingClient] = []
        self.open_requests: list[int] = []

    def score(self, samples: list[Sample]) -> None:
        self.open_requests.append(sum(client.started - client.finished for client in self.clients))
        for sample in samples:
            sample.rewards = {"length": float(len(sample.text))}
            sample.reward = sample.rewards["length"]


@pytest.fixture(scope="module")
def servers() -> Iterator[list[ServerThread]]:
    servers = [ServerThread(), ServerThread()]
    yield servers
    for server in servers:
        server.close()


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer(str(MODEL_DIR))


@pytest.fixture
def make_collector(servers, tokenizer):
    made: list[Collector] = []

    def make(urls: list[str] | None = None, max_concurrent_requests: int = 64) -> Collector:
        clients = [CountingClient(url) for url in urls or [server.url for server in servers]]
        scorer = AnswerLength()
        scorer.clients = clients
        made.append(Collector(clients, scorer, tokenizer, max_concurrent_requests))
        return made[-1]

    yield make
    for collector in made:
        collector.close()


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


def test_requests_are_spread_and_limited(make_collector) -> None:
    collector = make_collector(max_concurrent_requests=4)
    collector.collect(prompts_of(40), PARAMS, "a")
    started = [client.started for client in collector.clients]
    assert sum(started) == 40
    assert min(started) >= 8
    assert sum(client.most_in_flight for client in collector.clients) <= 4 + 1  # 2 + 2, or 3 at one end for a moment
    assert collector._load == [0, 0]
    assert max(collector.rewards.open_requests) > 0  # groups were scored while others were still being sampled


def test_a_dead_server_fails_the_collection(make_collector, servers) -> None:
    dead = ServerThread()
    url = dead.url
    dead.close()
    collector = make_collector([servers[0].url, url])
    begin = time.monotonic()
    with pytest.raises(EngineError, match=rf"prompt 11 at {url}: "):
        collector.collect(prompts_of(2), PARAMS, "a")
    assert time.monotonic() - begin < 10
    assert collector._load == [0, 0]
    deadline = time.monotonic() + 15  # the other request was announced as part of a cohort of its own: it just ends
    while servers[0].generator.busy:
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_refused_prompt_is_named(make_collector, servers) -> None:
    long = Prompt(index=77, token_ids=[3] * 128, text="")
    with pytest.raises(UserError, match=r"prompt 77 at http://.*--max-model-len is 128"):
        make_collector().collect([*prompts_of(3), long], PARAMS, "a")


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


def test_seeds() -> None:
    seeds = {prompt_seed(1, tag, index, n) for tag in ("a", "b") for index in range(50) for n in range(2)}
    assert len(seeds) == 200
    assert all(0 <= seed < 1 << 56 for seed in seeds)
    assert prompt_seed(1, "a", 2, 0) == prompt_seed(1, "a", 2, 0) != prompt_seed(2, "a", 2, 0)
    assert prompt_seed(None, "a", 2, 0) is None
