"""Qwen2 and Qwen2.5, dense: torchtitan's Qwen3 without norms of queries and keys, with biases on q, k and v."""

import dataclasses
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedConfig

from torchtitan.grpo.model import llama3, qwen3
from torchtitan.grpo.model.families import Unsupported
from torchtitan.models.qwen3 import Qwen3Model, Qwen3ModelArgs


class Qwen2Model(Qwen3Model):
    """torchtitan's Qwen3, whose arguments say `qk_norm=False`, plus a bias on each of wq, wk and wv."""

    def __init__(self, model_args: Qwen3ModelArgs) -> None:
        super().__init__(model_args)
        for linear in self._biased():
            linear.bias = nn.Parameter(torch.empty(linear.out_features))

    def init_weights(self, buffer_device: torch.device | None = None) -> None:
        super().init_weights(buffer_device)
        for linear in self._biased():
            nn.init.zeros_(linear.bias)

    def _biased(self) -> list[nn.Linear]:
        attentions = [block.attention for block in self.layers.values()]
        return [linear for attention in attentions for linear in (attention.wq, attention.wk, attention.wv)]


class Qwen2Adapter(qwen3.Qwen3Adapter):
    """Qwen3's names and those of the biases."""

    def __init__(self, model_args: Qwen3ModelArgs, hf_assets_path: str | None) -> None:
        super().__init__(model_args, hf_assets_path)
        for theirs, ours in (("q_proj", "wq"), ("k_proj", "wk"), ("v_proj", "wv")):
            self.from_hf_map[f"model.layers.{{}}.self_attn.{theirs}.bias"] = f"layers.{{}}.attention.{ours}.bias"


def args_from_hf(config: PreTrainedConfig) -> Qwen3ModelArgs:
    """torchtitan's arguments for the shape that `config` describes.

    Raises:
        Unsupported: The heads are not as wide together as the hidden states.
    """
    heads, head_dim = config.num_attention_heads, config.head_dim
    if head_dim * heads != config.hidden_size:
        why = f"vLLM's Qwen2 needs hidden_size / num_attention_heads = {config.hidden_size / heads:g}"
        raise Unsupported("head_dim", head_dim, why, everywhere=True)
    args = qwen3.args_from_hf(config)
    args.qk_norm = False
    return args


def _flavor(dim: int, layers: int, heads: int, kv_heads: int, hidden_dim: int, **more: Any) -> Qwen3ModelArgs:
    sizes = dict(dim=dim, n_layers=layers, n_heads=heads, n_kv_heads=kv_heads, hidden_dim=hidden_dim)
    common = dict(head_dim=dim // heads, vocab_size=152064, max_seq_len=32768, rope_theta=1e6, qk_norm=False)
    return Qwen3ModelArgs(**sizes | common | more)


TIED = dict(enable_weight_tying=True, vocab_size=151936)

FAMILY = dataclasses.replace(
    qwen3.FAMILY,
    model_cls=Qwen2Model,
    flavors={
        "0.5B": _flavor(896, 24, 14, 2, 4864, **TIED),
        "1.5B": _flavor(1536, 28, 12, 2, 8960, **TIED),
        "3B": _flavor(2048, 36, 16, 2, 11008, **TIED),
        "7B": _flavor(3584, 28, 28, 4, 18944),
        "14B": _flavor(5120, 48, 40, 8, 13824, norm_eps=1e-5),
        "32B": _flavor(5120, 64, 40, 8, 27648, norm_eps=1e-5),
        "72B": _flavor(8192, 80, 64, 8, 29568, norm_eps=1e-5),
    },
    args_from_hf=args_from_hf,
    adapter_cls=Qwen2Adapter,
    # Without norms of queries and keys a rank's heads need no DTensors: Llama's plan. It cuts biases like outputs.
    apply_tensor_parallel=llama3.FAMILY.apply_tensor_parallel,
    apply_compile=llama3.FAMILY.apply_compile,
    # A linear layer with a bias is one addmm.
    kept_operations=llama3.FAMILY.kept_operations | {torch.ops.aten.addmm.default},
)
