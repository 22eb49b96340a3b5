"""Episodes that a harness outside takes and ends, over HTTP, with real embedded servers."""

import asyncio
import functools
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import aiohttp
import pytest

from tests.helpers.embedded_servers import ServerThread
from tests.helpers.endpoint_runs import PARAMS, VERSION, Run, chat_tokenizer
from torchtitan.grpo.config.job_config import Data
from torchtitan.grpo.data.samples import Prompt
from torchtitan.grpo.endpoint.episodes import Episodes, rollout
from torchtitan.grpo.errors import UserError

LEASE_S = 20.0
"""Longer than anything here takes."""


@pytest.fixture(scope="module")
def server() -> Iterator[ServerThread]:
    server = ServerThread(VERSION)
    yield server
    server.close()


@pytest.fixture
def run(server) -> Iterator[Run]:
    run = Run(chat_tokenizer(), [server.url])
    run.endpoint.episodes = Episodes(run.endpoint, LEASE_S, 20.0, {"": Data()})
    columns = {Data().prompt_column: "1+1=", "place": 3}
    run.prompt = Prompt(3, run.prompt.token_ids, run.prompt.text, "2", columns)
    yield run
    run.collector.close()


class Harness:
    """The other end, on an event loop of its own."""

    def __init__(self, url: str, http: aiohttp.ClientSession) -> None:
        self.url, self.http = url, http

    async def post(self, url: str, **body) -> tuple[int, dict]:
        async with self.http.post(url, json=body) as response:
            return response.status, await response.json() if response.status != 204 else {}

    async def take(self) -> dict:
        status, episode = await self.post(f"{self.url}/episodes/next", wait_seconds=20)
        assert status == 200, episode
        return episode

    async def ask(self, episode: dict) -> str:
        body = {"messages": episode["messages"], "max_tokens": 4}
        status, said = await self.post(f"{episode['base_url']}/v1/chat/completions", **body)
        assert status == 200, said
        return said["choices"][0]["message"]["content"]

    async def end(self, episode: dict, **outcome) -> int:
        return (await self.post(f"{self.url}/episodes/{episode['id']}", **outcome))[0]


def collect(run: Run, play, n: int = 2):
    """A group of `n` episodes that `play(harness)` plays: its samples, and what `play` returns."""

    async def playing():
        async with aiohttp.ClientSession() as http:
            return await play(Harness(run.endpoint.url, http))

    with ThreadPoolExecutor(1) as thread:
        future = thread.submit(asyncio.run, playing())

        async def hand_out(client, prompt, _):
            return await rollout(client, prompt)

        try:
            samples = run.collect(hand_out, replace(PARAMS, n=n))
        except UserError:
            future.result(30)  # what failed first
            raise
        return samples, future.result(30)


def test_episodes_are_played_and_rewarded(run) -> None:
    async def play(harness):
        assert (await harness.post(f"{harness.url}/episodes/next", wait_seconds=-1))[0] == 400
        said = []
        deep = functools.reduce(lambda inner, _: [inner], range(950), 1)
        for reward in (0.25, -2):
            episode = await harness.take()
            assert episode["prompt"] == run.prompt.text and episode["answer"] == "2"
            assert episode["messages"] == [{"role": "user", "content": "1+1="}] and episode["columns"]["place"] == 3
            assert episode["sampling"]["max_tokens"] == PARAMS.max_tokens
            said.append(await harness.ask(episode))
            wrongs = [{"reward": value} for value in ("1", True, deep)] + [{"rewards": [1]}, {"score": 1}, {"error": 3}]
            for wrong in wrongs:
                assert await harness.end(episode, **wrong) == 400
            assert await harness.end(episode, reward=reward, rewards={"tests": 3}) == 204
            assert await harness.end(episode, reward=reward) == 410, "it is ended"
        assert (await harness.post(f"{harness.url}/episodes/next", wait_seconds=0))[0] == 204
        return said

    samples, said = collect(run, play)
    assert [(sample.reward, sample.rewards) for sample in samples] == [(0.25, {"tests": 3.0}), (-2.0, {"tests": 3.0})]
    assert [sample.text for sample in samples] == said
    assert len(run.sampled) == 2


def test_an_episode_of_a_dead_harness_is_handed_out_again(run) -> None:
    run.endpoint.episodes = Episodes(run.endpoint, 2.0, 20.0, {"": Data()})

    async def play(harness):
        lost = await harness.take()
        await harness.ask(lost)
        other = await harness.take()
        assert await harness.end(other, error="no sandbox") == 204
        again = await harness.take()
        assert again["id"] not in (lost["id"], other["id"]) and again["prompt"] == lost["prompt"]
        assert await harness.end(lost, reward=1.0) == 410
        assert (await harness.post(f"{lost['base_url']}/v1/completions", prompt="1+1="))[0] == 410
        await harness.ask(again)
        assert await harness.end(again, reward=0.5) == 204

    samples, _ = collect(run, play)
    assert [sample.reward for sample in samples] == [0.5, None]
    assert samples[0].sampled_tokens == len(run.sampled[-1][1].token_ids), "what the dead one sampled is dropped"
    assert "no sandbox" in samples[1].reward_failures["endpoint"] and not samples[1].token_ids


def test_an_episode_that_every_harness_loses_has_failed(run) -> None:
    run.endpoint.episodes = Episodes(run.endpoint, 0.5, 20.0, {"": Data()})

    async def play(harness):
        for _ in range(3):
            await harness.take()

    [sample], _ = collect(run, play, n=1)
    assert sample.reward is None and "lost by 3 harnesses" in sample.reward_failures["endpoint"]


def test_without_a_harness_the_wait_is_bounded(run) -> None:
    run.endpoint.episodes = Episodes(run.endpoint, LEASE_S, 0.3, {"": Data()})

    async def nothing(harness):
        return None

    with pytest.raises(UserError, match=r"no harness has asked for an episode for 0.3 s .*/episodes/next"):
        collect(run, nothing)
    assert run.endpoint.metrics()["endpoint/open_sessions"] == 0


def test_a_harness_is_there_while_it_works_on_an_episode(run) -> None:
    run.endpoint.episodes = Episodes(run.endpoint, LEASE_S, 1.5, {"": Data()})

    async def play(harness):
        for turn in range(2):
            episode = await harness.take()
            if turn == 0:
                await harness.ask(episode)
                await asyncio.sleep(2.0)  # a tool that takes longer than a harness may be away
            assert await harness.end(episode, reward=1.0) == 204

    samples, _ = collect(run, play)
    assert [sample.reward for sample in samples] == [1.0, None]


def test_a_harness_that_waits_at_the_end_is_told(run) -> None:
    async def wait():
        async with aiohttp.ClientSession() as http:
            return (await Harness(run.endpoint.url, http).post(f"{run.endpoint.url}/episodes/next"))[0]

    async def closing():
        waiting = asyncio.create_task(wait())
        while not run.endpoint.episodes._asking:
            await asyncio.sleep(0.01)
        await asyncio.to_thread(run.collector.close)
        return await waiting

    assert asyncio.run(closing()) == 410
