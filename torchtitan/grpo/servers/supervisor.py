"""Keeps inference servers alive: starts them, waits for their health, restarts those that end, lists their addresses.

A supervisor is threads of its owner: of trainer rank 0, or of `python -m torchtitan.grpo.servers`. It is no process of
its own. What starts servers also needs to know at once whether a lost server will return (`may_return`), and a thread
can be asked. And a process more could itself be lost. What must survive the owner's death is in a guard process per
server instead (guard.py):

    rank 0, or `python -m torchtitan.grpo.servers`
      thread "server 0"  ->  guard of server 0   ->  vLLM, SGLang or the embedded server  ->  engine cores, workers
      thread "server 1"  ->  guard of server 1   ->  ...

- kill -9 of the owner: each guard notices within 0.25 s and ends its server.
- kill -9 of a guard: the kernel kills the server, and the thread kills the group and starts the server again.
- kill -9 of a server, or of a part without which it ends or is unhealthy: the guard ends the rest, and it starts again.
- torchrun --max-restarts ends rank 0, so its servers end. The new rank 0 starts its own, at ports that are free, and
  writes a new list before anybody reads it.
"""

import contextlib
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

from torchtitan.grpo.engines.fleet_view import Keeper
from torchtitan.grpo.errors import UserError
from torchtitan.grpo.servers.kept_server import GRACE_S, KeptServer, Launch
from torchtitan.grpo.servers.state import ServerState, write_whole

CLOSE_S = GRACE_S + 6.0
"""How long `close` may take."""
_END_S = 60.0
"""A request for health, SIGTERM, SIGKILL, and the driver that gives a whole GPU back."""


class Supervisor(Keeper):
    """Keeps servers alive until `close`.

        with closing(Supervisor(launches, folder, urls_file, 300.0)) as supervisor:
            supervisor.start()            # returns at once; `urls_file` lists all servers
            ...                           # load the trainer's own weights meanwhile
            supervisor.wait_healthy()

    A server that ends is started again at its old address, after a pause that grows. It stays down if it ends before it
    has ever served, since then its flags are wrong, or more than RESTARTS_MAX times in WINDOW_S.

    Args:
        folder: For logs, N.log for each server; later starts append.
        urls_file: Where the addresses are written, atomically, and again when one changes. Removed in the end, unless
            another supervisor has replaced it. None: nowhere.
        start_timeout_s: Longest time from the start of a server to its health.
        host: Address to listen on. Not a wildcard: it is in the list.
        start_timeout_key: What to raise, for messages.
    """

    def __init__(
        self,
        launches: list[Launch],
        folder: Path,
        urls_file: Path | None,
        start_timeout_s: float,
        host: str = "127.0.0.1",
        start_timeout_key: str = "[rollout] start_timeout_seconds",
    ) -> None:
        self.urls_file = urls_file
        self.start_timeout_s, self.start_timeout_key = start_timeout_s, start_timeout_key
        self.host = host
        self.restarts = 0
        """How often servers were started again."""
        self.on_end: Callable[[str, str], None] = lambda url, why: None
        """Called in a thread with a server's address and reason as soon as it has ended."""
        self.on_healthy: Callable[[str], None] = lambda url: None
        """Called in a thread with a server's address as soon as it is healthy after a start."""
        self.may_restart = threading.Event()
        """While it is not set, a server that has ended waits. Others use the memory that it would take."""
        self.may_restart.set()
        self.closing = threading.Event()
        self.changed = threading.Condition()
        self._folder = folder
        self._listed: list[str] = []
        self._servers = [KeptServer(self, launch, folder / f"{launch.name}.log") for launch in launches]

    @property
    def urls(self) -> list[str]:
        return [server.state.url for server in self._servers]

    @property
    def states(self) -> list[ServerState]:
        """Of all servers. `changed` is notified after each change."""
        with self.changed:
            return [server.state for server in self._servers]

    def start(self) -> None:
        """Start all servers, and write the list. Does not wait for them.

        Raises:
            UserError: No port is free, or the folder for logs or the list cannot be written to.
        """
        make_log_folder(self._folder)
        for server in self._servers:
            server.reserve_port()
        self.write_urls()
        for server in self._servers:
            server.start()

    def wait_healthy(self) -> None:
        """Wait until every server serves. Bounded: each start is.

        Raises:
            UserError: One does not come up. The message ends with the end of its log.
        """
        with self.changed:
            while not all(state.healthy for state in self.states):
                for state in self.states:
                    if state.given_up:
                        raise UserError(state.given_up)
                self.changed.wait(1.0)

    def check(self) -> None:
        """Raises a UserError once every server stays down."""
        given_up = [state.given_up for state in self.states]
        if all(given_up):
            raise UserError(given_up[-1])

    def end(self, url: str, why: str) -> None:
        """End a server. It starts again as one that has ended by itself. Returns when it is down.

        Raises:
            UserError: It is not, after everything that could end it.
        """
        for server in self._servers:
            if server.state.url == url and not server.ask_to_end(why, _END_S):
                raise UserError(f"{url} cannot be ended in {_END_S:g} s, and keeps its memory ({why})")

    def may_return(self, url: str, lost_at: float) -> bool:
        """Whether a server that was lost then is being started again, is about to be, or has just been."""
        return any(server.has_had(url) and server.may_return(lost_at) for server in self._servers)

    def why_down(self, url: str) -> str:
        """Why it stays down, with the end of its log; "" if it does not."""
        down = [server.state.given_up for server in self._servers if server.has_had(url)]
        return next((f"\n{why}" for why in down if why), "")

    def write_urls(self) -> None:
        """Write the list, unless it is written already.

        Raises:
            UserError: It cannot be written. The next call tries again.
        """
        with self.changed:  # every server's thread calls this
            urls = self.urls
            if self.urls_file is None or urls == self._listed:
                return
            try:
                self.urls_file.parent.mkdir(parents=True, exist_ok=True)
                write_whole(self.urls_file, _lines(urls))
            except OSError as error:
                raise UserError(f"{self.urls_file}: the list of servers cannot be written: {error.strerror}") from error
            self._listed = urls

    def close(self) -> None:
        """Stop all servers, at the same time: SIGTERM, and SIGKILL after GRACE_S."""
        self.closing.set()
        deadline = time.monotonic() + CLOSE_S
        for server in self._servers:
            if server.is_alive():
                server.join(max(0.0, deadline - time.monotonic()))
            server.release_port()
        if self.urls_file is not None and self._listed:
            with contextlib.suppress(OSError):
                if self.urls_file.read_text() == _lines(self._listed):  # not that of servers that took their place
                    self.urls_file.unlink()


def make_log_folder(folder: Path) -> None:
    """Raises a UserError if logs cannot be written there."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        raise UserError(f"{folder}: logs cannot be written there: {error.strerror}") from error


def _lines(urls: list[str]) -> str:
    return "".join(f"{url}\n" for url in urls)
