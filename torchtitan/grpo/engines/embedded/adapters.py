"""LoRA adapters beside the linear layers of the embedded server's model, as the trainer has them beside its own."""

from collections.abc import Iterable
from pathlib import Path

from torch import Tensor, nn
from transformers import PreTrainedModel

from torchtitan.grpo.model.lora import Lora, LoraLinear, is_adapter
from torchtitan.grpo.weight_wire.adapters import PREFIX, AdapterInfo, adapted_layers, fingerprint
from torchtitan.grpo.weight_wire.refusals import ADAPTERS


def check_adapters(model: PreTrainedModel, name: str, info: AdapterInfo, names: Iterable[str]) -> None:
    """Whether adapters of these names fit the model, and belong to its weights.

    Args:
        name: The model's folder, for people.

    Raises:
        ValueError: They do not.
    """
    linear = {layer for layer, module in model.named_modules() if isinstance(module, nn.Linear)}
    if unknown := [layer for layer in adapted_layers(names) if layer not in linear]:
        raise ValueError(f"{ADAPTERS} {name} has no linear layer {unknown[0]} to adapt")
    base = base_parameters(model)
    info.check_base(Path(name).name, lambda: {weight: fingerprint(value) for weight, value in base.items()})


def held_fingerprints(model: PreTrainedModel) -> dict[str, str]:
    """Of the base's weights and of the adapters, as the model has them now, by the names that they are sent under."""
    return {name: fingerprint(value) for name, value in (base_parameters(model) | _adapters(model)).items()}


def base_parameters(model: PreTrainedModel, *, twice: bool = True) -> dict[str, Tensor]:
    """The model's own weights by the names of safetensors files. Single experts are views of the stacked ones.

    Args:
        twice: Tied embeddings have two names.
    """
    found: dict[str, Tensor] = {}
    for name, parameter in model.named_parameters(remove_duplicate=not twice):
        if not is_adapter(name):
            found |= _experts(name, parameter) or {name: parameter}
    return found


def _experts(name: str, parameter: Tensor) -> dict[str, Tensor]:
    """The matrices of single experts, which transformers stacks, gate and up projections in one; {} for others."""
    layer, _, stack = name.rpartition(".experts.")
    kinds = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}.get(stack if layer else "", ())
    return {
        f"{layer}.experts.{expert}.{kind}.weight": matrix
        for expert, weight in enumerate(parameter if kinds else ())
        for kind, matrix in zip(kinds, weight.chunk(len(kinds)), strict=True)
    }


def fit_adapters(model: PreTrainedModel, info: AdapterInfo, names: Iterable[str]) -> dict[str, nn.Parameter]:
    """Give the model adapters in place of those that it has. Their values are undefined.

    Returns:
        PEFT's name -> parameter.
    """
    remove_adapters(model)
    for layer in adapted_layers(names):
        LoraLinear.adapt(model.get_submodule(layer), Lora(info.rank, info.alpha, {}), model.dtype)
    model.requires_grad_(False)
    return _adapters(model)


def _adapters(model: PreTrainedModel) -> dict[str, nn.Parameter]:
    return {f"{PREFIX}{name}.weight": parameter for name, parameter in model.named_parameters() if is_adapter(name)}


def remove_adapters(model: PreTrainedModel) -> None:
    """The model is its base again."""
    for layer in model.modules():
        if isinstance(layer, LoraLinear):
            del layer.lora_A, layer.lora_B
            layer.__class__ = nn.Linear
