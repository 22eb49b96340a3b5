"""Peak device memory of a rank, computed from shapes. Nothing is allocated.

The peak is the largest of a few moments, not the sum of everything. What autograd saves for a block follows from
torchtitan's blocks, the attention kernel and `[activation_checkpoint]`. What FSDP2 holds follows from the order in
which it gathers, frees and reduces. The estimate is of `torch.cuda.max_memory_allocated`. The allocator's reserve, the
CUDA context, NCCL's buffers and a server on the same device come on top.
"""

import inspect
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from torchtitan.config import TORCH_DTYPE_MAP, JobConfig
from torchtitan.grpo.config.batch import data_ranks, optimizer_step_rows, row_tokens
from torchtitan.grpo.config.jobs import Job
from torchtitan.grpo.config.target import Target, this_machine
from torchtitan.grpo.policy.gradients import reduces_once

if TYPE_CHECKING:  # torchtitan's models take seconds to import
    from torchtitan.grpo.model.families import ModelArgs
    from torchtitan.grpo.model.lora import Lora
    from torchtitan.grpo.model.source import ModelSource

Parts = dict[str, int]
"""Bytes by holder."""


@dataclass(frozen=True)
class Memory:
    """What one rank holds.

    Attributes:
        parameters: Parameter count of the whole model, without adapters.
        trained: How many parameters are trained: all, or those of the adapters.
        moments: Bytes at each candidate for the peak: moment -> holder -> bytes.
        kept: Bytes that stay between two steps.
        checkpoint_copy: Bytes of host memory that `[checkpoint] async_mode` takes.
        active: Parameters that a token goes through: of experts those that it chooses.
    """

    parameters: int
    trained: int
    moments: dict[str, Parts]
    kept: int = 0
    checkpoint_copy: int = 0
    active: int = 0

    def total(self, moment: str) -> int:
        return sum(self.moments[moment].values())

    @property
    def peak(self) -> str:
        """The moment that needs the most memory."""
        return max(self.moments, key=self.total)


@dataclass(frozen=True)
class BlockActivations:
    """Bytes that one row takes in one block.

    Attributes:
        input: The block's input. Full checkpointing keeps nothing else.
        selected: What selective checkpointing keeps by torchtitan's list of operations, the input included.
        matmuls: The same with all matrix multiplications kept, not every second one.
        saved: What autograd saves for the backward pass, the input included.
        gradients: The most gradients that are alive at once in the backward pass.
    """

    input: int
    selected: int
    matmuls: int
    saved: int
    gradients: int


