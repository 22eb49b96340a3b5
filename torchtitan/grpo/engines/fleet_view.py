"""The servers of a run as those who send requests see them: which may get one, and what became of it."""

import threading
from collections.abc import Callable

from torchtitan.grpo.engines.server import Server
from torchtitan.grpo.errors import PlainError


class FleetError(PlainError, RuntimeError):
    """Fewer servers are left than `[rollout] min_servers`. The message names each lost server and the reason."""


class Keeper:
    """Who starts lost servers again. This one does not; see `servers.supervisor.Supervisor`."""

    restarts = 0

    def may_return(self, url: str, lost_at: float) -> bool:
        """Whether a server that was lost then counts as left, because it is being started again. Must not wait."""
        return False

    def why_down(self, url: str) -> str:
        """Why it is not started again, "" if nothing is to be said."""
        return ""


class FleetView:
    """The servers of a run, in the order of their list, as those who send requests see them. No method waits.

    Attributes:
        keeper: Who starts the servers again, if somebody does.
    """

    def __init__(self) -> None:
        self.keeper = Keeper()
        self._lock = threading.Lock()
        self._servers: list[Server] = []
        self._listeners: list[Callable[[], None]] = []
        self._changed: list[set[Server]] = []

    @property
    def servers(self) -> list[Server]:
        """The servers that are listed now; a copy."""
        with self._lock:
            return list(self._servers)

    def eligible(self, min_version: int) -> list[Server]:
        """The servers in traffic that have acknowledged `min_version` or newer."""
        with self._lock:
            return [server for server in self._servers if server.serves(min_version)]

    def describe(self) -> str:
        """All servers with their states, in one line."""
        with self._lock:
            return "; ".join(server.describe() for server in self._servers)

    def add_listener(self, call: Callable[[], None], changed: set[Server] | None = None) -> None:
        """Have `call` called after every change, on the thread that made it. It must neither block nor raise. Before
        that, `changed` gets the servers that are others than they were."""
        with self._lock:
            self._listeners.append(call)
            self._changed += [] if changed is None else [changed]

    def check(self) -> None:
        """Raises FleetError if too few servers are left, or the error that keeps them from newer weights."""
        raise NotImplementedError

    def suspect(self, server: Server, error: Exception, what: str = "a request failed") -> None:
        """Take it out of traffic until weight sync knows why a request failed there with `error`.

        For a server that is out of traffic already this has no effect.
        """
        raise NotImplementedError

    def fall_silent(self, server: Server, why: str) -> None:
        """It owes answers and did not reply in time."""
        raise NotImplementedError

    def heard(self, server: Server) -> None:
        """It has replied."""
        raise NotImplementedError

    def answered(self, server: Server) -> None:
        """It has answered a request."""
        raise NotImplementedError

    def _notify(self, *servers: Server) -> None:
        with self._lock:
            listeners = list(self._listeners)
            for changed in self._changed:
                changed.update(servers)
        for call in listeners:
            call()
