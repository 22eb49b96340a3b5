"""Qwen3, dense: torchtitan's model as it is."""

import functools
from typing import Any

from transformers import PreTrainedConfig

from torchtitan.grpo.model.families import Family
from torchtitan.grpo.model.tied_embedding import TiedEmbedding
from torchtitan.models.qwen3 import Qwen3Model, Qwen3ModelArgs, qwen3_args
from torchtitan.models.qwen3.infra import parallelize
from torchtitan.models.qwen3.model.state_dict_adapter import Qwen3StateDictAdapter


class Qwen3Adapter(TiedEmbedding, Qwen3StateDictAdapter):
    """torchtitan's adapter, for partial state dicts of tied models too."""


def args_from_hf(config: PreTrainedConfig) -> Qwen3ModelArgs:
    """torchtitan's arguments for the shape that `config` describes."""
    return Qwen3ModelArgs(
        dim=config.hidden_size,
        n_layers=config.num_hidden_layers,
        n_heads=config.num_attention_heads,
        n_kv_heads=config.num_key_value_heads,
        vocab_size=config.vocab_size,
        head_dim=config.head_dim,
        hidden_dim=config.intermediate_size,
        norm_eps=config.rms_norm_eps,
        rope_theta=config.rope_parameters["rope_theta"],
        max_seq_len=config.max_position_embeddings,
        enable_weight_tying=bool(config.tie_word_embeddings),
    )


def rope_to_hf(args: Qwen3ModelArgs) -> dict[str, Any]:
    """`rope_parameters` of config.json."""
    return {"rope_type": "default", "rope_theta": float(args.rope_theta)}


FAMILY = Family(
    model_cls=Qwen3Model,
    flavors={name: args for name, args in qwen3_args.items() if not args.moe_enabled},
    args_from_hf=args_from_hf,
    rope_to_hf=rope_to_hf,
    rope_types=("default",),
    adapter_cls=Qwen3Adapter,
    apply_tensor_parallel=functools.partial(
        parallelize.apply_non_moe_tp,
        loss_parallel=True,
        enable_float8_tensorwise_tp=False,
        enable_async_tp=False,
        cp_enabled=False,
    ),
    apply_compile=functools.partial(parallelize.apply_compile, ep_enabled=False),
    kept_operations=frozenset(parallelize._op_sac_save_list),
)
