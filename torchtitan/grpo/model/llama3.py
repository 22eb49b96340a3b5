"""Llama, SmolLM2 and Mistral: torchtitan's Llama 3, tied or not, of any feed-forward width, with plain or scaled RoPE.

Mistral without a sliding window computes what Llama does; `hf_config` refuses the window.
"""

import dataclasses
import functools

import torch
from transformers import PreTrainedConfig

from torchtitan.grpo.model.families import Family, Unsupported
from torchtitan.grpo.model.tied_embedding import TiedEmbedding
from torchtitan.models.llama3 import Transformer, TransformerModelArgs
from torchtitan.models.llama3.infra import parallelize
from torchtitan.models.llama3.model.args import RoPEScalingArgs
from torchtitan.models.llama3.model.state_dict_adapter import Llama3StateDictAdapter

# A wavelength is at most 2 pi theta: with this original length none is long enough to be scaled.
_UNSCALED_ROPE = RoPEScalingArgs(scaling_factor=1.0, original_max_position_embeddings=1 << 60)


@dataclasses.dataclass
class LlamaArgs(TransformerModelArgs):
    """torchtitan's arguments, with the names of `families.ModelArgs` that they lack. `n_kv_heads` is always set."""

    enable_weight_tying: bool = False

    @property
    def head_dim(self) -> int:
        return self.dim // self.n_heads

    @property
    def hidden_dim(self) -> int:
        """torchtitan's rule for the feed-forward width, which is that of Meta's release."""
        width = int(2 * 4 * self.dim / 3)
        if self.ffn_dim_multiplier is not None:
            width = int(self.ffn_dim_multiplier * width)
        return -(-width // self.multiple_of) * self.multiple_of


class Llama(Transformer):
    """torchtitan's model. Tied, embedding and output are one parameter, as in Llama 3.2 1B and 3B."""

    def __init__(self, model_args: LlamaArgs) -> None:
        super().__init__(model_args)
        self._tie()

    @property
    def rope_cache(self) -> torch.Tensor:
        """[max_seq_len, head_dim / 2], complex."""
        return self.freqs_cis

    def init_weights(self, buffer_device: torch.device | None = None) -> None:
        self._tie()  # `to_empty` gives each module its own
        super().init_weights(buffer_device)

    def _tie(self) -> None:
        if self.model_args.enable_weight_tying:
            self.output.weight = self.tok_embeddings.weight


class LlamaAdapter(TiedEmbedding, Llama3StateDictAdapter):
    """torchtitan's adapter, for tied models too. Its rotary dimensions alternate, Hugging Face's lie in halves."""


def args_from_hf(config: PreTrainedConfig) -> LlamaArgs:
    """torchtitan's arguments for the shape that `config` describes.

    Raises:
        Unsupported: The heads are not as wide together as the hidden states.
    """
    heads, head_dim = config.num_attention_heads, config.head_dim
    if head_dim * heads != config.hidden_size:
        why = f"torchtitan's Llama needs hidden_size / num_attention_heads = {config.hidden_size / heads:g}"
        raise Unsupported("head_dim", head_dim, why)
    rope = config.rope_parameters
    scaling = _UNSCALED_ROPE
    if rope["rope_type"] == "llama3":
        scaling = RoPEScalingArgs(
            scaling_factor=rope["factor"],
            low_freq_factor=rope["low_freq_factor"],
            high_freq_factor=rope["high_freq_factor"],
            original_max_position_embeddings=rope["original_max_position_embeddings"],
        )
    return LlamaArgs(
        dim=config.hidden_size,
        n_layers=config.num_hidden_layers,
        n_heads=heads,
        n_kv_heads=config.num_key_value_heads,
        vocab_size=config.vocab_size,
        # torchtitan rounds its own guess of the feed-forward width up to `multiple_of`: a guess of at most the
        # true width, rounded up to a multiple of it, is the true width, odd ones included.
        multiple_of=config.intermediate_size,
        ffn_dim_multiplier=config.intermediate_size / int(8 * config.hidden_size / 3),
        norm_eps=config.rms_norm_eps,
        rope_theta=rope["rope_theta"],
        rope_scaling_args=scaling,
        max_seq_len=config.max_position_embeddings,
        enable_weight_tying=bool(config.tie_word_embeddings),
    )


FAMILY = Family(
    model_cls=Llama,
    args_from_hf=args_from_hf,
    rope_types=("default", "llama3"),
    adapter_cls=LlamaAdapter,
    apply_tensor_parallel=functools.partial(
        parallelize.apply_tp, loss_parallel=True, enable_float8_tensorwise_tp=False
    ),
    apply_compile=parallelize.apply_compile,
    kept_operations=frozenset(parallelize._op_sac_save_list),
)
