"""The model for inference, from the files of a checkpoint."""

from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.checkpoint import DefaultLoadPlanner, FileSystemReader
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict

from torchtitan.grpo.model.finite import is_finite
from torchtitan.grpo.model.source import ModelSource, by_hf_name
from torchtitan.grpo.model.weight_files import WeightFile

_PART_BYTES = 1 << 30


def read_hf(folder: Path, model: dict[str, Tensor], source: ModelSource, dtype: torch.dtype) -> dict[str, Tensor]:
    """The whole model in `dtype` in host memory, by Hugging Face name. Not collective: one rank reads every shard.

    Args:
        folder: What DCP has written.
        model: The model's state dict, for names, shapes and dtypes.
    """
    own = {name: value for name, value in model.items() if not (source.tied and name == source.family.output_name)}
    full = read_full(folder, own, dtype)
    tensors: dict[str, Tensor] = {}
    for name in own:
        tensors |= by_hf_name(source, name, full.pop(name))
    return tensors


def read_full(folder: Path, model: dict[str, Tensor], dtype: torch.dtype | None = None) -> dict[str, Tensor]:
    """The tensors that `model` names, whole, in host memory; in `dtype`, by default as they were written."""
    full: dict[str, Tensor] = {}
    for names in _parts(model):
        part = {name: torch.empty(model[name].shape, dtype=model[name].dtype) for name in names}
        # Not `dcp.load`, which warns of `no_dist`: a filter of warnings would be for all threads.
        _load_state_dict({"model": part}, FileSystemReader(folder), planner=DefaultLoadPlanner(), no_dist=True)
        full |= {name: value.to(dtype or value.dtype) for name, value in part.items()}
    return full


def infinite_in(folder: Path) -> list[str]:
    """Names of the tensors in a folder's safetensors files that are infinite or NaN."""
    names: list[str] = []
    for path in sorted(folder.glob("*.safetensors")):
        with WeightFile(path, language_model=False) as file:
            names += [name for name in file.names if not is_finite(file.get_tensor(name))]
    return names


def _parts(model: dict[str, Tensor]) -> Iterator[list[str]]:
    """Names whose tensors have about `_PART_BYTES` together: of the model in its own dtype, no more is held."""
    names: list[str] = []
    size = 0
    for name, value in model.items():
        names.append(name)
        size += value.numel() * value.itemsize
        if size >= _PART_BYTES:
            yield names
            names, size = [], 0
    if names:
        yield names
