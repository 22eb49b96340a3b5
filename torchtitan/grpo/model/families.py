"""The model families that train: one row for each, and what a row's file must say.

`FAMILIES` is the table. Its key is the file beside this one that holds the family's `FAMILY`. That file is imported
when the family is used, as torchtitan does with its `TrainSpec`s: this one imports nothing heavy, so that configuration
and the embedded server can read the table.

A new family is one file and one row. Nothing else asks which family a model is of.
"""

from collections.abc import Callable, Mapping
from dataclasses import Field, dataclass, field
from importlib import import_module
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

if TYPE_CHECKING:  # these take seconds to import
    from torch import Tensor, nn
    from torch.distributed.device_mesh import DeviceMesh
    from transformers import PreTrainedConfig

    from torchtitan.config.job_config import Compile
    from torchtitan.grpo.model.tied_embedding import TiedEmbedding

FAMILIES: dict[str, dict[str, str]] = {
    # name: {architecture in config.json: its model_type}
    "qwen3": {"Qwen3ForCausalLM": "qwen3"},
    "qwen3_moe": {"Qwen3MoeForCausalLM": "qwen3_moe"},
    "qwen2": {"Qwen2ForCausalLM": "qwen2"},
    "llama3": {"LlamaForCausalLM": "llama", "MistralForCausalLM": "mistral"},
}

GENERAL = "transformers"
"""The row beside the table, for every other dense causal language model (`transformers.py`)."""

MODEL_TYPES = {architecture: kind for row in FAMILIES.values() for architecture, kind in row.items()}
"""`model_type` of each supported architecture, as transformers names both."""


class ModelArgs(Protocol):
    """What the trainer reads of a family's arguments. torchtitan's `Qwen3ModelArgs` has all of it."""

    __dataclass_fields__: ClassVar[dict[str, Field[Any]]]
    """They are a dataclass."""
    dim: int
    """Width of the hidden states."""
    n_layers: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    hidden_dim: int
    """Width of the feed-forward layer."""
    vocab_size: int
    max_seq_len: int
    """Tokens; the length of the RoPE table."""
    enable_weight_tying: bool
    """Embedding and output are one parameter."""


@dataclass
class BlockUses:
    """What the blocks of a model do with packed rows.

    Attributes:
        windows: Of each block that attends, by its number: the sliding window in tokens; 0: there is none.
        beyond_kernels: What no kernel on CUDA has, in words; empty: nothing.
        by_document: Some have layers that compute each document on its own (`by_document.py`).
    """

    windows: dict[int, int] = field(default_factory=dict)
    beyond_kernels: str = ""
    by_document: bool = False

    @property
    def window(self) -> int:
        """The longest window; 0: there is none."""
        return max(self.windows.values(), default=0)

    def see(self, block: int, q: "Tensor", v: "Tensor", window: int, softcap: float) -> None:
        """Attention of a block, which asks for this."""
        self.windows[block] = window
        self.beyond_kernels = self.beyond_kernels or _beyond_kernels(q.shape[-1], v.shape[-1], softcap)


def _beyond_kernels(width: int, width_of_values: int, softcap: float = 0.0) -> str:
    asks = {
        "a softcap of scores": bool(softcap),
        "values of another width than queries": width_of_values != width,
        "heads wider than 256": width > 256,
        f"heads of a width of {width}, which 8 does not divide": bool(width % 8),
    }
    return next((what for what, is_so in asks.items() if is_so), "")


def uses_of(args: Any) -> BlockUses:
    """What a model of these arguments does. One of torchtitan's has no windows."""
    return getattr(args, "uses", None) or BlockUses(beyond_kernels=_beyond_kernels(args.head_dim, args.head_dim))


class Unsupported(Exception):
    """A field of config.json that a family would compute differently from transformers.

    Args:
        everywhere: No other family could help: servers do not support it either.
    """

    def __init__(self, field: str, value: object, why: str, everywhere: bool = False) -> None:
        super().__init__(f"{field} = {value!r} is not supported: {why}")
        self.everywhere = everywhere


@dataclass(frozen=True)
class Family:
    """How one family is built, read, written, sharded, compiled and checkpointed (after torchtitan's `TrainSpec`).

    Attributes:
        model_cls: Builds the model from its arguments. It has `tok_embeddings`, `layers` (blocks), `output` and
            `init_weights`. It either has `final_states` (see `packed.States`), or torchtitan's other parts:
            `rope_cache` (a table with one row per position), `norm`, and blocks that hold an `attention` and take
            (hidden, rope, documents, None). In mixtures of experts each block has a `moe` (see `experts.MoE`).
        args_from_hf: The arguments that transformers' config describes; raises `Unsupported`.
        rope_types: The `rope_type`s that `args_from_hf` reads.
        adapter_cls: torchtitan's names to Hugging Face's and back, for partial state dicts too, tied or not
            (see `tied_embedding.TiedEmbedding`).
        apply_tensor_parallel: Shards the parameters of a model on a 1-D mesh, in place. None: it cannot be sharded so.
        apply_compile: Compiles each block by the `[compile]` section, in place.
        kept_operations: The operations whose results selective activation checkpointing may keep.
        apply_expert_parallel: Shards the experts on a 1-D mesh, in place. None: a dense model.
        output_name: The output layer's weight. In a tied model it is the embedding's, too.
        of_packed_rows: Fields of the arguments that make torchtitan's attention one of packed rows.
    """

    model_cls: "Callable[[Any], nn.Module]"
    args_from_hf: "Callable[[PreTrainedConfig], ModelArgs]"
    rope_types: tuple[str, ...]
    adapter_cls: "type[TiedEmbedding]"
    apply_tensor_parallel: "Callable[[nn.Module, DeviceMesh], None] | None"
    apply_compile: "Callable[[nn.Module, Compile], None]"
    kept_operations: frozenset[Any]
    apply_expert_parallel: "Callable[[nn.Module, DeviceMesh], None] | None" = None
    output_name: str = "output.weight"
    of_packed_rows: Mapping[str, str] = field(
        default_factory=lambda: {"attn_type": "varlen", "attn_mask_type": "block_causal"}
    )


def logit_rule(config: Any) -> tuple[float, float]:
    """What transformers does to logits before they are log-probabilities: a factor, or softcap * tanh(l / softcap). No
    class of it has both.

    A rule that is missing here shows when a class is compared with itself (`same_packed.py`).

    Args:
        config: transformers' configuration.

    Returns:
        The factor, and the softcap, 0 for none.
    """
    divisor = getattr(config, "logits_scaling", None) or 1.0  # Granite
    factor = getattr(config, "logit_scale", None) or 1.0  # Cohere
    return float(factor) / float(divisor), float(getattr(config, "final_logit_softcapping", None) or 0.0)


def get_family(name: str) -> Family:
    """The family of a row of `FAMILIES`, or `GENERAL`."""
    return import_module(f"torchtitan.grpo.model.{name}").FAMILY
