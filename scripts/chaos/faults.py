"""Faults of servers, drawn at random while a trainer trains, and what was seen of each."""

import contextlib
import json
import random
import shutil
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from chaos.in_flight import REQUEST_S, STRAGGLER_S
from chaos.processes import TINY, Broken, Server
from chaos.proxy import GENERATE, Proxy, Reply
from chaos.watch import Watch

DEAD_S = 5.0
"""A server that is gone must be out of traffic within this."""
HUNG_S = REQUEST_S + STRAGGLER_S + 2.0
"""So must one that does not answer: the limit of a request or of a push, and a look at it."""
BACK_S = 10.0
"""A server that is well must be back within this."""


@dataclass
class Member:
    """A server of the fleet, and the proxy in front of it, if any."""

    server: Server
    proxy: Proxy | None
    other_model: Path

    @property
    def url(self) -> str:
        """As the trainer knows it."""
        return self.proxy.url if self.proxy else self.server.url


Fault = Callable[[Member], Iterator[float | None]]
"""Begins, yields while it lasts, and ends. It may yield the time at which it fell."""


def killed(member: Member) -> Iterator[None]:
    member.server.kill()
    yield
    member.server.start()


def stopped_in_order(member: Member) -> Iterator[None]:
    member.server.signal(signal.SIGTERM)
    yield
    member.server.wait_gone(30.0)
    member.server.start()


def frozen(member: Member) -> Iterator[None]:
    member.server.signal(signal.SIGSTOP)
    yield
    member.server.signal(signal.SIGCONT)


def frozen_then_killed(member: Member) -> Iterator[None]:
    member.server.signal(signal.SIGSTOP)
    yield
    member.server.kill()
    member.server.start()


def another_model(member: Member) -> Iterator[None]:
    member.server.kill()
    member.server.start(member.other_model)
    yield
    member.server.kill()
    member.server.start()


def full_accept_queue(member: Member) -> Iterator[None]:
    """Something has the port and never accepts: connecting neither fails nor succeeds."""
    member.server.kill()
    with ExitStack() as stack:
        listener = stack.enter_context(socket.socket())
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(("127.0.0.1", member.server.port))
        listener.listen(0)
        for _ in range(4):
            client = stack.enter_context(socket.socket())
            client.setblocking(False)
            with contextlib.suppress(BlockingIOError):
                client.connect(("127.0.0.1", member.server.port))
        yield
    member.server.start()


def dripping(member: Member) -> Iterator[None]:
    """Answers come a few bytes at a time; the control routes are well."""
    member.proxy.change = lambda route, _, reply: (
        Reply(reply.status, reply.body, drip_s=0.2) if route in GENERATE else reply
    )
    yield
    member.proxy.pass_on()


def refuses_to_join(member: Member) -> Iterator[None]:
    """It comes back, is healthy, and answers 500 to whoever wants to give it weights."""
    member.server.kill()
    joins = ("/init_weight_transfer_engine", "/init_weights_update_group")
    member.proxy.refuse = lambda route: Reply(500, b'{"error": "no"}') if route in joins else None
    member.server.start()
    yield
    member.proxy.pass_on()


@dataclass(frozen=True)
class Kind:
    """A kind of fault.

    Attributes:
        limit_s: Longest time until the server is out of traffic.
        hold_s: Shortest and longest time that the fault lasts.
        by_proxy: Only a proxy can do it.
        stays_out: The server is healthy, and must not enter traffic while the fault lasts.
    """

    name: str
    fault: Fault
    limit_s: float
    hold_s: tuple[float, float]
    by_proxy: bool = False
    stays_out: bool = False


KINDS = [
    Kind("killed, started again", killed, DEAD_S, (0.2, 2.0)),
    Kind("stopped in order, started again", stopped_in_order, DEAD_S, (0.2, 2.0)),
    Kind("frozen, goes on", frozen, HUNG_S, (HUNG_S, HUNG_S + 2.0)),
    Kind("frozen, killed, started again", frozen_then_killed, HUNG_S, (HUNG_S, HUNG_S + 1.0)),
    Kind("comes back with another model", another_model, DEAD_S, (3.0, 6.0), stays_out=True),
    Kind("full accept queue", full_accept_queue, HUNG_S, (2.0, 5.0)),
    Kind("answers drip", dripping, HUNG_S, (HUNG_S, HUNG_S + 2.0), by_proxy=True),
    Kind("comes back and refuses to join", refuses_to_join, DEAD_S, (2.0, 5.0), by_proxy=True, stays_out=True),
]


