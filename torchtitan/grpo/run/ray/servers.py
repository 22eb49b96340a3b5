"""The servers of `[rollout] replicas` under Ray: each has an actor that supervises it, and a placement group.

    driver, thread "ray-server 0"  ->  actor: servers.Supervisor  ->  guard  ->  server
    driver, thread "ray-server 1"  ->  ...

The supervisor in the actor starts a server again that has ended. The thread here makes an actor anew that has died,
with its node or alone. Rank 0 hears of both by files (`servers/launched.py`).
"""

import dataclasses
import logging
import secrets
import threading
import time
import traceback
from contextlib import suppress
from pathlib import Path
from typing import Any

import ray
from ray.util.placement_group import placement_group, placement_group_table, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from torchtitan.config import JobConfig
from torchtitan.grpo.errors import UserError
from torchtitan.grpo.process.addresses import LOOPBACK
from torchtitan.grpo.run.ray import actors
from torchtitan.grpo.servers.launched import TOKEN, Notices
from torchtitan.grpo.servers.plan import LOG_FOLDER
from torchtitan.grpo.servers.restarts import Restarts
from torchtitan.grpo.servers.state import ServerState

logger = logging.getLogger(__name__)
CORES = 1
"""That Ray reserves for a server. It may use more."""
_WAIT_S = 5.0
"""An actor says so often how its server is, if nothing has changed."""
_ANSWER_S = 15.0
"""How much later it may do so. One that is silent for longer is lost."""
_CLOSE_S = 15.0
"""Longest wait for the end of a server. Its supervisor takes less."""
_POLL_S = 0.2


class Servers:
    """The servers of one attempt. Without `replicas`, nothing.

        with closing(Servers(config)) as servers:
            servers.place(address, cuda)    # of rank 0's node
            servers.start(common)           # they load once rank 0 has asked for them
            ...                             # ranks that have `servers.variables` in their environment

    Attributes:
        variables: Of rank 0's environment.
    """

    def __init__(self, config: JobConfig) -> None:
        self.config = config
        self._token = secrets.token_hex(8)
        self.notices = Notices(Path(config.job.dump_folder).absolute() / LOG_FOLDER, self._token)
        self.closing = threading.Event()
        self.address, self.cuda, self.common = "", False, None
        self._servers = [_Server(self, index) for index in range(config.rollout.replicas)]

    @property
    def count(self) -> int:
        return len(self._servers)

    @property
    def variables(self) -> dict[str, str]:
        return {TOKEN: self._token} if self._servers else {}

    def needs(self, cuda: bool) -> dict[str, int]:
        """Cores and GPUs of one server, on a cluster with or without GPUs."""
        return {"CPU": CORES} | ({"GPU": self.config.rollout.gpus_per_server} if cuda else {})

    def place(self, address: str, cuda: bool) -> None:
        """Reserve what each server needs. `address` is of rank 0's node.

        Raises:
            UserError: The resources were not free in time.
        """
        self.address, self.cuda = address, cuda
        for server in self._servers:
            server.place()

    def start(self, common: Any) -> None:
        """Begin to keep them. `common`: what every actor gets, in Ray."""
        self.common = common
        for server in self._servers:
            server.start()

    def write(self) -> None:
        """Tell rank 0 how they are."""
        try:
            self.notices.write([server.state for server in self._servers])
        except OSError as error:  # rank 0 writes there too, and ends the run
            logger.error(f"{self.notices.folder}: cannot be written to ({error.strerror}): rank 0 hears of no server")

    def close(self) -> None:
        """End all servers and their actors, at the same time."""
        self.closing.set()
        for server in self._servers:
            server.ask_to_close()
        deadline = time.monotonic() + _CLOSE_S
        for server in self._servers:
            if server.is_alive():
                server.join(max(0.0, deadline - time.monotonic()))
            server.kill()  # unless its thread has closed it
        self.notices.remove()


