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
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from torchtitan.grpo.engines.fleet import Keeper
from torchtitan.grpo.engines.http_control import HttpControl, NoReply
from torchtitan.grpo.engines.protocol import EngineError
from torchtitan.grpo.errors import UserError
from torchtitan.grpo.servers.restarts import Restarts

logger = logging.getLogger(__name__)

GRACE_S = 3.0
"""How long a server may take to end after SIGTERM. It has nothing to save."""
HUNG_S = 60.0
"""A server that has answered its health route is started again when it does not answer for so long."""
RETURN_S = 120.0
"""How long a lost server counts as one that returns although its process is well: from its loss, whose cause may be
found only later, and again from its health after a restart, as it is then connected and fed."""
HEALTH_S = 5.0
"""How often the health of a server that serves is asked."""
_AGAIN_S = 0.25
_FAILURES_MAX = 3
_SILENT = "did not answer"
_END_POLL_S = 0.1
_CLOSE_S = GRACE_S + 6.0
_TAIL_CHARS = 3000
PORTS = range(20_000, 32_768)
"""Below those that Linux gives to outgoing connections (net.ipv4.ip_local_port_range), which would take them first."""
_GUARD = str(Path(__file__).with_name("guard.py"))


@dataclass(frozen=True)
class Launch:
    """How one server is started.

    Attributes:
        name: In messages and of its log: "0", "1" ...
        command: Command line and environment for a port.
        control: The engine's control, for the health route.
    """

    name: str
    command: Callable[[int], tuple[list[str], dict[str, str]]]
    control: Callable[[str], HttpControl]


@dataclass(frozen=True)
class ServerState:
    """What a supervisor knows of a server.

    Attributes:
        url: Base address, "" before it has one.
        healthy: It has answered its health route since its last start.
        restarts, ends: How often it was started again, and how often it has ended.
        why: How it has ended last.
        given_up: Why it stays down, with the end of its log; "" before.
    """

    url: str = ""
    healthy: bool = False
    restarts: int = 0
    ends: int = 0
    why: str = ""
    given_up: str = ""


