"""In a server that is started with `--enable-lora`, every request gets the trainer's adapter. Runs in the API server.

The adapter has one name and one id for all versions: a version replaces the one before, also for answers under way, as
whole weights do. vLLM's prefix cache tells adapters apart by name, and versions by the request's cache salt.
"""

import functools
import inspect
import logging
from typing import Any

logger = logging.getLogger("vllm.torchtitan_grpo")  # below "vllm", so that it is in the server's log

NAME = "torchtitan_grpo"
ID = 1 << 20
"""Far from vLLM's own, which count from 1."""
_PLACE = "by weight transfer"
"""vLLM wants the path of an adapter. Ours has none."""


def request() -> Any:
    """What asks vLLM for the adapter."""
    from vllm.lora.request import LoRARequest

    return LoRARequest(NAME, ID, _PLACE)


def install() -> None:
    """Requests that name an adapter of their own keep it."""
    from vllm.v1.engine.async_llm import AsyncLLM

    add = AsyncLLM.add_request
    if getattr(add, "adapts", False):
        return
    ours, position = request(), _position(add)

    @functools.wraps(add)
    async def add_with_adapter(self: Any, *args: Any, **kwargs: Any) -> Any:
        if len(args) > position:  # `self` is not among them
            args = (*args[:position], args[position] or ours, *args[position + 1 :])
        else:
            kwargs["lora_request"] = kwargs.get("lora_request") or ours
        return await add(self, *args, **kwargs)

    add_with_adapter.adapts = True  # type: ignore[attr-defined]
    AsyncLLM.add_request = add_with_adapter
    logger.info("All requests are answered with the adapter that the trainer sends")


def _position(function: Any) -> int:
    """Of the argument `lora_request`, behind `self`."""
    return list(inspect.signature(function).parameters).index("lora_request") - 1
