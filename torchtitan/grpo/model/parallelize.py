"""Building a model on its mesh: tensor parallelism, activation checkpointing, compile, FSDP2.

Tensor parallelism, compile and checkpointing are torchtitan's, except the checkpointing option `matmul`, which keeps
every matrix multiplication. The FSDP2 grouping is ours: torchtitan's `apply_fsdp` fails on tied embeddings with torch
2.13, and it applies no mixed precision on one rank.
"""

import dataclasses
import functools
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from torchtitan.config import TORCH_DTYPE_MAP, JobConfig
from torchtitan.distributed import ParallelDims
from torchtitan.distributed.activation_checkpoint import apply_ac
from torchtitan.grpo.config.batch import ranks_of_a_row, row_tokens
from torchtitan.grpo.host_memory.block_inputs import BlockInputs
from torchtitan.grpo.model.context_parallel import ContextParallel
from torchtitan.grpo.model.families import uses_of
from torchtitan.grpo.model.flash_attention import choose_attention
from torchtitan.grpo.model.flash_operator import KEPT_BY_SELECTIVE_CHECKPOINTING
from torchtitan.grpo.model.lora import add_adapters, init_adapters
from torchtitan.grpo.model.mlp_chunks import chunk_mlps
from torchtitan.grpo.model.packed import make_packed
from torchtitan.grpo.model.rounded_weights import round_weights
from torchtitan.grpo.model.source import ModelSource
from torchtitan.tools.utils import set_default_dtype

TOGETHER_BYTES = 128 << 20
"""Blocks are gathered, and their gradients reduced, together up to this size in the compute dtype. FSDP2's hooks take
the host milliseconds each time, which the device's work on smaller blocks does not cover (docs/performance.md)."""


