"""An OpenEnv environment that counts what it is told. Run as a module it is the package's own server.

    python -m tests.helpers.openenv_server PORT

`wire_app` speaks the same protocol without the package, and its seed 3 never answers a step. The seed 2 fails at its
first step in both.
"""

import asyncio
import json
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.helpers import ROOT

STEPS = 3


class Counting:
    """The environment itself: (observation, reward, done) of a reset or a step."""

    def __init__(self) -> None:
        self.seed = self.steps = 0

    def reset(self, seed: int | None) -> tuple[str, float | None, bool]:
        self.seed, self.steps = seed or 0, 0
        return f"seed {self.seed}:", None, False

    def step(self, message: str) -> tuple[str, float | None, bool]:
        self.steps += 1
        if self.seed == 2:
            raise RuntimeError("no step today")
        return f"{len(message)}?", float(len(message)), self.steps >= STEPS


def wire_app() -> Any:
    from aiohttp import web

    async def session(request: web.Request) -> web.WebSocketResponse:
        socket, counting = web.WebSocketResponse(), Counting()
        await socket.prepare(request)
        async for message in socket:
            asked = json.loads(message.data)
            if asked["type"] == "close":
                break
            try:
                if asked["type"] == "reset":
                    text, reward, done = counting.reset(asked["data"].get("seed"))
                else:
                    if counting.seed == 3:
                        await asyncio.Event().wait()
                    text, reward, done = counting.step(asked["data"]["message"])
            except RuntimeError as error:
                answer: dict[str, Any] = {"type": "error", "data": {"message": str(error), "code": "EXECUTION_ERROR"}}
            else:
                data = {"observation": {"text": text}, "reward": reward, "done": done}
                answer = {"type": "observation", "data": data}
            await socket.send_json(answer)
        await socket.close()
        return socket

    app = web.Application()
    app.router.add_get("/ws", session)
    return app


@contextmanager
def served_wire() -> Iterator[str]:
    """The address of `wire_app` on a thread."""
    from aiohttp import web

    loop, runner = asyncio.new_event_loop(), web.AppRunner(wire_app(), shutdown_timeout=0.1)
    loop.run_until_complete(runner.setup())
    site = web.TCPSite(runner, "127.0.0.1", 0)
    loop.run_until_complete(site.start())
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    try:
        yield "http://{}:{}".format(*runner.addresses[0])
    finally:
        asyncio.run_coroutine_threadsafe(runner.cleanup(), loop).result(10)
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


@contextmanager
def served_real(log: Path) -> Iterator[str]:
    """The address of the package's server, in a process."""
    from tests.helpers.ranks import free_port  # only now: it imports torch

    port = free_port()
    command = [sys.executable, "-m", "tests.helpers.openenv_server", str(port)]
    with log.open("w") as file:
        server = subprocess.Popen(command, cwd=ROOT, stdout=file, stderr=file, process_group=0)
    try:
        deadline = time.monotonic() + 120
        while True:
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5).close()
                break
            except urllib.error.URLError:
                assert server.poll() is None and time.monotonic() < deadline, log.read_text()
                time.sleep(0.2)
        yield f"http://127.0.0.1:{port}"
    finally:
        server.terminate()
        server.wait(20)


def serve_real(port: int) -> None:
    import uvicorn
    from openenv.core.env_server.http_server import create_fastapi_app
    from openenv.core.env_server.interfaces import Environment
    from openenv.core.env_server.types import Action, Observation, State

    class Say(Action):
        message: str

    class Seen(Observation):
        text: str = ""

    class Served(Environment):
        SUPPORTS_CONCURRENT_SESSIONS = True

        def __init__(self) -> None:
            super().__init__()
            self._counting = Counting()

        def reset(self, seed: int | None = None, episode_id: str | None = None, **_: Any) -> Seen:
            text, reward, done = self._counting.reset(seed)
            return Seen(text=text, reward=reward, done=done)

        def step(self, action: Say, timeout_s: float | None = None, **_: Any) -> Seen:
            text, reward, done = self._counting.step(action.message)
            return Seen(text=text, reward=reward, done=done)

        @property
        def state(self) -> State:
            return State()

    uvicorn.run(create_fastapi_app(Served, Say, Seen, max_concurrent_envs=64), port=port, log_level="warning")


if __name__ == "__main__":
    serve_real(int(sys.argv[1]))
