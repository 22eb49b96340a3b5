"""Ray nodes on this machine, each with an address of its own, and the run on them."""

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self

from tests.helpers import ROOT
from tests.helpers.ranks import Ranks
from tests.helpers.servers import parent_of
from tests.helpers.trainer_runs import arguments, environment

RANK_CORES = 2
TWO_RANKS: dict[str, str | None] = {
    "--ray.enable": None,
    "--ray.ranks": "2",
    "--ray.cpus_per_rank": str(RANK_CORES),
    "--rollout.start_timeout_seconds": "120",
}
RANK, SERVER = "RankActor", "ServerActor"


class RayNodes:
    """A cluster with these numbers of cores. A rank takes two, and a server one. Node 0 is the head, and the driver's.

    Args:
        folder: For Ray's token.
    """

    def __init__(self, folder: Path, *cores: int) -> None:
        self._folder, self._cores = folder, cores
        self._nodes: list[Any] = []

    def __enter__(self) -> Self:
        from ray.cluster_utils import Cluster

        self._before = dict(os.environ)
        own = {"RAY_AUTH_TOKEN_PATH": str(self._folder / "token"), "RAY_USAGE_STATS_ENABLED": "0"}
        own |= {"RAY_worker_niceness": "0"}  # other tests run beside it, and take the cores from what is nice
        os.environ.update(own | environment())
        self._cluster = Cluster()
        try:
            for cores in self._cores:
                self.add(cores)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._cluster.shutdown()
        os.environ.clear()
        os.environ.update(self._before)

    @property
    def address(self) -> str:
        return self._cluster.address

    def add(self, cores: int) -> None:
        """Add a node, at 127.0.0.2, 127.0.0.3 and so on. The head is at this machine's address."""
        number = len(self._nodes)
        own = {"node_ip_address": f"127.0.0.{number + 1}"} if number else {"include_dashboard": False}
        self._nodes.append(self._cluster.add_node(num_cpus=cores, object_store_memory=80 * 2**20, **own))

    def kill(self, number: int) -> None:
        """kill -9 to a node's raylet. Its workers end once it is no process any more, so it must not stay a zombie."""
        os.kill(self._raylet(number), signal.SIGKILL)
        self._nodes[number].all_processes["raylet"][0].process.wait(10)

    def actors(self, kind: str = RANK) -> list[int]:
        """Processes of the actors of this kind, in order of their nodes."""
        found = []
        for path in Path("/proc").glob("[0-9]*"):
            try:
                words = (path / "cmdline").read_bytes()
            except OSError:
                continue
            if words.startswith(f"ray::{kind}".encode()) and (number := self.node_of(int(path.name))) is not None:
                found.append((number, int(path.name)))
        return [pid for _, pid in sorted(found)]

    def node_of(self, pid: int) -> int | None:
        """The number of the node whose raylet has started the process."""
        raylets = [self._raylet(number) for number in range(len(self._nodes))]
        parent = parent_of(pid)
        return raylets.index(parent) if parent in raylets else None

    def _raylet(self, number: int) -> int:
        return self._nodes[number].all_processes["raylet"][0].process.pid


@contextmanager
def driver(nodes: RayNodes, folder: Path, flags: dict[str, str | None], **variables: str) -> Iterator[Ranks]:
    """A run of two ranks on these nodes."""
    folder.parent.mkdir(exist_ok=True)
    words = arguments(folder, {"--ray.address": nodes.address} | TWO_RANKS | flags)
    log = folder.parent / f"{folder.name}.log"
    run = Ranks(1, ROOT / "grpo_train.py", *words, log=log, environment=environment() | variables, found=False)
    try:
        yield run
    finally:
        run.kill()
