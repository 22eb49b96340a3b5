"""vLLM's Triton kernels on a CPU, in Triton's interpreter: its model runner V2, which tells the kept tokens, has many.

The variables turn it on, `offer` must run before vLLM is imported, and `register` is a plug-in of vLLM.
"""

from types import SimpleNamespace

VARIABLES = {"TRITON_INTERPRET": "1", "VLLM_USE_V2_MODEL_RUNNER": "1"}


def offer() -> None:
    """vLLM looks for a back end for CPUs, which Triton has not. The interpreter needs none."""
    from triton.backends import backends

    backends["cpu"] = SimpleNamespace(driver=SimpleNamespace(is_active=lambda: True), compiler=None)


def register() -> None:
    """One kernel does what the interpreter cannot. vLLM has the same in PyTorch, for machines without Triton."""
    from vllm.v1.sample.ops import topk_topp_sampler

    topk_topp_sampler.HAS_TRITON = False
