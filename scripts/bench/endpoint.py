#!/usr/bin/env python3
"""Measure rollouts through the run's endpoint against the same calls made directly. docs/endpoint.md has results.

Both ways sample each answer by a call of its own, with the same prompts, lengths and server. `direct` is an environment
that calls `client.generate`. `endpoint` hands them out as episodes to a harness, which is this script in another
process. Rounds alternate; the first of each is not counted.
"""

import argparse
import asyncio
import contextlib
import multiprocessing
import statistics
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import aiohttp
import torch

import torchtitan_overlay  # noqa: F401
from torchtitan.grpo.config.job_config import Data, Rollout
from torchtitan.grpo.data.prompts import load_tokenizer
from torchtitan.grpo.data.samples import Prompt, Sample
from torchtitan.grpo.endpoint.chat import Chat
from torchtitan.grpo.endpoint.episodes import Episodes, rollout
from torchtitan.grpo.endpoint.server import Endpoint
from torchtitan.grpo.engines.embedded.spawn import EmbeddedServer
from torchtitan.grpo.engines.fleet import Fleet
from torchtitan.grpo.engines.protocol import SamplingParams
from torchtitan.grpo.engines.registry import make_server
from torchtitan.grpo.rollouts.collector import Collector
from torchtitan.grpo.rollouts.environment import RolloutClient, Turns
from torchtitan.grpo.rollouts.guarded_environment import Environments, GuardedEnvironment

TIMEOUT_S = 120.0


def harness(url: str, at_once: int, max_tokens: int) -> None:
    """Another process: take episodes, make one call each, post a reward."""

    async def work(http: aiohttp.ClientSession) -> None:
        while True:
            async with http.post(f"{url}/episodes/next", json={"wait_seconds": 60}) as response:
                if response.status == 410:
                    return
                if response.status == 204:
                    continue
                episode = await response.json()
            body = {"prompt": episode["prompt"], "max_tokens": max_tokens}
            async with http.post(f"{episode['base_url']}/v1/completions", json=body) as response:
                said = await response.json()
                assert response.status == 200, said
                reward = float(len(said["choices"][0]["text"]))
            async with http.post(f"{url}/episodes/{episode['id']}", json={"reward": reward}):
                pass

    async def run() -> None:
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as http:
            await asyncio.gather(*(work(http) for _ in range(at_once)))

    with contextlib.suppress(aiohttp.ClientError):  # the run has ended
        asyncio.run(run())


async def direct(client: RolloutClient, prompt: Prompt) -> list[Sample]:
    async def one(number: int) -> Sample:
        turns = Turns(prompt)
        [completion] = await client.generate(prompt.token_ids, session=f"{number}")
        turns.sampled(completion)
        turns.sample().reward = float(len(client.tokenizer.decode(completion.token_ids)))
        return turns.sample()

    return await asyncio.gather(*(one(number) for number in range(client.params.n)))


class Rewarded:
    """Both ways give rewards themselves."""

    def score(self, samples: list[Sample]) -> None:
        assert not samples


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="Hugging Face folder, for its tokenizer")
    parser.add_argument("--url", help="of a running server of the model (default: start an embedded one)")
    parser.add_argument("--engine", choices=["embedded", "vllm", "sglang"], default="embedded")
    parser.add_argument("--prompts", type=int, default=16, help="groups of a round (default 16)")
    parser.add_argument("--samples", type=int, default=8, help="answers to each prompt (default 8)")
    parser.add_argument(
        "--max-tokens", type=int, default=64, help="of each answer, all of which are sampled (default 64)"
    )
    parser.add_argument("--rounds", type=int, default=5, help="counted rounds of each way (default 5)")
    parser.add_argument("--port", type=int, default=0, help="of the endpoint (default: a free one)")
    arguments = parser.parse_args()
    with contextlib.ExitStack() as stack:
        url = arguments.url
        if url is None:
            log = Path(stack.enter_context(tempfile.TemporaryDirectory()), "server.log")
            device = "cuda" if torch.cuda.is_available() else "cpu"
            url = stack.enter_context(EmbeddedServer()).start(arguments.model, Rollout(), device, log)
        measure(arguments, url, stack)


def measure(arguments: argparse.Namespace, url: str, stack: contextlib.ExitStack) -> None:
    tokenizer = load_tokenizer(arguments.model)
    collectors = {}
    for name, environment in (("direct", direct), ("endpoint", rollout)):
        fleet = Fleet([url], lambda url: make_server(arguments.engine, url, None, TIMEOUT_S, TIMEOUT_S))
        for server in fleet.servers:
            server.control.wait_healthy(TIMEOUT_S)
            fleet.admit(server, -1)
        environments = Environments(GuardedEnvironment(environment, name))
        collectors[name] = Collector(fleet, Rewarded(), tokenizer, 4096, TIMEOUT_S, environments)
        stack.callback(collectors[name].close)
    endpoint = Endpoint(Chat(tokenizer), "model", "127.0.0.1", arguments.port)
    endpoint.episodes = Episodes(endpoint, TIMEOUT_S, TIMEOUT_S, {"": Data(chat_template=False)})
    collectors["endpoint"].call(endpoint.start())
    collectors["endpoint"].endpoint = endpoint
    answers = arguments.prompts * arguments.samples
    process = multiprocessing.get_context("spawn").Process(
        target=harness, args=(endpoint.url, answers, arguments.max_tokens), daemon=True
    )
    process.start()
    stack.callback(process.kill)
    texts = [f"{number}+{number}=" for number in range(arguments.prompts)]
    prompts = [Prompt(i, tokenizer(text)["input_ids"], text) for i, text in enumerate(texts)]
    params = SamplingParams(arguments.samples, 1.0, arguments.max_tokens, (), 1, ignore_eos=True)
    seconds: dict[str, list[float]] = {name: [] for name in collectors}
    cpu: dict[str, list[float]] = {name: [] for name in collectors}  # of this process, which is rank 0's in a run
    for number in range(arguments.rounds + 1):
        for name, collector in collectors.items():
            began, cpu_began = time.perf_counter(), time.process_time()
            groups = collector.collect(prompts, params, f"{name}{number}")
            seconds[name].append(time.perf_counter() - began)
            cpu[name].append(1000 * (time.process_time() - cpu_began) / answers)
            tokens = sum(len(sample.token_ids) for group in groups for sample in group)
            assert tokens == answers * arguments.max_tokens
            print(f"round {number} {name:8} {seconds[name][-1]:7.2f} s  {tokens / seconds[name][-1]:8.0f} tokens/s")
    medians = {name: statistics.median(each[1:]) for name, each in seconds.items()}
    ratios = sorted(e / d for e, d in zip(seconds["endpoint"][1:], seconds["direct"][1:], strict=True))
    cpu_ms = {name: statistics.median(each[1:]) for name, each in cpu.items()}
    print(
        f"{answers} answers of {arguments.max_tokens} tokens, medians of {arguments.rounds} rounds: direct "
        f"{medians['direct']:.2f} s, endpoint {medians['endpoint']:.2f} s; endpoint / direct "
        f"{statistics.median(ratios):.2f}, {ratios[0]:.2f} to {ratios[-1]:.2f}. CPU time of this process per answer: "
        f"direct {cpu_ms['direct']:.2f} ms, endpoint {cpu_ms['endpoint']:.2f} ms"
    )


if __name__ == "__main__":
    main()
