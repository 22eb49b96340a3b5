"""Qwen2 and Qwen2.5, dense: torchtitan's Qwen3 without norms of queries and keys, with biases on q, k and v."""

import dataclasses

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


FAMILY = dataclasses.replace(
    qwen3.FAMILY,
    model_cls=Qwen2Model,
    args_from_hf=args_from_hf,
    adapter_cls=Qwen2Adapter,
    # Without norms of queries and keys a rank's heads need no DTensors: Llama's plan. It cuts biases like outputs.
    apply_tensor_parallel=llama3.FAMILY.apply_tensor_parallel,
    apply_compile=llama3.FAMILY.apply_compile,
    # A linear layer with a bias is one addmm.
    kept_operations=llama3.FAMILY.kept_operations | {torch.ops.aten.addmm.default},
)
