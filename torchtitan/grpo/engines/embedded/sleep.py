"""Sleep: a server that gives up its memory while the trainer on the same device trains. The routes are vLLM's."""

import asyncio
from typing import TYPE_CHECKING

import torch
from aiohttp import web

from torchtitan.grpo.engines.embedded.generator import Generator

if TYPE_CHECKING:
    from torchtitan.grpo.engines.embedded.server import EmbeddedApp


class Sleep:
    """Level 2 of vLLM's sleep: weights, keys and values are dropped. Buffers of the model stay.

    After `wake_up` the weights are NaN, so that nothing can be sampled from them unnoticed. Call between two steps.
    """

    def __init__(self, generator: Generator) -> None:
        self._generator = generator
        self._shapes: dict[torch.nn.Parameter, torch.Size] = {}

    def fall_asleep(self) -> None:
        self._generator.preempt()
        self._generator.drop_cache()
        for parameter in self._generator.model.parameters():  # tied ones are one
            if parameter not in self._shapes:
                self._shapes[parameter] = parameter.shape
                parameter.data = parameter.data.new_empty(0)
        if self._generator.model.device.type == "cuda":
            torch.cuda.empty_cache()

    def wake_up(self) -> None:
        for parameter, shape in self._shapes.items():
            parameter.data = parameter.data.new_full(shape, torch.nan)
        self._shapes = {}


def sleep_routes(app: "EmbeddedApp") -> list[web.RouteDef]:
    """`/sleep` and `/wake_up`. An app that slept has torn weights, and resumes only after a whole update."""
    state = Sleep(app.generator)

    async def sleep(http: web.Request) -> web.Response:
        if http.query.get("level") != "2":
            raise web.HTTPBadRequest(text="level must be 2: weights on the host are not kept")
        await app.pause(http)
        app.torn = True
        await asyncio.wrap_future(app.worker.call(state.fall_asleep))
        return web.json_response({"status": "sleeping", "level": 2})

    async def wake_up(http: web.Request) -> web.Response:
        """The cache comes back by itself."""
        if "weights" in http.query.getall("tags", ["weights"]):
            await asyncio.wrap_future(app.worker.call(state.wake_up))
        return web.json_response({"status": "awake"})

    return [web.post("/sleep", sleep), web.post("/wake_up", wake_up)]
