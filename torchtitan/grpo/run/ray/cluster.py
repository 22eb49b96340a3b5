"""The Ray cluster of a run, and its ranks: placed together, numbered by node and GPU."""

import ipaddress
import logging
import math
import os
import signal
import sys
import threading
from collections.abc import Iterable
from contextlib import suppress
from typing import Any, Self

import ray
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

from torchtitan.config import JobConfig
from torchtitan.grpo.config.jobs import Job
from torchtitan.grpo.errors import UserError
from torchtitan.grpo.process.addresses import LOOPBACK
from torchtitan.grpo.process.stopping import AT_ONCE_S, end_within
from torchtitan.grpo.run.ray import actors
from torchtitan.grpo.run.ray.outcome import RanksFailed
from torchtitan.grpo.run.ray.servers import Servers

logger = logging.getLogger(__name__)
_OBJECT_STORE_BYTES = 200 * 2**20
"""Shared memory of a cluster of our own: numbers and short texts go through it."""
NO_PLAN = (0, 0)
_AGENT_S = 30.0
_SHUTDOWN_S = 60.0
_LEAVE_S = 5.0
"""How long a rank's process may take to end when Ray ends its actor."""


class Cluster:
    """A connection to the cluster that `[ray] address` names, or a cluster on this machine that ends with it.

    Attributes:
        plan: Inside, the number of ranks, and of the cluster's GPUs.
    """

    def __init__(self, config: JobConfig, plan: tuple[int, int], servers: Servers) -> None:
        """`plan`: NO_PLAN, or that of an earlier attempt. What a lost node had is then waited for, and not left out."""
        self._config, self._cfg, self.plan, self._servers = config, config.ray, plan, servers
        self._own = not config.ray.address

    def __enter__(self) -> Self:
        """Connect.

        Raises:
            UserError: No cluster answers, or it has too few GPUs or cores.
        """
        options: dict[str, Any] = {"address": self._cfg.address}
        if self._own:
            needed = self._cfg.ranks * self._cfg.cpus_per_rank + self._of_servers(cuda=False)["CPU"]
            cpus = max(os.cpu_count() or 1, needed)
            options = {"address": "local", "num_cpus": cpus, "include_dashboard": False}
            options |= {"object_store_memory": _OBJECT_STORE_BYTES}
        try:
            heard = signal.getsignal(signal.SIGTERM)
            ray.init(**options, logging_level=logging.ERROR)
        except (ConnectionError, ValueError, RuntimeError) as error:
            where = f'[ray] address = "{self._cfg.address}"' if self._cfg.address else "[ray] enable = true"
            raise UserError(f"{where}: cannot connect to, or start, a Ray cluster: {error}") from error
        signal.signal(signal.SIGTERM, heard)  # Ray's handler would end this process without its ranks
        logger.info("connected to the Ray cluster at %s", ray.get_runtime_context().gcs_address)
        ray.cloudpickle.register_pickle_by_value(actors)
        try:
            self.plan = self._make_plan() if self.plan == NO_PLAN else self.plan
        except BaseException:
            ray.shutdown()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        """Disconnect, which ends a cluster of the run's own. If that hangs, this process ends."""
        late = threading.Timer(_SHUTDOWN_S, end_within, (AT_ONCE_S,))
        late.daemon = True
        late.start()
        ray.shutdown()
        late.cancel()

    def _make_plan(self) -> tuple[int, int]:
        resources = ray.cluster_resources()
        gpus, cores = (int(resources.get(name, 0)) for name in ("GPU", "CPU"))
        of_servers = self._of_servers(gpus > 0)
        world_size = self._cfg.ranks or max(0, gpus - of_servers["GPU"])
        if not world_size:
            raise UserError(
                f"[ray] ranks = 0 means one for each GPU that no server takes, and the cluster has {gpus}, of which "
                f"servers take {of_servers['GPU']}: set their number"
            )
        each = {"GPU": 1 if gpus else 0, "CPU": self._cfg.cpus_per_rank}
        for name, has in (("GPU", gpus), ("CPU", cores)):
            if world_size * each[name] + of_servers[name] > has:
                servers = f", + {of_servers[name]} for servers ([rollout] replicas)" if of_servers[name] else ""
                key = f"cpus_per_rank = {each[name]} cores" if name == "CPU" else "1 GPU"
                raise UserError(
                    f"[ray] ranks = {world_size} x {key}{servers}, and the cluster has {has}: lower one of them, or "
                    "add nodes"
                )
        return world_size, gpus

    def _of_servers(self, cuda: bool) -> dict[str, int]:
        """GPUs and cores of all servers that the run starts."""
        needs = self._servers.needs(cuda)
        return {name: self._servers.count * needs.get(name, 0) for name in ("GPU", "CPU")}

    def start_ranks(self, argv: list[str], make: str, job: Job) -> "Ranks":
        """Place the actors, give them their ranks, and have each build its trainer: `Ranks.started` are the answers.

        Servers are placed after the ranks, and started with them.
        """
        world_size, gpus = self.plan
        ranks = Ranks(self._config, world_size, gpus, self._servers)
        try:
            ranks.place()
            ranks.start(argv, make, job)
        except BaseException:
            ranks.release()
            raise
        return ranks


