"""The servers as the process of rollouts sees them, and who tells it about them.

    the trainer's process                    the process of rollouts

    weight sync -> Fleet -> FleetTeller ---- changes ---> FleetMirror -> router, silence watch
                     ^----- FleetTeller <--- events -----------+

A change says what became of servers, an event what their requests met. Either is a list of plain values, and each way
keeps its order. Changes coalesce: one has the newest state of every server that differs from what was told. Events are
numbered, and a change names the last one that the fleet had seen when it was made. What an event has set in the mirror
stays until a change names it: one from before a suspicion arrived does not bring the suspected server back.

I3, no request goes to a server for a version that it was not proved to have: the mirror never adds to what the fleet
says. A server is in traffic there with a version only if it was so in the fleet, at one moment. Since then, the fleet
may have withdrawn it. A request that still goes there is like one sent before the withdrawal that arrives after it,
which any network may do: a server with torn weights is paused, and a reply names its versions.

The fleet's `requests_in_flight` and `versions_in_use` are asked of the mirror, on the channel of the changes and after
all that are due. So a `hold` is in force before requests are counted: none begins after the count. As for versions, a
request names the one that the mirror has for its server when it begins. Requests under earlier ones are found running,
and later ones name that version or one that is still to be told: no other version comes into use after the answer.
"""

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torchtitan.grpo.engines.fleet import Fleet
from torchtitan.grpo.engines.fleet_view import FleetError, FleetView
from torchtitan.grpo.engines.protocol import EngineError, LocalError, Refused
from torchtitan.grpo.engines.server import Server, one_line
from torchtitan.grpo.errors import PlainError, UserError, UserErrorOfAllRanks, in_words

_TOLD = (
    "serial",
    "url",
    "version",
    "in_traffic",
    "held",
    "lost",
    "losses",
    "suspected",
    "suspicions",
    "distrusted",
    "silent",
    "reason",
)
_ERRORS: dict[str, type[PlainError]] = {
    kind.__name__: kind for kind in (FleetError, EngineError, UserError, UserErrorOfAllRanks, LocalError, Refused)
}


class FleetTeller:
    """Tells a mirror about the fleet, and the fleet what the mirror met. Any thread may call any method; none waits.

    A change is [mirror, event, failure, restarts, serials, servers]: which mirror it is for; the last event of that
    mirror that the fleet had seen; [kind, words] of what `Fleet.check` raised, or None; how often servers were started
    again; the list of servers by `Server.serial`, None if it is as before; and for each server that differs its
    attributes `_TOLD`.

    Args:
        dirty: Called whenever `change` may have something, on any thread. It must neither block nor raise.
    """

    def __init__(self, fleet: Fleet, dirty: Callable[[], None]) -> None:
        self._fleet, self._dirty = fleet, dirty
        self._lock = threading.Lock()
        self._mirror = self._event = 0
        self._head: list[Any] = []
        self._states: dict[Server, list[Any]] = {}
        self._changed: set[Server] = set()  # since they were looked at
        fleet.add_listener(dirty, self._changed)

    def whole(self) -> list[Any]:
        """The first change for a new mirror. Events of the one before have no effect from now on."""
        with self._lock:
            self._mirror, self._event = self._mirror + 1, 0
            self._head, self._states = [], {}
            change = self._news()
        assert change is not None  # nothing was told yet
        return change

    def change(self) -> list[Any] | None:
        """What the mirror was not told yet, None if there is nothing.

        Changes must be sent in the order in which they were made. Ask for one once a second too: `Fleet.check` may
        fail because time has passed, which no listener hears.
        """
        with self._lock:
            return self._news()

    def on_event(self, event: list[Any]) -> None:
        """Have the fleet see an event of the mirror. One of a server that is no longer listed has no effect on it."""
        mirror, number, kind, serial, *said = event
        with self._lock:
            if mirror != self._mirror:
                return
        server = next((server for server in self._fleet.servers if server.serial == serial), None)
        if server is not None:
            self._see(server, kind, *said)
        with self._lock:
            if mirror == self._mirror:
                self._event = number
        self._dirty()

    def _see(self, server: Server, kind: str, *said: Any) -> None:
        match kind:
            case "suspect":
                losses, words, what = said
                if server.losses == losses:  # else it was connected again since
                    self._fleet.suspect(server, EngineError(words), what)
            case "silent":
                self._fleet.fall_silent(server, *said)
            case "heard":
                self._fleet.heard(server)
            case "answered":
                self._fleet.answered(server)

    def _news(self) -> list[Any] | None:
        """Under the lock: no event is counted between a look at the fleet and the number."""
        listed = dict.fromkeys(self._fleet.servers)
        changed = {self._changed.pop() for _ in range(len(self._changed))} & self._states.keys()
        servers = sorted(changed | (listed.keys() ^ self._states.keys()), key=lambda server: server.serial)
        states = self._fleet.states(servers, _TOLD)
        head = [self._event, self._failure(), self._fleet.keeper.restarts, [server.serial for server in listed]]
        told = [state for server, state in zip(servers, states, strict=True) if self._states.get(server) != state]
        if not told and head == self._head:
            return None
        serials = None if self._head[3:] == head[3:] else head[3]
        self._head = head
        self._states |= zip(servers, states, strict=True)
        for left in self._states.keys() - listed.keys():
            del self._states[left]
        return [self._mirror, *head[:3], serials, told]

    def _failure(self) -> list[str] | None:
        try:
            self._fleet.check()
        except BaseException as error:  # whatever `Fleet.fail` was given
            words = str(error) if isinstance(error, PlainError) else in_words(error)
            return [type(error).__name__, words.encode(errors="replace").decode()]
        return None


