"""In a server that is started with `--enable-lora`, every request gets the trainer's adapter. Runs in the API server.

The adapter has one name and one id for all versions: a version replaces the one before, also for answers under way, as
whole weights do. vLLM's prefix cache tells adapters apart by name, and versions by the request's cache salt.
"""

import functools
import inspect
from typing import Any

NAME = "torchtitan_grpo"
ID = 1 << 20
"""Far from vLLM's own, which count from 1."""
_NO_PATH = "by weight transfer"
"""In place of an adapter's path, which vLLM wants. Ours has none."""


def request() -> Any:
    """What asks vLLM for the adapter."""
    from vllm.lora.request import LoRARequest

    return LoRARequest(NAME, ID, _NO_PATH)


def install() -> None:
    """Requests that name an adapter of their own keep it."""
    from vllm.v1.engine.async_llm import AsyncLLM

    add = AsyncLLM.add_request
    ours, position = request(), list(inspect.signature(add).parameters).index("lora_request") - 1  # behind `self`

    @functools.wraps(add)
    async def add_with_adapter(self: Any, *args: Any, **kwargs: Any) -> Any:
        if len(args) > position:  # `self` is not among them
            args = (*args[:position], args[position] or ours, *args[position + 1 :])
        else:
            kwargs["lora_request"] = kwargs.get("lora_request") or ours
        return await add(self, *args, **kwargs)

    AsyncLLM.add_request = add_with_adapter
