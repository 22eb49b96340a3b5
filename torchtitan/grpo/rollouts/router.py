"""Sends requests to the servers, and again where one fails or is silent."""

import asyncio
import contextlib
from collections import defaultdict
from collections.abc import Callable
from functools import partial

from torchtitan.grpo.data.samples import Prompt
from torchtitan.grpo.engines.protocol import Completion, EngineError, LocalError, SamplingParams
from torchtitan.grpo.engines.server import Server
from torchtitan.grpo.errors import UserError
from torchtitan.grpo.rollouts.group_call import GroupCall
from torchtitan.grpo.rollouts.places import Cohort, Places
from torchtitan.grpo.rollouts.request_failures import Failures
from torchtitan.grpo.rollouts.silence import Answering, Request, SilenceWatch


class Router:
    """Sends requests to the servers of a fleet, where `Places` finds them a place. It runs on one event loop.

    If a server fails a request (`EngineError`), that server becomes suspected and leaves traffic. The request is sent
    again with the same seed, to a server that has failed it less often if one has a place. How often one server gets it
    is said in `request_failures`. A server that refuses it (`UserError`) gets it once, and is suspected if another one
    answers. The request fails when every server has failed it for good, or at the limits of request and group.

    Requests in flight at a server that weight sync finds lost are sent again at once. At a server that is only out of
    traffic they go on. If it is silent (`silence`), another server with a free place gets them as well, with the same
    seed, and the first answer counts. The other request is cancelled, so a late answer is not read. A server that was
    only busy loses nothing: its requests run on, and those that still wait for a place elsewhere stop waiting.

    Attributes:
        places: Which server a request goes to. Only the router uses the clients of its fleet, and it closes them.
        retried: Requests that were sent again.
        silence: Whoever waits for answers does it within its `during`.
    """

    def __init__(self, places: Places) -> None:
        self.places, self.fleet = places, places.fleet
        self.retried = 0
        self._running: dict[Server, set[Request]] = defaultdict(set)  # of each whose client may be open
        self._losses: dict[Server, int] = defaultdict(int)  # how often its requests were given up
        self._closing: dict[Server, asyncio.Task[None]] = {}
        self.silence = SilenceWatch(
            self.fleet, lambda: [server for server, requests in self._running.items() if requests]
        )

    async def close(self) -> None:
        """Close the connections."""
        self.silence.close()
        for server in self._running.keys() | self._closing.keys() | set(self.fleet.servers):
            if server.client is not None:
                await server.client.close()

    async def answer(
        self,
        prompt: Prompt,
        token_ids: list[int],
        params: SamplingParams,
        request_id: str,
        call: GroupCall,
        cohort: Cohort | None,
        before: str = "",
    ) -> list[Completion]:
        """Send a request to the server of its cohort, or else to the best server, and again if that fails.

        Args:
            before: The address of the server that answered its session's last turn.

        Raises:
            EngineError: It failed for good. The message names each server with the reason.
            UserError: Every server refuses it.
            LocalError: This process cannot send it.
            FleetError: Too few servers are left.
        """
        failures = Failures(prompt)

        async def ask(server: Server, named: tuple[str, int] | None) -> list[Completion]:
            own_id = f"{request_id}-retry-{failures.tries}" if failures.tries else request_id
            failures.tries += 1
            completions = await server.client.generate(token_ids, params, own_id, named)
            for completion in completions:
                completion.server = server.url
            self.silence.heard(server)
            self.fleet.answered(server)
            return completions

        completions = await self._answer(ask, call, failures, cohort, before)
        for refusing, refusal in failures.refusals():
            self.fleet.suspect(refusing, refusal)
        return completions

    async def _answer(
        self,
        ask: Callable[[Server, tuple[str, int] | None], Answering],
        call: GroupCall,
        failures: Failures,
        cohort: Cohort | None = None,
        before: str = "",
        instead_of: Server | None = None,
    ) -> list[Completion]:
        """See `answer`. `instead_of` is a silent server that has the request too. Then no third one gets it."""
        self.retried += instead_of is not None
        while True:
            named = None
            if cohort is not None and cohort[0].serves(call.oldest()):  # its cohort waits for it
                server, named = cohort
                self.places.occupy(server, call)
            else:
                server = await self.places.acquire(call, failures, before, instead_of)
            request = Request(server, ask(server, named))
            self._running[server].add(request)
            elsewhere = None if instead_of else partial(self._answer, ask, call, failures, instead_of=server)
            try:
                return await request.first_answer(elsewhere)
            except LocalError:
                raise
            except (EngineError, UserError) as error:
                failures.add(server, request.losses, error)
                if isinstance(error, EngineError) and server.losses == request.losses:
                    self.fleet.suspect(server, error)
                self._end(server, request)
                if request.spare is not None:
                    with contextlib.suppress(EngineError, UserError):
                        return await request.spare
                if failures.final(self.fleet.servers):
                    raise failures.error() from error
            finally:
                self._end(server, request)
                request.cancel()
            cohort = None
            self.retried += 1

    def _end(self, server: Server, request: Request) -> None:
        """Give the request's place back, if it has one."""
        if request in self._running.get(server, ()):
            self._running[server].remove(request)
            self.places.release(server)

    def look_at_fleet(self) -> None:
        """The fleet has changed: give up requests at lost servers, ask others too where one is silent, serve waiting
        ones, and forget a server that has left the list, if none is left there."""
        listed = set(self.fleet.servers)
        for server, requests in list(self._running.items()):
            if server.lost or server.silent or server.losses != self._losses[server]:
                self._losses[server] = server.losses
                for request in requests:
                    request.look_at_server()
            if server not in listed and not server.in_flight:
                self._forget(server)
        self.places.look_at_fleet()

    def _forget(self, server: Server) -> None:
        """Close its client, and keep nothing of it. If it returns to the list, it is a new object."""
        del self._running[server]
        self._losses.pop(server, None)
        assert server.client is not None
        self._closing[server] = closing = asyncio.create_task(server.client.close())
        closing.add_done_callback(lambda task: task.cancelled() or self._closing.pop(server))
