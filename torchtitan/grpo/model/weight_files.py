"""Safetensors files of a model's folder: found, and checked before anything is built."""

from collections.abc import Container
from pathlib import Path
from typing import Any, Self

import torch
from safetensors import SafetensorError, safe_open

from torchtitan.grpo.errors import UserError
from torchtitan.grpo.model.finite import is_finite
from torchtitan.grpo.model.hf_config import LANGUAGE_MODEL, has_other_parts, read_json

FLOATS = ("BF16", "F16", "F32", "F64")
"""Dtypes of weights that can be trained, by safetensors' names."""


class WeightFile:
    """A safetensors file, by the names of the language model that is in it.

    Args:
        language_model: Whether the folder's model has other parts, which are then left out.

    Attributes:
        names: Of its tensors, once it is entered; to each the one in the file.
    """

    def __init__(self, path: Path, language_model: bool) -> None:
        self.path, self.name, self._language_model = path, path.name, language_model
        self.names: dict[str, str] = {}

    def __enter__(self) -> Self:
        self._file = safe_open(self.path, framework="pt", device="cpu").__enter__()
        for name in self._file.keys():  # noqa: SIM118 (it is no dict)
            if own := _of_language_model(name) if self._language_model else name:
                self.names[own] = name
        return self

    def __exit__(self, *error: Any) -> None:
        self._file.__exit__(*error)

    def get_slice(self, name: str) -> Any:
        return self._file.get_slice(self.names[name])

    def get_tensor(self, name: str) -> torch.Tensor:
        return self._file.get_tensor(self.names[name])


def _of_language_model(name: str) -> str:
    """Its name in a folder of the language model alone; "" for other parts."""
    for prefix, own in (
        (LANGUAGE_MODEL, "model."),
        ("language_model.model.", "model."),
        ("language_model.lm_head.", "lm_head."),
        ("lm_head.", "lm_head."),
    ):
        if name.startswith(prefix):
            return own + name.removeprefix(prefix)
    return ""


INDEX = "model.safetensors.index.json"


def has_weights(folder: Path) -> bool:
    return (folder / "model.safetensors").is_file() or (folder / INDEX).is_file()


def weight_files(folder: Path) -> list[WeightFile]:
    index_path, config_path = folder / INDEX, folder / "config.json"
    language_model = config_path.is_file() and has_other_parts(read_json(config_path))
    if (folder / "model.safetensors").is_file():
        return [WeightFile(folder / "model.safetensors", language_model)]
    if not index_path.is_file():
        raise UserError(
            f'[model] hf_assets_path = "{folder}" has neither model.safetensors nor {index_path.name}: download the '
            'safetensors weights (other formats are not read), or set [model] weights = "random"'
        )
    weight_map = read_json(index_path).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise UserError(f"{index_path} has no weight_map: download it again")
    return [WeightFile(folder / name, language_model) for name in sorted(set(map(str, weight_map.values())))]


def not_finite(files: list[WeightFile], expected: Container[str], dtype: torch.dtype) -> str:
    """Which tensors hold NaN or infinity once they are cast to `dtype`, and in which files. Reads them all."""
    bad = []
    for each in files:
        with each as file:
            names = [name for name in file.names if name in expected]
            bad += [f"{name} ({file.name})" for name in names if not is_finite(file.get_tensor(name).to(dtype))]
    return _some(bad)


def check_headers(files: list[WeightFile], expected: dict[str, tuple[int, ...]], tied: bool, folder: Path) -> None:
    """Check the files by their headers and sizes.

    Args:
        expected: Shapes of the model's tensors, by name.
        tied: Embedding and output are one parameter.

    Raises:
        UserError: A file is missing or broken; a tensor is missing, left over, of another shape, or not of floats.
    """
    found, dtypes = _headers(files, folder)
    packed = [f"{name} {kind}" for name, kind in dtypes.items() if name in expected and kind not in FLOATS]
    if packed:
        raise UserError(
            f"[model] hf_assets_path: the weights in {folder} are quantised, and training needs those in {FLOATS[0]}, "
            f"{FLOATS[1]} or {FLOATS[2]}: {_some(packed)}. Give the unquantised model"
        )
    problems = []
    missing = [name for name in expected if name not in found]
    # Old files hold the rotary table. Files of tied models sometimes hold a second copy of the embedding.
    spare = ("rotary_emb.inv_freq", "lm_head.weight") if tied else ("rotary_emb.inv_freq",)
    extra = [name for name in found if name not in expected and not name.endswith(spare)]
    wrong = [
        f"{name} {list(found[name])}, not {list(shape)}"
        for name, shape in expected.items()
        if name in found and found[name] != shape
    ]
    if missing:
        problems.append(f"{len(missing)} missing: {_some(missing)}")
    if extra:
        problems.append(f"{len(extra)} that the model has no place for: {_some(extra)}")
    if wrong:
        problems.append(f"{len(wrong)} of another shape: {_some(wrong)}")
    if problems:
        raise UserError(
            f"the tensors in {folder} do not fit the model that [model] describes; {'; '.join(problems)}. "
            "config.json and the weights must be of the same model (tie_word_embeddings and sizes included)"
        )


def _headers(files: list[WeightFile], folder: Path) -> tuple[dict[str, tuple[int, ...]], dict[str, str]]:
    """Shape and dtype of each tensor.

    Raises:
        UserError: A file is missing or broken.
    """
    shapes: dict[str, tuple[int, ...]] = {}
    dtypes: dict[str, str] = {}
    missing = [file.name for file in files if not file.path.is_file()]
    broken = [f"missing: {_some(missing)} (model.safetensors.index.json names them)"] if missing else []
    for each in files:
        if each.name in missing:
            continue
        try:
            with each as file:
                for name in file.names:
                    header = file.get_slice(name)
                    shapes[name], dtypes[name] = tuple(header.get_shape()), header.get_dtype()
        except (SafetensorError, OSError) as error:
            broken.append(f"{each.name} is truncated or not a safetensors file ({error})")
    if broken:
        raise UserError(
            f"[model] hf_assets_path: the weights in {folder} are torn: {'; '.join(broken[:8])}. Download them again"
        )
    return shapes, dtypes


def _some(names: list[str], limit: int = 8) -> str:
    return ", ".join(names[:limit]) + (f" and {len(names) - limit} more" if len(names) > limit else "")
