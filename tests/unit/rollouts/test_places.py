"""The lanes of waiting requests against the plain rule, which looks at every waiting request at each event."""

import asyncio
import itertools
import random
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace

import pytest

from torchtitan.grpo.engines.fleet import Fleet
from torchtitan.grpo.engines.protocol import EngineError
from torchtitan.grpo.engines.server import Server
from torchtitan.grpo.rollouts.group_call import GroupCall, Ticket
from torchtitan.grpo.rollouts.places import HOLD_S, Places
from torchtitan.grpo.rollouts.request_failures import Failures

SERVERS = 5


class Loop:
    """What places need of an event loop, with a clock of its own."""

    def __init__(self) -> None:
        self.now = 0.0
        self.timers: list[tuple[float, Callable[[], None]]] = []

    def time(self) -> float:
        return self.now

    def call_later(self, delay: float, call: Callable[[], None]) -> object:
        self.timers.append((self.now + delay, call))
        return call

    def create_future(self) -> SimpleNamespace:
        future = SimpleNamespace(given=None)
        future.done = lambda: future.given is not None
        future.set_result = future.set_exception = partial(setattr, future, "given")
        return future


class Call(GroupCall):
    """Without a time limit."""

    def restarts(self) -> None:
        pass


class Plain(Places):
    """All waiting requests in queues, each of which is looked at."""

    def _join(self, call, failures, before="", instead_of=None) -> Ticket:
        self.queues = getattr(self, "queues", ({}, {}, {}))
        rank = (0 if call.is_under_way else 1 if call.first else 2), next(self._numbers)
        ticket = Ticket(call, failures, self._loop.create_future(), self._loop.time(), rank, before, instead_of)
        self.queues[rank[0]][ticket] = None
        self._dispatch()
        return ticket

    def _forget(self, ticket: Ticket) -> None:
        self.queues[ticket.rank[0]].pop(ticket, None)

    def look_at_fleet(self) -> None:
        self._dispatch()

    def _dispatch(self) -> None:
        waiting = list(itertools.chain(*getattr(self, "queues", ())))
        in_traffic = self.fleet.eligible(-1)
        oldest = min((server.version for server in in_traffic), default=-1)
        in_flight = sum(server.in_flight for server in in_traffic)
        share, held = (in_flight + len(waiting)) / max(1, len(in_traffic)), False
        for ticket in waiting:
            places = [server for server in in_traffic if self._has_place(server)]
            min_version = ticket.call.oldest()
            server = self._best(places, ticket, min_version)
            if server is None:
                continue
            if oldest < min_version and server.in_flight >= share and server.url != ticket.before:
                ticket.held_at = self._loop.time() if ticket.held_at is None else ticket.held_at
                if self._loop.time() < ticket.held_at + HOLD_S:
                    held = True
                    continue
            self._forget(ticket)
            self.occupy(server, ticket.call)
            ticket.server.set_result(server)
        if held and self._hold_ends is None:
            self._hold_ends = self._loop.call_later(HOLD_S, self._end_hold)


class World:
    """Places with their fleet, and groups that need newer weights the more of them have begun."""

    def __init__(self, kind: type[Places], count: int, per_version: int) -> None:
        self.per_version = per_version
        self.loop, self.begun = Loop(), 0
        self.fleet = Fleet([f"s{i}" for i in range(SERVERS)], lambda url: Server(url, None))
        self.places = kind(self.fleet, count, 600.0, self.loop)
        self.calls: list[GroupCall] = []
        self.tickets: list[Ticket] = []
        self.versions: dict[int, int] = {}

    def needed(self) -> int:
        return self.begun // self.per_version - 1

    def group(self, samples: int, first: bool) -> None:
        number = len(self.calls)

        def begin(version: int) -> None:
            assert version >= oldest()
            self.begun += number not in self.versions
            self.versions.setdefault(number, version)

        def oldest() -> int:
            return self.versions.get(number, self.needed())

        whole = Call(oldest, begin, first=first, unbegun=self.needed)
        of_samples = [Call(oldest, whole.begun, first=first, group=whole) for _ in range(samples)]
        self.calls += of_samples or [whole]
        for call in of_samples or [whole]:
            self.ask(call)

    def ask(self, call: GroupCall, before: str = "", failed_at: int = -1) -> None:
        failures = Failures()
        if failed_at >= 0:
            failures.add(self.fleet.servers[failed_at], 0, EngineError("down"))
        self.tickets.append(self.places._join(call, failures, before))

    def again(self, number: int, failed_at: int) -> None:
        """A later turn of a request that was answered, or a retry."""
        ticket = self.tickets[number]
        self.ask(ticket.call, "" if failed_at >= 0 else ticket.server.given.url, failed_at)

    def release(self, number: int) -> None:
        self.places.release(self.tickets[number].server.given)

    def admit(self, server: int, version: int) -> None:
        server = self.fleet.servers[server]
        self.fleet.admit(server, max(version, server.version))
        self.places.look_at_fleet()

    def withdraw(self, server: int) -> None:
        self.fleet.withdraw(self.fleet.servers[server], "busy", lost=False)
        self.places.look_at_fleet()

    def wait(self, seconds: float) -> None:
        self.loop.now += seconds
        due = [timer for timer in self.loop.timers if timer[0] <= self.loop.now]
        self.loop.timers = [timer for timer in self.loop.timers if timer not in due]
        for _, call in due:
            call()

    def give_up(self, number: int) -> None:
        self.places._forget(self.tickets[number])

    def routed(self) -> list[str]:
        return [ticket.server.given.url if ticket.server.done() else "" for ticket in self.tickets]


