"""The call for one group, and its requests that wait for a server."""

import asyncio
import contextlib
import heapq
import math
from collections.abc import Callable
from dataclasses import dataclass, field

from torchtitan.grpo.engines.server import Server
from torchtitan.grpo.rollouts.request_failures import Failures


@dataclass(eq=False)
class Ticket:
    """A request that waits for a server.

    Attributes:
        failures: Where it has failed before.
        since: When it came, or its group began.
        rank: (queue, number), in the order in which requests are served.
        before: The address of the server that it should go to if it can; "" for none.
        instead_of: The silent server that has the request too.
        held_at: Since when it waits for a less busy server that is about to be eligible.
    """

    call: "GroupCall"
    failures: Failures
    server: asyncio.Future[Server]
    since: float
    rank: tuple[int, int]
    before: str = ""
    instead_of: Server | None = None
    held_at: float | None = None
    lane: "Lane" = field(init=False)


class Lane:
    """Waiting requests of one queue that accept the same weights: they become eligible together.

    Attributes:
        oldest: The oldest weights that they accept now.
        alone: Its only request, if where that may go depends on more than its weights.
        tickets: By rank.
        eligible_at: When there was last a server that they may go to.
        eligible: Whether there is one.
    """

    def __init__(self, key: tuple[int, object], oldest: Callable[[], int], alone: Ticket | None) -> None:
        self.key, self.oldest, self.alone = key, oldest, alone
        self.tickets: dict[tuple[int, int], Ticket] = {}
        self.eligible_at, self.eligible = -math.inf, False
        # Heaps of ranks, of new groups only. They may have some that are no longer in `tickets`.
        self._order: list[tuple[int, int]] = []
        self._never_held: list[tuple[int, int]] = []

    def add(self, ticket: Ticket) -> None:
        ticket.lane = self
        self.tickets[ticket.rank] = ticket
        if ticket.rank[0]:
            heapq.heappush(self._order, ticket.rank)
            if ticket.held_at is None:
                heapq.heappush(self._never_held, ticket.rank)

    def first(self) -> Ticket:
        for heap in (self._order, self._never_held):
            while heap and heap[0] not in self.tickets:
                heapq.heappop(heap)
        return self.tickets[self._order[0]]

    def hold(self, last: tuple[float, int], now: float) -> None:
        """Its requests up to this rank are held. Each is looked at once, however often its lane is held."""
        while self._never_held and self._never_held[0] <= last:
            ticket = self.tickets.get(heapq.heappop(self._never_held))
            if ticket is not None:
                ticket.held_at = now


@dataclass(eq=False)
class GroupCall:
    """The call for one group: what its requests need, the time that it may take, and two events on its way back.

    Attributes:
        oldest: The oldest weights that its requests accept now. -1: any.
        on_begun: One of its requests has got a server with weights of this version.
        on_answered: Its samples are complete, and will be scored.
        limit: `timeout_s` from its first request on. Waiting for the first server does not count.
        is_under_way: One of its requests has had a server.
        first: Its requests are served before the first ones of other groups.
        unbegun: What `oldest` says until the group begins, for all groups with the same function. None: what `oldest`
            says never changes.
        group: The call of the whole group, if this one is for a sample of it.
        waiting: Requests of the group that wait since before it began.
    """

    oldest: Callable[[], int] = lambda: -1
    on_begun: Callable[[int], None] = lambda version: None
    on_answered: Callable[[], None] = lambda: None
    limit: asyncio.Timeout | None = None
    timeout_s: float = 0.0
    is_under_way: bool = False
    first: bool = False
    unbegun: Callable[[], int] | None = None
    group: "GroupCall | None" = None
    waiting: list[Ticket] = field(default_factory=list)

    def begun(self, version: int) -> None:
        self.restarts()
        self.is_under_way = True
        self.on_begun(version)

    def waits(self) -> None:
        """For a server, or a place in the environment: no time passes, unless it is under way."""
        self._end_at(None)

    def restarts(self) -> None:
        """Its time begins anew, unless it is under way."""
        self._end_at(asyncio.get_running_loop().time() + self.timeout_s)

    def unlimited(self) -> float:
        """End its time limit, and return how long that was."""
        self._end_at(None)
        self.limit = None
        return self.timeout_s

    def _end_at(self, time: float | None) -> None:
        if self.limit is not None and not self.is_under_way and not self.limit.expired():
            with contextlib.suppress(RuntimeError):  # the group has ended, and its environment still asks
                self.limit.reschedule(time)
