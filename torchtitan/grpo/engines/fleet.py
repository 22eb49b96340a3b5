"""Which inference servers there are, which of them may be asked, and which weights each of them has.

The collector asks here where a request may go; weight sync's workers say here what became of a server. The list of
servers may change during a run (`[rollout] urls_file`).
"""

import logging
import os
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from torchtitan.grpo.config.urls import url_problem
from torchtitan.grpo.engines.engine import Engine
from torchtitan.grpo.engines.http_control import HttpControl
from torchtitan.grpo.engines.protocol import EngineClient
from torchtitan.grpo.errors import UserError

logger = logging.getLogger(__name__)


class FleetError(RuntimeError):
    """Fewer servers are left than `[rollout] min_servers`. The message names every lost one and why it was lost."""


@dataclass(eq=False)
class Server:
    """One server as the trainer knows it. Its `Fleet` changes it; others read.

    Attributes:
        url: Base address, without a slash at its end.
        control: Its control routes, for weight sync.
        client: Its generation route, for the collector, which closes it.
        check: Asks it whether it is set up as the trainer needs it; raises UserError if not.
        version: The newest weight version that it has acknowledged, -1 for none.
        in_traffic: Requests may go there.
        lost: It failed. It counts against `[rollout] min_servers` until it is admitted again.
        held: No new requests go there until it is admitted again; it finishes those under way.
        suspected: A request failed there. Weight sync's worker finds out what is wrong, and admits or withdraws it.
        reason: Why it is out of traffic, "" while it is in traffic.
        in_flight: Our requests under way there; the collector's event loop alone writes it.
    """

    url: str
    control: HttpControl
    client: EngineClient | None = None
    engine: Engine | None = None
    check: Callable[[], None] = lambda: None
    version: int = -1
    in_traffic: bool = False
    lost: bool = False
    held: bool = False
    suspected: bool = False
    reason: str = "has not been given any weights yet"
    in_flight: int = 0

    def serves(self, min_version: int) -> bool:
        """Whether a request that needs weights of this version or newer may go there."""
        return self.in_traffic and not self.held and self.version >= min_version

    def describe(self) -> str:
        state = "in traffic" if self.in_traffic else "lost" if self.lost else "out of traffic"
        return f"{self.url}: {state}, version {self.version}" + (f", {self.reason}" if self.reason else "")


