"""Any dense causal language model of transformers: its own class on packed rows, no tensor parallelism.

Each class is compared with itself first (`same_packed.py`), and refused where packed rows give other values.
"""

import dataclasses
from typing import Any, cast

import torch
from torch import nn
from transformers import PreTrainedConfig

from torchtitan.grpo.model import qwen2
from torchtitan.grpo.model.families import BlockUses, Family, Unsupported
from torchtitan.grpo.model.hf_model import PREFIX, TransformersModel, with_layers
from torchtitan.grpo.model.same_packed import block_uses


@dataclasses.dataclass
class TransformersArgs:
    """`ModelArgs` of a config, and the config itself."""

    dim: int
    n_layers: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    hidden_dim: int
    vocab_size: int
    max_seq_len: int
    enable_weight_tying: bool
    config: PreTrainedConfig
    uses: BlockUses


class HfNames:
    """The state-dict adapter of names that are Hugging Face's already (see `tied_embedding.TiedEmbedding`)."""

    def __init__(self, model_args: TransformersArgs, hf_assets_path: str | None) -> None:
        self.tied, self._args = model_args.enable_weight_tying, model_args

    @property
    def from_hf_map(self) -> dict[str, str]:
        """Of linear layers in blocks, as torchtitan's adapters have it, with `model.layers` for the blocks."""
        with torch.device("meta"):
            (block,) = _build(dataclasses.replace(self._args, n_layers=1)).layers.children()
        linear = [path for path, module in block.named_modules() if isinstance(module, nn.Linear)]
        return {f"model.layers.{{}}.{path}.weight": f"layers.{{}}.{path}.weight" for path in linear}

    def to_hf(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        names = {name: name.removeprefix(PREFIX) for name in state_dict}
        return {theirs: state_dict[ours] for ours, theirs in names.items() if not self._is_tied_output(theirs)}

    def from_hf(self, hf_state_dict: dict[str, Any]) -> dict[str, Any]:
        kept = {name: value for name, value in hf_state_dict.items() if not self._is_tied_output(name)}
        return {PREFIX + name: value for name, value in kept.items()}

    def expert(self, hf_name: str) -> int | None:
        return None

    def _is_tied_output(self, name: str) -> bool:
        return self.tied and name == "lm_head.weight"


def args_from_hf(config: PreTrainedConfig) -> TransformersArgs:
    """The arguments of a config.

    Raises:
        Unsupported: The class has what does not train here, or computes other values on packed rows.
    """
    uses = block_uses(config)
    heads, values = config.num_attention_heads, config.to_dict()
    sizes = {"n_kv_heads": "num_key_value_heads", "head_dim": "head_dim", "hidden_dim": "intermediate_size"}
    given = {name: _largest(values.get(key)) for name, key in sizes.items()}
    return TransformersArgs(
        dim=config.hidden_size,
        n_layers=config.num_hidden_layers,
        n_heads=heads,
        n_kv_heads=given["n_kv_heads"] or heads,
        head_dim=given["head_dim"] or config.hidden_size // heads,
        hidden_dim=given["hidden_dim"] or 4 * config.hidden_size,
        vocab_size=config.vocab_size,
        max_seq_len=_longest(config, values),
        enable_weight_tying=bool(config.tie_word_embeddings),
        config=config,
        uses=uses,
    )


def _longest(config: PreTrainedConfig, values: dict[str, Any]) -> int:
    """The longest document, in tokens. Rotary embeddings that change with a batch's longest sequence end before."""
    rope = values.get("rope_parameters") or {}
    for each in (rope, *(value for value in rope.values() if isinstance(value, dict))):
        if each.get("rope_type") == "dynamic":
            raise Unsupported("rope_type", "dynamic", "it depends on the longest sequence beside a document")
        if each.get("rope_type") == "longrope":
            return int(each.get("original_max_position_embeddings") or values["original_max_position_embeddings"])
    if not isinstance(values.get("max_position_embeddings"), int):
        raise Unsupported("max_position_embeddings", None, "config.json must say how long a document may be")
    return int(config.max_position_embeddings)


def _largest(value: Any) -> int:
    """Some configs give a size for each block."""
    return max(value) if isinstance(value, list) else value or 0


def _build(args: TransformersArgs) -> TransformersModel:
    return TransformersModel(with_layers(args.config, args.n_layers), args)


def apply_compile(model: nn.Module, compile_config: Any) -> None:
    """Compile each block. One that the compiler cannot take as a whole is compiled in parts."""
    for name, block in list(model.layers.named_children()):
        model.layers.register_module(name, torch.compile(block, backend=compile_config.backend))


FAMILY = Family(
    model_cls=_build,
    args_from_hf=args_from_hf,
    rope_types=(),
    adapter_cls=cast(Any, HfNames),
    apply_tensor_parallel=None,
    apply_compile=apply_compile,
    kept_operations=qwen2.FAMILY.kept_operations,
    output_name=PREFIX + "lm_head.weight",
    of_packed_rows={},
)
