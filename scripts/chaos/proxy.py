"""An HTTP proxy in front of one server, which refuses, delays or changes what it is told to."""

import asyncio
import threading
from collections.abc import Callable
from dataclasses import dataclass

import aiohttp
from aiohttp import web

GENERATE = ("/inference/v1/generate", "/generate")
"""Routes that answer prompts: vLLM's and the embedded server's, SGLang's."""
_KEPT = ("Authorization", "Content-Type", "X-Rollout-Cohort")
_DRIP_BYTES = 4


@dataclass
class Reply:
    """What the client gets.

    Attributes:
        drip_s: Seconds between pieces of a few bytes; 0 sends all at once.
        cut: The connection is reset after half of the body.
    """

    status: int
    body: bytes
    drip_s: float = 0.0
    cut: bool = False


class Proxy:
    """Listens on a port of its own, on a thread of its own.

    Attributes:
        refuse: Gets a route before the server is asked. A reply stands in for the server's.
        change: Gets route, request and the server's reply, and returns what the client gets.
    """

    def __init__(self, server_url: str) -> None:
        self._server_url = server_url
        self.refuse: Callable[[str], Reply | None] = lambda route: None
        self.change: Callable[[str, bytes, Reply], Reply] = lambda route, request, reply: reply
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="proxy", daemon=True)
        self._thread.start()
        self._call(self._start())

    def pass_on(self) -> None:
        """Change nothing from now on."""
        self.refuse = lambda route: None
        self.change = lambda route, request, reply: reply

    def close(self) -> None:
        if self._loop.is_running():
            self._call(self._stop())
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(10)

    def __enter__(self) -> "Proxy":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _call(self, coroutine) -> None:
        asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(30)

    async def _start(self) -> None:
        # A connection of its own for each request: one that a killed server has left is no fault of the next server.
        connector = aiohttp.TCPConnector(limit=0, force_close=True)
        self._session = aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=None))
        app = web.Application(client_max_size=2**28)
        app.router.add_route("*", "/{route:.*}", self._pass)
        self._runner = web.AppRunner(app, access_log=None, handler_cancellation=True, shutdown_timeout=0.5)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        self.url = f"http://127.0.0.1:{self._runner.addresses[0][1]}"

    async def _stop(self) -> None:
        await self._session.close()
        await self._runner.cleanup()

    async def _pass(self, request: web.Request) -> web.StreamResponse:
        body = await request.read()
        reply = self.refuse(request.path)
        if reply is None:
            headers = {name: request.headers[name] for name in _KEPT if name in request.headers}
            address = self._server_url + request.path_qs
            try:
                async with self._session.request(request.method, address, data=body, headers=headers) as answer:
                    reply = self.change(request.path, body, Reply(answer.status, await answer.read()))
            except aiohttp.ClientError:
                reply = Reply(0, b"", cut=True)  # as if the client had reached the server, which is gone
        return await self._send(request, reply)

    async def _send(self, request: web.Request, reply: Reply) -> web.StreamResponse:
        if not (reply.drip_s or reply.cut):
            return web.Response(status=reply.status, body=reply.body, content_type="application/json")
        response = web.StreamResponse(status=reply.status or 200, headers={"Content-Length": str(len(reply.body) or 1)})
        await response.prepare(request)
        if reply.cut:
            await response.write(reply.body[: len(reply.body) // 2])
            request.transport.abort()
            return response
        for start in range(0, len(reply.body), _DRIP_BYTES):
            await response.write(reply.body[start : start + _DRIP_BYTES])
            await asyncio.sleep(reply.drip_s)
        return response