def block_activations(
    args: "ModelArgs",
    block: nn.Module,
    tokens: int,
    itemsize: int,
    tensor_degree: int,
    compiled: bool,
    mode: str,
    lora: "Lora | None" = None,
) -> BlockActivations:
    """Activations of one of torchtitan's blocks for a row of `tokens`. Those of experts are `_experts`'.

    All widths are those of one tensor-parallel rank. Between blocks and in the norms the rank holds its part of the
    tokens. In attention and feed-forward it holds its part of the heads and of the width; their inputs are whole.

    Args:
        args: The model's arguments.
        block: One of its blocks, on any device; it shows which norms and biases exist.
        itemsize: Bytes of an element in compute dtype.
        mode: `[activation_checkpoint] mode`.
        lora: The block's adapters. A frozen layer without one does not save its input.
    """
    heads, kv_heads, has_experts = args.n_heads, args.n_kv_heads, hasattr(block, "moe")
    residual, width = args.dim / tensor_degree, 0 if has_experts else args.hidden_dim / tensor_degree
    query, key = heads * args.head_dim / tensor_degree, kv_heads * args.head_dim / tensor_degree
    log_sum_exp = 4 * heads / tensor_degree  # of flash attention, float32

    adapted = {path.partition(".")[2] for path in lora.layers.values()} if lora else {"wq", "w1", "w2"}
    # Inputs of the norms, and their outputs, which the projections save.
    norms = 2 * residual + args.dim * (bool(adapted & {"wq", "wk", "wv"}) + bool(adapted & {"w1", "w3"}))
    norms += args.dim * (has_experts and bool(lora))  # the router and the experts pass gradients on
    attention = 2 * query + 2 * key  # queries and keys after RoPE, values, and attention's output
    statistics = 2 * 4 / tensor_degree + log_sum_exp  # of the norms, float32
    if getattr(block.attention, "q_norm", None) is not None:
        attention += query + key  # before the norm
        statistics += 4 * (heads + kv_heads) / tensor_degree
    gate = 3 if compiled else 4  # w1, w3, silu(w1) * w3, and silu(w1), which a compiled block recomputes
    gate -= "w2" not in adapted
    inner = lora.rank * len(lora.layers) if lora else 0  # x A^T of each adapter
    saved = (norms + attention + gate * width + inner) * itemsize + statistics

    # All matrix multiplications and attention; under tensor parallelism also the reduce-scattered sums.
    of_wo = 0 if compiled and tensor_degree > 1 else args.dim  # the reduce-scattered sum is kept in its place
    of_w2 = 0 if compiled or has_experts else args.dim  # no backward reads it, so a compiled block drops it
    reduced = 2 * residual if tensor_degree > 1 else 0
    matmuls = residual + 2 * query + 2 * key + 2 * width + of_wo + of_w2 + reduced + inner
    # torchtitan drops every second matrix multiplication without a bias: wk, wo and w3, or w1 and w2.
    biased = block.attention.wq.bias is not None
    selected = matmuls - (width + of_w2 if biased else key + of_wo + width)
    if lora:  # with an adapter on each layer, every second product is x A^T
        sizes = {"wq": query, "wk": key, "wv": key, "wo": args.dim, "w1": width, "w3": width, "w2": args.dim}
        matmuls += sum(sizes[name] for name in adapted) if biased else 0  # the update is an addmm, as a biased layer is
        selected = matmuls

    # At silu(w1) * w3. A compiled block computes both gradients in place.
    gradients = residual + (1 if compiled and mode == "none" else 2) * width
    if has_experts:
        of_experts = _experts(args, itemsize, compiled, frozen=lora is not None)
        saved += of_experts.saved
        matmuls += of_experts.matmuls / itemsize
        gradients += of_experts.gradients / itemsize
    return BlockActivations(
        input=int(tokens * residual * itemsize),
        selected=int(tokens * (selected * itemsize + log_sum_exp)),
        matmuls=int(tokens * (matmuls * itemsize + log_sum_exp)),
        saved=int(tokens * saved),
        gradients=int(tokens * gradients * itemsize),
    )


def _experts(args: Any, itemsize: int, compiled: bool, frozen: bool) -> BlockActivations:
    """Bytes of one token in the router and its experts, beside their input."""
    moe, width = args.moe_args, args.moe_inter_dim
    scores = 4 * moe.num_experts + (4 + 3 * 8 + 4) * moe.top_k  # float32; weights twice, int64 choices and two orders
    # Of each expert, for gradients of its weights: its input and the gated product. For those of its input: w1 and w3;
    # an uncompiled block keeps both in float32, and two more products.
    inputs = 0 if frozen else args.dim + width
    saved = moe.top_k * (inputs * itemsize + (2 * itemsize if compiled else 4 * 4) * width) + scores
    outputs = moe.top_k * (2 * width + (0 if compiled else args.dim)) + moe.num_experts
    gradients = moe.top_k * (2 * args.dim + width)  # of the inputs through w1 and w3, before they are added
    return BlockActivations(0, 0, outputs * itemsize, saved, gradients * itemsize)


def kept_activations(config: JobConfig, block: BlockActivations, layers: int) -> tuple[int, int]:
    """Bytes that all blocks keep from forward to backward, and bytes that one block recomputes in its backward."""
    checkpoint = config.activation_checkpoint
    if checkpoint.mode == "none":
        return layers * block.saved, 0
    if checkpoint.mode == "full":
        return layers * block.input, block.saved - block.input
    if checkpoint.mode == "memory_budget":  # torch.compile saves this share of what it could recompute
        each = block.input + int(checkpoint.memory_budget * (block.saved - block.input))
        return layers * each, block.saved - each
    if checkpoint.selective_ac_option in ("op", "matmul"):
        each = block.selected if checkpoint.selective_ac_option == "op" else block.matmuls
        return layers * each, block.saved - each
    interval = int(checkpoint.selective_ac_option)
    whole = layers // interval if interval else layers  # every n-th block is fully checkpointed
    return whole * block.input + (layers - whole) * block.saved, block.saved - block.input if whole else 0


