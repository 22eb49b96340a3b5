"""Asking the servers: prompts in, scored groups of answers out."""

import asyncio
import contextlib
import hashlib
import secrets
import threading
from collections import Counter
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from typing import Protocol

from transformers import PreTrainedTokenizerBase

from torchtitan.grpo.engines.fleet import Fleet, Server
from torchtitan.grpo.engines.protocol import Completion, EngineError, SamplingParams
from torchtitan.grpo.errors import UserError
from torchtitan.grpo.rollouts.samples import Group, Prompt, Sample

ATTEMPTS = 3
"""How often a request is sent before its failure is the collection's."""
SCORING_THREADS = 16
CLOSE_TIMEOUT_S = 10.0


class Scorer(Protocol):
    """What the collector needs of `rewards.RewardRunner`."""

    def score(self, samples: list[Sample]) -> None: ...


class Collector:
    """Sends prompts to servers and gathers their answers, decoded and scored.

    The event loop runs in a thread of its own, so a caller blocks in `collect`, and several threads may collect at the
    same time.

    Routing: a request goes to the server in traffic with the fewest of our requests in flight, of those that have
    acknowledged `min_version` or newer. While there is none it waits, without taking the place of one that need not,
    until the fleet says that something has changed; at most `request_timeout_s`, and not at all once fewer servers
    than `[rollout] min_servers` are left. A request under way is left alone when its server leaves traffic.

    Retries: a request that its server fails (`EngineError`) makes that server suspected, which takes it out of traffic,
    and is sent again, `ATTEMPTS` times in all, with the same seed to whatever server is eligible then. What a server
    refuses for a reason that the user can mend (`UserError`) is not sent again. `retried` counts what was sent again.

    Every prompt gets its own seed, from `params.seed`, its index, the tag and how often it has come before in the same
    call: answers are reproducible, and differ between steps (give each step its own tag). When all prompts of a call
    fit into `max_concurrent_requests` they are assigned to the servers that are eligible then and announced to each as
    one cohort, which the embedded server starts as one batch: then results do not depend on arrival times even in the
    last bit, as long as no request has to go elsewhere.

    Args:
        fleet: The servers, with their clients; the collector closes the clients, and alone uses them.
        max_concurrent_requests: Requests in flight over all servers. The others wait here.
        request_timeout_s: Longest wait of a request for a server to send it to; the clients bound the request itself.
    """

    def __init__(
        self,
        fleet: Fleet,
        rewards: Scorer,
        tokenizer: PreTrainedTokenizerBase,
        max_concurrent_requests: int,
        request_timeout_s: float,
    ) -> None:
        self.fleet = fleet
        self.rewards = rewards
        self.tokenizer = tokenizer
        self.max_concurrent_requests = max_concurrent_requests
        self.request_timeout_s = request_timeout_s
        self.retried = 0
        self._in_flight = 0
        self._used: set[Server] = set()
        self._loop = asyncio.new_event_loop()
        self._slots = asyncio.Semaphore(max_concurrent_requests)
        self._fleet_changed = asyncio.Event()
        self._scoring = ThreadPoolExecutor(SCORING_THREADS, thread_name_prefix="scoring")
        self._thread = threading.Thread(target=self._loop.run_forever, name="collector", daemon=True)
        self._thread.start()
        fleet.add_listener(self._on_fleet_change)

    def collect(self, prompts: list[Prompt], params: SamplingParams, tag: str, min_version: int = -1) -> list[Group]:
        """Answer every prompt `params.n` times. Blocks; `request_timeout_s` and the clients' timeouts bound the wait.

        See `start`.
        """
        future = self.start(prompts, params, tag, min_version)
        try:
            return future.result()
        finally:
            future.cancel()  # nothing but an interrupt leaves it unfinished

    def start(
        self, prompts: list[Prompt], params: SamplingParams, tag: str, min_version: int = -1
    ) -> Future[list[Group]]:
        """Have every prompt answered `params.n` times, without waiting for it. Cancel the future to end it early.

        Args:
            tag: Names this call in request ids and seeds, e.g. "step-12".
            min_version: Only servers that have acknowledged this weight version or a newer one are asked.

        Returns:
            A future of one scored group per prompt, in the order of the prompts.

        Raises (when its result is asked for):
            EngineError, UserError: The first request that failed for good; the message names server and prompt, or
                every server if none became eligible in time. The other requests are cancelled.
            FleetError: Too few servers are left.
        """
        return asyncio.run_coroutine_threadsafe(self._collect(prompts, params, tag, min_version), self._loop)

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
        for server in self._used | set(self.fleet.servers):  # those that left the list have been used, or never opened
            if server.client is not None:
                await server.client.close()

    def _on_fleet_change(self) -> None:
        """The fleet's listener, on any thread."""
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
            self._loop.call_soon_threadsafe(self._wake)

    def _wake(self) -> None:
        self._fleet_changed.set()
        self._fleet_changed = asyncio.Event()

    async def _wait_for_server(self, min_version: int, at_most_s: float) -> float:
        """Wait until a server is eligible. Returns how much of `at_most_s` is left."""
        deadline = self._loop.time() + at_most_s
        while True:
            changed = self._fleet_changed  # taken before the look, so that no change in between is missed
            self.fleet.check()
            if self.fleet.eligible(min_version):
                return deadline - self._loop.time()
            try:
                async with asyncio.timeout_at(deadline):
                    await changed.wait()
            except TimeoutError as error:
                wanted = f" with weights of version {min_version} or newer" if min_version >= 0 else ""
                raise EngineError(
                    f"no server in traffic{wanted} after {self.request_timeout_s:g} s of waiting "
                    f"([rollout] request_timeout_seconds): {self.fleet.describe()}"
                ) from error

    async def _collect(self, prompts: list[Prompt], params: SamplingParams, tag: str, min_version: int) -> list[Group]:
        if not prompts:
            return []
        await self._wait_for_server(min_version, self.request_timeout_s)
        # The tag may come again (another run on the same server, a repeated step); request ids must not.
        nonce = secrets.token_hex(4)
        servers: list[Server | None] = [None] * len(prompts)
        cohorts: list[tuple[str, int] | None] = [None] * len(prompts)
        load = {server: server.in_flight for server in self.fleet.eligible(min_version)}
        if load and self._in_flight + len(prompts) <= self.max_concurrent_requests:
            for i in range(len(prompts)):
                servers[i] = min(load, key=load.__getitem__)
                load[servers[i]] += 1
            sizes = Counter(servers)
            cohorts = [(f"{tag}-{nonce}", sizes[server]) for server in servers]
        seen: Counter[int] = Counter()
        tasks = []
        for i, prompt in enumerate(prompts):
            own = replace(params, seed=prompt_seed(params.seed, tag, prompt.index, seen[prompt.index]))
            seen[prompt.index] += 1
            request_id = f"{tag}-{i:06d}-{nonce}"
            group = self._group(prompt, own, request_id, min_version, servers[i], cohorts[i])
            tasks.append(asyncio.create_task(group))
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
        min_version: int,
        server: Server | None,
        cohort: tuple[str, int] | None,
    ) -> Group:
        completions = await self._answer(prompt, params, request_id, min_version, server, cohort)
        group = [Sample(prompt, c.token_ids, c.logprobs, c.versions, c.finish_reason) for c in completions]
        return await self._loop.run_in_executor(self._scoring, self._score, group)

    async def _answer(
        self,
        prompt: Prompt,
        params: SamplingParams,
        request_id: str,
        min_version: int,
        server: Server | None,
        cohort: tuple[str, int] | None,
    ) -> list[Completion]:
        """Ask the assigned server as part of its cohort, or else the best there is; again if that fails."""
        failures, wait_s = 0, self.request_timeout_s
        while True:
            async with self._slots:
                if server is None or not server.serves(min_version):
                    server, cohort = self.fleet.pick(min_version), None
                if server is not None:
                    own_id = f"{request_id}-retry-{failures}" if failures else request_id
                    try:
                        return await self._ask(server, prompt, params, own_id, cohort)
                    except EngineError as error:
                        self.fleet.suspect(server, error)
                        failures += 1
                        if failures == ATTEMPTS:
                            raise
                    server, wait_s = None, self.request_timeout_s
                    self.retried += 1
            wait_s = await self._wait_for_server(min_version, wait_s)

    async def _ask(
        self, server: Server, prompt: Prompt, params: SamplingParams, request_id: str, cohort: tuple[str, int] | None
    ) -> list[Completion]:
        self._used.add(server)
        self._in_flight += 1
        server.in_flight += 1
        try:
            return await server.client.generate(prompt.token_ids, params, request_id, cohort)
        except UserError as error:
            raise UserError(f"prompt {prompt.index} at {server.url}: {error}") from error
        except EngineError as error:
            raise EngineError(f"prompt {prompt.index} at {server.url}: {error}") from error
        finally:
            self._in_flight -= 1
            server.in_flight -= 1

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
