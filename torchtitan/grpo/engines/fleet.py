"""The servers of a run, as weight sync changes them. Their list may change during a run (`[rollout] urls_file`)."""

import logging
import os
import time
from collections.abc import Callable, Iterable
from typing import Any

from torchtitan.grpo.config.urls import read_urls
from torchtitan.grpo.engines.fleet_view import FleetError, FleetView
from torchtitan.grpo.engines.protocol import EngineError
from torchtitan.grpo.engines.server import Server, one_line
from torchtitan.grpo.errors import UserError

logger = logging.getLogger(__name__)

BACKOFF_S, BACKOFF_MAX_S = 1.0, 8.0
"""How long a healthy server that fails its second request in a row stays out of traffic; twice as long each time."""


class Fleet(FleetView):
    """The servers as weight sync changes them. Any thread may call any method; none waits.

    A server is out of traffic until it is admitted with the version that it acknowledged. It stays in traffic until it
    is withdrawn (weight sync found it slow or gone), suspected (a request failed there) or no longer listed. Only
    `admit` brings it back. A server that left the list is not in `servers` and gets no more requests. Nothing that a
    worker still reports about it has an effect. Its running requests may end.

    Args:
        urls: Base addresses, one per server. Ignored if there is a `urls_file`.
        make: Makes the server of an address. It must not block or call the fleet.
        min_servers: `[rollout] min_servers`, see `check`.
        urls_file: `[rollout] urls_file`, see `read_urls` and `reread`.

    Attributes:
        keeper: Who starts the servers again, if somebody does.
        alone: There will never be a second server.
        resting: Between `rest` and `rise`.
        requests_in_flight: Our running requests at a server. Asked after `hold`, it misses none that is under way.
        versions_in_use: Of a server; see `Server.versions_in_use`. None: not known now.

    Raises:
        UserError: The `urls_file` is bad, or lists fewer than `min_servers`.
    """

    def __init__(self, urls: list[str], make: Callable[[str], Server], min_servers: int = 1, urls_file: str = ""):
        super().__init__()
        self.min_servers = min_servers
        self.alone = self.resting = False
        self.requests_in_flight: Callable[[Server], int] = lambda server: server.in_flight
        self.versions_in_use: Callable[[Server], set[int] | None] = Server.versions_in_use
        self._make = make
        self._urls_file = urls_file
        self._stamp = _stamp(urls_file)
        self._error: BaseException | None = None
        if urls_file:
            urls = read_urls(urls_file)
            if len(urls) < min_servers:
                raise UserError(
                    f"[rollout] min_servers = {min_servers} is over the number of servers in {self._list_key}, "
                    f"{len(urls)}"
                )
        self._servers = [make(url.rstrip("/")) for url in urls]

    @property
    def may_grow(self) -> bool:
        """Whether servers may be added."""
        return bool(self._urls_file) and not self.alone

    def admit(self, server: Server, version: int) -> None:
        """Put it into traffic: the server has acknowledged `version` and is resumed (I3).

        One that is healthy but goes on failing requests comes back later each time: until then it stays suspected.
        """
        with self._lock:
            if server not in self._servers or server.distrusted:
                return
            changed = (server.version, server.silent) != (version, False)
            server.version, server.silent = version, False
            comes = not server.suspected or time.monotonic() >= server.back_at
            returned = comes and not server.in_traffic
            if comes:
                server.in_traffic, server.lost, server.suspected, server.reason = True, False, False, ""
                server.held = False
        if returned:
            weights = f"weights of version {version}" if version >= 0 else "the weights that it was started with"
            logger.info("%s is in traffic, with %s", server.url, weights)
        if comes or changed:
            self._notify(server)

    def hold(self, server: Server) -> None:
        """Send it nothing new until it is admitted again, so that it can finish its answers before an update."""
        with self._lock:
            server.held = True
        self._notify(server)

    def withdraw(self, server: Server, reason: str, lost: bool = True) -> None:
        """Take it out of traffic until it is admitted again.

        Args:
            lost: The server failed. False: it is slow, or busy with an update. A lost server stays lost until it is
                admitted, whatever this says.
        """
        with self._lock:
            if server not in self._servers:
                return
            before = (server.in_traffic, server.lost, server.suspected and not server.distrusted)
            if lost and not server.lost:
                server.losses, server.lost_at = server.losses + 1, time.monotonic()
            server.suspicions = 0 if lost else server.suspicions
            server.in_traffic, server.lost, server.suspected = False, server.lost or lost, False
            server.held = server.distrusted = False
            server.silent = server.silent and not lost
            server.reason = one_line(reason)
            changed = before != (server.in_traffic, server.lost, server.suspected)
        if changed:
            logger.warning("%s is %s: %s", server.url, "lost" if server.lost else "out of traffic", server.reason)
        self._notify(server)

    def suspect(self, server: Server, error: Exception, what: str = "a request failed") -> None:
        """See `FleetView.suspect`."""
        with self._lock:
            if server not in self._servers or not server.in_traffic:
                return
            server.in_traffic, server.suspected = False, True
            server.suspicions += 1
            if server.suspicions > 1:
                server.back_at = time.monotonic() + min(BACKOFF_S * 2 ** (server.suspicions - 2), BACKOFF_MAX_S)
            server.reason = one_line(f"{what}: {error}")
        logger.warning("%s is out of traffic: %s", server.url, server.reason)
        self._call(server)

    def fall_silent(self, server: Server, why: str) -> None:
        """It owes answers and did not reply in time: it leaves traffic and pushes until it is `heard`.

        This has no effect for the last server in traffic, since no other one could take its part. Nor has it while the
        server loads weights, when some reply late: a push drops it if it is.
        """
        with self._lock:
            others = any(other.in_traffic for other in self._servers if other is not server)
            if server.silent or not others or (server.updating and server.in_traffic):
                return
            server.silent = True
        self.suspect(server, EngineError(why), "it does not reply")
        self._notify(server)

    def rest(self) -> None:
        """The servers are to sleep. Weight sync ends what it does with each, which is `at_rest` then."""
        self.resting = True
        self._call(*self.servers)

    def rise(self) -> None:
        """They may wake up: weight sync connects and feeds them again."""
        self.resting = False
        self._call(*self.servers)

    def heard(self, server: Server) -> None:
        """It has replied."""
        if server.silent:
            server.silent = False
            self._notify(server)

    def started(self, url: str) -> None:
        """Its keeper has started the server at this address again and found it healthy. Weight sync need not look."""
        with self._lock:
            started = [server for server in self._servers if server.url == url]
            for server in started:
                server.starts += 1
        self._call(*started)

    def distrust(self, server: Server, reason: str) -> None:
        """It is lost, whatever its health, until weight sync has connected it again and fed it.

        For a server that is out of traffic already this has no effect.
        """
        with self._lock:
            if server not in self._servers or not server.in_traffic:
                return
            server.in_traffic, server.lost, server.suspected, server.distrusted = False, True, True, True
            server.distrusts += 1
            server.losses, server.lost_at, server.suspicions = server.losses + 1, time.monotonic(), 0
            server.reason = one_line(reason)
        logger.warning("%s is lost: %s", server.url, server.reason)
        self._call(server)

    def answered(self, server: Server) -> None:
        """It has answered a request."""
        if server.suspicions:
            server.suspicions = 0
            self._notify(server)

    def fail(self, error: BaseException) -> None:
        """No server will get newer weights, because of this error. `check` raises it for everyone who waits."""
        with self._lock:
            self._error = self._error or error
        self._notify()

    def check(self) -> None:
        """Check that enough servers are left, and that weight sync still works.

        A lost server that its keeper is starting again counts as left.

        Raises:
            FleetError: Fewer than `[rollout] min_servers` are listed and not lost.
            The error that `fail` was given.
        """
        if self._error is not None:
            raise self._error
        with self._lock:
            servers = list(self._servers)
        gone = [server for server in servers if server.lost and not self.keeper.may_return(server.url, server.lost_at)]
        left = len(servers) - len(gone)
        if left < self.min_servers:
            lost = [server.describe() + self.keeper.why_down(server.url) for server in gone]
            why = "; ".join(lost) if lost else f"no other is listed in {self._list_key}"
            raise FleetError(
                f"{left} of {left + len(lost)} servers left, [rollout] min_servers = {self.min_servers}: {why}"
            )

    def states(self, servers: Iterable[Server], names: tuple[str, ...]) -> list[list[Any]]:
        """These attributes of each server, all of one moment."""
        with self._lock:
            return [[getattr(server, name) for name in names] for server in servers]

    def reread(self) -> tuple[list[Server], list[Server]]:
        """Read `urls_file` again if it has changed. If it has not, this costs one `stat`.

        A missing file or a bad line is logged once and has no effect. To change the list, write a new file and rename
        it: a list that is written in place may be read before it is complete.

        Returns:
            (added, removed): New servers, which are not in traffic yet, and those that are no longer listed. A server
            that stays listed keeps its object. One that returns to the list gets a new object.
        """
        stamp = _stamp(self._urls_file)
        with self._lock:
            if stamp == self._stamp:
                return [], []
        try:
            urls, problem = read_urls(self._urls_file), None
        except UserError as error:
            urls, problem = [], error
        if _stamp(self._urls_file) != stamp:
            return [], []  # being written right now: the next call reads it
        if problem:
            logger.error("%s. The servers stay as they are.", problem)
        with self._lock:
            self._stamp = stamp
            if problem:
                return [], []
            before, known = self._servers, {server.url: server for server in self._servers}
            self._servers = [known.get(url) or self._make(url) for url in urls]
            added = [server for server in self._servers if server.url not in known]
            removed = [server for server in known.values() if server not in self._servers]
            changed = self._servers != before
            for server in removed:
                server.in_traffic, server.suspected, server.reason = False, False, "no longer in [rollout] urls_file"
        for server in added:
            logger.info("%s is new in %s", server.url, self._list_key)
        for server in removed:
            logger.info("%s is out of traffic: %s", server.url, server.reason)
        if changed:
            self._notify()
        return added, removed

    def _call(self, *servers: Server) -> None:
        for server in servers:
            server.call()
        self._notify(*servers)

    @property
    def _list_key(self) -> str:
        return f"[rollout] urls_file ({self._urls_file})" if self._urls_file else "[rollout] urls"


def _stamp(path: str) -> tuple[int, int, int] | None:
    """A value that changes with the file; None if there is no file. The inode reveals a renamed file."""
    try:
        status = os.stat(path)
    except OSError:
        return None
    return status.st_mtime_ns, status.st_size, status.st_ino
