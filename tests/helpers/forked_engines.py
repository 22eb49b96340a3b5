"""Plug-ins for vLLM and SGLang on a CPU: a server forks its processes.

There both start each process anew, and each imports everything again. Until a server is healthy that takes 29 s of CPU,
10 if they are forked, and 7 without garbage collections of what is imported. SGLang would also do one in each update.
"""

import functools
import gc
import multiprocessing
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any


def import_uncollected(folder: Path) -> None:
    """Has Python begin without garbage collection where `folder` is on PYTHONPATH; the plug-ins switch it on."""
    (folder / "sitecustomize.py").write_text("import gc\n\ngc.disable()\n")


def _collect_what_comes() -> None:
    gc.freeze()
    gc.enable()


def vllm() -> None:
    from vllm.utils import system_utils

    # Its CPU platform has chosen "spawn" when this runs; get_mp_context asks it just before it reads the choice.
    system_utils._maybe_force_spawn = lambda: os.environ.update(VLLM_WORKER_MULTIPROC_METHOD="fork")
    _collect_what_comes()


def sglang_lora() -> None:
    """SGLang 0.5.23 does not start with --enable-lora on a CPU: it asks for pinned memory, which torch has with an
    accelerator only. Here it gets other memory, in all processes that are forked from this one."""
    import torch

    sglang()

    def unpinned(make: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(make)
        def made(*args: Any, pin_memory: bool = False, **others: Any) -> Any:
            return make(*args, **others)

        return made

    torch.tensor, torch.empty, torch.zeros = map(unpinned, (torch.tensor, torch.empty, torch.zeros))
    torch.Tensor.pin_memory = lambda tensor: tensor


def sglang() -> None:
    choose = multiprocessing.set_start_method

    def fork(method: str, force: bool = False) -> None:
        choose("fork", force)
        _collect_what_comes()

    multiprocessing.set_start_method = fork


def vllm_ngram() -> None:
    """Speculative decoding of vLLM 0.32 on a CPU divides logits by memory that nobody wrote: the replacement of the
    Triton kernel that repeats each request's temperature fills a copy. Here it fills what it was given."""
    from vllm.utils import cpu_triton_utils

    vllm()
    cpu_triton_utils._expand_kernel_impl = _expand


def _expand(output: Any, values: Any, ends: Any, replace_from: Any, replace_to: Any, *_: Any) -> None:
    kept = values.where(values != replace_from, values.new_full((), replace_to))
    output.copy_(kept.repeat_interleave(ends.diff(prepend=ends.new_zeros(1))))
