"""Embedded servers in the test's own process, which tests may pause, kill and give weight versions."""

import asyncio
import copy
import functools
import threading

import torch
from aiohttp import web
from transformers import PreTrainedModel

from tests.helpers import TINY_QWEN3
from torchtitan.grpo.engines.embedded.generator import Generator
from torchtitan.grpo.engines.embedded.model import load_model
from torchtitan.grpo.engines.embedded.server import EmbeddedApp
from torchtitan.grpo.weight_wire.version_names import version_name


@functools.cache
def tiny_model() -> PreTrainedModel:
    """Random weights, the same for all servers of the process."""
    torch.manual_seed(0)
    return load_model(TINY_QWEN3, torch.device("cpu"), torch.float32)


class ServerThread:
    """An embedded server on an event loop of its own.

    Args:
        version: Of its weights.
        port: 0 takes a free one; that of a server that was killed is where it comes back.
        takes_weights: It gets a model of its own.
        folder: Which it says that its model is from.
        model: What it serves; None: `tiny_model`.
    """

    def __init__(
        self,
        version: int,
        port: int = 0,
        takes_weights: bool = False,
        folder: str = "tiny",
        model: PreTrainedModel | None = None,
    ) -> None:
        self.folder = folder
        model = model or (copy.deepcopy(tiny_model()) if takes_weights else tiny_model())
        self.generator = Generator(model, max_sequences=64, max_model_len=128)
        self.generator.version = version_name(version)
        self.loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self.thread.start()
        try:
            self.call(self._start(port))
        except OSError:  # the port is taken
            self.close()
            raise

    def call(self, coroutine):
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop).result(30)

    async def _start(self, port: int) -> None:
        app = EmbeddedApp(self.generator, self.folder).application()
        self.runner = web.AppRunner(app, access_log=None, handler_cancellation=True, shutdown_timeout=1.0)
        await self.runner.setup()
        await web.TCPSite(self.runner, "127.0.0.1", port).start()
        self.port = self.runner.addresses[0][1]
        self.url = f"http://127.0.0.1:{self.port}"

    def kill(self) -> None:
        """As the network sees a kill -9: nobody listens, and all connections are reset."""
        self.call(self._reset_connections())
        self.close()

    async def _reset_connections(self) -> None:
        for site in list(self.runner.sites):
            await site.stop()
        for connection in list(self.runner.server.connections):
            if connection.transport is not None:  # else it has just ended
                connection.transport.abort()

    def close(self) -> None:
        if self.loop.is_running():
            self.call(self.runner.cleanup())
            self.loop.call_soon_threadsafe(self.loop.stop)
            self.thread.join(10)
