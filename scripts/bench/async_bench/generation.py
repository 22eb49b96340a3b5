"""The servers' throughput when they only generate: the bound of every mode."""

import asyncio
import itertools
import random
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass

import requests

from torchtitan.grpo.engines.protocol import EngineClient, EngineError, SamplingParams
from torchtitan.grpo.engines.registry import make_server

IDLE_LIMIT_S = 30.0
GENERATED = ("vllm:generation_tokens_total", "sglang:generation_tokens_total")
"""SGLang counts an answer's tokens when it has ended, and only with --enable-metrics."""
UNDER_WAY = ("vllm:num_requests_running", "vllm:num_requests_waiting")


@dataclass(frozen=True)
class Ask:
    """One answer of the job: its prompt, its longest length in tokens, and what ends it."""

    prompt_ids: list[int]
    max_tokens: int
    stop_token_ids: tuple[int, ...]


def under_way(asks: list[Ask], count: int) -> list[Ask]:
    """What is left of `count` answers at some moment of a long run, each after the tokens that it has by then.

    Answers of exactly `max_tokens` tokens are assumed. The longer one is, the likelier it is under way, and as likely
    at one of its tokens as at another. What it has is drawn from its prompt's tokens. A server that starts with these
    runs at once at the speed of one that has run for long, whose answers are longer than those that just began.
    """
    draw = random.Random(0)
    found = []
    for ask in draw.choices(asks, weights=[ask.max_tokens for ask in asks], k=count):
        sampled = draw.randrange(ask.max_tokens)
        prompt_ids = ask.prompt_ids + draw.choices(ask.prompt_ids, k=sampled)
        found.append(Ask(prompt_ids, ask.max_tokens - sampled, ask.stop_token_ids))
    return found


async def generation_rate(
    engine: str,
    urls: list[str],
    asks: list[Ask],
    sequences: int,
    settle_s: float,
    count_s: float,
    timeout_s: float,
    first: Sequence[Ask] = (),
) -> float:
    """Answer tokens/s of all servers together, each kept at `sequences` unseeded answers.

    The job's requests are sent again and again, a new one for each that ends; before them `first`, once. After
    `settle_s`, tokens are counted for `count_s` by the servers' own counter (`GENERATED`), or by the answers that end
    where a server has none. Requests still under way are then cancelled.

    Raises:
        EngineError: A server fails, or ends no answer in that time.
    """
    finished: list[tuple[float, int]] = []
    numbered = enumerate(itertools.chain(first, itertools.cycle(asks)))
    clients = [make_server(engine, url, None, timeout_s, timeout_s).client for url in urls]
    nonce = time.time_ns()

    async def keep_asking(client: EngineClient) -> None:
        for i, ask in numbered:
            params = SamplingParams(1, 1.0, ask.max_tokens, ask.stop_token_ids)
            answers = await client.generate(ask.prompt_ids, params, f"bench-{nonce}-{i}")
            finished.append((time.monotonic(), sum(len(answer.token_ids) for answer in answers)))

    tasks = [asyncio.create_task(keep_asking(client)) for client in clients for _ in range(sequences)]
    try:
        await _sleep(tasks, settle_s)
        start, before = time.monotonic(), await asyncio.to_thread(generated_tokens, urls)
        await _sleep(tasks, count_s)
        end, after = time.monotonic(), await asyncio.to_thread(generated_tokens, urls)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for client in clients:
            await client.close()
    await asyncio.to_thread(_wait_idle, urls)
    if before is not None and after is not None:
        return (after - before) / (end - start)
    tokens = sum(count for at, count in finished if start < at <= end)
    if not tokens:
        raise EngineError(f"{', '.join(urls)}: no answer ended within {count_s:g} s (--bound-s)")
    return tokens / (end - start)


async def _sleep(tasks: list[asyncio.Task], seconds: float) -> None:
    """Sleep, or raise what a task raises meanwhile."""
    done, _ = await asyncio.wait(tasks, timeout=seconds, return_when=asyncio.FIRST_EXCEPTION)
    for task in done:
        task.result()


def generated_tokens(urls: list[str]) -> float | None:
    """Tokens that these servers have generated since they started; None unless all of them count."""
    counts = [_metric(url, *GENERATED) for url in urls]
    return None if None in counts else sum(counts)


def _wait_idle(urls: list[str]) -> None:
    """Until vLLM has dropped the cancelled requests, so that the next measurement starts with an empty server."""
    deadline = time.monotonic() + IDLE_LIMIT_S
    for url in urls:
        while _metric(url, *UNDER_WAY):
            if time.monotonic() > deadline:
                raise EngineError(f"{url}: cancelled requests are still running after {IDLE_LIMIT_S:g} s")
            time.sleep(0.2)


def _metric(url: str, *names: str) -> float | None:
    """Sum of Prometheus metrics over their labels; None if the server has none of them."""
    reply = requests.get(f"{url}/metrics", timeout=10)
    lines = reply.text.splitlines() if reply.ok else []
    values = [float(line.rpartition(" ")[2]) for line in lines if re.split("[{ ]", line, maxsplit=1)[0] in names]
    return sum(values) if values else None
