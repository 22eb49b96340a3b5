"""Which model this is: what trainer and servers tell of theirs, and whether it is the same one.

Standard library only, since servers import it too.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FIELDS = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "num_experts",
    "num_experts_per_tok",
    "moe_intermediate_size",
    "norm_topk_prob",
    "vocab_size",
    "tie_word_embeddings",
    "rms_norm_eps",
    "rope_theta",
    "rope_type",
    "rope_factor",
)
"""The entries of config.json that decide the names, shapes and use of the weights. Those of rotary embeddings are in
other places of it by the version of transformers."""
KEY = "hf_config"
"""Where a server's entry in `/v1/models` has them: the embedded server's, and vLLM's with our plug-in."""


@dataclass(frozen=True)
class ModelIdentity:
    """A model.

    Attributes:
        name: Its folder, for people.
        config: `architectures` and FIELDS, as config.json has them. What is not known is left out.
    """

    name: str
    config: dict[str, Any]

    @property
    def has_other_parts(self) -> bool:
        """It sees or hears, by the name of its class."""
        return any(str(name).endswith("ForConditionalGeneration") for name in self.config.get("architectures", ()))

    def differing(self, other: "ModelIdentity") -> list[str]:
        """The entries that both know and that are not equal."""
        return [
            field
            for field in ("architectures", *FIELDS)
            if field in self.config and field in other.config and self.config[field] != other.config[field]
        ]

    def describe(self, fields: list[str]) -> str:
        """`models/Qwen3-0.6B (hidden_size 1024, vocab_size 151936)`."""
        return f"{self.name} ({', '.join(f'{field} {self.config[field]}' for field in fields)})"


def identity(name: str, config: Any) -> ModelIdentity:
    """The identity of the model that `config` describes.

    Args:
        config: The content of a config.json, or transformers' object for it.
    """
    entries = dict(config if isinstance(config, dict) else vars(config))
    if "num_local_experts" in entries:  # transformers' name for it; a file may have either
        entries.setdefault("num_experts", entries["num_local_experts"])
    entries |= _rope(entries)
    found = {field: entries.get(field, getattr(config, field, None)) for field in ("architectures", *FIELDS)}
    return ModelIdentity(name, {field: value for field, value in found.items() if value is not None})


def _rope(entries: dict[str, Any]) -> dict[str, Any]:
    """The rotary embeddings, if all layers have the same ones: `rope_parameters`, or of before transformers 5
    `rope_theta` and `rope_scaling`."""
    given = entries.get("rope_parameters") or entries.get("rope_scaling") or {}
    theta = entries.get("rope_theta", given.get("rope_theta")) if isinstance(given, dict) else None
    if not isinstance(theta, int | float) or any(isinstance(value, dict) for value in given.values()):
        return {}
    kind = entries.get("rope_type") or given.get("rope_type") or given.get("type") or "default"
    factor = entries.get("rope_factor") or given.get("factor") or 1.0
    return {"rope_theta": float(theta), "rope_type": kind, "rope_factor": float(factor)}


def identity_of_folder(folder: str) -> ModelIdentity:
    """The identity by `folder`/config.json; nothing is known if this machine cannot read it."""
    try:
        config = json.loads((Path(folder) / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        config = {}
    return identity(folder, config if isinstance(config, dict) else {})
