"""The mirror of the fleet in another process, over a channel that delays and coalesces."""

import asyncio
import os
import random
from collections import Counter, deque
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest

from torchtitan.grpo.engines import fleet as fleet_module
from torchtitan.grpo.engines.fleet import Fleet
from torchtitan.grpo.engines.fleet_mirror import _TOLD, FleetMirror, FleetTeller
from torchtitan.grpo.engines.fleet_view import FleetError
from torchtitan.grpo.engines.protocol import Completion, EngineError, Refused, SamplingParams
from torchtitan.grpo.engines.server import Server
from torchtitan.grpo.errors import UserError
from torchtitan.grpo.rollouts.group_call import GroupCall
from torchtitan.grpo.rollouts.places import Places
from torchtitan.grpo.rollouts.router import Router

A, B, C = "http://a:8000", "http://b:8000", "http://c:8000"
FAILED = EngineError("reset by peer")


class Client:
    """Has the versions that running requests name, as that of adapters has."""

    def __init__(self) -> None:
        self.running: Counter[int] = Counter()

    def running_versions(self) -> set[int]:
        return set(+self.running)


def make(url: str) -> Server:
    return Server(url, SimpleNamespace(), Client())


class World:
    """A fleet and its mirror. What crosses between them does so in order, as MessagePack, when it is delivered."""

    def __init__(self, *urls: str, urls_file: str = "", min_servers: int = 1) -> None:
        self.dirty = 0
        self.fleet = Fleet(list(urls), make, min_servers, urls_file)
        self.teller = FleetTeller(self.fleet, self.soil)
        self.start(self.teller.whole())

    def start(self, change: list) -> None:
        """A new process of rollouts."""
        self.changes: deque[bytes] = deque()
        self.events: deque[bytes] = deque()
        self.mirror = FleetMirror(make, lambda event: self.events.append(msgspec.msgpack.encode(event)))
        self.changes.append(msgspec.msgpack.encode(change))
        self.deliver()

    def soil(self) -> None:
        self.dirty += 1

    def tell(self) -> list | None:
        """Make a change, and put it on its way."""
        change = self.teller.change()
        if change is not None:
            self.changes.append(msgspec.msgpack.encode(change))
        return change

    def deliver(self) -> None:
        while self.changes:
            self.mirror.apply(msgspec.msgpack.decode(self.changes.popleft()))

    def arrive(self) -> None:
        """Events reach the fleet."""
        while self.events:
            self.teller.on_event(msgspec.msgpack.decode(self.events.popleft()))

    def drain(self) -> None:
        """Until both sides know all."""
        while self.events or self.changes or self.tell():
            self.arrive()
            self.deliver()
        assert self.mirror.describe() == self.fleet.describe()
        for told, server in zip(self.mirror.servers, self.fleet.servers, strict=True):
            assert [getattr(told, name) for name in _TOLD] == [getattr(server, name) for name in _TOLD]
        assert error_of(self.mirror) == error_of(self.fleet)

    def admit_all(self, version: int) -> None:
        for server in self.fleet.servers:
            self.fleet.admit(server, version)
        self.drain()


def error_of(fleet: Fleet | FleetMirror) -> tuple[type, str] | None:
    try:
        fleet.check()
    except Exception as error:
        return type(error), str(error)
    return None


def test_the_mirror_shows_what_the_fleet_says_and_only_news_crosses() -> None:
    world = World(A, B)
    fleet, mirror = world.fleet, world.mirror
    seen: list[str] = []
    mirror.add_listener(lambda: seen.append(mirror.describe()))
    assert mirror.describe() == fleet.describe() and mirror.eligible(-1) == [] and world.tell() is None
    fleet.admit(fleet.servers[1], 3)
    fleet.keeper.restarts = 2
    change = world.tell()
    assert len(change[-1]) == 1 and change[-1][0][1] == B and world.tell() is None
    world.deliver()
    a, b = mirror.servers
    assert mirror.eligible(3) == [b] and mirror.eligible(4) == [] and mirror.keeper.restarts == 2
    assert seen == [fleet.describe()]
    dirty = world.dirty
    fleet.hold(fleet.servers[1])
    assert world.dirty > dirty
    world.drain()
    assert b.held and mirror.eligible(-1) == [] and [a, b] == mirror.servers


