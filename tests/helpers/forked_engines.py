"""Plug-ins for vLLM and SGLang on a CPU: a server forks its processes.

There both start each process anew, and each imports everything again. Until a server is healthy that takes 29 s of CPU,
and 12 if they are forked.
"""

import multiprocessing
import os


def vllm() -> None:
    from vllm.utils import system_utils

    # Its CPU platform has chosen "spawn" when this runs; get_mp_context asks it just before it reads the choice.
    system_utils._maybe_force_spawn = lambda: os.environ.update(VLLM_WORKER_MULTIPROC_METHOD="fork")


def sglang() -> None:
    choose = multiprocessing.set_start_method
    multiprocessing.set_start_method = lambda method, force=False: choose("fork", force)