def memory_bytes(config: JobConfig, world_size: int, target: Target | None = None, job: Job = "grpo") -> Memory:
    """What one of `world_size` ranks holds at each moment of a step.

    Assumes that sharded tensors divide evenly and that rows are full.

    Args:
        target: The machine of the run; by default this one.

    Raises:
        UserError: The model folder cannot be read.
    """
    from torchtitan.grpo.model.flops import used
    from torchtitan.grpo.model.replay import route_shape
    from torchtitan.grpo.model.source import check_compiles, check_degrees, resolve_model

    source = resolve_model(config.model, config.training.seq_len, config.lora)
    check_degrees(source, config.parallelism)
    check_compiles(source, config)
    if config.grpo.routing_replay:
        route_shape(source.model_args)
    with torch.device("meta"):
        model = source.build()
    rank = _Rank(config, world_size, source, model, target or this_machine(), job)
    moments = {
        "log-probabilities' backward": rank.logprobs_backward(),
        "last block's backward": rank.block_backward(rank.layers),
        "first block's backward": rank.block_backward(1),
        "embedding's backward": rank.embedding_backward(),
        "optimizer step": rank.optimizer_step(),
    }
    if 1 < rank.together < rank.layers:
        moments["second group's backward"] = rank.block_backward(rank.layers - rank.together)
    if config.grpo.kl_coef:
        moments["reference's log-probabilities"] = rank.reference_logprobs()
    kept = sum(rank.always().values())
    active = sum(used(parameter, source.model_args) for parameter in model.parameters())
    return Memory(rank.parameters, rank.trained or rank.parameters, moments, kept, rank.checkpoint_copy(), active)


