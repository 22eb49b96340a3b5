"""Asking the servers: prompts in, scored groups of answers out."""

import asyncio
import hashlib
import secrets
import threading
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Protocol

from transformers import PreTrainedTokenizerBase

from torchtitan.grpo.engines.protocol import Completion, EngineClient, EngineError, SamplingParams
from torchtitan.grpo.errors import UserError
from torchtitan.grpo.rollouts.samples import Group, Prompt, Sample

SCORING_THREADS = 16
CLOSE_TIMEOUT_S = 10.0


class Scorer(Protocol):
    """What the collector needs of `rewards.RewardRunner`."""

    def score(self, samples: list[Sample]) -> None: ...


class Collector:
    """Sends prompts to servers and gathers their answers, decoded and scored.

    The event loop runs in a thread of its own, so a caller blocks in `collect`, and several threads may collect at the
    same time. Each prompt goes to the server with the fewest of our requests in flight.

    Every prompt gets its own seed, from `params.seed`, its index, the tag and how often it has come before in the same
    call: answers are reproducible, and differ between steps (give each step its own tag). When all prompts of a call
    fit into `max_concurrent_requests` they are announced to each server as one cohort, which the embedded server
    starts as one batch: then results do not depend on arrival times even in the last bit.

    Args:
        clients: One per server; the collector closes them.
        max_concurrent_requests: Requests in flight over all servers. The others wait here.
    """

    def __init__(
        self,
        clients: Sequence[EngineClient],
        rewards: Scorer,
        tokenizer: PreTrainedTokenizerBase,
        max_concurrent_requests: int,
    ) -> None:
        if not clients:
            raise UserError("[rollout] urls: no server to send prompts to")
        self.clients = list(clients)
        self.rewards = rewards
        self.tokenizer = tokenizer
        self.max_concurrent_requests = max_concurrent_requests
        self._in_flight = 0
        self._load = [0] * len(self.clients)
        self._loop = asyncio.new_event_loop()
        self._slots = asyncio.Semaphore(max_concurrent_requests)
        self._scoring = ThreadPoolExecutor(SCORING_THREADS, thread_name_prefix="scoring")
        self._thread = threading.Thread(target=self._loop.run_forever, name="collector", daemon=True)
        self._thread.start()

    def collect(self, prompts: list[Prompt], params: SamplingParams, tag: str) -> list[Group]:
        """Answer every prompt `params.n` times. Blocks; the clients' request timeouts bound the wait.

        Args:
            tag: Names this call in request ids and seeds, e.g. "step-12".

        Returns:
            One scored group per prompt, in the order of the prompts.

        Raises:
            EngineError, UserError: The first request that failed; the message names server and prompt. The other
                requests are cancelled.
        """
        future = asyncio.run_coroutine_threadsafe(self._collect(prompts, params, tag), self._loop)
        try:
            return future.result()
        finally:
            future.cancel()  # nothing but an interrupt leaves it unfinished

    def close(self) -> None:
        """Cancel what is under way and close the connections. Bounded."""
        if self._loop.is_closed():
            return
        asyncio.run_coroutine_threadsafe(self._shut_down(), self._loop).result(CLOSE_TIMEOUT_S)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(CLOSE_TIMEOUT_S)
        self._loop.close()
        self._scoring.shutdown(wait=False, cancel_futures=True)

    async def _shut_down(self) -> None:
        tasks = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for client in self.clients:
            await client.close()

    async def _collect(self, prompts: list[Prompt], params: SamplingParams, tag: str) -> list[Group]:
        # The tag may come again (another run on the same server, a repeated step); request ids must not.
        nonce = secrets.token_hex(4)
        servers: list[int | None] = [None] * len(prompts)
        cohorts: list[tuple[str, int] | None] = [None] * len(prompts)
        if self._in_flight + len(prompts) <= self.max_concurrent_requests:
            load = list(self._load)
            for i in range(len(prompts)):
                servers[i] = load.index(min(load))
                load[servers[i]] += 1
            sizes = Counter(servers)
            cohorts = [(f"{tag}-{nonce}", sizes[server]) for server in servers]
        seen: Counter[int] = Counter()
        tasks = []
        for i, prompt in enumerate(prompts):
            own = replace(params, seed=prompt_seed(params.seed, tag, prompt.index, seen[prompt.index]))
            seen[prompt.index] += 1
            request_id = f"{tag}-{i:06d}-{nonce}"
            tasks.append(asyncio.create_task(self._group(prompt, own, request_id, servers[i], cohorts[i])))
        if not tasks:
            return []
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
            failed = [task for task in tasks if task.done() and not task.cancelled() and task.exception()]
            if failed:
                raise failed[0].exception()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        return [task.result() for task in tasks]

    async def _group(
        self,
        prompt: Prompt,
        params: SamplingParams,
        request_id: str,
        server: int | None,
        cohort: tuple[str, int] | None,
    ) -> Group:
        async with self._slots:
            if server is None:
                server = self._load.index(min(self._load))
            self._in_flight += 1
            self._load[server] += 1
            try:
                completions = await self._ask(server, prompt, params, request_id, cohort)
            finally:
                self._in_flight -= 1
                self._load[server] -= 1
        group = [Sample(prompt, c.token_ids, c.logprobs, c.versions, c.finish_reason) for c in completions]
        return await self._loop.run_in_executor(self._scoring, self._score, group)

    async def _ask(
        self, server: int, prompt: Prompt, params: SamplingParams, request_id: str, cohort: tuple[str, int] | None
    ) -> list[Completion]:
        client = self.clients[server]
        try:
            return await client.generate(prompt.token_ids, params, request_id, cohort)
        except UserError as error:
            raise UserError(f"prompt {prompt.index} at {client.url}: {error}") from error
        except EngineError as error:
            raise EngineError(f"prompt {prompt.index} at {client.url}: {error}") from error

    def _score(self, group: Group) -> Group:
        for sample in group:
            sample.text = self.tokenizer.decode(sample.token_ids, skip_special_tokens=True)
        self.rewards.score(group)
        return group


def prompt_seed(seed: int | None, tag: str, index: int, occurrence: int) -> int | None:
    """The seed of one request, 0 to 2**56 - 1 so that servers may add the sample's number; None stays None."""
    if seed is None:
        return None
    digest = hashlib.blake2b(f"{seed}/{tag}/{index}/{occurrence}".encode(), digest_size=7).digest()
    return int.from_bytes(digest, "little")
