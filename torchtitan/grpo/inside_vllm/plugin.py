"""vLLM's entry point: offers the weight-transfer engine `torchtitan_grpo` and sets up servers that use it.

vLLM calls `register` in its API server, its engine core and its workers, before it knows its configuration. It does so
in every vLLM of the environment. So `register` changes nothing by itself:

- The engine is registered by name. vLLM imports `transfer_engine` only in workers whose configuration names it.
- Two hooks look at the configuration where each process first has it: `AsyncLLM.__init__` in an API server, and
  `EngineCoreProc.run_busy_loop` in an engine core. They set up the process if the configuration names our engine, and
  otherwise only call vLLM's own function. An engine core that is forked inherits the hooks, because `register` is not
  called there again.

This module imports without vLLM.
"""

import functools
import logging
import os
import re
import signal
import threading
import time
from typing import Any

from torchtitan.grpo.inside_vllm.backend import BACKEND

logger = logging.getLogger("vllm.torchtitan_grpo")  # below "vllm", so that it is in the server's log

ENGINE = ("torchtitan.grpo.inside_vllm.transfer_engine", "TorchtitanGrpoEngine")

TESTED = ">=0.25.1,<0.33"
"""vLLM versions that this project is tested with; pyproject.toml has the same."""
_OLDEST, _NEXT = (tuple(map(int, bound.strip("<>=").split("."))) for bound in TESTED.split(","))

_PARENT_POLL_S = 0.2


def register() -> None:
    """Offer our engine and hook into start-up. vLLM may call it more than once in a process."""
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    if BACKEND in WeightTransferEngineFactory._registry:
        return
    WeightTransferEngineFactory.register_engine(BACKEND, *ENGINE)
    try:
        _hook()
    except (ImportError, AttributeError) as error:
        logger.warning(
            "This vLLM's start-up is unknown (%s). With backend %s its replies stay its own.", error, BACKEND
        )


def _hook() -> None:
    from vllm.v1.engine.async_llm import AsyncLLM
    from vllm.v1.engine.core import EngineCoreProc

    init, run = AsyncLLM.__init__, EngineCoreProc.run_busy_loop

    @functools.wraps(init)
    def init_hooked(self: Any, vllm_config: Any, *args: Any, **kwargs: Any) -> None:
        if is_configured(vllm_config):
            set_up_api_server(vllm_config)
        init(self, vllm_config, *args, **kwargs)

    @functools.wraps(run)
    def run_hooked(self: Any) -> None:
        if is_configured(self.vllm_config):
            set_up_engine_core(self)
        run(self)

    AsyncLLM.__init__, EngineCoreProc.run_busy_loop = init_hooked, run_hooked


def is_configured(vllm_config: Any) -> bool:
    """Whether a server with this `VllmConfig` is to take its weights from our trainer."""
    return getattr(vllm_config.weight_transfer_config, "backend", None) == BACKEND


def set_up_api_server(vllm_config: Any) -> None:
    """Runs in an API server before it starts its engine core, so a wrong BUNDLE_TOKENS is an error at once."""
    import vllm

    from torchtitan.grpo.inside_vllm import (
        adapter_requests,
        bundled_outputs,
        flat_logprobs,
        prompt_scores,
        quick_pause,
        served_model,
        token_versions,
    )

    if complaint := untested(vllm.__version__):
        logger.warning(complaint)
    bundled_outputs.tokens_per_entry()
    flat_logprobs.install()
    prompt_scores.install()
    quick_pause.install()
    served_model.install(vllm_config.model_config.hf_config)
    if vllm_config.lora_config is not None:
        adapter_requests.install()
    if not token_versions.reported_by_vllm():
        token_versions.install()


def set_up_engine_core(engine: Any) -> None:
    """Runs in an engine core before its loop.

    Args:
        engine: The `EngineCoreProc`.
    """
    from torchtitan.grpo.inside_vllm import bundled_outputs

    end_with_parent()
    bundled_outputs.install(engine)


def end_with_parent() -> None:
    """End this process soon after its parent: an engine core after its API server, a worker after its engine core.

    After kill -9 there, vLLM 0.32 would keep the GPU, and a worker of any vLLM would keep it for many seconds.
    """
    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(_PARENT_POLL_S)
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=watch, name="parent-watch", daemon=True).start()


def untested(version: str) -> str:
    """What to say of this vLLM version; nothing if it is one of those tested. `pip install --no-deps` checks none."""
    numbers = re.match(r"(\d+)\.(\d+)(?:\.(\d+))?", version)
    if numbers and _OLDEST <= tuple(int(number or 0) for number in numbers.groups()) < _NEXT:
        return ""
    return (
        f"vLLM {version} is outside the range that torchtitan-grpo is tested with ({TESTED}). Weight updates, token "
        f"versions or replies may fail or be wrong. Install one of these: pip install 'vllm{TESTED}'"
    )
