"""Plug-ins for vLLM and SGLang on a CPU: a server forks its processes.

There both start each process anew, and each imports everything again. Until a server is healthy that takes 29 s of CPU,
and 12 if they are forked.
"""

import functools
import multiprocessing
import os
from collections.abc import Callable
from typing import Any


def vllm() -> None:
    from vllm.utils import system_utils

    # Its CPU platform has chosen "spawn" when this runs; get_mp_context asks it just before it reads the choice.
    system_utils._maybe_force_spawn = lambda: os.environ.update(VLLM_WORKER_MULTIPROC_METHOD="fork")


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
    multiprocessing.set_start_method = lambda method, force=False: choose("fork", force)


def vllm_ngram() -> None:
    """Speculative decoding of vLLM 0.32 on a CPU divides logits by memory that nobody wrote: the replacement of the
    Triton kernel that repeats each request's temperature fills a copy. Here it fills what it was given."""
    from vllm.utils import cpu_triton_utils

    vllm()
    cpu_triton_utils._expand_kernel_impl = _expand


def _expand(output: Any, values: Any, ends: Any, replace_from: Any, replace_to: Any, *_: Any) -> None:
    kept = values.where(values != replace_from, values.new_full((), replace_to))
    output.copy_(kept.repeat_interleave(ends.diff(prepend=ends.new_zeros(1))))