@dataclass(eq=False)
class _Entry:
    """A server of the mirror.

    Attributes:
        told: Its attributes in the fleet.
        own: Those that an event has set here -> the event's number.
        accused: It may be silent in the fleet, or become so, by an event from here.
    """

    server: Server
    told: dict[str, Any] = field(default_factory=dict)
    own: dict[str, int] = field(default_factory=dict)
    accused: bool = False


class FleetMirror(FleetView):
    """The fleet as far as it was told. One event loop calls its methods, and its listeners are called there.

    An event takes effect here at once, as it will in the fleet. Only `fall_silent` waits for the fleet, which knows
    what the server is doing. A server that returns to the list is a new object, as in the fleet. One that has left
    keeps its last state, and what its requests meet stays here.

    Args:
        make: Makes the server of an address, with its client and control.
        send: Sends an event to `FleetTeller.on_event`: [mirror, number, kind, serial, ...]. It must not block.
    """

    def __init__(self, make: Callable[[str], Server], send: Callable[[list[Any]], None]) -> None:
        super().__init__()
        self._make, self._send = make, send
        self._mirror = self._event = self._seen = 0
        self._failure: list[str] | None = None
        self._entries: dict[int, _Entry] = {}  # of listed servers, and of others with requests
        self._listed: set[int] = set()

    def apply(self, change: list[Any]) -> None:
        """Take over a change. Listeners are called once."""
        self._mirror, self._seen, self._failure, self.keeper.restarts, serials, states = change
        differ = [entry for entry in self._entries.values() if entry.own]
        for state in states:
            told = dict(zip(_TOLD, state, strict=True))
            if told["serial"] not in self._entries:
                self._entries[told["serial"]] = _Entry(self._make(told["url"]))
            entry = self._entries[told["serial"]]
            entry.told = told
            differ.append(entry)
        with self._lock:
            for entry in differ:
                entry.own = {name: event for name, event in entry.own.items() if event > self._seen}
                for name in entry.told.keys() - entry.own.keys():
                    setattr(entry.server, name, entry.told[name])
            if serials is not None:
                self._servers, self._listed = [self._entries[serial].server for serial in serials], set(serials)
        if serials is not None:
            left = {serial: entry for serial, entry in self._entries.items() if entry.server.in_flight}
            self._entries = {serial: self._entries[serial] for serial in serials} | left
        self._notify()

    def check(self) -> None:
        """Raises what `Fleet.check` has raised, or a FleetError with its words if that is of an unknown kind."""
        if self._failure is not None:
            kind, words = self._failure
            raise _ERRORS.get(kind, FleetError)(words)

    def suspect(self, server: Server, error: Exception, what: str = "a request failed") -> None:
        """See `FleetView.suspect`."""
        if server.in_traffic:
            words = one_line(str(error))
            here = {"in_traffic": False, "suspected": True, "suspicions": server.suspicions + 1}
            self._tell("suspect", server, server.losses, words, what, **here, reason=one_line(f"{what}: {words}"))

    def fall_silent(self, server: Server, why: str) -> None:
        """See `Fleet.fall_silent`. The fleet decides, except for a server that has left the list."""
        if server.silent:
            return
        if server.serial in self._listed:
            self._entries[server.serial].accused = True
            self._tell("silent", server, one_line(why))
        elif any(other.in_traffic for other in self.servers):
            self._tell("silent", server, silent=True)

    def heard(self, server: Server) -> None:
        """See `FleetView.heard`."""
        entry = self._entries.get(server.serial)
        if server.silent or (entry is not None and entry.accused):
            if entry is not None:
                entry.accused = False
            self._tell("heard", server, silent=False)

    def answered(self, server: Server) -> None:
        """See `FleetView.answered`."""
        if server.suspicions:
            self._tell("answered", server, suspicions=0)

    def requests_in_flight(self, serial: int) -> int:
        """Requests that run at this server, for `Fleet.requests_in_flight`."""
        entry = self._entries.get(serial)
        return 0 if entry is None else entry.server.in_flight

    def versions_in_use(self, serial: int) -> list[int]:
        """Versions that requests there name, or may name from now on, for `Fleet.versions_in_use`."""
        entry = self._entries.get(serial)
        if entry is None:
            return []
        may_return = {entry.told["version"]} if entry.told["in_traffic"] else set()  # suspected here only, perhaps
        return sorted(entry.server.versions_in_use() | may_return)

    def _tell(self, kind: str, server: Server, *said: Any, **here: Any) -> None:
        """Send an event of a listed server, and set these attributes here."""
        if server.serial in self._listed:
            self._event += 1
            self._entries[server.serial].own |= dict.fromkeys(here, self._event)
            self._send([self._mirror, self._event, kind, server.serial, *said])
        for name, value in here.items():
            setattr(server, name, value)
        if here:
            self._notify()