def test_a_change_looks_only_at_servers_that_have_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each version changes all of them, one after the other: looks at all would be quadratic."""
    world = World(A, B)
    world.admit_all(1)
    looked, states = [], world.fleet.states
    monkeypatch.setattr(world.fleet, "states", lambda *asked: looked.append(list(asked[0])) or states(*asked))
    world.fleet.admit(world.fleet.servers[1], 2)
    world.tell()
    assert looked == [world.fleet.servers[1:]]


def test_only_a_change_from_after_a_suspicion_readmits() -> None:
    world = World(A, B)
    world.admit_all(1)
    fleet, mirror = world.fleet, world.mirror
    a = mirror.servers[0]
    fleet.admit(fleet.servers[0], 2)
    world.tell()  # says that it is in traffic
    mirror.suspect(a, EngineError("reset\nby peer"))
    assert (a.in_traffic, a.suspicions, a.reason) == (False, 1, "a request failed: reset by peer")
    mirror.suspect(a, FAILED)
    assert len(world.events) == 1, "it is out of traffic already"
    world.deliver()
    assert a.version == 2 and not a.in_traffic and mirror.eligible(-1) == [mirror.servers[1]]
    world.arrive()
    assert not fleet.servers[0].in_traffic and fleet.servers[0].reason == a.reason
    fleet.admit(fleet.servers[0], 2)
    world.drain()
    assert mirror.eligible(2) == [a]


def test_a_suspicion_that_the_fleet_ignores_is_forgotten() -> None:
    """The server was connected again since."""
    world = World(A, B)
    world.admit_all(1)
    fleet, mirror = world.fleet, world.mirror
    a = mirror.servers[0]
    fleet.withdraw(fleet.servers[0], "gone")
    fleet.admit(fleet.servers[0], 1)
    mirror.suspect(a, FAILED)
    dirty = world.dirty
    world.arrive()
    assert fleet.servers[0].in_traffic and world.dirty > dirty
    world.drain()
    assert a.in_traffic and a.losses == 1

    fleet.withdraw(fleet.servers[0], "slow", lost=False)  # of one that is out of traffic
    mirror.suspect(a, FAILED)
    world.arrive()
    assert not fleet.servers[0].suspected
    fleet.admit(fleet.servers[0], 1)
    world.drain()
    assert a.in_traffic and a.reason == ""


def test_the_fleet_decides_who_is_silent() -> None:
    world = World(A, B)
    world.admit_all(1)
    fleet, mirror = world.fleet, world.mirror
    a, b = mirror.servers
    mirror.heard(a)
    assert not world.events, "it is not silent"
    mirror.fall_silent(a, "no reply")
    assert not a.silent and a.in_traffic
    world.drain()
    assert a.silent and not a.in_traffic
    mirror.fall_silent(b, "no reply")
    world.drain()
    assert b.in_traffic and not b.silent, "it is the last one"
    mirror.heard(a)
    assert not a.silent and len(world.events) == 1
    fleet.admit(fleet.servers[1], 2)
    world.tell()
    world.deliver()
    assert not a.silent, "the fleet had not seen yet that it replies"
    world.drain()
    assert not a.silent and not fleet.servers[0].silent


def test_a_server_that_replies_before_the_fleet_says_that_it_is_silent() -> None:
    world = World(A, B)
    world.admit_all(1)
    a = world.mirror.servers[0]
    world.mirror.fall_silent(a, "no reply")
    world.arrive()
    world.tell()
    world.mirror.heard(a)
    world.mirror.heard(a)
    assert len(world.events) == 1
    world.deliver()
    assert not a.silent and not a.in_traffic
    world.drain()
    assert not world.fleet.servers[0].silent


def test_an_answer_ends_a_row_of_suspicions() -> None:
    world = World(A, B)
    world.admit_all(1)
    fleet, mirror = world.fleet, world.mirror
    a = mirror.servers[0]
    mirror.answered(a)
    assert not world.events
    mirror.suspect(a, FAILED)
    mirror.answered(a)  # another request, on its way already
    mirror.answered(a)
    assert len(world.events) == 2 and a.suspicions == 0
    world.drain()
    world.admit_all(1)
    mirror.suspect(a, FAILED)
    world.drain()
    assert a.suspicions == fleet.servers[0].suspicions == 1
    world.admit_all(1)
    assert a.in_traffic, "it was the first in a row"


def test_an_admission_that_comes_too_early_is_told_too() -> None:
    world = World(A, B)
    world.admit_all(1)
    fleet, server = world.fleet, world.fleet.servers[0]
    for _ in range(2):
        fleet.suspect(server, FAILED)
        fleet.admit(server, 1)
    world.drain()
    dirty = world.dirty
    fleet.admit(server, 2)
    assert world.dirty > dirty and not server.in_traffic
    dirty = world.dirty
    fleet.admit(server, 2)
    assert world.dirty == dirty, "nothing has changed: a listener may admit"
    world.drain()
    assert world.mirror.servers[0].version == 2


class Listed:
    """A file of servers that is written again and again."""

    def __init__(self, folder: Path) -> None:
        self.path, self.folder = folder / "servers.txt", folder

    def write(self, *urls: str) -> None:
        (self.folder / "new").write_text("".join(f"{url}\n" for url in urls))
        os.replace(self.folder / "new", self.path)


def test_a_server_that_leaves_and_returns_is_a_new_one(tmp_path) -> None:
    listed = Listed(tmp_path)
    listed.write(A, B)
    world = World(urls_file=str(listed.path))
    world.admit_all(1)
    fleet, mirror = world.fleet, world.mirror
    a, b = mirror.servers
    a.in_flight = 2
    a.client.running.update([1])
    listed.write(B, C)
    fleet.reread()
    mirror.suspect(a, FAILED)
    mirror.fall_silent(a, "no reply")
    world.drain()
    assert [server.url for server in mirror.servers] == [B, C] and mirror.servers[0] is b
    assert (a.in_traffic, a.suspected, a.reason) == (False, False, "no longer in [rollout] urls_file")
    assert (mirror.requests_in_flight(a.serial), mirror.versions_in_use(a.serial)) == (2, [1])
    mirror.suspect(a, FAILED)
    mirror.fall_silent(a, "no reply")
    assert a.silent and not world.events, "its requests are asked elsewhere too"
    mirror.heard(a)
    assert not a.silent and not world.events
    a.in_flight = 0
    listed.write(C, B, A)
    fleet.reread()
    world.drain()
    assert [server.url for server in mirror.servers] == [C, B, A]
    assert mirror.servers[2] is not a and mirror.servers[2].serial != a.serial and mirror.servers[1] is b
    assert (mirror.requests_in_flight(a.serial), mirror.versions_in_use(a.serial)) == (0, [])
    dirty = world.dirty
    listed.write(A, B, C)
    fleet.reread()
    assert world.dirty > dirty, "the order has changed"
    world.drain()
    assert [server.url for server in mirror.servers] == [A, B, C]


@pytest.mark.parametrize(
    ("error", "kind", "words"),
    [
        (EngineError("a:\nb"), EngineError, "a:\nb"),
        (UserError("bad \ud800 key"), UserError, "bad ? key"),
        (Refused("no"), Refused, "no"),
        (ZeroDivisionError("by 0"), FleetError, "ZeroDivisionError: by 0"),
    ],
)
def test_what_the_fleet_raises_is_raised_here(error, kind, words) -> None:
    world = World(A)
    world.mirror.check()
    world.fleet.fail(error)
    world.mirror.check()
    world.tell()
    world.deliver()
    for _ in range(2):
        assert error_of(world.mirror) == (kind, words)


def test_too_few_servers_here_as_there() -> None:
    world = World(A, B, min_servers=2)
    world.fleet.withdraw(world.fleet.servers[1], "dead")
    world.drain()
    assert error_of(world.mirror)[0] is FleetError and "http://b:8000: lost" in error_of(world.mirror)[1]
    world.admit_all(1)
    assert error_of(world.mirror) is None


def test_a_new_process_starts_from_the_whole_fleet_and_hears_nothing_of_the_one_before() -> None:
    world = World(A, B)
    world.admit_all(1)
    for server in world.mirror.servers:
        world.mirror.suspect(server, FAILED)
    late = [msgspec.msgpack.decode(event) for event in world.events]
    world.start(world.teller.whole())
    assert world.mirror.describe() == world.fleet.describe() and len(world.mirror.eligible(1)) == 2
    a = world.mirror.servers[0]
    world.mirror.suspect(a, FAILED)
    for event in late[1:]:
        world.teller.on_event(event)
    assert world.tell() is None
    assert all(server.in_traffic for server in world.fleet.servers) and not a.in_traffic
    world.drain()
    assert [server.in_traffic for server in world.fleet.servers] == [False, True]


def test_words_of_a_server_that_utf8_cannot_carry_cross() -> None:
    world = World(A, B)
    world.admit_all(1)
    mirror, fleet = world.mirror, world.fleet
    mirror.suspect(mirror.servers[0], EngineError("bad \ud800 reply"))
    mirror.fall_silent(mirror.servers[1], "\udfff")
    fleet.withdraw(fleet.servers[1], "\ud800")
    world.drain()
    assert mirror.servers[0].reason == "a request failed: bad ? reply" and mirror.servers[1].reason == "?"


def test_versions_in_use_count_one_that_a_forgotten_suspicion_brings_back() -> None:
    world = World(A, B)
    world.admit_all(7)
    a = world.mirror.servers[0]
    a.client.running.update([5, 7])
    assert world.mirror.versions_in_use(a.serial) == [5, 7]
    a.client.running.clear()
    world.mirror.suspect(a, FAILED)
    assert world.mirror.versions_in_use(a.serial) == [7]
    world.drain()
    assert world.mirror.versions_in_use(a.serial) == []


def test_requests_at_a_server_that_was_lost_and_has_returned_are_sent_again() -> None:
    """Nobody looked while it was lost. The new one is not suspected for them."""
    world = World(A)
    world.admit_all(1)
    server, fleet, mirror = world.fleet.servers[0], world.fleet, world.mirror

    async def run() -> tuple[list[Completion], list[int]]:
        loop, asked = asyncio.get_running_loop(), asyncio.Queue()

        async def generate(*_: object) -> list[Completion]:
            asked.put_nowait(mirror.servers[0].version)
            if mirror.servers[0].version == 1:
                await asyncio.Event().wait()
            return [Completion([1], [0.0], "stop", [2])]

        mirror.servers[0].client.generate = generate
        router = Router(Places(mirror, 4, 10.0, loop))
        mirror.add_listener(lambda: loop.call_soon(router.look_at_fleet))
        params, prompt = SamplingParams(1, 1.0, 4), SimpleNamespace(index=0)
        answer = asyncio.create_task(router.answer(prompt, [1], params, "request", GroupCall(), None))
        versions = [await asyncio.wait_for(asked.get(), 10)]
        fleet.withdraw(server, "gone")
        fleet.admit(server, 2)
        world.tell()
        world.deliver()
        completions = await asyncio.wait_for(answer, 10)
        router.silence.close()
        return completions, [*versions, asked.get_nowait()]

    completions, versions = asyncio.run(run())
    assert completions[0].token_ids == [1] and versions == [1, 2]
    world.drain()
    assert server.in_traffic and server.suspicions == 0


class Life:
    """Random operations on both sides, and what an onlooker knows of each server by its serial number.

    Attributes:
        proved: The version that weight sync has proved there, -2 for none.
        stopped: Servers that may get nothing: never admitted, or held, withdrawn, suspected or removed since.
        loaded: Versions that the server can be asked for.
        known: (proved, stopped, event) when the newest change was made that the mirror has.
        suspected: Server -> the event with which the mirror suspected it.
    """

    def __init__(self, folder: Path, seed: int) -> None:
        self.random = random.Random(seed)
        self.listed = Listed(folder)
        self.urls = [f"http://s{i}:1" for i in range(6)]
        self.listed.write(*self.urls[:4])
        self.world = World(urls_file=str(self.listed.path))
        self.newest, self.sent, self.questions = 0, 0, 0
        self.proved: Counter[int] = Counter()
        self.loaded: dict[int, set[int]] = {}
        self.changes: deque[tuple[str, object]] = deque()
        self.answers: deque[tuple[Server, int, list[int]]] = deque()
        self.busy: set[int] = set()
        self.seen = self.dirty = 0
        self.stopped = {server.serial for server in self.world.fleet.servers}
        self.proved.update({serial: -2 for serial in self.stopped})
        self.known = self.knowledge()
        self.suspected: dict[int, int] = {}
        self.requests: list[tuple[Server, int]] = []

    def knowledge(self) -> tuple[dict[int, int], set[int], int]:
        return dict(self.proved), set(self.stopped), self.seen

    # The trainer's side.

    def admit(self, server: Server) -> None:
        """Only its worker does, which is not busy. It gets the newest version, if it has not got that."""
        if server.serial not in self.busy:
            self.load(server)
            self.world.fleet.admit(server, self.newest)
            if server.in_traffic and not server.suspected:
                self.stopped.discard(server.serial)

    def load(self, server: Server) -> None:
        self.loaded.setdefault(server.serial, set()).add(self.newest)
        self.proved[server.serial] = self.newest

    def publish(self, server: Server) -> None:
        self.newest += 1
        self.admit(server)

    def hold(self, server: Server) -> None:
        if server.serial not in self.busy:
            self.world.fleet.hold(server)
            self.stopped.add(server.serial)

    def withdraw(self, server: Server) -> None:
        if server.serial not in self.busy:
            lost = self.random.random() < 0.5
            self.world.fleet.withdraw(server, "late", lost)
            self.stopped.add(server.serial)
            self.proved[server.serial] = -2 if lost else self.proved[server.serial]

    def distrust(self, server: Server) -> None:
        was = server.in_traffic
        self.world.fleet.distrust(server, "not the policy's")
        if was:
            self.stopped.add(server.serial)
            self.proved[server.serial] = -2

    def suspect(self, server: Server) -> None:
        was = server.in_traffic
        self.world.fleet.suspect(server, FAILED)
        if was:
            self.stopped.add(server.serial)

    def fall_silent(self, server: Server) -> None:
        self.world.fleet.fall_silent(server, "no reply")
        if not server.in_traffic:
            self.stopped.add(server.serial)

    def heard(self, server: Server) -> None:
        self.world.fleet.heard(server)

    def reread(self, server: Server) -> None:
        self.listed.write(*self.random.sample(self.urls, self.random.randint(2, 6)))
        added, removed = self.world.fleet.reread()
        for server in added + removed:
            self.stopped.add(server.serial)
            self.proved[server.serial] = -2

    def ask(self, server: Server) -> None:
        """The worker holds the server, then asks what runs there. The answer comes after what the mirror is due."""
        if server.serial not in self.busy:
            self.hold(server)
            self.busy.add(server.serial)
            self.tell()
            self.changes.append(("question", server))

    def tell(self, server: Server | None = None) -> None:
        heard_of, self.dirty = self.dirty < self.world.dirty, self.world.dirty
        change = self.world.teller.change()
        if change is not None:
            assert heard_of, "nobody was told that there is something to tell"
            self.changes.append(("change", (msgspec.msgpack.encode(change), self.knowledge())))

    def event(self, server: Server | None = None) -> None:
        if self.world.events:
            event = msgspec.msgpack.decode(self.world.events.popleft())
            before = {server.serial for server in self.world.fleet.servers if server.in_traffic}
            self.world.teller.on_event(event)
            self.stopped |= before - {server.serial for server in self.world.fleet.servers if server.in_traffic}
            self.seen = event[1]

    def answer(self, server: Server | None = None) -> None:
        """What does not run there is unloaded, and the newest version loaded."""
        if self.answers:
            server, in_flight, versions = self.answers.popleft()
            self.questions += 1
            there = [version for told, version in self.requests if told.serial == server.serial]
            assert len(there) <= in_flight, "a request has begun after they were counted"
            self.loaded[server.serial] = self.loaded.get(server.serial, set()) & set(versions)
            assert self.loaded[server.serial] >= set(there), "a running request names a version that is unloaded"
            self.busy.discard(server.serial)
            self.admit(server)

    # The side of rollouts.

    def deliver(self, _: Server | None = None) -> None:
        if not self.changes:
            return
        kind, what = self.changes.popleft()
        if kind == "change":
            change, self.known = what
            self.world.mirror.apply(msgspec.msgpack.decode(change))
        else:
            mirror, serial = self.world.mirror, what.serial
            self.answers.append((what, mirror.requests_in_flight(serial), mirror.versions_in_use(serial)))

    def send(self, _: Server | None = None) -> None:
        version = self.random.randint(max(-1, self.newest - 3), self.newest)
        for server in self.world.mirror.eligible(version):
            proved, stopped, seen = self.known
            assert proved[server.serial] >= version, "it was not proved to have these weights (I3)"
            assert server.serial not in stopped, "the mirror was told that it gets nothing"
            assert self.suspected.get(server.serial, 0) <= seen, "it is suspected here, and the fleet does not know"
            assert server.version in self.loaded[server.serial], "the adapter that is named was unloaded"
            self.sent += 1
            self.requests.append((server, server.version))
            server.in_flight += 1
            server.client.running[server.version] += 1

    def end(self, _: Server | None = None) -> None:
        if self.requests:
            mirror = self.world.mirror
            server, version = self.requests.pop(self.random.randrange(len(self.requests)))
            server.in_flight -= 1
            server.client.running[version] -= 1
            was, event = server.in_traffic, mirror._event
            match self.random.randrange(30):
                case 0:
                    mirror.suspect(server, FAILED)
                    if was:
                        assert not server.in_traffic and mirror._event == event + 1
                        self.suspected[server.serial] = mirror._event
                case 1:
                    mirror.fall_silent(server, "no reply")
                case _:
                    mirror.heard(server)
                    mirror.answered(server)

    def step(self) -> None:
        trainer = [self.admit, self.publish, self.hold, self.withdraw, self.suspect, self.distrust]
        trainer += [self.fall_silent, self.heard, self.reread, self.ask, self.tell, self.event, self.answer]
        rollouts = [self.deliver, self.send, self.end]
        weights = [40, 4, 2, 2, 2, 0.5, 1, 2, 0.5, 5, 25, 25, 20, 40, 40, 60]
        call = self.random.choices(trainer + rollouts, weights)[0]
        call(self.random.choice(self.world.fleet.servers))

    def settle(self) -> None:
        """Deliver everything that is on its way."""
        self.tell()
        while self.changes or self.world.events:
            self.deliver()
            self.event()
            self.tell()
        self.world.drain()


@pytest.mark.parametrize("seed", range(4))
def test_no_request_goes_to_a_server_that_was_not_proved_to_have_its_version(tmp_path, monkeypatch, seed) -> None:
    """I3, whatever the delays. In the end both sides agree."""
    now = iter(range(10**9))
    monkeypatch.setattr(fleet_module, "time", SimpleNamespace(monotonic=lambda: next(now) * 0.05))
    monkeypatch.setattr(fleet_module.logger, "disabled", True)
    life = Life(tmp_path, seed)
    for _ in range(4):
        for _ in range(2000):
            life.step()
        life.settle()
    assert life.sent > 1000 and life.questions > 100 and life.newest > 100