@pytest.mark.parametrize("block", range(4))
def test_requests_go_where_they_go_if_each_is_looked_at_every_time(block) -> None:
    routed_in_all = held = 0
    for seed in range(12 * block, 12 * block + 12):
        chance = random.Random(seed)
        settings = chance.choice([2, 5, 12]), chance.choice([4, 8, 16])
        worlds = [World(kind, *settings) for kind in (Places, Plain)]
        version, ended = 0, set()
        per_sample = seed % 2
        for _ in range(150):
            routed = worlds[0].routed()
            running = [i for i, url in enumerate(routed) if url and i not in ended]
            waiting = [i for i, url in enumerate(routed) if not url and i not in ended]
            chosen = chance.random()
            if chosen < 0.3:
                act = ("group", chance.randint(1, 4) * per_sample, chance.random() < 0.1)
            elif chosen < 0.5 and running:
                ended.add(done := chance.choice(running))
                act = ("release", done)
                if chance.random() < 0.5:
                    failed_at = chance.choice([-1, -1, 0])
                    for world in worlds:
                        world.again(done, failed_at)
            elif chosen < 0.8:
                version += chance.random() < 0.4
                act = ("admit", chance.randrange(SERVERS), version)
            elif chosen < 0.84:
                act = ("withdraw", chance.randrange(SERVERS))
            elif chosen < 0.87 and waiting:
                ended.add(left := chance.choice(waiting))
                act = ("give_up", left)
            else:
                act = ("wait", chance.choice([0.1, 0.3, 0.6]))
            for world in worlds:
                getattr(world, act[0])(*act[1:])
            assert worlds[0].routed() == worlds[1].routed(), (seed, act)
            new, plain = (world.places for world in worlds)
            assert new.waiting == sum(map(len, getattr(plain, "queues", ())))
            assert (new._hold_ends is None) == (plain._hold_ends is None)
            held += new._hold_ends is not None
        routed_in_all += sum(map(bool, worlds[0].routed()))
    assert routed_in_all > 250 and held > 20


def test_a_sample_that_waits_since_before_its_group_began_has_its_whole_time_without_a_server():
    """Its time counts from when there was last a server for it, not from the beginning of its group."""

    async def two_samples_of_a_group() -> None:
        loop, limit_s = asyncio.get_running_loop(), 2.0
        fleet = Fleet(["http://a"], lambda url: Server(url, None))
        places = Places(fleet, 1, limit_s, loop)
        (server,) = fleet.servers
        fleet.admit(server, 0)
        begun: list[int] = []
        whole = GroupCall(lambda: begun[0] if begun else 0, begun.append, unbegun=lambda: 0)
        await places.acquire(GroupCall(lambda: 0))  # the one place
        calls = [GroupCall(whole.oldest, whole.begun, group=whole) for _ in range(2)]
        first, second = [loop.create_task(places.acquire(call)) for call in calls]
        await asyncio.sleep(0.05)
        places.release(server)
        await first
        await asyncio.sleep(0.6 * limit_s)
        fleet.withdraw(server, "busy", lost=False)
        places.look_at_fleet()
        await asyncio.sleep(0.6 * limit_s)
        assert not second.done()
        fleet.admit(server, 0)
        places.look_at_fleet()
        places.release(server)
        assert await second is server

    asyncio.run(two_samples_of_a_group())