class Supervisor(Keeper):
    """Keeps servers alive until `close`.

        with Supervisor(launches, folder, urls_file, 300.0) as supervisor:
            supervisor.start()            # returns at once; `urls_file` lists all servers
            ...                           # load the trainer's own weights meanwhile
            supervisor.wait_healthy()

    A server that ends is started again at its old address, after a pause that grows. It stays down if it ends before it
    has ever served, since then its flags are wrong, or more than RESTARTS_MAX times in WINDOW_S.

    Args:
        folder: For logs, N.log for each server; later starts append.
        urls_file: Where the addresses are written, atomically, and again when one changes. Removed in the end. None:
            nowhere.
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
        self.may_restart = threading.Event()
        """While it is not set, a server that has ended waits. Others use the memory that it would take."""
        self.may_restart.set()
        self.closing = threading.Event()
        self.changed = threading.Condition()
        self._servers = [_Server(self, launch, folder / f"{launch.name}.log") for launch in launches]

    @property
    def urls(self) -> list[str]:
        return [server.url for server in self._servers]

    @property
    def states(self) -> list[ServerState]:
        """Of all servers. `changed` is notified after each change."""
        with self.changed:
            return [server.state() for server in self._servers]

    def start(self) -> None:
        """Start all servers, and write the list. Does not wait for them.

        Raises:
            UserError: A program cannot be run, or no port is free.
        """
        for server in self._servers:
            server.reserve_port()
            server.log_path.parent.mkdir(parents=True, exist_ok=True)
        self.write_urls()
        for server in self._servers:
            server.start()

    def wait_healthy(self) -> None:
        """Wait until every server serves. Bounded: each start is.

        Raises:
            UserError: One does not come up. The message ends with the end of its log.
        """
        with self.changed:
            while not all(server.healthy for server in self._servers):
                for server in self._servers:
                    if server.given_up:
                        raise UserError(server.given_up)
                self.changed.wait(1.0)

    def check(self) -> None:
        """Raises a UserError once every server stays down."""
        if all(server.given_up for server in self._servers):
            raise UserError(self._servers[-1].given_up)

    def may_return(self, url: str, lost_at: float) -> bool:
        """Whether a server that was lost then is being started again, is about to be, or has just been."""
        return any(server.url == url and server.may_return(lost_at) for server in self._servers)

    def why_down(self, url: str) -> str:
        """Why it stays down, with the end of its log; "" if it does not."""
        return next((f"\n{server.given_up}" for server in self._servers if server.url == url and server.given_up), "")

    def write_urls(self) -> None:
        if self.urls_file is None:
            return
        unfinished = self.urls_file.with_name(f"{self.urls_file.name}.{os.getpid()}.tmp")
        try:
            self.urls_file.parent.mkdir(parents=True, exist_ok=True)
            unfinished.write_text("".join(f"{url}\n" for url in self.urls))
            unfinished.replace(self.urls_file)
        except OSError as error:
            raise UserError(f"{self.urls_file}: the list of servers cannot be written: {error.strerror}") from error

    def close(self) -> None:
        """Stop all servers, at the same time: SIGTERM, and SIGKILL after GRACE_S."""
        self.closing.set()
        deadline = time.monotonic() + _CLOSE_S
        for server in self._servers:
            if server.is_alive():
                server.join(max(0.0, deadline - time.monotonic()))
            server.release_port()
        if self.urls_file is not None:
            with contextlib.suppress(OSError):
                self.urls_file.unlink()

    def __enter__(self) -> "Supervisor":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _Server(threading.Thread):
    """The thread that keeps one server alive.

    Attributes:
        healthy: It has answered its health route since its last start.
        given_up: Why it stays down, "" before.
    """

    def __init__(self, supervisor: Supervisor, launch: Launch, log_path: Path) -> None:
        super().__init__(name=f"server {launch.name}", daemon=True)
        self.launch, self.log_path = launch, log_path
        self.url = ""
        self.port = 0
        self.restarts = self.ends = 0
        self.healthy = False
        self.why = self.given_up = ""
        self.process: subprocess.Popen | None = None
        self._supervisor = supervisor
        self._restarts = Restarts()
        self._failures = 0  # of health requests in a row
        self._healthy_at = 0.0
        self._log_start = 0
        self._reserved: socket.socket | None = None

    def state(self) -> ServerState:
        return ServerState(self.url, self.healthy, self.restarts, self.ends, self.why, self.given_up)

    def may_return(self, lost_at: float) -> bool:
        if self.given_up or self._supervisor.closing.is_set():
            return False
        serves = self.healthy and not self._failures and self._runs()
        return not serves or time.monotonic() < max(lost_at, self._healthy_at) + RETURN_S

    def run(self) -> None:
        closing, has_served = self._supervisor.closing, False
        while True:
            try:
                why = self._serve()
            except Exception as error:  # no port, no process: as if the server had ended
                why = f"could not be started: {error}"
            if closing.is_set():
                return
            has_served = has_served or self.healthy
            self._set(healthy=False, ends=self.ends + 1, why=f"server {self.launch.name} {why}")
            self._supervisor.on_end(self.url, self.why)
            if problem := self._restarts.ended() or ("" if has_served else "before it served"):
                said = f"server {self.launch.name} ({self.url}) {why} {problem}"
                logger.error("%s (%s)", said, self.log_path)
                self._set(given_up=f"{said}; its log {self.log_path} ends with:\n{self._tail()}")
                return
            pause_s = self._restarts.pause_s
            logger.warning(
                "server %s (%s) %s: starting it again in %g s (%s)",
                self.launch.name,
                self.url,
                why,
                pause_s,
                self.log_path,
            )
            if closing.wait(pause_s):
                return
            while not self._supervisor.may_restart.wait(_AGAIN_S):
                if closing.is_set():
                    return
            with self._supervisor.changed:
                self.restarts += 1
                self._supervisor.restarts += 1

    def _serve(self) -> str:
        """Start the server and look after it until it ends. Returns why it did; "" if it was closed."""
        started = time.monotonic()
        self._start()
        control = self.launch.control(self.url)
        self._failures, ask_at, answered = 0, 0.0, started
        try:
            while not self._supervisor.closing.wait(_END_POLL_S):
                if not self._runs():
                    return f"ended with {self._how_it_ended()}"
                if time.monotonic() < ask_at:
                    continue
                why = _ill(control)
                now = time.monotonic()
                ask_at = now + (HEALTH_S if self.healthy and not why else _AGAIN_S)
                self._failures = self._failures + 1 if why else 0
                answered = answered if why else now
                if not why and not self.healthy:
                    logger.info(
                        "server %s serves at %s, %.1f s after its start", self.launch.name, self.url, now - started
                    )
                    self._healthy_at = now
                    self._set(healthy=True)
                elif self.healthy and self._failures >= _FAILURES_MAX and (why != _SILENT or now > answered + HUNG_S):
                    return f"{why} for {now - answered:.0f} s"
                elif not self.healthy and now > started + self._supervisor.start_timeout_s:
                    limit_s, key = self._supervisor.start_timeout_s, self._supervisor.start_timeout_key
                    return f"did not serve within {limit_s:g} s ({key})"
            return ""
        finally:
            self._stop()

    def _start(self) -> None:
        self._keep_or_change_port()
        command, environment = self.launch.command(self.port)
        # The guard itself needs nothing that is installed, and neither PYTHONPATH nor site-packages.
        guard = [sys.executable, "-I", "-S", _GUARD, str(os.getpid()), str(GRACE_S), *command]
        with self.log_path.open("ab") as log:
            self._log_start = log.tell()
            # A process group of its own: Ctrl-C reaches only the owner, which then closes the servers. Not a session of
            # its own: Linux first divides the cores among sessions (sched_autogroup_enabled).
            self.process = subprocess.Popen(
                guard,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                process_group=0,
            )

    def _runs(self) -> bool:
        """Whether the guard runs. It is not waited for, so its number stays that of its group."""
        process = self.process
        if process is None or process.returncode is not None:
            return False
        try:
            return os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None
        except ChildProcessError:
            return False

    def _how_it_ended(self) -> str:
        self._kill_group()
        status = self.process.wait()
        status = 128 - status if status < 0 else status
        if status <= 128:
            return f"exit status {status}"
        with contextlib.suppress(ValueError):
            return signal.Signals(status - 128).name
        return f"exit status {status}"

    def _stop(self) -> None:
        """End the server, if it runs."""
        if self._runs():
            self.process.terminate()
            deadline = time.monotonic() + GRACE_S + 1.0
            while self._runs() and time.monotonic() < deadline:
                time.sleep(0.02)
        self._kill_group()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(5.0)

    def _kill_group(self) -> None:
        """What a guard that was killed has left."""
        if self.process.returncode is None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.process.pid, signal.SIGKILL)

    def _tail(self) -> str:
        with self.log_path.open("rb") as log:
            end = log.seek(0, os.SEEK_END)
            log.seek(max(self._log_start, end - 4 * _TAIL_CHARS))  # it may be of days
            return log.read().decode(errors="replace")[-_TAIL_CHARS:].strip()

    def _set(self, **values: object) -> None:
        with self._supervisor.changed:
            for name, value in values.items():
                setattr(self, name, value)
            self._supervisor.changed.notify_all()

    # ------------------------------------------------------------------------------------------------ ports

    def reserve_port(self) -> None:
        """Choose a port, the first that is free: addresses, and with them names of metrics, seldom change.

        Another run may be starting servers too, which listen only after a while. So a socket without a file, whose name
        has the port, is held as long as this process lives (Linux).
        """
        for port in PORTS:
            if (reserved := _reserve(port)) is not None:
                if self._is_free(port):
                    self._reserved, self.port = reserved, port
                    host = f"[{self._supervisor.host}]" if ":" in self._supervisor.host else self._supervisor.host
                    self.url = f"http://{host}:{port}"
                    return
                reserved.close()
        raise UserError(f"no port from {PORTS.start} to {PORTS.stop - 1} is free on {self._supervisor.host}")

    def release_port(self) -> None:
        if self._reserved is not None:
            self._reserved.close()

    def _keep_or_change_port(self) -> None:
        if self.restarts and not self._is_free(self.port):
            old, old_reserved = self.url, self._reserved
            self.reserve_port()
            old_reserved.close()
            logger.warning("server %s moves from %s to %s: the port is taken", self.launch.name, old, self.url)
            self._supervisor.write_urls()

    def _is_free(self, port: int) -> bool:
        family = socket.AF_INET6 if ":" in self._supervisor.host else socket.AF_INET
        with socket.socket(family) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # connections of an earlier server may linger
            try:
                probe.bind((self._supervisor.host, port))
            except OSError:
                return False
        return True


def _ill(control: HttpControl) -> str:
    """What is wrong with a server; "" if it is healthy."""
    try:
        return "" if control.is_healthy() else "was not healthy"
    except NoReply:
        return _SILENT
    except (EngineError, UserError):
        return "took no connections"


def _reserve(port: int) -> socket.socket | None:
    """Keep other supervisors of this machine from a port. None: one of them has it."""
    reserved = socket.socket(socket.AF_UNIX)
    if sys.platform.startswith("linux"):
        try:
            reserved.bind(f"\0torchtitan-grpo-server-{port}")
        except OSError:
            reserved.close()
            return None
    return reserved