class _Server(threading.Thread):
    """The thread that keeps one actor.

    Attributes:
        state: How the server is, with the ends and restarts of all its supervisors. It keeps its last address until it
            serves at another one.
    """

    def __init__(self, servers: Servers, index: int) -> None:
        super().__init__(name=f"ray-server {index}", daemon=True)
        self.state = ServerState()
        self._servers, self._index = servers, index
        self._actor: Any = None
        self._group: Any = None
        self._node = self._host = ""
        self._before = ServerState()

    def place(self) -> None:
        """Create the placement group, and choose the address to listen on.

        Raises:
            UserError: The resources were not free in time.
        """
        servers, limit_s = self._servers, self._servers.config.rollout.start_timeout_seconds
        needs = servers.needs(servers.cuda)
        here = {} if servers.config.ray.expose_servers else {f"node:{servers.address}": 0.001}
        self._group = placement_group([needs | here], strategy="STRICT_PACK")
        deadline = time.monotonic() + limit_s
        while not (has_room := self._group.wait(_POLL_S)) and time.monotonic() < deadline:
            if servers.closing.is_set():
                return
        if not has_room:
            where = "the cluster"
            change = "lower [rollout] replicas or gpus_per_server, or add nodes"
            if here:
                where = f"the node of rank 0, {servers.address},"
                change += (
                    ". Servers on other nodes need [ray] expose_servers = true: whoever reaches one can replace its "
                    "weights, so name a key in [rollout] api_key_env, or have a firewall"
                )
            raise UserError(
                f"[rollout] start_timeout_seconds = {limit_s:g}: {where} had no room for server {self._index} with "
                f"{needs}: {change}"
            )
        self._node = placement_group_table(self._group)["bundles_to_node_id"][0]
        address = next(node["NodeManagerAddress"] for node in ray.nodes() if node["NodeID"] == self._node)
        self._host = LOOPBACK if address == servers.address else address
        if self._host != LOOPBACK and not servers.config.rollout.api_key_env:
            logger.warning(
                f"server {self._index} listens on {address}, and [rollout] api_key_env is empty: whoever reaches it "
                "can replace its weights"
            )

    def run(self) -> None:
        closing, restarts = self._servers.closing, Restarts()
        while True:
            problem = ""
            try:
                why = self._keep()
            except UserError as error:
                why = problem = str(error)
            except ray.exceptions.RayTaskError as error:
                why = problem = f"cannot be supervised: {error}"
            except (ray.exceptions.RayError, TimeoutError) as error:
                why = f"has lost its supervisor on node {self._node[:12]} ({type(error).__name__})"
                self.kill()  # it would not answer
            except Exception:  # without this thread nobody would make it anew
                why = problem = f"cannot be kept any longer:\n{traceback.format_exc()}"
            self.release()
            if closing.is_set():
                return
            name = f"server {self._index} {self.state.url}".rstrip()
            if not problem and (often := restarts.ended()):
                problem = f"{name} {why} {often}"
            if problem:
                logger.error(problem)
                self._is_wanted()  # else rank 0 would not hear of it
            self._ended(f"server {self._index} {why}", problem)
            if problem:
                return
            logger.warning(f"{name} {why}: making it anew in {restarts.pause_s:g} s")
            if closing.wait(restarts.pause_s):
                return

    def ask_to_close(self) -> None:
        actor = self._actor
        with suppress(ray.exceptions.RayError):
            if actor is not None:
                actor.do.remote("close")

    def release(self) -> None:
        """End the server and its actor, and give the placement group back."""
        if self._actor is not None:
            with suppress(ray.exceptions.RayError, TimeoutError):
                ray.get(self._actor.do.remote("close"), timeout=_CLOSE_S)
        self.kill()

    def kill(self) -> None:
        """The same at once: the guard ends the server."""
        actor, group, self._actor, self._group = self._actor, self._group, None, None
        with suppress(ray.exceptions.RayError):
            if actor is not None:
                ray.kill(actor)  # also one that a signal has stopped
        with suppress(ray.exceptions.RayError):
            if group is not None:
                remove_placement_group(group)

    def _keep(self) -> str:
        """Have an actor supervise the server. Returns when it is time to close.

        Raises:
            UserError: The server cannot be started, or there is no room for it.
            RayError, TimeoutError: The actor is lost.
        """
        servers = self._servers
        limit_s, closing = servers.config.rollout.start_timeout_seconds, servers.closing
        if self._group is None:
            self.place()
        if closing.is_set():
            return ""
        needs = servers.needs(servers.cuda)
        self._actor = (
            ray.remote(actors.ServerActor)
            .options(
                num_cpus=needs["CPU"],
                num_gpus=needs.get("GPU", 0),
                max_restarts=0,
                max_concurrency=4,
                scheduling_strategy=PlacementGroupSchedulingStrategy(self._group, 0),
            )
            .remote()
        )
        ray.get(self._actor.start.remote(servers.common, self._index), timeout=limit_s)
        if not self._is_wanted():
            return ""
        if problem := ray.get(self._actor.do.remote("serve", self._host), timeout=limit_s):
            raise UserError(problem)
        known = None
        while not closing.is_set():
            state = ray.get(self._actor.do.remote("state", known, _WAIT_S), timeout=_WAIT_S + _ANSWER_S)
            if state != known:
                known = state
                self._tell(state)
        return ""

    def _is_wanted(self) -> bool:
        """Wait until rank 0 has asked for servers. False: it is time to close."""
        while not self._servers.notices.is_wanted():
            if self._servers.closing.wait(_POLL_S):
                return False
        return True

    def _tell(self, state: ServerState) -> None:
        """Of the actor that there is now."""
        url = state.url if state.healthy or not self.state.url else self.state.url
        ends, restarts = self._before.ends + state.ends, self._before.restarts + state.restarts
        self.state = dataclasses.replace(state, url=url, ends=ends, restarts=restarts, why=state.why or self.state.why)
        self._servers.write()

    def _ended(self, why: str, problem: str) -> None:
        """The actor is lost."""
        restarts = self.state.restarts + (not problem)
        self.state = dataclasses.replace(
            self.state, healthy=False, ends=self.state.ends + 1, restarts=restarts, why=why, given_up=problem
        )
        self._before = self.state
        self._servers.write()
