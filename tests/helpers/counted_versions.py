"""A vLLM plug-in of the tests: our own bookkeeping of token versions beside vLLM 0.32's, under another name."""

from torchtitan.grpo.inside_vllm import token_versions

KEY = "counted_versions"


def register() -> None:
    """Entry point of `vllm.general_plugins`. Where vLLM reports no versions, our plug-in's are the only ones."""
    if token_versions.reported_by_vllm():
        token_versions.install(KEY)