@dataclass
class Injection:
    """One fault, and what was seen of it.

    Attributes:
        at, cleared_at: When it began and ended. All times are those of `time.time()`.
        well_at: When the server was healthy again.
        out_at, in_at: When the trainer took it out of traffic, and back.
        lost_s: By how much longer than usual the steps took that it touched. Faults at one time share it.
        wrong: What did not hold.
    """

    kind: Kind
    url: str
    at: float
    cleared_at: float = 0.0
    well_at: float = 0.0
    out_at: float = 0.0
    in_at: float = 0.0
    lost_s: float = 0.0
    wrong: str = ""


def start_members(stack: ExitStack, engine: str, count: int, folder: Path, **how: Any) -> list[Member]:
    """Healthy servers. The last one has a proxy in front."""
    other_model = folder / "other_model"
    _save_other_model(other_model)
    servers = [stack.enter_context(Server(engine, folder, f"server-{i}", **how)) for i in range(count)]
    for server in servers:
        server.wait_healthy()
    proxies = [None] * (count - 1) + [stack.enter_context(Proxy(servers[-1].url))]
    return [Member(server, proxy, other_model) for server, proxy in zip(servers, proxies, strict=True)]


class Torment:
    """Breaks every server again and again, each kind in turn, never all of several at once.

    Args:
        watch: Of the trainer that they serve.
        over: Whether no further fault shall begin.
        pause_s: Shortest and longest time between two faults of one server.
        kinds: Those that are drawn.

    Attributes:
        injections: The faults so far.
    """

    def __init__(
        self,
        members: list[Member],
        watch: Watch,
        draw: random.Random,
        over: Callable[[], bool],
        pause_s: tuple[float, float] = (0.5, 2.0),
        kinds: Sequence[Kind] = KINDS,
    ) -> None:
        self.injections: list[Injection] = []
        self._kinds = kinds
        self._members, self._watch, self._random, self._over = members, watch, draw, over
        self._pause_s = pause_s
        self._lock = threading.Lock()
        self._deck: list[Kind] = []
        self._failures: list[BaseException] = []

    def run(self, limit_s: float) -> None:
        """Until it is over, and the servers are well.

        Raises:
            Broken: The trainer has ended, or did not see a server leave or come back.
        """
        free = threading.Semaphore(max(1, len(self._members) - 1))
        threads = [
            threading.Thread(target=self._break_often, args=(member, free, self._random.random()), daemon=True)
            for member in self._members
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(limit_s)
        if self._failures:
            raise self._failures[0]

    def _break_often(self, member: Member, free: threading.Semaphore, seed: float) -> None:
        draw = random.Random(seed)
        try:
            while not (self._over() or self._failures):
                time.sleep(draw.uniform(*self._pause_s))
                with free:
                    if not (self._over() or self._failures):
                        self._inject(member, self._next_kind(member), draw)
        except BaseException as error:
            if not isinstance(error, Broken) or not self._over():
                self._failures.append(error)

    def _next_kind(self, member: Member) -> Kind:
        """Each kind in turn, as far as it is possible here."""
        with self._lock:
            if not any(not kind.by_proxy or member.proxy for kind in self._deck):
                more = list(self._kinds)
                self._random.shuffle(more)
                self._deck += more
            kind = next((kind for kind in self._deck if kind.by_proxy and member.proxy), None) or next(
                kind for kind in self._deck if not kind.by_proxy
            )
            self._deck.remove(kind)
            return kind

    def _inject(self, member: Member, kind: Kind, draw: random.Random) -> None:
        watch = self._watch
        watch.wait_for(f"{member.url} in traffic", lambda: watch.is_in(member.url), 60.0)
        injection = Injection(kind, member.url, time.time())
        with self._lock:
            self.injections.append(injection)
        fault = kind.fault(member)
        injection.at = next(fault) or injection.at
        hold_until = time.time() + draw.uniform(*kind.hold_s)
        what = f"{member.url} out of traffic after {kind.name!r}"
        watch.wait_for(what, lambda: watch.first(member.url, False, injection.at), kind.limit_s + 20.0)
        injection.out_at = watch.first(member.url, False, injection.at).time
        if kind.stays_out:
            member.server.wait_healthy()
            hold_until = max(hold_until, time.time() + kind.hold_s[0])
        time.sleep(max(0.0, hold_until - time.time()))
        injection.cleared_at = time.time()
        next(fault, None)
        injection.well_at = max(injection.cleared_at, member.server.wait_healthy())
        since = injection.cleared_at
        back = f"{member.url} in traffic again after {kind.name!r}"
        watch.wait_for(back, lambda: watch.first(member.url, True, since) or watch.is_in(member.url), BACK_S + 20.0)
        entered = watch.first(member.url, True, since)
        injection.in_at = max(injection.well_at, entered.time if entered else 0.0)


def _save_other_model(folder: Path) -> None:
    """The same model, but for one layer."""
    shutil.copytree(TINY, folder)
    config = json.loads((folder / "config.json").read_text())
    config["num_hidden_layers"] -= 1
    config["layer_types"].pop()
    (folder / "config.json").write_text(json.dumps(config))
