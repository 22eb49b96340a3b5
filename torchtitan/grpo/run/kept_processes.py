"""The rollout processes of a run, each with its share of the prompts: what is asked of all of them."""

from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from typing import Any

from torchtitan.grpo.engines.fleet import Fleet
from torchtitan.grpo.engines.fleet_mirror import FleetTeller
from torchtitan.grpo.engines.server import Server
from torchtitan.grpo.run.kept_process import KeptProcess
from torchtitan.grpo.run.rollout_process import Reply


class KeptProcesses:
    """One or more processes that ask the same servers.

    Args:
        make: Makes one.

    Attributes:
        each: All of them. The first one also has what is there once: validation, the log of answers, the warm start.
    """

    def __init__(self, make: Callable[[], KeptProcess], count: int) -> None:
        self.each = [make() for _ in range(count)]
        self._pool = ThreadPoolExecutor(count, "rollouts-call")

    @property
    def losses(self) -> int:
        """How often one has ended."""
        return sum(process.losses for process in self.each)

    @property
    def scored(self) -> int:
        """See `RolloutWorker.scored`."""
        return sum(process.scored for process in self.each)

    @property
    def failure(self) -> Exception | None:
        """Why there will be no other one in the place of one of them."""
        return next((process.failure for process in self.each if process.failure is not None), None)

    def call(self, verb: str, *arguments: Any) -> list[Reply]:
        """What each answers. They are asked at the same time, and the first error that comes is raised."""
        return self.map(lambda process: process.call(verb, *arguments))

    def map(self, function: Callable[..., Any], *of_each: Sequence[Any]) -> list[Any]:
        """What the function returns for each process and its own values, on threads of their own."""
        if len(self.each) == 1:
            return [function(self.each[0], *(values[0] for values in of_each))]
        futures = [self._pool.submit(function, *own) for own in zip(self.each, *of_each, strict=True)]
        done, _ = wait(futures, return_when=FIRST_EXCEPTION)
        for future in done:
            future.result()
        return [future.result() for future in futures]

    def follow(self, fleet: Fleet) -> None:
        """Tell each of the servers, and have the fleet ask them of theirs."""
        fleet.requests_in_flight, fleet.versions_in_use = self._requests_in_flight, self._versions_in_use
        for process in self.each:
            process.follow(FleetTeller(fleet, process.tell_of_servers))

    def stop(self) -> None:
        """No step takes groups from now on. For any thread."""
        for process in self.each:
            process.stop()

    def describe(self) -> str:
        """What they wait for. For any thread."""
        return "\n".join(process.describe() for process in self.each)

    def close(self) -> None:
        """End them, at the same time. Bounded. One alone needs no thread, of which the machine may have no other."""
        first, *others = self.each
        with ThreadPoolExecutor(len(self.each), "rollouts-close") as pool:  # the other pool may wait for answers
            closing = pool.map(KeptProcess.close, others)
            first.close()
            list(closing)
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _requests_in_flight(self, server: Server) -> int:
        return sum(process.requests_in_flight(server) for process in self.each)

    def _versions_in_use(self, server: Server) -> set[int] | None:
        versions = [process.versions_in_use(server) for process in self.each]
        known = [each for each in versions if each is not None]
        return set().union(*known) if len(known) == len(versions) else None
