"""One server that is kept alive: its thread starts it, asks for its health, and starts it again when it ends."""

import contextlib
import getpass
import logging
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torchtitan.grpo.engines.http_control import HttpControl, NoReply
from torchtitan.grpo.engines.protocol import EngineError, LocalError
from torchtitan.grpo.errors import UserError
from torchtitan.grpo.servers.ports import ReservedPort
from torchtitan.grpo.servers.restarts import Restarts
from torchtitan.grpo.servers.state import ServerState
from torchtitan.grpo.weight_wire.version_names import FOLDER_PREFIX, MEMORY, own_run

if TYPE_CHECKING:  # it imports this module
    from torchtitan.grpo.servers.supervisor import Supervisor

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
_TAIL_CHARS = 3000
_GUARD = str(Path(__file__).with_name("guard.py"))
_SOCKET_PATH_MAX = 107
_SOCKET_NAME = 40
"""Longer than the names of the sockets that vLLM and SGLang make in their temporary folder."""


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


class KeptServer(threading.Thread):
    """The thread that keeps one server alive.

    Attributes:
        state: How it is. The supervisor's `changed` is notified after each change.
    """

    def __init__(self, supervisor: "Supervisor", launch: Launch, log_path: Path) -> None:
        super().__init__(name=f"server {launch.name}", daemon=True)
        self.launch, self.log_path = launch, log_path
        self.state = ServerState()
        self._unwanted = ""  # why it is to end
        self.process: subprocess.Popen | None = None
        self._supervisor = supervisor
        self._restarts = Restarts()
        self._failures = 0  # of health requests in a row
        self._healthy_at = 0.0
        self._log_start = 0
        self._folder = ""
        self._reserved: ReservedPort | None = None
        self._had: set[str] = set()  # addresses before it moved: a fleet may not have read its new one yet

    def has_had(self, url: str) -> bool:
        """Whether this is its address, or was."""
        return url == self.state.url or url in self._had

    def reserve_port(self) -> None:
        """Choose where it listens.

        Raises:
            UserError: No port is free.
        """
        self._reserved = ReservedPort(self._supervisor.host)
        self._set(url=self._reserved.url)

    def release_port(self) -> None:
        if self._reserved is not None:
            self._reserved.close()

    def may_return(self, lost_at: float) -> bool:
        state = self.state
        if state.given_up or self._supervisor.closing.is_set():
            return False
        serves = state.healthy and not self._failures and self._runs()
        return not serves or time.monotonic() < max(lost_at, self._healthy_at) + RETURN_S

    def ask_to_end(self, why: str, timeout_s: float) -> bool:
        """Have it end. It starts again as one that has ended by itself. Returns when it is down, or False."""
        with self._supervisor.changed:
            if self.state.down:
                return True
            self._unwanted, ends = why, self.state.ends
            return self._supervisor.changed.wait_for(lambda: self.state.ends > ends, timeout_s)

    def run(self) -> None:
        try:
            self._keep()
        except Exception as error:
            logger.exception("server %s is left alone", self.launch.name)
            why = f"server {self.launch.name} ({self.state.url}) is left alone: {error!r}"
            self._set(healthy=False, down=True, given_up=why)

    def _keep(self) -> None:
        closing, has_served = self._supervisor.closing, False
        while True:
            try:
                why = self._serve()
            except Exception as error:  # no port, no process: as if the server had ended
                why = f"could not be started: {error}"
            if closing.is_set():
                return
            has_served = has_served or self.state.healthy
            url, told = self.state.url, f"server {self.launch.name} {why}"
            with self._supervisor.changed:  # who sees it down may ask for another end
                self._unwanted = ""
                self._set(healthy=False, down=True, ends=self.state.ends + 1, why=told)
            self._supervisor.on_end(url, told)
            if problem := self._restarts.ended() or ("" if has_served else "before it served"):
                said = f"server {self.launch.name} ({url}) {why} {problem}"
                logger.error("%s (%s)", said, self.log_path)
                self._set(given_up=f"{said}; its log {self.log_path} ends with:\n{self._tail()}")
                return
            pause_s = self._restarts.pause_s
            logger.warning(
                "server %s (%s) %s: starting it again in %g s (%s)",
                self.launch.name,
                url,
                why,
                pause_s,
                self.log_path,
            )
            if closing.wait(pause_s):
                return
            while self.state.down:
                if closing.is_set():
                    return
                self._supervisor.may_restart.wait(_AGAIN_S)
                with self._supervisor.changed:
                    if self._supervisor.may_restart.is_set():  # whoever clears it sees this server starting, or down
                        self._set(down=False, restarts=self.state.restarts + 1)
                        self._supervisor.restarts += 1

    def _serve(self) -> str:
        """Start the server and look after it until it ends. Returns why it did; "" if it was closed."""
        started = time.monotonic()
        self._start()
        url = self.state.url
        control = self.launch.control(url)
        self._failures, ask_at, answered = 0, 0.0, started
        try:
            while not self._supervisor.closing.wait(_END_POLL_S):
                if not self._runs():
                    return f"ended with {self._how_it_ended()}"
                if self._unwanted:
                    return self._unwanted
                if time.monotonic() < ask_at:
                    continue
                why = _ill(control)
                now = time.monotonic()
                healthy = self.state.healthy
                ask_at = now + (HEALTH_S if healthy and not why else _AGAIN_S)
                self._failures = self._failures + 1 if why else 0
                answered = answered if why else now
                if not why and not healthy:
                    logger.info("server %s serves at %s, %.1f s after its start", self.launch.name, url, now - started)
                    self._healthy_at = now
                    self._set(healthy=True)
                    self._supervisor.on_healthy(url)
                elif healthy and self._failures >= _FAILURES_MAX and (why != _SILENT or now > answered + HUNG_S):
                    return f"{why} for {now - answered:.0f} s"
                elif not healthy and now > started + self._supervisor.start_timeout_s:
                    limit_s, key = self._supervisor.start_timeout_s, self._supervisor.start_timeout_key
                    return f"did not serve within {limit_s:g} s ({key})"
            return ""
        finally:
            self._end()

    def _start(self) -> None:
        self._keep_or_change_port()
        command, environment = self.launch.command(self._reserved.port)
        with self.log_path.open("ab") as log:
            self._log_start = log.tell()
            self._folder = tempfile.mkdtemp(prefix="grpo-")
            # The guard itself needs nothing that is installed, and neither PYTHONPATH nor site-packages.
            weights = f"{MEMORY}/{FOLDER_PREFIX}{own_run()}-*"  # of transport "disk", if this process is a trainer
            guard = [sys.executable, "-I", "-S", _GUARD, str(os.getpid()), str(GRACE_S), self._folder, weights]
            # A process group of its own: Ctrl-C reaches only the owner, which then closes the servers. Not a session of
            # its own: Linux first divides the cores among sessions (sched_autogroup_enabled).
            try:
                self.process = subprocess.Popen(
                    [*guard, *command],
                    env=with_temporary_folder(environment, self._folder),
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    process_group=0,
                )
            except OSError:
                shutil.rmtree(self._folder, ignore_errors=True)
                raise

    def _keep_or_change_port(self) -> None:
        if self.state.restarts and not self._reserved.is_free():
            old = self._reserved
            self._had.add(old.url)
            self.reserve_port()
            old.close()
            new = self._reserved.url
            logger.warning("server %s moves from %s to %s: the port is taken", self.launch.name, old.url, new)
        self._supervisor.write_urls()

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

    def _end(self) -> None:  # Thread has a `_stop` of its own
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
        shutil.rmtree(self._folder, ignore_errors=True)

    def _tail(self) -> str:
        try:
            with self.log_path.open("rb") as log:
                end = log.seek(0, os.SEEK_END)
                log.seek(max(self._log_start, end - 4 * _TAIL_CHARS))  # it may be of days
                return log.read().decode(errors="replace")[-_TAIL_CHARS:].strip()
        except OSError as error:
            return f"(it cannot be read: {error})"

    def _set(self, **values: Any) -> None:
        with self._supervisor.changed:
            self.state = replace(self.state, **values)
            self._supervisor.changed.notify_all()


def with_temporary_folder(environment: Mapping[str, str], folder: str) -> dict[str, str]:
    """`environment` of a server whose temporary files go into `folder`: vLLM and SGLang leave some there at each start.

    It stays as it is if the path is too long for sockets. What torch compiles is kept where other starts find it, and
    Ray looks for a cluster where it always does.
    """
    if len(folder) + _SOCKET_NAME > _SOCKET_PATH_MAX:
        return dict(environment)
    shared = tempfile.gettempdir()
    with contextlib.suppress(KeyError, OSError):  # a user without a name
        environment = {"TORCHINDUCTOR_CACHE_DIR": f"{shared}/torchinductor_{getpass.getuser()}", **environment}
    return {"RAY_TMPDIR": shared, **environment, "TMPDIR": folder}


def _ill(control: HttpControl) -> str:
    """What is wrong with a server; "" if it is healthy."""
    try:
        return "" if control.is_healthy() else "was not healthy"
    except LocalError:  # it was not asked
        return ""
    except NoReply:
        return _SILENT
    except (EngineError, UserError):
        return "took no connections"
