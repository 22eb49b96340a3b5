"""Places at the servers, and the requests that wait for one."""

import asyncio
import heapq
import itertools
import math
import time
from collections import Counter, defaultdict
from collections.abc import Iterator

from torchtitan.grpo.engines.fleet_view import FleetView
from torchtitan.grpo.engines.protocol import EngineError
from torchtitan.grpo.engines.server import Server
from torchtitan.grpo.rollouts.group_call import GroupCall, Lane, Ticket
from torchtitan.grpo.rollouts.request_failures import Failures

HOLD_S = 0.5
"""How long a request waits for a less busy server, while new weights have reached only some servers."""

Cohort = tuple[Server, tuple[str, int]]
"""The server of a request that starts together with others, and (name, size) of their cohort there."""


class Places:
    """Who gets the next free place at a server. Everything happens on one event loop; nothing polls.

    A request goes to the least busy server in traffic that has a free place and has acknowledged the weights that the
    request needs. New weights reach servers one after the other. The first server to have them gets its share of the
    waiting requests, and more only if the others take longer than `HOLD_S`. A turn of a session goes back to the server
    of the turn before, which has its prefix cached, if that has a place and the weights.

    Without such a server a request waits, first come, first served. Later turns and retries of groups under way go
    before new groups, and those that come `first` before other new ones. A request waits at most `request_timeout_s`
    while no server is eligible for it. It fails at once if fewer servers than `[rollout] min_servers` are left.

    Args:
        fleet: The servers.
        max_concurrent_requests: Requests in flight at one server. Further requests wait here.
        request_timeout_s: Longest wait of a request for an eligible server; the clients bound the request itself.
        loop: The event loop that runs all of this.
    """

    def __init__(
        self, fleet: FleetView, max_concurrent_requests: int, request_timeout_s: float, loop: asyncio.AbstractEventLoop
    ) -> None:
        self.fleet = fleet
        self.max_concurrent_requests = max_concurrent_requests
        self.request_timeout_s = request_timeout_s
        self._loop = loop
        self._busy: dict[str, list[tuple[float, float]]] = defaultdict(list)
        self._busy_since: dict[Server, float] = {}
        self._under_way: dict[Ticket, None] = {}
        """Waiting requests of groups that were under way when they came: queue 0, which is served first."""
        self._lanes: dict[tuple[int, object], Lane] = {}
        """All waiting requests. Those of groups that come first are queue 1, and all others queue 2."""
        self._numbers = itertools.count()
        self._hold_ends: asyncio.TimerHandle | None = None

    @property
    def waiting(self) -> int:
        """Requests that wait for a server."""
        return sum(len(lane.tickets) for lane in self._lanes.values())

    def take_busy_spans(self) -> dict[str, list[tuple[float, float]]]:
        """When each server had a request of this run, since the last call: from and until, by `time.monotonic()`."""
        now = time.monotonic()
        for server, since in self._busy_since.items():
            self._busy[server.url].append((since, now))
            self._busy_since[server] = now
        taken, self._busy = dict(self._busy), defaultdict(list)
        return taken

    def cohorts(self, count: int, name: str, min_version: int) -> list[Cohort | None]:
        """Servers for `count` requests that start together.

        Returns:
            For each request its server and (name, size) of its cohort there. All None if there are too few places, or
            if not every server has the weights.
        """
        load = {server: server.in_flight for server in self.fleet.eligible(min_version)}
        free = sum(max(0, self.max_concurrent_requests - in_flight) for in_flight in load.values())
        if self.waiting or free < count or len(load) < len(self.fleet.eligible(-1)):
            return [None] * count
        servers = []
        for _ in range(count):
            servers.append(min(load, key=load.__getitem__))
            load[servers[-1]] += 1
        sizes = Counter(servers)
        return [(server, (name, sizes[server])) for server in servers]

    async def until_served(self, call: "GroupCall") -> None:
        """Wait until a server is free for such a request."""
        self.release(await self.acquire(call))

    async def acquire(
        self,
        call: GroupCall,
        failures: Failures | None = None,
        before: str = "",
        instead_of: Server | None = None,
    ) -> Server:
        """Take a place at a server; `release` gives it back."""
        self.fleet.check()
        ticket = self._join(call, Failures() if failures is None else failures, before, instead_of)
        if not ticket.server.done():
            call.waits()
        try:
            while not ticket.server.done():
                left_s = self._eligible_at(ticket) + self.request_timeout_s - self._loop.time()
                await asyncio.wait([ticket.server], timeout=max(left_s, 0.0))
                if ticket.server.done():
                    break
                if self._is_eligible(ticket.lane, self._newest_in_traffic()):
                    ticket.lane.eligible_at = self._loop.time()
                elif self._loop.time() - self._eligible_at(ticket) >= self.request_timeout_s:
                    raise self._none_eligible(ticket)
            return ticket.server.result()
        except asyncio.CancelledError:
            if ticket.server.done() and not ticket.server.exception():
                self.release(ticket.server.result())
            raise
        finally:
            self._forget(ticket)

    def occupy(self, server: Server, call: GroupCall) -> None:
        """Take a place at this server, whether it has one or not; `release` gives it back."""
        if server.in_flight == 0:
            self._busy_since[server] = time.monotonic()
        server.in_flight += 1
        call.begun(server.version)
        whole = call.group or call
        waiting, whole.waiting = whole.waiting, []
        for ticket in waiting:  # the group has begun: they accept other weights than those that have not
            if ticket.rank in ticket.lane.tickets:
                self._forget(ticket)
                ticket.since = self._loop.time()
                self._line_up(ticket)
                ticket.lane.eligible |= self._is_eligible(ticket.lane, self._newest_in_traffic())

    def release(self, server: Server) -> None:
        server.in_flight -= 1
        if server.in_flight == 0:
            self._busy[server.url].append((self._busy_since.pop(server), time.monotonic()))
        self._dispatch()

    def look_at_fleet(self) -> None:
        """The fleet has changed: serve waiting requests, or end their wait."""
        servers, newest, now = self.fleet.servers, self._newest_in_traffic(), self._loop.time()
        for lane in list(self._lanes.values()):
            if (ticket := lane.alone) is not None:
                error: Exception | None = ticket.failures.error() if ticket.failures.final(servers) else None
                if ticket.instead_of is not None and not ticket.instead_of.silent:
                    error = EngineError(f"{ticket.instead_of.url} replies again")
                if error is not None and not ticket.server.done():
                    ticket.server.set_exception(error)
                    self._forget(ticket)
                    continue
            was, lane.eligible = lane.eligible, self._is_eligible(lane, newest)
            if was or lane.eligible:
                lane.eligible_at = now
        try:
            self.fleet.check()
        except Exception as error:
            for ticket in [ticket for lane in self._lanes.values() for ticket in lane.tickets.values()]:
                ticket.server.set_exception(error)
                self._forget(ticket)
        self._dispatch()

    def _join(self, call: GroupCall, failures: Failures, before: str = "", instead_of: Server | None = None) -> Ticket:
        """A request joins a queue, and gets a place at once if there is one."""
        rank = (0 if call.is_under_way else 1 if call.first else 2), next(self._numbers)
        server: asyncio.Future[Server] = self._loop.create_future()
        ticket = Ticket(call, failures, server, self._loop.time(), rank, before, instead_of)
        self._line_up(ticket)
        ticket.lane.eligible |= self._is_eligible(ticket.lane, self._newest_in_traffic())
        self._dispatch()
        return ticket

    def _line_up(self, ticket: Ticket) -> None:
        """Put it into its lane."""
        queue, whole = ticket.rank[0], ticket.call.group or ticket.call
        key: object
        if ticket.failures or ticket.instead_of is not None or (ticket.before and queue):
            key, oldest = ticket, ticket.call.oldest
        elif whole.unbegun is not None and not whole.is_under_way:
            key = oldest = whole.unbegun
            whole.waiting.append(ticket)
        else:
            key = version = whole.oldest()
            oldest = lambda: version  # noqa: E731
        if (queue, key) not in self._lanes:
            alone = ticket if key is ticket else None
            self._lanes[queue, key] = Lane((queue, key), oldest, alone)
        self._lanes[queue, key].add(ticket)
        if queue == 0:
            self._under_way[ticket] = None

    @staticmethod
    def _eligible_at(ticket: Ticket) -> float:
        """When there was last a server that it may go to, or when it came."""
        return max(ticket.since, ticket.lane.eligible_at)

    def _is_eligible(self, lane: Lane, newest: int) -> bool:
        """Whether a server in traffic, the newest of which has version `newest`, may get its requests."""
        min_version = lane.oldest()
        if min_version > newest or lane.alone is None:
            return min_version <= newest
        return not all(lane.alone.failures.final_at(server) for server in self.fleet.eligible(min_version))

    def _none_eligible(self, ticket: Ticket) -> EngineError:
        min_version = ticket.lane.oldest()
        failed = f"; the request failed {ticket.failures}" if ticket.failures else ""
        wanted = f" with weights of version {min_version} or newer" if min_version >= 0 else ""
        return EngineError(
            f"no server in traffic{wanted} after {self.request_timeout_s:g} s of waiting "
            f"([rollout] request_timeout_seconds): {self.fleet.describe()}{failed}"
        )

    def _forget(self, ticket: Ticket) -> None:
        self._under_way.pop(ticket, None)
        lane = ticket.lane
        if lane.tickets.pop(ticket.rank, None) is not None and not lane.tickets:
            del self._lanes[lane.key]

    def _dispatch(self) -> None:
        """Give free places to waiting requests, queue after queue, each in order of arrival.

        Requests that a group sends together get their places before the next group gets its first. Of a lane of new
        groups only its first request is looked at: if that cannot go, the others cannot either.
        """
        if not self._lanes:
            return
        in_traffic = self.fleet.eligible(-1)
        places = [server for server in in_traffic if self._has_place(server)]
        newest = max((server.version for server in places), default=-1)
        oldest = min((server.version for server in in_traffic), default=-1)
        share = (sum(server.in_flight for server in in_traffic) + self.waiting) / max(1, len(in_traffic))
        now, held = self._loop.time(), False
        passed: dict[Lane, float] = {}  # lanes whose first request cannot go, with the weights that held ones need
        by_load: dict[int, list[tuple[int, int, Server]]] = {}  # heaps of places, by the weights that they must have

        def first_ones() -> Iterator[Ticket]:
            while able := [lane for lane in self._lanes.values() if lane.key[0] and lane not in passed]:
                ranks = [lane.first() for lane in able if lane.oldest() <= newest]
                if not ranks:
                    return
                yield min(ranks, key=lambda ticket: ticket.rank)

        def hold(last: tuple[float, int]) -> None:
            for lane, needed in passed.items():
                if needed <= newest:
                    lane.hold(last, now)

        served = []  # of those under way, which are looked at one by one
        for ticket in itertools.chain(self._under_way, first_ones()):
            if not places:
                break
            queue, lane = ticket.rank[0], ticket.lane
            min_version = lane.oldest()
            if min_version > newest:
                continue
            if queue == 0 or lane.alone is not None:
                server = self._best(places, ticket, min_version)
            else:
                server = self._least_busy(by_load, places, min_version)
            if server is None:  # it has failed there for good, or the server has just left traffic: a change comes
                passed[lane] = math.inf
                continue
            if oldest < min_version and server.in_flight >= share and server.url != ticket.before:
                if queue == 0 and ticket.held_at is None:
                    ticket.held_at = now
                if ticket.held_at is None or now < ticket.held_at + HOLD_S:
                    held = True
                    passed[lane] = min_version
                    continue
            if queue:
                self._forget(ticket)
            else:
                served.append(ticket)
            self.occupy(server, ticket.call)
            ticket.server.set_result(server)
            if not self._has_place(server):
                hold(ticket.rank)
                places.remove(server)
                newest = max((server.version for server in places), default=-1)
        hold((math.inf, 0))
        for ticket in served:
            self._forget(ticket)
        if held and self._hold_ends is None:
            self._hold_ends = self._loop.call_later(HOLD_S, self._end_hold)

    def _least_busy(
        self, by_load: dict[int, list[tuple[int, int, Server]]], places: list[Server], min_version: int
    ) -> Server | None:
        """As `_best` for a request without a past. Loads only grow meanwhile: the first of a heap is put right."""
        if min_version not in by_load:
            loads = [(server.in_flight, i, server) for i, server in enumerate(places) if server.serves(min_version)]
            heapq.heapify(loads)
            by_load[min_version] = loads
        heap = by_load[min_version]
        while heap:
            load, i, server = heap[0]
            if not self._has_place(server) or not server.serves(min_version):
                heapq.heappop(heap)
            elif load != server.in_flight:
                heapq.heapreplace(heap, (server.in_flight, i, server))
            else:
                return server
        return None

    @staticmethod
    def _best(places: list[Server], ticket: Ticket, min_version: int) -> Server | None:
        """The server of its session's last turn, else the least busy one that has failed the request least often."""
        failures, eligible = ticket.failures, (server for server in places if server.serves(min_version))
        if not failures:
            return min(eligible, key=lambda s: (s.url != ticket.before, s.in_flight), default=None)
        may_have_it = (server for server in eligible if not failures.final_at(server))
        return min(may_have_it, key=lambda server: (failures.at(server), server.in_flight), default=None)

    def _end_hold(self) -> None:
        self._hold_ends = None
        self._dispatch()

    def _newest_in_traffic(self) -> int:
        return max((server.version for server in self.fleet.eligible(-1)), default=-2)

    def _has_place(self, server: Server) -> bool:
        return server.in_flight < self.max_concurrent_requests
