"""A vLLM plug-in of the tests: our own bookkeeping of token versions beside vLLM 0.32's, under another name."""

import functools

from torchtitan.grpo.inside_vllm import before_vllm_0_32

KEY = "counted_versions"


def register() -> None:
    """Entry point of `vllm.general_plugins`. Where vLLM reports no versions, our plug-in's are the only ones."""
    if before_vllm_0_32.reported_by_vllm():
        _install(KEY)


@functools.cache
def _install(key: str) -> None:
    """Once: vLLM may call `register` more than once."""
    before_vllm_0_32.mark_versions()
    before_vllm_0_32.install(key)
