"""How the driver has every rank execute an order, and gets their answers in order of rank."""

import logging
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, Protocol

import ray

logger = logging.getLogger(__name__)  # not torchtitan's, which imports torch: agents have no use for it
COMPILE_S = 60.0
"""Longest wait for the other nodes' graphs."""
MARGIN_S = 60.0
"""A call waits so much longer than its limit: `Watch` ends ranks at the limit, and knows which one to name."""


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

    Only the process that made it may call it, one thread at a time. Numbers and short texts go through it: an array's
    result would hold the channel's buffer.
    """

    def __init__(self, actors: Sequence[Any], timeout_s: float) -> None:
        from ray.dag import InputNode, MultiOutputNode

        with InputNode() as order:
            answers = MultiOutputNode([actor.call.bind(order) for actor in actors])
        self._timeout_s = timeout_s + MARGIN_S
        self._graph = answers.experimental_compile()

    def call(self, order: int) -> list[Any]:
        deadline = time.monotonic() + self._timeout_s
        references = self._graph.execute(order)
        return [each.get(timeout=max(0.0, deadline - time.monotonic())) for each in references]

    def close(self) -> None:
        self._graph.teardown()


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
        ray.get(compiled, timeout=COMPILE_S)

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