def blocks_together(layers: int, parameters: int, itemsize: int) -> int:
    """How many blocks are one FSDP2 group. The last group may have fewer.

    Args:
        parameters: Of one block, of one tensor-parallel rank.
        itemsize: Bytes of one in the compute dtype.
    """
    groups = -(-layers // max(1, TOGETHER_BYTES // (parameters * itemsize)))
    return -(-layers // groups)


def parallel_dims(config: JobConfig, world_size: int) -> ParallelDims:
    """The run's mesh: data parallelism (sharded, replicated or both), context, tensor and expert parallelism.

    `[parallelism] data_parallel_replicate_degree` = 0 is one copy of the model here: `nodes` settles it before.
    """
    parallelism = config.parallelism
    return ParallelDims(
        dp_replicate=parallelism.data_parallel_replicate_degree or 1,
        dp_shard=parallelism.data_parallel_shard_degree,
        cp=parallelism.context_parallel_degree,
        tp=parallelism.tensor_parallel_degree,
        pp=1,
        ep=parallelism.expert_parallel_degree,
        etp=1,
        world_size=world_size,
    )


def build_model(
    source: ModelSource,
    config: JobConfig,
    dims: ParallelDims,
    device: torch.device,
    *,
    trainable: bool = True,
    rounded: bool = False,
) -> nn.Module:
    """Build, shard and randomly initialise a model that takes packed rows (see `packed.make_packed`).

    With `[lora]` all weights but the adapters are frozen. They are held in the dtype that they are computed in, to
    which FSDP2 would cast them for each use: in bfloat16 that halves them, and the values that are used are the same.

    Args:
        source: Which model, from `source.resolve_model`.
        trainable: False for a reference model: no gradients, no activation checkpointing.
        rounded: Compute with weights that are rounded as servers in FP8 round them.
    """
    lora, held = source.lora, TORCH_DTYPE_MAP[config.training.dtype]
    base = TORCH_DTYPE_MAP[config.training.mixed_precision_param] if lora else held
    with torch.device("meta"), set_default_dtype(base):
        model = source.build()
    tp_mesh = dims.get_optional_mesh("tp")
    if tp_mesh is not None:
        _apply_tensor_parallel(model, source, tp_mesh)
    ep_mesh = dims.get_optional_mesh("ep")
    if ep_mesh is not None and source.family.apply_expert_parallel is not None:
        source.family.apply_expert_parallel(model, ep_mesh)
    if lora:
        add_adapters(model, lora, held)
    if rounded:
        round_weights(model)
    compiled = config.compile.enable
    cp_mesh = dims.get_optional_mesh("cp")
    make_packed(
        model,
        tp_mesh,
        context=None if cp_mesh is None else ContextParallel(cp_mesh),
        compile=compiled,
        kept_logits_bytes=config.training.kept_logits_mib << 20,
        round_logits=config.training.logits_dtype == "model",
        flash=_attention(source, config, dims, device),
    )
    # torchtitan's own JobConfig, which scripts use, has neither this key nor `offload`.
    if chunk := getattr(config.activation_checkpoint, "mlp_chunk_tokens", 0):
        chunk_mlps(model.layers.children(), chunk)
    if trainable and config.activation_checkpoint.mode != "none":
        _apply_checkpointing(model, source, config)
    if compiled:
        source.family.apply_compile(model, config.compile)
    if trainable and getattr(config.activation_checkpoint, "offload", False):
        row = row_tokens(config) // ranks_of_a_row(config) * source.model_args.dim
        itemsize = TORCH_DTYPE_MAP[config.training.mixed_precision_param].itemsize
        model.block_inputs = BlockInputs(model.layers.children(), device, row * itemsize)
    if dims.dp_cp_enabled or config.training.mixed_precision_param != config.training.dtype:
        _apply_fsdp(model, config, dims, device)
    model.to_empty(device=device)
    with torch.no_grad():
        model.init_weights(buffer_device=device)
    if lora:
        init_adapters(model, config.debug.seed or 0)
    else:
        model.requires_grad_(trainable)
    return model.train()


def _apply_checkpointing(model: nn.Module, source: ModelSource, config: JobConfig) -> None:
    checkpoint = config.activation_checkpoint
    kept = source.family.kept_operations | {KEPT_BY_SELECTIVE_CHECKPOINTING}
    if (checkpoint.mode, checkpoint.selective_ac_option) != ("selective", "matmul"):
        apply_ac(
            model,
            checkpoint,
            model_compile_enabled=config.compile.enable,
            op_sac_save_list=kept,
            base_folder=config.job.dump_folder,
        )
        return

    # torchtitan's list of operations, without its rule that recomputes every second matrix multiplication, and experts.
    kept |= {torch.ops.aten._grouped_mm.default}

    def policy(ctx: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        return CheckpointPolicy.MUST_SAVE if operation in kept else CheckpointPolicy.PREFER_RECOMPUTE

    for name, block in model.layers.named_children():
        block = checkpoint_wrapper(
            block,
            context_fn=functools.partial(create_selective_checkpoint_contexts, policy),
            early_stop=False,
        )
        model.layers.register_module(name, block)


def _attention(source: ModelSource, config: JobConfig, dims: ParallelDims, device: torch.device) -> int:
    if config.training.mixed_precision_param == "float32":  # neither version has kernels for it
        return 2
    args: Any = source.model_args
    split = dims.tp * dims.cp
    heads, kv_heads = args.n_heads // split, max(1, args.n_kv_heads // split)
    window = uses_of(args).window
    return choose_attention(config.training.flash_attention, device, heads, kv_heads, args.head_dim, window)


def _apply_tensor_parallel(model: nn.Module, source: ModelSource, tp_mesh: DeviceMesh) -> None:
    assert source.family.apply_tensor_parallel is not None, "see `source.check_degrees`"
    source.family.apply_tensor_parallel(model, tp_mesh)
    if source.tied:  # sharding replaced both parameters; FSDP2 must see one
        model.output.weight = model.tok_embeddings.weight


def _hide_hooks(module: nn.Module) -> None:
    """Keep what FSDP2's hooks do in a module from selective checkpointing around it, which remembers each operation.

    They gather the weights inside of the checkpointed region: at other places when it is recomputed.
    """

    def hidden(hook: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(hook)
        def run(*args: Any, **kwargs: Any) -> Any:
            with _disable_current_modes():
                return hook(*args, **kwargs)

        return run

    for hooks in (module._forward_pre_hooks, module._forward_hooks):
        for key, hook in hooks.items():
            hooks[key] = hidden(hook)


def _apply_fsdp(model: nn.Module, config: JobConfig, dims: ParallelDims, device: torch.device) -> None:
    """Groups of blocks, and one for embedding, final norm and output: tied weights must be in one group."""
    names = ("dp_replicate", "fsdp") if dims.dp_replicate_enabled else ("fsdp",)
    if dims.fsdp_enabled:  # context parallelism shards the model, too
        mesh = dims.get_mesh(list(names))
    else:  # torchtitan makes no mesh dimension of one rank; FSDP2 needs one, in TP's world
        world = dims.world_mesh._unflatten(0, (dims.dp_replicate, 1, dims.tp), ("dp_replicate", "fsdp", "tp"))
        mesh = world[names]
    policy = MixedPrecisionPolicy(
        param_dtype=TORCH_DTYPE_MAP[config.training.mixed_precision_param],
        reduce_dtype=TORCH_DTYPE_MAP[config.training.mixed_precision_reduce],
    )
    blocks = list(model.layers.children())
    together = 1
    if dims.ep_enabled:  # the experts of this rank, over the ranks that have the same ones
        for block in blocks:
            experts, experts_mesh = block.moe.experts, dims.get_mesh([*names[:-1], "efsdp"])
            own = dataclasses.replace(policy, cast_forward_inputs=False)  # routing weights stay float32
            fully_shard(experts, mesh=experts_mesh, mp_policy=own, reshard_after_forward=True)
            _hide_hooks(experts)
    else:
        parameters = sum(parameter.numel() for parameter in blocks[0].parameters()) // dims.tp
        together = blocks_together(len(blocks), parameters, policy.param_dtype.itemsize)
    for first in range(0, len(blocks), together):
        fully_shard(blocks[first : first + together], mesh=mesh, mp_policy=policy, reshard_after_forward=True)
    if dims.ep_enabled:  # the host waits for numbers of rows in every block, so it cannot run ahead
        for block, following in pairwise(blocks):
            block.set_modules_to_forward_prefetch([following, following.moe.experts])
            following.set_modules_to_backward_prefetch([block, block.moe.experts])
    # The root's forward computes log-probabilities from the output weight, which must stay for the backward.
    fully_shard(model, mesh=mesh, mp_policy=policy, reshard_after_forward=False)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            # Token weights include the global normaliser, so gradients are summed, never averaged.
            if mesh.size() > 1:  # of one rank FSDP2 would copy them
                module.set_gradient_divide_factor(1.0)
            if device.type == "cpu":  # gloo has no premultiplied sum
                module.set_force_sum_reduction_for_comms(True)
