"""Fingerprints of the weights that a vLLM worker has loaded, by Hugging Face's names.

In the worker they are fused, sliced for tensor parallelism, and on a CPU packed. So the loader that read the files at
the start reads them once more, when the first trainer connects. A server of adapters gets no other weights, so its base
stays what the files hold.
"""

from typing import Any

import torch
from vllm.model_executor.model_loader import get_model_loader

from torchtitan.grpo.weight_wire.adapters import fingerprint
from torchtitan.grpo.weight_wire.refusals import ADAPTERS


def base_fingerprints(vllm_config: Any, model: torch.nn.Module, device: torch.device) -> dict[str, str]:
    """
    Args:
        vllm_config: Which says what was loaded, and how.
        device: Where to compute.

    Raises:
        ValueError: The weights are of no files, or their format cannot be read tensor by tensor.
    """
    loading = vllm_config.load_config
    read = getattr(get_model_loader(loading), "get_all_weights", None)
    if read is None:
        raise ValueError(
            f"{ADAPTERS} this server was started with --load-format {loading.load_format}, so it does not have the "
            "weights that adapters belong to: start it with the folder's safetensors"
        )
    return {name: fingerprint(weight.to(device)) for name, weight in read(vllm_config.model_config, model)}
