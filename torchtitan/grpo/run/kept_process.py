"""The rollout process, and another one in its place when it ends."""

import logging
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from torchtitan.grpo.engines.fleet_mirror import FleetTeller
from torchtitan.grpo.engines.server import Server
from torchtitan.grpo.errors import PlainError
from torchtitan.grpo.process.channel import Buffer
from torchtitan.grpo.process.stopping import StopRequested
from torchtitan.grpo.run.rollout_process import CLOSE_S, ProcessLost, Reply, RolloutError, RolloutProcess

logger = logging.getLogger(__name__)

ASKED_S = 5.0
"""How long a link of weight sync waits for what the process says of a server."""
LOSSES_MAX = 5
"""How often the process may end in a row, without a step's groups between."""
_LAST = ("take", "take_share", "pack_share", "metrics_of_shares", "is_ready", "validate", "metrics", "log")
"""What a run that is asked to stop does without, if it had to wait for another process."""

OnEvent = Callable[[str, list[Any]], None]
OnEnd = Callable[[RolloutProcess, str], None]


class KeptProcess:
    """A process that is there as long as the run. If it ends, the next one is told what it was told, and gets `state`.
    What was asked is asked again.

    Args:
        start: Starts a process with these callbacks.
        on_event: See `RolloutProcess`; but for beats.

    Attributes:
        state: What the next process begins with, from `keep`; None for nothing.
        newest: Returns the newest version that a server can have.
        losses: How often it has ended.
        losses_in_a_row: The same since `keep` was last called for the process that is there.
        is_stopping: The run is asked to stop.
        failure: Why there will be no other process.
    """

    def __init__(self, start: Callable[[OnEvent, OnEnd], RolloutProcess], on_event: OnEvent) -> None:
        self.state: Buffer | None = None
        self.newest: Callable[[], int] = lambda: 0
        self.losses = self.losses_in_a_row = 0
        self.is_stopping = self._is_closed = False
        self.failure: Exception | None = None
        self._start, self._on_event = start, on_event
        self._told: dict[str, tuple[Any, ...]] = {}
        self._teller: FleetTeller | None = None
        self._is_told: RolloutProcess | None = None  # as soon as all before is sent
        self._scored = 0  # by processes that have ended
        self._changed = threading.Condition()
        self._process: RolloutProcess | None = None
        self._answered: RolloutProcess | None = None  # the newest call
        self._next: RolloutProcess | None = None  # is about to take its place
        self._is_there(start(self._heard, self._on_end))

    @property
    def scored(self) -> int:
        """See `RolloutWorker.scored`."""
        process = self._process
        return self._scored + (process.scored if process else 0)

    def introduce(self, verb: str, *arguments: Any) -> Any:
        """A call that every process gets when it begins. Returns what this one answers."""
        self._told[verb] = arguments
        return self.call(verb, *arguments)[0]

    def call(self, verb: str, *arguments: Any, file: Sequence[Buffer] = ()) -> Reply:
        """See `RolloutProcess.call`. A process that is lost meanwhile is replaced, and the next one asked."""
        while True:
            process = self._running(verb)
            try:
                reply = process.call(verb, self.newest(), arguments, file)
                self._answered = process
                return reply
            except ProcessLost:
                self._await_another(process)

    def keep(self, state: Buffer) -> None:
        """A step's groups are taken, by the newest call: another process begins with this state. So does one that has
        taken the place of the one that answered."""
        with self._changed:
            self.state, process = state, self._process
        if process is self._answered:
            self.losses_in_a_row = 0
        elif process is not None:
            self.call("load_state", file=[state])

    def state_after(self, step: int, kept: Buffer) -> Buffer:
        """What the process says of a step that was taken, after which its state was `kept`. That, if there is none, if
        it began behind the step, or if it fails: a step that was trained is saved."""
        process, is_new = self._process, self.losses_in_a_row > 0
        if process is None or (is_new and self.state is not kept):
            return kept
        try:
            return process.call("state", self.newest(), [step])[1][0]
        except (PlainError, RolloutError, ProcessLost, TimeoutError):
            return kept

    def follow(self, teller: FleetTeller) -> None:
        """Tell the process of the servers from now on."""
        with self._changed:
            self._teller = teller
            if self._process is not None:  # else the next one is told when it begins
                self._process.tell_made("servers", teller.whole)
        self.tell_of_servers()

    def tell_of_servers(self) -> None:
        """There may be something that the process does not know. For any thread."""
        process, teller = self._process, self._teller
        if process is not None and teller is not None and process is not self._is_told:
            self._is_told = process

            def change() -> Any:
                self._is_told = None  # what changes from here on is told by itself
                return teller.change()

            process.tell_made("servers", change)

    def requests_in_flight(self, server: Server) -> int:
        """See `Fleet.requests_in_flight`."""
        return self._asked("requests_in_flight", server, lost=0, silent=1)

    def versions_in_use(self, server: Server) -> set[int] | None:
        """See `Fleet.versions_in_use`."""
        named = [server.version] if server.in_traffic else []
        versions = self._asked("versions_in_use", server, lost=named, silent=None)
        return None if versions is None else set(versions)

    def stop(self) -> None:
        """No step takes groups from now on. For any thread."""
        self.is_stopping = True
        with self._changed:
            self._changed.notify_all()
            process = self._process
        if process is not None:
            process.stop()

    def describe(self) -> str:
        """What it waits for. For any thread."""
        process = self._process
        return process.describe() if process else str(self.failure or "the rollout process is started again")

    def close(self) -> None:
        """End it, which releases all it has opened. Bounded."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
            processes, self._process, self._next = (self._process, self._next), None, None
        for process in processes:
            if process is not None:
                process.close()

    def _await_another(self, process: RolloutProcess) -> None:
        """Its reader's thread is about to take it away."""
        with self._changed:
            self._changed.wait_for(lambda: self._process is not process, CLOSE_S)

    def _running(self, verb: str) -> RolloutProcess:
        """The process, as soon as there is one."""
        with self._changed:
            while self._process is None:
                if self.failure is not None:
                    raise self.failure
                if self.is_stopping and verb in _LAST:
                    raise StopRequested
                if self._is_closed:
                    raise ProcessLost("the rollout process is closed")
                self._changed.wait(1.0)  # starting it is bounded
            return self._process

    def _asked(self, question: str, server: Server, lost: Any, silent: Any) -> Any:
        """What the process says of a server, with all that it was told before. `lost` if there is none: servers end the
        requests of one that is gone. `silent` if it is frozen or blocked, which does not last."""
        process = self._process
        if process is None:
            return lost
        try:
            return process.ask(question, server.serial, limit_s=ASKED_S)
        except ProcessLost:
            return lost
        except TimeoutError:
            return silent

    # ----------------------------------------------------------------------------------------- one after another

    def _heard(self, name: str, values: list[Any]) -> None:
        if name == "server" and self._teller is not None:
            self._teller.on_event(*values)
        elif name == "beat":  # what `Fleet.check` finds depends on time too
            self.tell_of_servers()
        else:
            self._on_event(name, values)

    def _on_end(self, process: RolloutProcess, how: str) -> None:
        """In the reader's thread of a process that has ended."""
        with self._changed:
            if process is not self._process or self._is_closed:
                return
            self._process = None
            self._scored += process.scored
            self._changed.notify_all()  # a run that stops does not wait for another one
        self._replace(how)  # on this thread: the machine may have no other

    def _replace(self, how: str) -> None:
        began = time.monotonic()
        while not self._is_closed:
            self.losses += 1
            self.losses_in_a_row += 1
            if self.losses_in_a_row > LOSSES_MAX:
                times = f"{self.losses_in_a_row} times in a row, without a step between"
                self._fail(PlainError(f"{how}. It has ended {times}"))
                return
            logger.warning("%s: the groups under way are lost, and another one takes its place", how)
            try:
                self._begin(began)
                return
            except ProcessLost as error:
                how = str(error)
                with self._changed:  # the machine may be short of what it needs
                    self._changed.wait_for(lambda: self._is_closed, self.losses_in_a_row)
            except Exception as error:
                self._fail(error)
                return

    def _begin(self, began: float) -> None:
        """Have a new process, with all that the one before it was told, which ended at `began`."""
        process = self._start(self._heard, self._on_end)
        with self._changed:
            self._next = process
        try:
            if self._is_closed:
                raise ProcessLost("the run has ended")
            for verb, arguments in list(self._told.items()):
                process.call(verb, self.newest(), arguments)
            loaded = None
            while not self._is_there(process, loaded, began):  # `keep` may come meanwhile
                loaded = self.state
                assert loaded is not None
                process.call("load_state", self.newest(), file=[loaded])
        except BaseException:
            process.close()
            raise

    def _is_there(self, process: RolloutProcess, state: Buffer | None = None, began: float | None = None) -> bool:
        """It may be asked from now on, unless it has another state than the newest: then this is False."""
        with self._changed:
            if self.state is not state:
                return False
            if began is not None:  # before the run goes on, which may end soon
                logger.info("Rollouts go on after %.1f s, in process %d", time.monotonic() - began, process.pid)
            if self._teller is not None:
                process.tell_made("servers", self._teller.whole)
            closed, self._process = self._is_closed, None if self._is_closed else process
            self._next = None
            self._changed.notify_all()
        if closed:
            process.close()
            return True
        self.tell_of_servers()
        if self.is_stopping:
            process.stop()
        if process.lost:  # before anybody would have been told
            self._on_end(process, process.lost)
        return True

    def _fail(self, error: Exception) -> None:
        with self._changed:
            self.failure = error
            self._changed.notify_all()
