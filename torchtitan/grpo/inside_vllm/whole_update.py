"""One call takes a version of the weights into service: vLLM's route `/update_weights`, once the server is paused.

vLLM has a route each to start, update, finish and resume. The server generates nothing until the last has come, and
each waits for its turn in a trainer and an API server that are busy. Here the engine core takes these steps itself. If
one fails, the server stays paused. The routes to start and to finish are not for our backend.
"""

import functools
import gc
import logging
from typing import Any

from torchtitan.grpo.weight_wire.version_names import version_name

logger = logging.getLogger("vllm.torchtitan_grpo")  # below "vllm", so that it is in the server's log

TAKE = "take_version"
"""What the engine core's method is called, and the workers'."""


def in_worker(worker: Any, update_info: dict[str, Any]) -> str:
    """Take a version (`receiver.UpdateInfo`): what went wrong, or "".

    An error that is raised would leave vLLM out of step: it reads no reply behind the first failure of several workers,
    and refuses the next update where one did not end.
    """
    try:
        worker.start_weight_update()
        worker.update_weights(update_info)
        worker.finish_weight_update()
    except Exception as error:
        logger.exception("The weight update failed")
        worker._weight_update_active = False
        failure = str(error) or repr(error)
    else:
        return ""
    gc.collect()  # the error's traceback had buckets
    return failure


def in_engine_core(engine: Any, update_info: dict[str, Any], resume: bool) -> None:
    """Have all workers take a version, and go on generating, with `resume`.

    Raises:
        RuntimeError: The engine is not paused, or a worker failed.
    """
    if not engine.is_scheduler_paused():
        raise RuntimeError("pause the server before a weight update")
    for error in engine.collective_rpc(TAKE, args=(update_info,)):
        if error:
            raise RuntimeError(error)
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
        await self.engine_core.call_utility_async(TAKE, info, resume and not several)
        if resume and several:  # once all engines have it
            await self.resume_generation()

    _ = AsyncMPClient.call_utility_async
    AsyncLLM.update_weights = update_weights
