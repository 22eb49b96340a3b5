"""While the trainer waits for answers: which server owes some and says nothing, and what becomes of its requests."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

from torchtitan.grpo.engines.fleet_view import FleetView
from torchtitan.grpo.engines.protocol import Completion, EngineError, LocalError
from torchtitan.grpo.engines.server import Server
from torchtitan.grpo.errors import UserError

T = TypeVar("T")
Answering = Coroutine[Any, Any, list[Completion]]

LOOK_S = 0.5
"""How often a server with requests is asked for its health, if it has answered nothing for as long."""
REPLY_S = 1.5
"""How long it may take to reply. Twice as long after each time that it was only late, at most REPLY_MAX_S."""
REPLY_MAX_S = 5.0
_THREADS = 256  # as many as may freeze at once, as with a node


class SilenceWatch:
    """Notices a server that is frozen or cut off, and tells the fleet when it falls silent and when it is heard.

    Weight sync asks for health too, but rarely, and it may be busy with that server. Here a server is asked only while
    somebody waits for its answers, so it costs a busy trainer nothing. With LOOK_S and REPLY_S a frozen server is
    noticed within 2 s, while one that a large batch, garbage collection or a short compilation blocks for a second is
    not. A server may well be blocked for longer. So silence only has its requests asked elsewhere as well
    (`Router`) and keeps it out of traffic and pushes until it replies. It is not lost for that, and its requests go on.

    Health is asked in threads: they see a reply in time even if the event loop is late.

    Args:
        owing: The servers with requests. Called on the event loop, like all methods.
    """

    def __init__(self, fleet: FleetView, owing: Callable[[], Iterable[Server]]) -> None:
        self._fleet, self._owing = fleet, owing
        # Nobody says here that a server has left the list.
        self._heard_at: WeakKeyDictionary[Server, float] = WeakKeyDictionary()
        self._reply_s: WeakKeyDictionary[Server, float] = WeakKeyDictionary()
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="health")
        self._waiting = 0
        self._watch: asyncio.Task[None] | None = None

    async def during(self, wait: Awaitable[T]) -> T:
        """Await it, and watch meanwhile."""
        self._waiting += 1
        if self._watch is None or self._watch.done():
            self._watch = asyncio.create_task(self._look())
        try:
            return await wait
        finally:
            self._waiting -= 1
            if not self._waiting:
                self._watch.cancel()
                self._watch = None

    def heard(self, server: Server) -> None:
        """It has replied to something."""
        self._heard_at[server] = time.monotonic()
        if server.silent:
            self._reply_s[server] = min(2 * self._reply_s.get(server, REPLY_S), REPLY_MAX_S)
        self._fleet.heard(server)

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def _look(self) -> None:
        asked: dict[Server, asyncio.Task[None]] = {}
        async with asyncio.TaskGroup() as asking:  # one that is late delays no look at others
            while True:
                await asyncio.sleep(LOOK_S)
                quiet_since = time.monotonic() - LOOK_S
                for server in self._owing():
                    if self._heard_at.get(server, 0.0) < quiet_since and (server not in asked or asked[server].done()):
                        asked[server] = asking.create_task(self._ask(server))

    async def _ask(self, server: Server) -> None:
        asked_at, loop = time.monotonic(), asyncio.get_running_loop()
        why = "it is not healthy"
        try:
            if await loop.run_in_executor(self._threads, server.control.is_healthy, self._reply_s.get(server, REPLY_S)):
                self.heard(server)
                return
        except UserError:  # this process cannot ask
            return
        except EngineError as error:
            why = str(error)
        if self._heard_at.get(server, 0.0) < asked_at:
            self._fleet.fall_silent(server, why)


class Request:
    """A request at one server, and at another one too while the first is silent.

    Attributes:
        losses: How often the server was lost before.
        spare: Asks the other one.
    """

    def __init__(self, server: Server, answering: Answering) -> None:
        self.spare: asyncio.Task[list[Completion]] | None = None
        self.losses = server.losses
        self._server, self._task = server, _task(answering)
        self._silent = asyncio.get_running_loop().create_future()

    async def first_answer(self, elsewhere: Callable[[], Answering] | None) -> list[Completion]:
        """The server's answer, or the one from `elsewhere` if the server is silent and that comes first.

        Raises:
            EngineError, UserError: The server fails or refuses the request, or was lost. `spare` may still run.
            LocalError, FleetError: As from the server and from `elsewhere`.
        """
        while not self._task.done():
            if self._server.silent and elsewhere is not None and self.spare is None:
                self.spare = _task(elsewhere())
            await asyncio.wait([self._task, self.spare or self._silent], return_when=asyncio.FIRST_COMPLETED)
            if self._silent.done():
                self._silent = asyncio.get_running_loop().create_future()
            if self.spare is not None and self.spare.done():
                spare, self.spare = self.spare, None
                error = spare.exception()
                if not isinstance(error, EngineError | UserError) or isinstance(error, LocalError):
                    return spare.result()
        if self._task.cancelled():
            why = self._server.reason or "the server was lost"
            raise EngineError(f"{self._server.url}: a request was given up: {why}")
        return self._task.result()

    def look_at_server(self) -> None:
        """It is lost or silent, or was lost and has returned."""
        if self._server.lost or self._server.losses != self.losses:
            self._task.cancel()
        elif not self._silent.done():
            self._silent.set_result(None)

    def cancel(self) -> None:
        self._task.cancel()
        if self.spare is not None:
            self.spare.cancel()


def _task(answering: Answering) -> asyncio.Task[list[Completion]]:
    task = asyncio.create_task(answering)
    task.add_done_callback(lambda task: task.cancelled() or task.exception())  # seen, though another one was first
    return task
