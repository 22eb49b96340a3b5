"""Part 6: GRPO on Ray nodes of this machine, two trainer actors and two supervised servers; each kind of process dies.

Node 0 has rank 0, a server and the driver, node 1 has rank 1, and node 2 has a server. A node that is killed is
replaced by a new one, as a cloud does.
"""

import os
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from chaos.processes import Broken, metric_lines, until
from chaos.report import Row, row
from tests.helpers.ranks import Ranks
from tests.helpers.ray_nodes import RANK, RANK_CORES, SERVER, RayNodes, driver
from tests.helpers.servers import server_pids
from tests.helpers.trainer_runs import processes_of

FLAGS: dict[str, str | None] = {
    "--training.steps": "100000",
    "--checkpoint.interval": "1",
    "--rollout.replicas": "2",
    "--rollout.api_key_env": "SERVER_KEY",
    "--ray.expose_servers": None,
    "--ray.max_restarts": "100",
    "--rollout.start_timeout_seconds": "600",
    "--comm.init_timeout_seconds": "1800",
}
START_S = 900.0
NOTICED_S, RECOVERED_S, GONE_S = 120.0, 600.0, 120.0
SERVES, IN_TRAFFIC = " serves at http", " is in traffic, with weights of version"
"""What the supervisor says of a server that it has started, and then rank 0."""
RANKS_FAILED = "from the newest checkpoint, if any"
"""What the driver says before it starts the ranks again."""


@dataclass
class Fault:
    """One kind of fault.

    Attributes:
        hit: Does it.
        noticed: The driver's log then says one of these.
        ranks: The run starts again from its newest checkpoint; else only a server is made anew.
    """

    name: str
    hit: Callable[[], None]
    noticed: tuple[str, ...]
    ranks: bool = False


@dataclass
class RayFaults:
    """Every kind of fault in turn, in one run, which the last one ends.

    Attributes:
        wrong: What did not hold.
    """

    folder: Path
    rounds: int
    wrong: list[str] = field(default_factory=list)

    def run(self) -> list[Row]:
        run_folder = self.folder / "run"
        seen: dict[str, list[tuple[float, float]]] = {}
        with self._nodes() as nodes, driver(nodes, run_folder, FLAGS, SERVER_KEY="of-the-campaign") as run:
            until("two servers in traffic", lambda: self._in_traffic(run_folder, 0), START_S, run)
            for _ in range(self.rounds):
                for fault in self._faults(nodes, run_folder):
                    seen.setdefault(fault.name, []).append(self._try(fault, run_folder, run))
            started = time.monotonic()
            run.kill()
            try:
                until("nothing is left", lambda: not self._left(nodes, run_folder), GONE_S)
            except Broken as error:
                raise Broken(f"{error}{''.join(map(_described, self._left(nodes, run_folder)))}") from None
            seen["SIGKILL to the driver: nothing is left"] = [(time.monotonic() - started, 0.0)]
        rows = []
        for name, times in seen.items():
            noticed, recovered = ([seconds[i] for seconds in times if seconds[i]] for i in (0, 1))
            rows.append(row("ray", name, len(times), len(times), noticed, recovered))
        return rows

    def details(self) -> list[str]:
        return []

    def _nodes(self) -> RayNodes:
        return RayNodes(self.folder, RANK_CORES + 1, RANK_CORES, 1)

    def _faults(self, nodes: RayNodes, run_folder: Path) -> Iterator[Fault]:
        """Each finds its process when it is its turn: earlier faults have replaced some."""

        def kill(pids: Callable[[], list[int]], number: int = signal.SIGKILL) -> Callable[[], None]:
            return lambda: os.kill(pids()[-1], number)

        def kill_node(kind: str, cores: int) -> None:
            if not (number := nodes.node_of(nodes.actors(kind)[-1])):  # the driver is on node 0
                raise Broken(f"no {kind} on a node but the head's")
            nodes.kill(number)
            nodes.add(cores)

        made_anew = ("making it anew",)
        yield Fault("SIGKILL to a server", kill(lambda: server_pids(run_folder)), ("starting it again",))
        yield Fault("SIGKILL to a server's supervisor", kill(lambda: nodes.actors(SERVER)), made_anew)
        yield Fault("SIGSTOP to a server's supervisor", kill(lambda: nodes.actors(SERVER), signal.SIGSTOP), made_anew)
        yield Fault("SIGKILL to the raylet of a server's node", lambda: kill_node(SERVER, 1), made_anew)
        yield Fault("SIGKILL to one of two ranks", kill(lambda: nodes.actors(RANK)), (RANKS_FAILED,), ranks=True)
        yield Fault(
            "SIGKILL to the raylet of a rank's node", lambda: kill_node(RANK, RANK_CORES), (RANKS_FAILED,), ranks=True
        )

    def _try(self, fault: Fault, run_folder: Path, run: Ranks) -> tuple[float, float]:
        """Seconds until it was noticed, and until the run trains with two servers."""
        said, step = len(run.log), metric_lines(run_folder)[-1]["step"]
        restarts = 0.0 if fault.ranks else metric_lines(run_folder)[-1]["sync/servers_restarted"]
        started = time.monotonic()
        fault.hit()

        def noticed() -> bool:
            return any(words in run.log[said:] for words in fault.noticed)

        def recovered() -> bool:
            line = metric_lines(run_folder)[-1]
            # Once its supervisor is lost a server counts as restarted, and the old one may be in traffic for a moment.
            _, serves, after = run.log[said:].rpartition(SERVES)
            again = line["sync/servers_restarted"] <= restarts if fault.ranks else serves and IN_TRAFFIC in after
            return bool(again) and line["step"] > step and self._in_traffic(run_folder, restarts + (not fault.ranks))

        until(f"{fault.name}: noticed", noticed, NOTICED_S, run)
        noticed_s = time.monotonic() - started
        step = metric_lines(run_folder)[-1]["step"]
        until(f"{fault.name}: recovered", recovered, RECOVERED_S, run)
        return noticed_s, time.monotonic() - started

    def _in_traffic(self, run_folder: Path, restarts: float) -> bool:
        lines = metric_lines(run_folder)
        return (
            bool(lines)
            and lines[-1]["sync/servers_in_traffic"] == 2
            and (lines[-1]["sync/servers_restarted"] >= restarts)
        )

    def _left(self, nodes: RayNodes, run_folder: Path) -> list[int]:
        return [*processes_of(run_folder), *nodes.actors(RANK), *nodes.actors(SERVER)]


def _described(pid: int) -> str:
    """The process's command, state and parent, on a line."""
    try:
        command = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return f"\n{pid} has just ended"
    state = ", ".join(line for line in lines if line.startswith(("State", "PPid")))
    return f"\n{pid}: {command[:200]} {state}"