class Ranks:
    """One attempt's actors and agents.

    Attributes:
        actors, nodes: By rank; `nodes` are the ids of their nodes.
        agents: By node.
        started: References to the answers of `Rank.start`.
    """

    def __init__(self, config: JobConfig, world_size: int, gpus: int, servers: Servers) -> None:
        self._cfg, self._start_s = config.ray, config.rollout.start_timeout_seconds
        self._world_size, self._gpus = world_size, gpus
        self._servers = servers
        self.actors: list[Any] = []
        self.nodes: list[str] = []
        self.agents: dict[str, Any] = {}
        self.started: list[Any] = []
        self._places: list[dict[str, Any]] = []
        self._group: Any = None

    def place(self) -> None:
        """Create the placement group, an actor in each bundle, and an agent on each node.

        Raises:
            UserError: The resources were not free in time.
        """
        cfg, limit_s = self._cfg, self._start_s
        needs = {"CPU": cfg.cpus_per_rank} | ({"GPU": 1} if self._gpus else {})
        self._group = placement_group([needs] * self._world_size, strategy="PACK")
        if not self._group.wait(limit_s):
            free = {name: value for name, value in ray.available_resources().items() if name in ("CPU", "GPU")}
            raise UserError(
                f"[rollout] start_timeout_seconds = {limit_s:g}: the cluster had no room for {self._world_size} ranks "
                f"with {needs} each, free are {free}: wait for the other jobs, lower ranks, or add nodes"
            )
        gpus = 1 if self._gpus else 0
        self.actors = [
            ray.remote(actors.RankActor)
            .options(
                num_cpus=cfg.cpus_per_rank,
                num_gpus=gpus,
                max_restarts=0,
                scheduling_strategy=PlacementGroupSchedulingStrategy(self._group, bundle),
            )
            .remote()
            for bundle in range(self._world_size)
        ]
        places = self._get([actor.where.remote() for actor in self.actors], limit_s, "the ranks' processes")
        order = in_order(places, ray.get_runtime_context().get_node_id())
        self.actors = [self.actors[i] for i in order]
        self._places = [places[i] for i in order]
        self.nodes = [place["node"] for place in self._places]
        logger.info("ranks in order are on %s", ", ".join(place["address"] for place in self._places))
        self.agents = {
            node: ray.remote(actors.AgentActor)
            .options(
                num_cpus=0,
                max_concurrency=4,
                scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False),
            )
            .remote()
            for node in dict.fromkeys(self.nodes)
        }
        self._get([agent.start.remote(sys.path) for agent in self.agents.values()], limit_s, "the nodes' agents")
        self._servers.place(self._places[0]["address"], self._gpus > 0)

    def start(self, argv: list[str], make: str, job: Job) -> None:
        port = self._get([self.agents[self.nodes[0]].do.remote("free_port")], _AGENT_S, "rank 0's node")[0]
        one_node = len(self.agents) == 1
        address = LOOPBACK if one_node else self._places[0]["address"]
        environment = {name: value for name, value in os.environ.items() if not name.startswith(("RAY_", "CUDA_VIS"))}
        common = ray.put((sys.path, environment, argv, make, job, os.getcwd()))  # once, however many ranks
        self._servers.start(common)
        for rank, actor in enumerate(self.actors):
            own = {"MASTER_ADDR": address, "MASTER_PORT": str(port)} | self._variables(rank)
            self.started.append(actor.start.remote(common, self.agents[self.nodes[rank]], own))

    def _variables(self, rank: int) -> dict[str, str]:
        """Those of torchrun's workers that a trainer reads. It sees its node's GPUs; number i is local rank i's."""
        here = [i for i, node in enumerate(self.nodes) if node == self.nodes[rank]]
        numbers = {
            "RANK": rank,
            "WORLD_SIZE": self._world_size,
            "LOCAL_RANK": here.index(rank),
            "LOCAL_WORLD_SIZE": len(here),
        }
        variables = {name: str(value) for name, value in numbers.items()} | self._servers.variables
        gpus = [gpu for i in here for gpu in self._places[i]["gpus"]]
        return variables | ({"CUDA_VISIBLE_DEVICES": ",".join(gpus)} if gpus else {})

    def kill(self, after_s: float = 0.0) -> None:
        """End every rank's process that is still there after `after_s`, in bounded time."""
        with suppress(ray.exceptions.RayError, TimeoutError):
            ray.get([agent.do.remote("kill", after_s) for agent in self.agents.values()], timeout=_AGENT_S)

    def release(self) -> None:
        """End actors and agents, and give the placement group back. Ranks that have closed lose nothing."""
        self._end(self.actors)
        self.kill(_LEAVE_S)
        self._end(self.agents.values())
        if self._group is not None:
            with suppress(ray.exceptions.RayError):
                remove_placement_group(self._group)

    def _end(self, ended: Iterable[Any]) -> None:
        for actor in ended:
            with suppress(ray.exceptions.RayError):
                ray.kill(actor)

    def _get(self, references: Iterable[Any], timeout_s: float, what: str) -> list[Any]:
        try:
            return ray.get(list(references), timeout=timeout_s)
        except ray.exceptions.GetTimeoutError as error:
            raise UserError(
                f"[rollout] start_timeout_seconds = {self._start_s:g}: {what} did not start within "
                f"{timeout_s:g} s: raise it, or look at the nodes"
            ) from error
        except ray.exceptions.RayError as error:
            raise RanksFailed(f"{what} did not start ({type(error).__name__}): {error}") from error


def in_order(places: list[dict[str, Any]], first_node: str) -> list[int]:
    """Indices of the places in order of rank: this driver's node first, others by address, GPUs by number.

    Ray's own order of bundles is arbitrary. Neighbours in rank exchange the most, so they must share a node.
    """

    def key(index: int) -> tuple[Any, ...]:
        place = places[index]
        gpus = [(int(gpu) if gpu.isdigit() else math.inf, gpu) for gpu in place["gpus"]]
        address = ipaddress.ip_address(place["address"])
        return place["node"] != first_node, address.version, int(address), place["node"], gpus, index

    return sorted(range(len(places)), key=key)
