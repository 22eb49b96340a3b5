"""Adapters as a folder that `peft`, vLLM and SGLang load, and which frozen weights they belong to.

The folder has adapter_config.json and adapter_model.safetensors.
"""

import json
import re
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict

from torchtitan.grpo.config.hub import named
from torchtitan.grpo.model.hf_config import LANGUAGE_MODEL
from torchtitan.grpo.model.lora import PeftNames, is_adapter
from torchtitan.grpo.model.shards import whole
from torchtitan.grpo.model.source import ModelSource, share
from torchtitan.grpo.weight_wire.adapters import PREFIX, peft_config
from torchtitan.grpo.weight_wire.buckets import checksum_of, combine_checksums


def adapter_state(model: nn.Module) -> dict[str, Tensor]:
    """The adapters of a model, sharded as they are, by torchtitan's names."""
    return {name: value for name, value in get_model_state_dict(model).items() if is_adapter(name)}


@torch.no_grad()
def base_checksum(model: nn.Module) -> int:
    """Of all frozen weights, whatever their shards: 64 bits, signed. Collective."""
    state = get_model_state_dict(model)
    sums = [checksum_of(whole(value)) for name, value in state.items() if not is_adapter(name)]
    return combine_checksums(torch.stack(sums).tolist())


def gather_adapter(model: nn.Module) -> dict[str, Tensor]:
    """The adapters whole, in host memory, by torchtitan's names. On every rank: they are small. Collective."""
    return {name: whole(value).detach().to("cpu", copy=True) for name, value in adapter_state(model).items()}


def write_adapter(tensors: Mapping[str, Tensor], source: ModelSource, folder: Path, dtype: torch.dtype) -> None:
    """Write the folder.

    Args:
        tensors: What `gather_adapter` returned.
        source: Which model they belong to, and `lora`: how they apply.
        dtype: Of the tensors in the file.
    """
    folder.mkdir(parents=True, exist_ok=True)
    names = PeftNames(source.adapter, {name: value.shape for name, value in tensors.items()})
    content = {name: value.to(dtype).contiguous() for name, value in names.convert(tensors).items()}
    if source.is_part:  # `peft` would take no tensor without its name in the base, and say so in a warning alone
        own, of_base = f"{PREFIX}model.", PREFIX + LANGUAGE_MODEL
        content = {name.replace(own, of_base, 1): value for name, value in content.items()}
    save_file(content, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    text = json.dumps(adapter_config(source), indent=2)
    (folder / "adapter_config.json").write_text(text + "\n", encoding="utf-8")
    share(folder)


def adapter_config(source: ModelSource) -> dict[str, object]:
    """Content of adapter_config.json."""
    lora = source.lora
    if lora is None:
        raise ValueError("a model without adapters has no adapter_config.json")
    folder = str(source.folder)
    base, revision = named(folder), ""
    if base != folder:
        base, _, revision = base.rpartition("@")
    config = peft_config(lora.rank, lora.alpha, lora.layers, base)
    if source.is_part:  # other parts have layers with the same names; SGLang takes no pattern in place of the names
        config["exclude_modules"] = rf"(?!{re.escape(LANGUAGE_MODEL)}).*"
    return config | {"revision": revision} if revision else config
