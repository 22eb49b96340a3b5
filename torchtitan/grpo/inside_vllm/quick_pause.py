"""A pause for new weights returns as soon as the engine has stopped.

vLLM's own (0.25 to 0.33) sleeps for 20 ms after that, so that answers that have ended are usually delivered first. That
was most of a pause, in which the server generates nothing. Nobody here relies on that order: the version of a token
follows from the order in which the engine's outputs come (`before_vllm_0_32`), or is the engine's word.

Requests that come during the pause wait for its end. From 0.33 on, vLLM's own refuses them in mode "wait".
"""

import functools
from typing import Any


def install() -> None:
    """In vLLM's API server."""
    from vllm.renderers import BaseRenderer
    from vllm.v1.engine.async_llm import AsyncLLM
    from vllm.v1.engine.core_client import AsyncMPClient

    pause = AsyncLLM.pause_generation
    _ = BaseRenderer.clear_mm_cache_async, AsyncMPClient.pause_scheduler_async  # what it calls below

    @functools.wraps(pause)
    async def pause_quickly(self: AsyncLLM, **asked: Any) -> None:
        mode, clear_cache = asked.pop("mode", "abort"), asked.pop("clear_cache", True)
        if mode == "abort" or any(asked.values()):  # weight sync asks for none of these
            await pause(self, mode=mode, clear_cache=clear_cache, **asked)
            return
        if clear_cache:
            await self.renderer.clear_mm_cache_async()
        await self.engine_core.pause_scheduler_async(mode=mode, clear_cache=clear_cache)

    AsyncLLM.pause_generation = pause_quickly
