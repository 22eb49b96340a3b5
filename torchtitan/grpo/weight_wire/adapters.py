"""What both ends know of LoRA adapters: how they apply, and which base weights they belong to.

The tensors of an adapter travel as those of a model do, under the names of the `peft` package. The server learns the
rest once, when the trainer connects: `AdapterInfo`, in the field `adapter` of `receiver.InitInfo`. Adapters change a
model in the right way on top of the right weights only, so both ends compare fingerprints of their base first.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from torchtitan.grpo.weight_wire.buckets import checksum_of, combine_checksums
from torchtitan.grpo.weight_wire.refusals import ADAPTERS

PREFIX = "base_model.model."
"""In front of each module's name in PEFT's names."""
ENDS = (".lora_A.weight", ".lora_B.weight")


@dataclass(frozen=True)
class AdapterInfo:
    """How adapters apply.

    Attributes:
        rank: Rows of A and columns of B.
        alpha: The update of a weight is alpha / rank times B A.
        base_name: Of the trainer's folder, for people.
        base: Hugging Face name -> `fingerprint` of each frozen weight. Empty in a benchmark, whose weights nobody has:
            then nothing is compared.
    """

    rank: int
    alpha: float
    base_name: str
    base: dict[str, str]

    def check_base(self, name: str, fingerprints: Callable[[], Mapping[str, str]]) -> None:
        """Compare the server's base with the trainer's.

        Args:
            name: Of the server's folder. vLLM hides whole paths in its errors.
            fingerprints: Computes those of its weights. More of them than the trainer's do not matter.

        Raises:
            ValueError: They differ. The message begins with ADAPTERS.
        """
        found = fingerprints() if self.base else {}
        differing = [weight for weight, value in self.base.items() if found.get(weight) != value]
        if differing:
            own, theirs = together(self.base.values()), together(found.get(weight, "") for weight in self.base)
            raise ValueError(
                f"{ADAPTERS} the adapters belong to other base weights: the trainer has those of {self.base_name!r} "
                f"with the fingerprint {own}, this server those of {name!r} with {theirs}. They differ in "
                f"{len(differing)} of {len(self.base)} weights, such as {differing[0]}. Start the server with the "
                "folder that [model] hf_assets_path names"
            )


def peft_config(rank: int, alpha: float, layers: Iterable[str], base: str) -> dict[str, Any]:
    """Content of an adapter_config.json, which `peft`, vLLM and SGLang read.

    Args:
        layers: Names of the adapted layers in a block, such as "q_proj".
        base: The folder of the base, or its name.
    """
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": rank,
        "lora_alpha": alpha,
        "lora_dropout": 0.0,
        "target_modules": list(layers),
        "bias": "none",
        "fan_in_fan_out": False,
        "use_rslora": False,
        "use_dora": False,
        "modules_to_save": None,
        "inference_mode": True,
    }


def adapted_layers(names: Iterable[str]) -> list[str]:
    """Hugging Face names of the layers that the adapters with these names belong to, in their order.

    Raises:
        ValueError: A name is not that of an adapter, or a layer lacks one of its two matrices.
    """
    halves: dict[str, int] = {}
    for name in names:
        if not name.startswith(PREFIX) or not name.endswith(ENDS):
            raise ValueError(f"{name} is no adapter's name: expected {PREFIX}LAYER{ENDS[0]} or {ENDS[1]}")
        layer = name.removeprefix(PREFIX).removesuffix(ENDS[0]).removesuffix(ENDS[1])
        halves[layer] = halves.get(layer, 0) + 1
    if alone := [layer for layer, count in halves.items() if count != 2]:
        raise ValueError(f"{alone[0]} has one of its adapter's two matrices only")
    return list(halves)


def block_layers(names: Iterable[str]) -> list[str]:
    """Names of the adapted layers in a block ("q_proj") of adapters with these names, in their order."""
    return list(dict.fromkeys(layer.rpartition(".")[2] for layer in adapted_layers(names)))


@torch.no_grad()
def fingerprint(weight: torch.Tensor) -> str:
    """64 bits of a tensor's values in bfloat16, in hex: the same in whichever dtype a program holds the weights."""
    return _hex(int(checksum_of(weight.detach().to(torch.bfloat16))))


def together(fingerprints: Iterable[str]) -> str:
    """One fingerprint for several, in their order."""
    return _hex(combine_checksums([int(each or "0", 16) for each in fingerprints]))


def _hex(value: int) -> str:
    return f"{value % 2**64:016x}"
