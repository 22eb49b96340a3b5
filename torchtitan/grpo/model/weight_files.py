"""Safetensors files of a model's folder: found, and checked before anything is built."""

from collections.abc import Container
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from torchtitan.grpo.errors import UserError
from torchtitan.grpo.model.finite import is_finite
from torchtitan.grpo.model.hf_config import read_json

FLOATS = ("BF16", "F16", "F32", "F64")
"""Dtypes of weights that can be trained, by safetensors' names."""


def weight_files(folder: Path) -> list[Path]:
    index_path = folder / "model.safetensors.index.json"
    if (folder / "model.safetensors").is_file():
        return [folder / "model.safetensors"]
    if not index_path.is_file():
        raise UserError(
            f'[model] hf_assets_path = "{folder}" has neither model.safetensors nor {index_path.name}: download the '
            'safetensors weights (other formats are not read), or set [model] weights = "random"'
        )
    weight_map = read_json(index_path).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise UserError(f"{index_path} has no weight_map: download it again")
    return [folder / name for name in sorted(set(map(str, weight_map.values())))]


def not_finite(files: list[Path], expected: Container[str], dtype: torch.dtype) -> str:
    """Which tensors hold NaN or infinity once they are cast to `dtype`, and in which files. Reads them all."""
    bad = []
    for path in files:
        with opened(path) as file:
            names = [name for name in file.keys() if name in expected]  # noqa: SIM118
            bad += [f"{name} ({path.name})" for name in names if not is_finite(file.get_tensor(name).to(dtype))]
    return _some(bad)


def opened(path: Path) -> safe_open:
    return safe_open(path, framework="pt", device="cpu")


def check_headers(files: list[Path], expected: dict[str, tuple[int, ...]], tied: bool, folder: Path) -> None:
    """Check the files by their headers and sizes.

    Args:
        expected: Shapes of the model's tensors, by name.
        tied: Embedding and output are one parameter.

    Raises:
        UserError: A file is missing or broken; a tensor is missing, left over, of another shape, or not of floats.
    """
    found: dict[str, tuple[int, ...]] = {}
    dtypes: dict[str, str] = {}
    missing_files = [path.name for path in files if not path.is_file()]
    broken = [f"missing: {_some(missing_files)} (model.safetensors.index.json names them)"] if missing_files else []
    for path in files:
        if path.name in missing_files:
            continue
        try:
            with opened(path) as file:
                slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118
                found |= {name: tuple(each.get_shape()) for name, each in slices.items()}
                dtypes |= {name: each.get_dtype() for name, each in slices.items() if name in expected}
        except (SafetensorError, OSError) as error:
            broken.append(f"{path.name} is truncated or not a safetensors file ({error})")
    if broken:
        raise UserError(
            f"[model] hf_assets_path: the weights in {folder} are torn: {'; '.join(broken[:8])}. Download them again"
        )
    packed = [f"{name} {dtype}" for name, dtype in dtypes.items() if dtype not in FLOATS]
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


def _some(names: list[str], limit: int = 8) -> str:
    return ", ".join(names[:limit]) + (f" and {len(names) - limit} more" if len(names) > limit else "")