class _Rank:
    """The sizes of one rank's parts, and which parts it holds at which moment."""

    def __init__(
        self, config: JobConfig, world_size: int, source: "ModelSource", model: nn.Module, target: Target, job: Job
    ) -> None:
        from torchtitan.grpo.model.parallelize import blocks_together

        training, parallelism, args, lora = config.training, config.parallelism, source.model_args, source.lora
        self.config, self.args, self.target, self.frozen = config, args, target, lora is not None
        self.publishes = job == "grpo"
        self.held, self.computed, self.reduced = (
            TORCH_DTYPE_MAP[name].itemsize
            for name in (training.dtype, training.mixed_precision_param, training.mixed_precision_reduce)
        )
        ranks, tensor = data_ranks(config, world_size), parallelism.tensor_parallel_degree
        copies = parallelism.data_parallel_replicate_degree or 1
        shards = ranks // copies
        self.replicated = copies > 1
        self.uses_fsdp = ranks > 1 or training.mixed_precision_param != training.dtype
        self.never_resharded = parallelism.fsdp_reshard_after_forward == "never"
        self.several_rows = optimizer_step_rows(config, world_size, job) > 1
        once = reduces_once(training.reduce_gradients, model)
        self.reduced_once = self.uses_fsdp and self.several_rows and once
        self.compiled = config.compile.enable

        # Parameter counts. The first is the whole model's, the others are one tensor-parallel rank's.
        self.parameters = sum(parameter.numel() for parameter in model.parameters())
        block = next(iter(model.layers.values()))
        self.layers = len(model.layers)
        self.local = math.ceil(self.parameters / tensor / shards)
        # Experts of other ranks are never gathered here.
        experts = sum(p.numel() for p in block.moe.experts.parameters()) if source.has_experts else 0
        elsewhere = experts - experts // parallelism.expert_parallel_degree
        self.whole = math.ceil(self.parameters / tensor) - elsewhere * self.layers
        # Adapters. Under tensor parallelism each rank has one of the two matrices whole; here it has both.
        self.adapter = (
            sum(lora.rank * sum(block.get_submodule(p).weight.shape) for p in lora.layers.values()) if lora else 0
        )
        self.trained = self.adapter * self.layers
        self.trained_here = math.ceil(self.trained / shards) if lora else self.local
        self.published = self.trained or self.parameters
        self.block = math.ceil(sum(parameter.numel() for parameter in block.parameters()) / tensor) - elsewhere
        with_adapters = self.block + self.adapter // tensor
        self.together = 1 if elsewhere else blocks_together(self.layers, with_adapters, self.computed)
        self.outside = self.whole - self.block * self.layers  # embedding, last norm, output
        self.vocabulary = math.ceil(args.vocab_size / tensor)
        # FSDP2 prefetches a group and frees a gathered buffer late. One rank gathers nothing.
        self.ahead = self.together if shards > 1 else 0

        # Activations of one row, bytes.
        self.tokens = row_tokens(config)
        mode = config.activation_checkpoint.mode
        widths = self.tokens, self.computed, tensor
        self.activations = block_activations(args, block, *widths, self.compiled, mode, lora)
        self.kept, self.recomputed = kept_activations(config, self.activations, self.layers)
        self.hidden = self.tokens * args.dim * self.computed
        rope = model.rope_cache
        self.rope = self.tokens * rope.shape[-1] * (rope.dtype.itemsize if rope.is_complex() else self.computed)
        self.last_norm = self.hidden // tensor + self.hidden  # its input, its output where answers are

    def always(self, in_window: bool = False) -> Parts:
        """Held at every moment. `in_window`: while the reference's log-probabilities are computed."""
        offload, sync = self.config.offload, self.config.weight_sync
        state_away = offload.optimizer_states == "host" or (in_window and offload.offload_optimizer_states_for_logprob)
        reference_here = self.config.grpo.kl_coef and (in_window or offload.reference_weights == "device")
        reference_here = reference_here and not self.frozen  # with adapters it is the policy without them
        sent = sent_bytes(self.config, self.target)
        parts = {
            "weights": self.local * (self.computed if self.frozen else self.held),
            "adapters": self.trained_here * self.held * self.frozen,
            "AdamW state": 0 if state_away else 2 * self.trained_here * self.held,
            # The reference has no backward, after which FSDP2 would free what it gathered for the forward.
            "reference model": self.local * self.held + self._gathered(0) if reference_here else 0,
        }
        if not self.publishes:
            return parts
        return parts | {
            "snapshots": self.trained_here * sent * (2 if sync.async_weight_update else 1),
            "buckets, at most": min(_bucket_share(self.config, self.target), self.published * sent),
        }

    def logprobs_backward(self) -> Parts:
        """All activations are saved. A chunk of logits and the output layer's gradients come on top."""
        return (
            self.always()
            | self._earlier_gradients()
            | {
                "activations": self.kept + self.rope + self.last_norm,
                "hidden states' gradient": self.hidden,
                "kept logits": self._kept_logits(),
                "logits chunk": self._logits_chunk(backward=True),
                "gathered weights": self._gathered(self.ahead),
                "output weight's gradient": self._output_gradient(),
            }
        )

    def block_backward(self, number: int) -> Parts:
        """In the backward pass of block `number`, counted from 1, after the backward of all later blocks."""
        first = number == 1
        stay_gathered = self.reduced_once and first  # all blocks do, in a row that is not the last
        gathered = self.together + self.ahead * (not first)
        return (
            self.always()
            | (self._all_gradients() if first else self._earlier_gradients())
            | {
                "activations": self.kept * number // self.layers + self.rope,
                "recomputed activations": self.recomputed,
                "activations' gradients": self.activations.gradients,
                "gathered weights": self._gathered(self.layers if stay_gathered else gathered),
                "output weight's gradient": self._output_gradient(),
                "gradients to reduce": self._to_reduce(number) if self.uses_fsdp and not stay_gathered else 0,
            }
        )

    def embedding_backward(self) -> Parts:
        """At the end. Embedding and output are one FSDP2 group, whose gradients are reduced together."""
        sharded = self.uses_fsdp and not self.reduced_once and not self.frozen
        return (
            self.always()
            | self._all_gradients()
            | {
                "gathered weights": self._gathered(self.layers if self.reduced_once else 0),
                "output weight's gradient": 0 if sharded else self._output_gradient(),
                "gradients to reduce": self.outside * (self.computed + self.reduced) if sharded else 0,
            }
        )

    def checkpoint_copy(self) -> int:
        """What is trained, both moments of AdamW, and the reference, on the host."""
        checkpoint = self.config.checkpoint
        in_background = checkpoint.enable and checkpoint.async_mode != "disabled"
        copies = 4 if self.config.grpo.kl_coef and not self.frozen else 3
        return self.trained_here * self.held * copies * in_background

    def optimizer_step(self) -> Parts:
        """Fused AdamW needs no temporaries; foreach needs the square root of the second moments."""
        foreach = self.config.optimizer.implementation == "foreach"
        return self.always() | {
            "gradients": self.trained_here * self.held,
            "AdamW's temporaries": self.trained_here * self.held if foreach else 0,
        }

    def reference_logprobs(self) -> Parts:
        """A forward without autograd. The last step's gradients still exist."""
        return self.always(in_window=True) | {
            "gradients": self.trained_here * self.held,
            "activations": self.hidden + self.activations.gradients + self.rope,
            "logits chunk": self._logits_chunk(backward=False),
            "gathered weights": self._gathered(self.together + self.ahead) - self._gathered(0),
        }

    def _earlier_gradients(self) -> Parts:
        """Gradients summed over the rows before this one."""
        if self.reduced_once:
            return {"whole gradients": self._trained_whole() * self.reduced}
        return {"gradients": self.trained_here * self.held if self.several_rows else 0}

    def _all_gradients(self) -> Parts:
        """Gradients summed over the rows, this one included, when its backward is almost done."""
        if self.reduced_once:
            return {"whole gradients": self._trained_whole() * self.reduced}
        # FSDP2 keeps the replicas' sum until the end. In the first row it becomes the gradient itself.
        summing = self.replicated and self.several_rows
        return {
            "gradients": self.trained_here * self.held,
            "gradients of replicas": self.trained_here * self.reduced if summing else 0,
        }

    def _trained_whole(self) -> int:
        """Of one tensor-parallel rank."""
        return self.trained if self.frozen else self.whole

    def _to_reduce(self, number: int) -> int:
        """The gradients of one group of blocks on their way, and those of the next group's other blocks."""
        trained = self.adapter if self.frozen else self.block
        if number == self.layers:
            return trained * self.reduced
        return trained * (self.together * self.reduced + (self.together - 1) * self.computed)

    def _gathered(self, blocks: int) -> int:
        """Unsharded weights in compute dtype: `blocks` blocks, and the embedding, last norm and output."""
        if not self.uses_fsdp:
            return 0
        if self.never_resharded:
            return (self.whole + self.trained) * self.computed
        return (self.outside + min(blocks, self.layers) * (self.block + self.adapter)) * self.computed

    def _output_gradient(self) -> int:
        return 0 if self.frozen else self.vocabulary * self.args.dim * self.computed

    def _kept_logits(self) -> int:
        """Whole chunks that fit into `[training] kept_logits_mib`, if every token is an answer token."""
        chunk = min(_chunk_tokens(), self.tokens) * self.vocabulary * self.computed
        room = self.config.training.kept_logits_mib << 20
        return min(room // chunk * chunk, self.tokens * self.vocabulary * self.computed)

    def _logits_chunk(self, backward: bool) -> int:
        """What `logprobs.token_logprobs` holds for one chunk: two copies at most if fused, else float32 temporaries."""
        if self.compiled:
            each = self.computed * (2 if backward else 1)
        else:
            each = self.computed + 4 * (5 if backward and self.config.grpo.entropy_coef else 4)
        return min(_chunk_tokens(), self.tokens) * self.vocabulary * each


def sent_bytes(config: JobConfig, target: Target) -> int:
    """Bytes per parameter of a weight update."""
    return {"float32": 4, "bfloat16": 2, "auto": 2 if target.cuda else 4}[config.weight_sync.dtype]


def checkpoint_bytes(config: JobConfig, memory: Memory) -> int:
    """Bytes of one checkpoint: what is trained, AdamW's two moments, the reference and the export."""
    held, checkpoint, lora = TORCH_DTYPE_MAP[config.training.dtype].itemsize, config.checkpoint, config.lora
    exported = memory.trained + memory.parameters * lora.merge if lora.enable else memory.parameters
    export = exported * TORCH_DTYPE_MAP[checkpoint.export_dtype].itemsize if checkpoint.export_hf else 0
    reference = memory.parameters * held if config.grpo.kl_coef and not lora.enable else 0
    return memory.trained * 3 * held + reference + export


def _bucket_share(config: JobConfig, target: Target) -> int:
    """Upper bound in bytes for all buckets in flight."""
    from torchtitan.grpo.weight_wire.buckets import bucket_bytes

    sync, memory = config.weight_sync, target.memory_bytes
    return sync.num_buffers * bucket_bytes(memory, sync.buffer_memory_ratio, sync.num_buffers, sync.bucket_mib_max)


def _chunk_tokens() -> int:
    from torchtitan.grpo.model.logprobs import token_logprobs

    return inspect.signature(token_logprobs).parameters["chunk_tokens"].default
