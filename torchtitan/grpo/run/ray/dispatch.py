"""How the driver has every rank execute an order, and gets their answers in order of rank."""

import logging
import os
import select
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from typing import Any, Protocol, Self

import ray

logger = logging.getLogger(__name__)  # not torchtitan's, which imports torch: agents have no use for it
COMPILE_S = 60.0
"""Longest wait for the ranks to join a graph, and again to serve it."""
MARGIN_S = 60.0
"""A call waits so much longer than its limit: `Watch` ends ranks at the limit, and knows which one to name."""
SPIN_S = 200e-6
"""How long an answer is waited for without sleep, as in an empty step: to wake up takes another 30 us."""
_SLEEP_S = 60.0
"""Longest sleep in one piece: the system's own limit is 24 days."""


class Dispatch(Protocol):
    def call(self, order: int) -> list[Any]:
        """Every rank's answer. Raises an error of Ray's if a rank has died."""

    def close(self) -> None: ...


class RemoteCalls:
    """One plain call of Ray's to each actor."""

    def __init__(self, actors: Sequence[Any], timeout_s: float) -> None:
        self._actors, self._timeout_s = actors, timeout_s + MARGIN_S

    def call(self, order: int) -> list[Any]:
        return ray.get([actor.call.remote(order) for actor in self._actors], timeout=self._timeout_s)

    def close(self) -> None:
        pass


class CompiledGraph:
    """One static graph, driver -> every rank -> driver, through shared memory. All ranks are on this process's node.

    Only the process that made it may call it, one thread at a time. Orders and answers go through it as bytes, which
    Ray neither pickles nor lends from the channel's buffer; only a rank's outcome is more.
    """

    def __init__(self, actors: Sequence[Any], timeout_s: float) -> None:
        from ray.dag import InputNode, MultiOutputNode

        self._timeout_s = timeout_s + MARGIN_S
        with ExitStack() as stack:
            self._bell = stack.enter_context(_Bell())
            joined = [actor.join_graph.remote(self._bell.path) for actor in actors]
            self._bell.expect(ray.get(joined, timeout=COMPILE_S))
            with InputNode() as order:
                answers = MultiOutputNode([actor.answer.bind(order) for actor in actors])
            self._graph = answers.experimental_compile()
            stack.callback(self._graph.teardown)
            for actor in actors:
                actor.serve.remote()  # until the teardown
            if not self._bell.wait(time.monotonic() + COMPILE_S):
                raise RuntimeError("it does not run in every rank's main thread")
            self._open = stack.pop_all()

    def call(self, order: int) -> list[Any]:
        deadline = time.monotonic() + self._timeout_s
        references = self._graph.execute(b"%d" % order)
        self._bell.wait(deadline)
        answers = [each.get(timeout=max(0.0, deadline - time.monotonic())) for each in references]
        return [int(answer) if isinstance(answer, bytes) else answer for answer in answers]

    def close(self) -> None:
        """From now on ranks answer plain calls again."""
        self._open.close()


class _Bell:
    """A pipe to which each rank of this node writes a byte when it has answered.

    Ray waits for a graph's answer in a loop that never sleeps. It would take a core from the ranks during their step.

    Attributes:
        path: Of the end that ranks write to.
    """

    def __init__(self) -> None:
        self._heard, end = os.pipe()
        self._files = [self._heard, end]
        self._poll = select.poll()
        self._poll.register(self._heard, select.POLLIN)
        self._ranks = 0
        self.path = f"/proc/{os.getpid()}/fd/{end}"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for file in self._files:
            os.close(file)

    def expect(self, pids: Sequence[int]) -> None:
        """These processes will ring."""
        self._ranks = len(pids)
        for pid in pids:
            self._files.append(os.pidfd_open(pid))
            self._poll.register(self._files[-1], select.POLLIN)

    def wait(self, deadline: float) -> bool:
        """Until all have rung, or one has ended, or `deadline` (of `time.monotonic`) has passed.

        Returns:
            Whether all have rung.
        """
        left, start = self._ranks, time.monotonic()
        while left:
            now = time.monotonic()
            spins = now < start + SPIN_S
            sleep_s = 0.0 if spins else min(max(0.0, deadline - now), _SLEEP_S)
            ready = [file for file, _ in self._poll.poll(sleep_s * 1000)]
            if self._heard in ready:
                left -= len(os.read(self._heard, left))
            elif ready or now > deadline:
                return False
            elif spins:
                os.sched_yield()  # a rank may wait for this core
        return True


class GraphOfEachNode:
    """One `CompiledGraph` on each node, which its agent calls; a plain remote call to each agent.

    No channel crosses nodes: there Compiled Graphs can hang after hours (ray #58426).
    """

    def __init__(self, agents: Mapping[str, Any], actors: Mapping[str, Mapping[int, Any]], timeout_s: float) -> None:
        """`actors`: of each node, by rank."""
        self._agents = [agents[node] for node in actors]
        self._ranks = [rank for of_node in actors.values() for rank in of_node]
        self._timeout_s = timeout_s + 2 * MARGIN_S
        compiled = [
            agent.do.remote("compile", list(of_node.values()), timeout_s)
            for agent, of_node in zip(self._agents, actors.values(), strict=True)
        ]
        try:
            ray.get(compiled, timeout=COMPILE_S + MARGIN_S)
        except BaseException:
            self.close()  # ranks that serve a graph answer no plain call
            raise

    def call(self, order: int) -> list[Any]:
        of_nodes = ray.get([agent.do.remote("call", order) for agent in self._agents], timeout=self._timeout_s)
        answers = [answer for of_node in of_nodes for answer in of_node]
        return [answer for _, answer in sorted(zip(self._ranks, answers, strict=True), key=lambda pair: pair[0])]

    def close(self) -> None:
        with suppress(ray.exceptions.RayError, TimeoutError):
            ray.get([agent.do.remote("close_graph") for agent in self._agents], timeout=COMPILE_S)


def compiled_or_remote(
    actors: Sequence[Any], nodes: Sequence[str], agents: Mapping[str, Any], timeout_s: float
) -> Dispatch:
    """Compiled Graphs if that works, else plain remote calls, and a warning that says why.

    Args:
        actors, nodes: By rank; `nodes` are their ids.
        agents: By node.
    """
    try:
        if set(nodes) == {ray.get_runtime_context().get_node_id()}:
            return CompiledGraph(actors, timeout_s)
        by_node: dict[str, dict[int, Any]] = {}
        for rank, (node, actor) in enumerate(zip(nodes, actors, strict=True)):
            by_node.setdefault(node, {})[rank] = actor
        return GraphOfEachNode(agents, by_node, timeout_s)
    except Exception as error:  # whatever a version of Ray does not have, or cannot do here
        reason = (str(error).splitlines() or [""])[0]
        logger.warning(
            f'[ray] dispatch = "compiled" falls back to "remote": Ray {ray.__version__} cannot compile the graph '
            f"({type(error).__name__}: {reason})"
        )
        return RemoteCalls(actors, timeout_s)
