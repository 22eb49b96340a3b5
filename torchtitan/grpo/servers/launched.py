"""Servers that the launcher of a run keeps alive: what it and trainer rank 0 tell one another, by files.

`[ray]` starts servers on any node of a cluster. The trainer knows nothing of that: it finds a token in the environment
variable TOKEN. The files are in the run's folder, where the servers' logs are:

    wanted        rank 0 writes the token once the folder is its own and the servers' model is in it
    state.json    the launcher writes it after each change: the token, and a `ServerState` of each server
    urls.txt      their addresses; the fleet reads it as any `[rollout] urls_file`

A token is of one attempt of one launcher. A second run that is started in the folder by mistake is refused by its rank
0, which then wants nothing, so its launcher starts no server and writes no file.
"""

import contextlib
import dataclasses
import json
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from torchtitan.grpo.engines.fleet_view import Keeper
from torchtitan.grpo.errors import UserError
from torchtitan.grpo.servers.kept_server import RETURN_S
from torchtitan.grpo.servers.plan import URLS_FILE
from torchtitan.grpo.servers.state import ServerState, write_whole

TOKEN = "TORCHTITAN_GRPO_SERVERS"
_WANTED, _STATE = "wanted", "state.json"
_POLL_S = 0.2
MARGIN_S = 10.0
"""How much longer than a server's own limit rank 0 waits: the launcher knows more of the reason."""


class Notices:
    """The launcher's end. Any thread may call it.

    Args:
        folder: Of the servers' logs, absolute.
    """

    def __init__(self, folder: Path, token: str) -> None:
        self.folder, self._token = folder, token
        self._lock = threading.Lock()
        self._is_wanted = False

    def is_wanted(self) -> bool:
        """Whether rank 0 has asked for servers."""
        with contextlib.suppress(OSError):
            self._is_wanted = (self.folder / _WANTED).read_text() == self._token
        return self._is_wanted

    def write(self, states: Sequence[ServerState]) -> None:
        """Tell rank 0, if it has asked. The list of addresses comes once every server has one."""
        with self._lock:
            if not self._is_wanted:
                return
            urls = dict.fromkeys(state.url for state in states)  # a new server may have a lost one's address
            if all(urls):
                write_whole(self.folder / URLS_FILE, "".join(f"{url}\n" for url in urls))
            told = {"token": self._token, "servers": [dataclasses.asdict(state) for state in states]}
            write_whole(self.folder / _STATE, json.dumps(told))

    def remove(self) -> None:
        """Remove the files, if rank 0 has asked this launcher for servers."""
        for name in (URLS_FILE, _STATE, _WANTED) if self._is_wanted else ():
            with contextlib.suppress(OSError):
                (self.folder / name).unlink()


class LaunchedServers(Keeper):
    """Rank 0's end. In place of a `Supervisor`: it answers the same questions.

        with closing(LaunchedServers(folder, token, 300.0)) as servers:
            servers.start()            # returns at once
            ...                        # load the trainer's own weights meanwhile
            servers.wait_healthy()     # `urls_file` is there from then on

    Args:
        folder: As in `Notices`.
        start_timeout_s: Longest time from the start of a server to its health.
    """

    def __init__(self, folder: Path, token: str, start_timeout_s: float) -> None:
        self.urls_file = folder / URLS_FILE
        self.on_end: Callable[[str, str], None] = lambda url, why: None
        """Called in a thread with a server's address and reason soon after it has ended."""
        self.on_healthy: Callable[[str], None] = lambda url: None
        """Called in a thread with a server's address soon after it is healthy after a start."""
        self._folder, self._token, self._start_timeout_s = folder, token, start_timeout_s
        self._states: list[ServerState] = []
        self._formerly: dict[str, int] = {}  # the server that had this address, until the fleet has read its new one
        self._healthy_at: dict[str, float] = {}
        self._changed, self._closing = threading.Condition(), threading.Event()
        self._thread = threading.Thread(target=self._follow, name="servers", daemon=True)

    @property
    def urls(self) -> list[str]:
        with self._changed:
            return [state.url for state in self._states]

    def start(self) -> None:
        """Ask the launcher for the servers. Does not wait for them.

        Raises:
            UserError: The folder cannot be written to.
        """
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            write_whole(self._folder / _WANTED, self._token)
        except OSError as error:
            raise UserError(f"{self._folder}: cannot be written to: {error.strerror}") from error
        self._thread.start()

    def wait_healthy(self) -> None:
        """Wait until every server serves.

        Raises:
            UserError: One does not come up. The message ends with the end of its log, if it has one.
        """
        deadline = time.monotonic() + self._start_timeout_s + MARGIN_S
        with self._changed:
            while not (self._states and all(state.healthy for state in self._states)):
                if problem := next((state.given_up for state in self._states if state.given_up), ""):
                    raise UserError(problem)
                if time.monotonic() > deadline:
                    raise UserError(self._late())
                self._changed.wait(1.0)

    def may_return(self, url: str, lost_at: float) -> bool:
        with self._changed:
            return any(self._may_return(state, lost_at) for state in self._of(url))

    def why_down(self, url: str) -> str:
        with self._changed:
            return next((f"\n{state.given_up}" for state in self._of(url) if state.given_up), "")

    def close(self) -> None:
        self._closing.set()
        if self._thread.is_alive():
            self._thread.join(5.0)

    def _of(self, url: str) -> list[ServerState]:
        """The servers that have the address, or had it last."""
        having = [state for state in self._states if state.url == url]
        return having or [self._states[i] for i in (self._formerly.get(url),) if i is not None]

    def _may_return(self, state: ServerState, lost_at: float) -> bool:
        recently = max(lost_at, self._healthy_at.get(state.url, 0.0)) + RETURN_S
        return not state.given_up and (not state.healthy or time.monotonic() < recently)

    def _late(self) -> str:
        waited = f"did not serve within {self._start_timeout_s:g} s ([rollout] start_timeout_seconds)"
        late = [f"server {i} ({state.url or 'no address yet'})" for i, state in enumerate(self._states)]
        late = [name for name, state in zip(late, self._states, strict=True) if not state.healthy]
        return f"{' and '.join(late) or 'the servers'} {waited}; their logs are in {self._folder}"

    def _follow(self) -> None:
        """Read what the launcher writes, until `close`."""
        stamp = None
        while not self._closing.wait(_POLL_S):
            try:
                status = (self._folder / _STATE).stat()
                now = status.st_mtime_ns, status.st_ino
                if now == stamp:
                    continue
                told = json.loads((self._folder / _STATE).read_text())
            except (OSError, ValueError):  # not there yet, or a network file system that is not up to date
                continue
            stamp = now
            if told["token"] == self._token:
                self._hear([ServerState(**state) for state in told["servers"]])

    def _hear(self, states: list[ServerState]) -> None:
        with self._changed:
            changes = list(zip(self._states or [ServerState()] * len(states), states, strict=True))
            started = [new for old, new in changes if new.healthy and (not old.healthy or old.ends != new.ends)]
            for new in started:
                self._healthy_at[new.url] = time.monotonic()
            moved = [(old.url, i) for i, (old, new) in enumerate(changes) if old.url not in ("", new.url)]
            self._formerly |= dict(moved)
            self._states, self.restarts = states, sum(state.restarts for state in states)
            self._changed.notify_all()
        for old, new in changes:
            if new.ends > old.ends:
                self.on_end(old.url, new.why)
        for new in started:
            self.on_healthy(new.url)
