"""Qwen3, dense: torchtitan's model as it is."""

import functools

from transformers import PreTrainedConfig

from torchtitan.grpo.model.families import Family
from torchtitan.grpo.model.tied_embedding import TiedEmbedding
from torchtitan.models.qwen3 import Qwen3Model, Qwen3ModelArgs
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


FAMILY = Family(
    model_cls=Qwen3Model,
    args_from_hf=args_from_hf,
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
