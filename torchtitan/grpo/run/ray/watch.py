"""A thread of the driver that watches the ranks, and ends all of them when one has failed, died or hung."""

import signal
import threading
import time
from collections.abc import Mapping
from typing import Any, Self

import ray

from torchtitan.config import JobConfig
from torchtitan.grpo.run.ray.outcome import RanksFailed, error_of

POLL_S = 0.5
OTHERS_S = 10.0
"""How long the other ranks may take to end after the first."""
_ANSWER_S = 10.0
"""Longest wait for a node's agent."""
_SILENT_S = 5.0
"""A rank that was not heard of for so long has stopped as a whole: a thread of its own reports each second."""


class Watch:
    """Inside, ranks that are left when one has gone wrong are killed, which also ends the driver's calls to them.

    Args:
        agents: By node.
    """

    def __init__(self, agents: Mapping[str, Any], config: JobConfig) -> None:
        self._agents, self._config = agents, config
        self._found: BaseException | None = None
        self._closed, self._done = threading.Event(), threading.Event()
        self.stopping = False
        self._thread = threading.Thread(target=self._run, name="ray-watch", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._closed.set()
        self._thread.join(2 * _ANSWER_S)

    def stop(self, _: int) -> bool:
        """Ask every rank to save and stop, without waiting; for `stopping.asks_first`. A Ray worker blocks SIGINT."""
        self.stopping = True
        for agent in self._agents.values():
            agent.do.remote("signal", signal.SIGTERM)
        return True

    def explain(self, error: Exception) -> BaseException:
        """Why a call to the ranks has failed with `error`. Waits until this thread knows, or for a bounded time."""
        self._done.wait(OTHERS_S + 2 * _ANSWER_S)
        return self._found or RanksFailed(f"a call to the ranks failed ({type(error).__name__}): {error}")

    def _run(self) -> None:
        try:
            self._watch()
        except Exception as error:  # without this thread nobody would end ranks that hang
            self._end(RanksFailed(f"the ranks can no longer be watched ({type(error).__name__}): {error}"))

    def _watch(self) -> None:
        ended_at = None
        while not self._closed.wait(POLL_S):
            try:
                status = self._status()
            except RanksFailed as lost:
                return self._end(lost)
            outcomes = {rank: each["outcome"] for rank, each in status.items() if each["outcome"]}
            left = {rank: each for rank, each in status.items() if not each["outcome"]}
            dead = [rank for rank, each in left.items() if not each["alive"]]
            error = error_of(outcomes)
            if dead and ended_at is None:  # what other ranks say now comes of it
                names = " and ".join(_name(rank, status[rank]) for rank in sorted(dead))
                return self._end(RanksFailed(f"{names} died (killed, or out of memory)"))
            if error is not None:
                ended_at = ended_at or time.monotonic()
                if not left or dead or time.monotonic() > ended_at + OTHERS_S:
                    return self._end(error)
            elif passed := [limit for each in left.values() if each["still_s"] > (limit := self._limit_s(each))]:
                return self._end(self._hung(status, min(passed)))

    def _status(self) -> dict[int, dict[str, Any]]:
        status: dict[int, dict[str, Any]] = {}
        asked = {node: agent.do.remote("status") for node, agent in self._agents.items()}
        for node, reference in asked.items():
            try:
                answer = ray.get(reference, timeout=_ANSWER_S)
            except (ray.exceptions.RayError, TimeoutError) as error:
                raise RanksFailed(
                    f"the node {node[:12]} is lost: its agent did not answer within {_ANSWER_S:g} s, or has died "
                    f"({type(error).__name__})"
                ) from error
            status |= {rank: each | {"node": node} for rank, each in answer.items()}
        return status

    def _limit_s(self, each: dict[str, Any]) -> float:
        """Longest time without getting on, of a rank with this status."""
        limit_s = self._config.debug.hang_seconds
        return limit_s if each["step"] else max(limit_s, self._config.rollout.start_timeout_seconds)

    def _hung(self, status: dict[int, dict[str, Any]], limit_s: float) -> RanksFailed:
        """Names the ranks that did not answer in time: those that stand still as a whole, else those that are not done.
        A rank that waits for such a one may be the first to pass its limit."""
        busy = {rank: each for rank, each in status.items() if not each["doing"].startswith("waiting")}
        silent = {rank: each for rank, each in busy.items() if each["halted"] or each["silent_s"] > _SILENT_S}
        named = silent or busy
        stacks: dict[int, str] = {}
        for agent in self._agents.values():
            try:
                stacks |= ray.get(agent.do.remote("stacks"), timeout=_ANSWER_S)
            except (ray.exceptions.RayError, TimeoutError):
                continue
        names = " and ".join(_name(rank, each) for rank, each in sorted(named.items()))
        hung = limit_s <= self._config.debug.hang_seconds
        key = "[debug] hang_seconds" if hung else "[rollout] start_timeout_seconds"
        lines = [f"{names} did not answer within {limit_s:g} s ({key})"]
        for rank, each in sorted(status.items()):
            lines.append(f"rank {rank}: {each['doing']}, {each['detail'] or 'no details'}, for {each['still_s']:.0f} s")
        lines += [f"rank {rank}, main thread, {_main_thread(text)}" for rank, text in sorted(stacks.items())]
        return RanksFailed("\n".join(lines))

    def _end(self, error: BaseException) -> None:
        self._found = error
        self._done.set()
        for agent in self._agents.values():
            agent.do.remote("kill")


def _name(rank: int, each: dict[str, Any]) -> str:
    stopped = ", stopped by a signal" if each["halted"] else ""
    return f"rank {rank} (process {each['pid']} on node {each['node'][:12]}, {each['doing']}{stopped})"


def _main_thread(stacks: str) -> str:
    """The last of the stacks that faulthandler writes, without the thread's number."""
    return stacks.strip().rpartition("\n\n")[2].partition("(")[2].replace("):", ":", 1)
