"""vLLM's entry point: offers the weight-transfer engine `torchtitan_grpo` and sets up servers that use it.

vLLM calls `register` in its API server, its engine core and its workers, before it knows its configuration. It does so
in every vLLM of the environment. So `register` changes nothing by itself:

- The engine is registered by name. vLLM imports `transfer_engine` only in workers whose configuration names it.
- Engine cores get a method, `take_version`, which only our API servers call (`whole_update`).
- Two hooks look at the configuration where each process first has it: `AsyncLLM.__init__` in an API server, and
  `EngineCoreProc.run_busy_loop` in an engine core. They set up the process if the configuration names our engine, and
  otherwise only call vLLM's own function. An engine core that is forked inherits the hooks, because `register` is not
  called there again.

This module imports without vLLM.
"""

import functools
import gc
import logging
import os
import re
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

from torchtitan.grpo.inside_vllm.backend import BACKEND

logger = logging.getLogger("vllm.torchtitan_grpo")  # below "vllm", so that it is in the server's log

ENGINE = ("torchtitan.grpo.inside_vllm.transfer_engine", "TorchtitanGrpoEngine")

TESTED = ">=0.25.1,<0.34"
"""vLLM versions that this project is tested with; pyproject.toml has the same."""
RAN = "0.25.1 on GPUs, 0.32.0 and 0.33.0 on CPUs"
"""Those whose servers the tests have run. 0.33.0 has no build for CPUs: its Python code ran with 0.32.0's kernels."""
_OLDEST, _NEXT = (tuple(map(int, bound.strip("<>=").split("."))) for bound in TESTED.split(","))

_PARENT_POLL_S = 0.2
_YOUNG = 100_000
"""New objects between two searches for garbage. The default, 700, takes 4 % of an engine core's thread for answers of
11 tokens; what it allocates for them is freed without."""
_changed: set[str] = set()
"""What was changed in this process's vLLM."""


def register() -> None:
    """Offer our engine and hook into start-up. vLLM may call it more than once in a process."""
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    if BACKEND in WeightTransferEngineFactory._registry:
        return
    WeightTransferEngineFactory.register_engine(BACKEND, *ENGINE)
    change("start-up", _hook, f"with backend {BACKEND} its replies stay its own")


def change(part: str, install: Callable[[], None], otherwise: str | None) -> None:
    """Change a part of this process's vLLM, once. If vLLM is not as expected, it stays as it is and the log says so.

    Args:
        otherwise: What is then the case. None: it must not be, so the error is raised.
    """
    if part in _changed:
        return
    _changed.add(part)
    try:
        install()
    except (ImportError, AttributeError) as error:
        if otherwise is None:
            raise
        logger.warning("This vLLM is not as expected (%s): %s.", error, otherwise)
    else:
        logger.info("Changed in this vLLM: %s", part)


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

    def take_version(self: Any, update_info: Any, resume: bool) -> None:
        from torchtitan.grpo.inside_vllm import whole_update

        whole_update.in_engine_core(self, update_info, resume)

    AsyncLLM.__init__, EngineCoreProc.run_busy_loop = init_hooked, run_hooked
    EngineCoreProc.take_version = take_version


def is_configured(vllm_config: Any) -> bool:
    """Whether a server with this `VllmConfig` is to take its weights from our trainer."""
    return getattr(vllm_config.weight_transfer_config, "backend", None) == BACKEND


def set_up_api_server(vllm_config: Any) -> None:
    """Runs in an API server before it starts its engine core, so a wrong BUNDLE_TOKENS is an error at once."""
    import vllm

    from torchtitan.grpo.inside_vllm import (
        adapter_requests,
        before_vllm_0_32,
        bundled_outputs,
        flat_logprobs,
        prompt_scores,
        quick_pause,
        served_model,
        whole_update,
    )

    if complaint := untested(vllm.__version__):
        logger.warning(complaint)
    bundled_outputs.tokens_per_entry()
    hf_config = vllm_config.model_config.hf_config
    change("flat log-probabilities", flat_logprobs.install, "log-probabilities stay one object per token")
    change("a teacher's tokens as arrays", prompt_scores.install, "a teacher's tokens are sent one by one")
    change("updates in one call", whole_update.install, None)
    change("a quick pause", quick_pause.install, "a pause may take 20 ms longer than necessary")
    change("the model's shape", lambda: served_model.install(hf_config), "its list of models does not tell the shape")
    if vllm_config.lora_config is not None:
        change("the trainer's adapter", adapter_requests.install, None)
    if not before_vllm_0_32.reported_by_vllm():
        change("versions of tokens", before_vllm_0_32.install, before_vllm_0_32.OTHERWISE)


def set_up_engine_core(engine: Any) -> None:
    """Runs in an engine core before its loop.

    Args:
        engine: The `EngineCoreProc`.
    """
    from torchtitan.grpo.inside_vllm import before_vllm_0_32, bundled_outputs, old_prefixes, quick_slots

    end_with_parent()
    gc.set_threshold(_YOUNG, *gc.get_threshold()[1:])
    if not before_vllm_0_32.reported_by_vllm():
        change("marks of versions", before_vllm_0_32.mark_versions, None)
    change("bundles", lambda: bundled_outputs.install(engine), "it sends its API server every token by itself")
    change("slots", lambda: quick_slots.install(engine.scheduler), "it takes longer to schedule many answers")
    change("prefixes", lambda: old_prefixes.install(engine), "requests from before an update may find old prefixes")


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
        f"vLLM {version} is outside the range that torchtitan-grpo is tested with ({TESTED}; servers of "
        f"{RAN}). Weight updates, token versions or replies may fail or be wrong. Install one of these: "
        f"pip install 'vllm{TESTED}'"
    )
