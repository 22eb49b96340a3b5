"""The classes that Ray gets. It sends them by value (`cluster.py` asks for that).

A worker process of Ray could not import this module first: `torchtitan_overlay` must come before `torchtitan`, and the
path to both comes with the first call. So nothing here imports this project but inside a method.
"""

import os
import sys
from typing import Any


class RankActor:
    """Holds one rank. Ray runs its methods in the main thread, as it has neither concurrency groups nor coroutines."""

    def where(self) -> dict[str, Any]:
        """Where this actor was placed."""
        import ray

        context = ray.get_runtime_context()
        gpus = [str(gpu) for gpu in ray.get_gpu_ids()]
        address = ray.util.get_node_ip_address()
        return {"node": context.get_node_id(), "address": address, "gpus": gpus, "pid": os.getpid()}

    def start(self, common: tuple[Any, ...], *own: Any) -> int | dict[str, Any]:
        """`common`: what every rank gets, put into Ray once: the driver's `sys.path`, and arguments of `Rank`."""
        paths, *arguments = common
        sys.path[:] = list(dict.fromkeys([*paths, *sys.path]))
        import torchtitan_overlay  # noqa: F401  before torchtitan

        from torchtitan.grpo.run.ray.rank import Rank

        self.rank = Rank(*own, *arguments)
        return self.rank.start()

    def train(self) -> int | dict[str, Any]:
        return self.rank.train()

    def call(self, order: int) -> int | dict[str, Any]:
        return self.rank.call(order)

    def join_graph(self, bell: str) -> int:
        return self.rank.join_graph(bell)

    def serve(self) -> None:
        self.rank.serve()

    def answer(self, order: bytes) -> bytes | dict[str, Any]:
        return self.rank.answer(order)

    def close(self) -> dict[str, Any]:
        return self.rank.close()


class AgentActor:
    """Holds a node's agent. Its methods run in several threads."""

    def start(self, paths: list[str]) -> None:
        sys.path[:] = list(dict.fromkeys([*paths, *sys.path]))
        import torchtitan_overlay  # noqa: F401  before torchtitan

        from torchtitan.grpo.run.ray.node import NodeAgent

        self.agent = NodeAgent()

    def do(self, name: str, *arguments: Any) -> Any:
        return getattr(self.agent, name)(*arguments)


class ServerActor:
    """Supervises one server. Its methods run in several threads."""

    def start(self, common: tuple[Any, ...], *own: Any) -> None:
        """`common`: as in `RankActor.start`."""
        paths, *arguments = common
        sys.path[:] = list(dict.fromkeys([*paths, *sys.path]))
        import torchtitan_overlay  # noqa: F401  before torchtitan

        from torchtitan.grpo.run.ray.supervised import SupervisedServer

        self.server = SupervisedServer(*own, *arguments)

    def do(self, name: str, *arguments: Any) -> Any:
        return getattr(self.server, name)(*arguments)