class Fleet:
    """The servers of a run, in the order of their list. Any method may be called from any thread; none waits.

    A server is out of traffic until it is admitted with the version that it acknowledged. From then on it is in
    traffic until it is withdrawn (weight sync found it slow or gone), suspected (a request failed there) or no longer
    listed; only `admit` brings it back. A server that left the list is no longer in `servers`, is never picked again,
    and whatever a worker still says about it changes nothing; requests under way there may end.

    Args:
        urls: Base addresses, one per server. Left alone if there is an `urls_file`.
        make: Makes the server of an address; must not block, nor call the fleet.
        min_servers: `[rollout] min_servers`, see `check`.
        urls_file: `[rollout] urls_file`, see `read_urls` and `reread`.

    Raises:
        UserError: The `urls_file` is bad, or lists fewer than `min_servers`.
    """

    def __init__(self, urls: list[str], make: Callable[[str], Server], min_servers: int = 1, urls_file: str = ""):
        self.min_servers = min_servers
        self._make = make
        self._urls_file = urls_file
        self._stamp = _stamp(urls_file)
        self._lock = threading.Lock()
        self._listeners: list[Callable[[], None]] = []
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
    def servers(self) -> list[Server]:
        """The servers of the list as it is now; a copy."""
        with self._lock:
            return list(self._servers)

    @property
    def may_grow(self) -> bool:
        """Servers may be added."""
        return bool(self._urls_file)

    def admit(self, server: Server, version: int) -> None:
        """Into traffic: the server has acknowledged `version` and is resumed."""
        with self._lock:
            if server not in self._servers:
                return
            returned = not server.in_traffic
            server.version = version
            server.in_traffic, server.lost, server.suspected, server.reason = True, False, False, ""
            server.held = False
        if returned:
            logger.info("%s is in traffic, with weights of version %d", server.url, version)
        self._notify()

    def hold(self, server: Server) -> None:
        """Send it nothing new until it is admitted again, for an update that its running answers must not see."""
        with self._lock:
            server.held = True

    def withdraw(self, server: Server, reason: str, lost: bool = True) -> None:
        """Out of traffic until admitted again. `lost`: it failed; False: it is slow, or busy with its weights.

        A lost server stays lost until it is admitted, whatever `lost` says.
        """
        with self._lock:
            if server not in self._servers:
                return
            before = (server.in_traffic, server.lost, server.suspected)
            server.in_traffic, server.lost, server.suspected = False, server.lost or lost, False
            server.held = False
            server.reason = _one_line(reason)
            changed = before != (server.in_traffic, server.lost, server.suspected)
        if changed:
            logger.warning("%s is %s: %s", server.url, "lost" if server.lost else "out of traffic", server.reason)
        self._notify()

    def suspect(self, server: Server, error: Exception) -> None:
        """Out of traffic until weight sync has found out: `error` is how a request failed there.

        Of a server that is out of traffic already this says nothing new, and changes nothing.
        """
        with self._lock:
            if server not in self._servers or not server.in_traffic:
                return
            server.in_traffic, server.suspected = False, True
            server.reason = _one_line(f"a request failed: {error}")
        logger.warning("%s is out of traffic: %s", server.url, server.reason)
        self._notify()

    def fail(self, error: BaseException) -> None:
        """No server will get newer weights, for this reason: whoever waits for one is told so by `check`."""
        with self._lock:
            self._error = self._error or error
        self._notify()

    def check(self) -> None:
        """Check that enough servers are left, and that they are looked after.

        Raises:
            FleetError: Fewer than `[rollout] min_servers` are listed and not lost.
            What `fail` was given.
        """
        if self._error is not None:
            raise self._error
        with self._lock:
            lost = [server.describe() for server in self._servers if server.lost]
            left = len(self._servers) - len(lost)
        if left < self.min_servers:
            why = "; ".join(lost) if lost else f"no other is listed in {self._list_key}"
            raise FleetError(
                f"{left} of {left + len(lost)} servers left, [rollout] min_servers = {self.min_servers}: {why}"
            )

    def eligible(self, min_version: int) -> list[Server]:
        """The servers in traffic that have acknowledged `min_version` or newer."""
        with self._lock:
            return [server for server in self._servers if server.serves(min_version)]

    def describe(self) -> str:
        """Every server with its state, in one line."""
        with self._lock:
            return "; ".join(server.describe() for server in self._servers)

    def reread(self) -> tuple[list[Server], list[Server]]:
        """Take up `urls_file` if it has changed since it was last read; otherwise this costs one `stat`.

        A file that is missing or has a bad line is logged once and changes nothing until it changes again. Write the
        new list beside the old one and rename it: a list that is written in place may be read half.

        Returns:
            (added, removed): New servers, which are not in traffic yet, and those that are no longer listed. A server
            that stays listed keeps its object; one that comes back to the list is a new one.
        """
        stamp = _stamp(self._urls_file)
        with self._lock:
            if stamp == self._stamp:
                return [], []
        urls, problem = [], None
        try:
            urls = read_urls(self._urls_file)
        except UserError as error:
            problem = error
        if _stamp(self._urls_file) != stamp:
            return [], []  # being written just now: the next call takes it up
        if problem:
            logger.error("%s. The servers stay as they are.", problem)
        with self._lock:
            self._stamp = stamp
            if problem:
                return [], []
            known = {server.url: server for server in self._servers}
            self._servers = [known.get(url) or self._make(url) for url in urls]
            added = [server for server in self._servers if server.url not in known]
            removed = [server for server in known.values() if server not in self._servers]
            for server in removed:
                server.in_traffic, server.suspected, server.reason = False, False, "no longer in [rollout] urls_file"
        for server in added:
            logger.info("%s is new in %s", server.url, self._list_key)
        for server in removed:
            logger.info("%s is out of traffic: %s", server.url, server.reason)
        if added or removed:
            self._notify()
        return added, removed

    def add_listener(self, call: Callable[[], None]) -> None:
        """Have `call` called after every change, on the thread that made it. It must neither block nor raise."""
        with self._lock:
            self._listeners.append(call)

    @property
    def _list_key(self) -> str:
        return f"[rollout] urls_file ({self._urls_file})" if self._urls_file else "[rollout] urls"

    def _notify(self) -> None:
        with self._lock:
            listeners = list(self._listeners)
        for call in listeners:
            call()


def read_urls(path: str | Path) -> list[str]:
    """The addresses in a text file: one `http://host:port` a line; empty lines and what follows a # do not count.

    Raises:
        UserError: The file cannot be read, lists no server or has a bad line; the message names the line.
    """
    try:
        text = Path(path).read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        raise UserError(f"[rollout] urls_file: {path}: {error.strerror}") from error
    urls: dict[str, int] = {}
    for number, line in enumerate(text.splitlines(), 1):
        url = line.partition("#")[0].strip().rstrip("/")
        if not url:
            continue
        problem = url_problem(url)
        if url in urls:
            problem = f"{url} is in line {urls[url]} already: one line per server"
        if problem:
            raise UserError(f"[rollout] urls_file: {path} line {number}: {problem}")
        urls[url] = number
    if not urls:
        raise UserError(f"[rollout] urls_file: {path} lists no server: write one base address a line, http://host:port")
    return list(urls)


def _stamp(path: str) -> tuple[int, int, int] | None:
    """Changes when the file does; None if there is none. The inode tells a renamed file of the same size and time."""
    try:
        status = os.stat(path)
    except OSError:
        return None
    return status.st_mtime_ns, status.st_size, status.st_ino


def _one_line(text: str) -> str:
    return " ".join(text.split())
