"""Qwen3, mixtures of experts: torchtitan's model with the computation of `experts`."""

import dataclasses
import functools
import re
from typing import Any

import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointWrapper
from transformers import PreTrainedConfig

from torchtitan.config.job_config import Compile
from torchtitan.grpo.model import qwen3
from torchtitan.grpo.model.experts import MoE, apply_expert_parallel
from torchtitan.grpo.model.families import Unsupported
from torchtitan.models.moe import MoEArgs
from torchtitan.models.qwen3 import Qwen3Model, Qwen3ModelArgs

_STACKED = ".moe.experts."
_EXPERT = re.compile(r"model\.layers\.(\d+)\.mlp\.experts\.(\d+)\.(gate|up|down)_proj\.weight")
_MATRICES = {"gate": "w1", "up": "w3", "down": "w2"}


class Qwen3Moe(Qwen3Model):
    """torchtitan's model. Every block has experts, and they have no bias that balances their load."""

    def __init__(self, model_args: Qwen3ModelArgs) -> None:
        super().__init__(model_args)
        for block in self.layers.values():
            block.moe = MoE(model_args.moe_args, model_args.dim, model_args.moe_inter_dim)


class Qwen3MoeAdapter(qwen3.Qwen3Adapter):
    """Experts are stacked in torchtitan, and single tensors in files. Takes some of a layer's experts, too."""

    def to_hf(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Views of the stacked experts; every other tensor as it is."""
        result = super().to_hf({name: value for name, value in state_dict.items() if _STACKED not in name})
        for name, value in state_dict.items():
            if _STACKED in name:
                layer, matrix = name.split(".")[1], next(k for k, v in _MATRICES.items() if name.endswith(v))
                for expert, weight in enumerate(value.unbind(0)):
                    result[f"model.layers.{layer}.mlp.experts.{expert}.{matrix}_proj.weight"] = weight
        return result

    def from_hf(self, hf_state_dict: dict[str, Any]) -> dict[str, Any]:
        """Stacks those experts of a layer that are there."""
        stacks: dict[str, dict[int, torch.Tensor]] = {}
        others = {}
        for name, value in hf_state_dict.items():
            if match := _EXPERT.fullmatch(name):
                stack = f"layers.{match[1]}{_STACKED}{_MATRICES[match[3]]}"
                stacks.setdefault(stack, {})[int(match[2])] = value
            else:
                others[name] = value
        stacked = {name: torch.stack([value for _, value in sorted(stack.items())]) for name, stack in stacks.items()}
        return super().from_hf(others) | stacked

    def expert(self, hf_name: str) -> int | None:
        match = _EXPERT.fullmatch(hf_name)
        return int(match[2]) if match else None


def args_from_hf(config: PreTrainedConfig) -> Qwen3ModelArgs:
    """torchtitan's arguments for the shape that `config` describes.

    Raises:
        Unsupported: Some blocks are dense, tokens choose more experts than there are, or widths are odd.
    """
    if config.mlp_only_layers:
        raise Unsupported("mlp_only_layers", config.mlp_only_layers, "every block must have experts")
    if config.decoder_sparse_step != 1:
        raise Unsupported("decoder_sparse_step", config.decoder_sparse_step, "every block must have experts")
    if not 1 <= config.num_experts_per_tok <= config.num_experts:
        why = f"a token is computed by 1 or more of the {config.num_experts} experts"
        raise Unsupported("num_experts_per_tok", config.num_experts_per_tok, why)
    for field in ("hidden_size", "moe_intermediate_size"):
        if getattr(config, field) % 8:
            raise Unsupported(field, getattr(config, field), "experts are computed 16 bytes at a time: a multiple of 8")
    experts = MoEArgs(
        num_experts=config.num_experts,
        num_shared_experts=0,
        top_k=config.num_experts_per_tok,
        score_func="softmax",
        route_norm=config.norm_topk_prob,
        score_before_experts=False,
        load_balance_coeff=None,
    )
    return dataclasses.replace(
        qwen3.args_from_hf(config), moe_enabled=True, moe_inter_dim=config.moe_intermediate_size, moe_args=experts
    )


def apply_compile(model: nn.Module, config: Compile) -> None:
    """Each block as one graph. With expert parallelism the host reads numbers of rows, so a block is several."""
    # A replaying router notes whether it agrees. Recomputation need not note it again.
    torch._dynamo.config.skip_fwd_side_effects_in_bwd_under_checkpoint = True
    for name, block in model.layers.named_children():
        if block.moe.ep_mesh is None:
            model.layers.register_module(name, torch.compile(block, backend=config.backend, fullgraph=True))
            continue
        # Not of the wrapper, whose attributes its block does not see.
        inner = block._checkpoint_wrapped_module if isinstance(block, CheckpointWrapper) else block
        whole = functools.partial(torch.compile, backend=config.backend, fullgraph=True)
        for part in ("attention", "attention_norm", "ffn_norm"):
            setattr(inner, part, whole(getattr(inner, part)))
        moe = inner.moe
        moe.route = whole(moe.route)
        moe.experts.compute = whole(moe.experts.compute, dynamic=True)  # another number of rows each time


FAMILY = dataclasses.replace(  # its tensor parallelism is refused by `source.check_degrees`
    qwen3.FAMILY,
    model_cls=Qwen3Moe,
    args_from_hf=args_from_hf,
    adapter_cls=Qwen3MoeAdapter,
    apply_compile=apply_compile,
    apply_expert_parallel=apply_expert_parallel,
)
