"""One call takes a version of the weights into service: vLLM's route `/update_weights`, once the server is paused.

vLLM has a route each to start, update, finish and resume. The server generates nothing until the last has come, and
each waits for its turn in a trainer and an API server that are busy. Here the engine core takes these steps itself. If
one fails, the server stays paused.
"""

import functools
from typing import Any

from torchtitan.grpo.weight_wire.version_names import version_name


def take_version(engine: Any, update_info: dict[str, Any], resume: bool) -> None:
    """In the thread of a paused engine core. Raises what a worker raises.

    Args:
        engine: The `EngineCoreProc`. plugin.py makes this a method of it.
        update_info: Fields of `receiver.UpdateInfo`.
        resume: Go on generating.
    """
    engine.collective_rpc("start_weight_update")
    engine.collective_rpc("update_weights", kwargs={"update_info": update_info})
    engine.collective_rpc("finish_weight_update")
    if hasattr(engine, "set_weight_version"):  # one with data parallelism has none before vLLM 0.32
        engine.set_weight_version(version_name(update_info["version"], update_info.get("run", "")))
    if resume:
        engine.resume_scheduler()


def install() -> None:
    """In an API server."""
    from vllm.v1.engine.async_llm import AsyncLLM
    from vllm.v1.engine.core_client import AsyncMPClient

    @functools.wraps(AsyncLLM.update_weights)
    async def update_weights(self: AsyncLLM, request: Any) -> None:
        info = request.update_info
        resume = info.get("resume", False)
        several = self.vllm_config.parallel_config.data_parallel_size > 1
        await self.engine_core.call_utility_async(take_version.__name__, info, resume and not several)
        if resume and several:  # once all engines have it
            await self.resume_generation()

    _ = AsyncMPClient.call_utility_async
    AsyncLLM.update_weights = update_weights
