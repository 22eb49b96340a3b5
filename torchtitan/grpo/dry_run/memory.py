"""How much device memory a rank needs at most, counted from shapes alone: nothing is allocated.

A peak is the largest of a few moments, not a sum of everything. What autograd saves for a block follows from
torchtitan's blocks, the flash kernel that `packed_model` calls and `[activation_checkpoint]`; what FSDP2 holds follows
from the order in which it gathers, frees and reduces. Counted is what `torch.cuda.max_memory_allocated` reports: the
allocator's reserve, the CUDA context and NCCL's buffers come on top, and so does a server on the same device.
"""

import inspect
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import nn

from torchtitan.config import TORCH_DTYPE_MAP, JobConfig
from torchtitan.grpo.config.batch import data_ranks, optimizer_step_rows, row_tokens
from torchtitan.grpo.policy.gradients import reduces_once

if TYPE_CHECKING:  # torchtitan's models take seconds to import
    from torchtitan.grpo.model.families import ModelArgs

Parts = dict[str, int]
"""Bytes by what holds them."""


@dataclass(frozen=True)
class Memory:
    """What one rank holds.

    Attributes:
        parameters: How many the whole model has.
        moments: Bytes at each moment that may be the peak, by moment and then by holder.
    """

    parameters: int
    moments: dict[str, Parts]

    def total(self, moment: str) -> int:
        return sum(self.moments[moment].values())

    @property
    def peak(self) -> str:
        """The moment that needs most."""
        return max(self.moments, key=self.total)


@dataclass(frozen=True)
class BlockActivations:
    """Bytes of one row in one block.

    Attributes:
        input: The block's input: all that full checkpointing keeps.
        selected: What selective checkpointing keeps by torchtitan's list of operations, the input included.
        products: The same with every matrix product, not every second one.
        saved: What autograd saves for the backward pass, the input included.
        gradients: Gradients alive at once in the backward pass, at the most.
    """

    input: int
    selected: int
    products: int
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
) -> BlockActivations:
    """Activations of one dense block of torchtitan's for a row of `tokens`.

    Widths are those of one tensor-parallel rank: between blocks and in the norms it holds its part of the tokens, in
    attention and feed-forward its part of the heads and of the width, and the inputs of these are whole.

    Args:
        args: The model's arguments.
        block: One of its blocks, on any device: it tells which norms and biases there are.
        itemsize: Bytes of an element in compute dtype.
        mode: `[activation_checkpoint] mode`.
    """
    heads, kv_heads = args.n_heads, args.n_kv_heads
    residual, width = args.dim / tensor_degree, args.hidden_dim / tensor_degree
    query, key = heads * args.head_dim / tensor_degree, kv_heads * args.head_dim / tensor_degree
    log_sum_exp = 4 * heads / tensor_degree  # of flash attention, float32

    norms = 2 * residual + 2 * args.dim  # their inputs; their outputs, which the projections save
    attention = 2 * query + 2 * key  # after RoPE, values, and what attention gives
    statistics = 2 * 4 / tensor_degree + log_sum_exp  # of the norms, float32
    if getattr(block.attention, "q_norm", None) is not None:
        attention += query + key  # before the norm
        statistics += 4 * (heads + kv_heads) / tensor_degree
    gate = 3 if compiled else 4  # w1, w3, their product, and silu(w1), which a compiled block computes again
    saved = (norms + attention + gate * width) * itemsize + statistics

    # All matrix products and attention; under tensor parallelism also what is reduced-scattered.
    of_wo = 0 if compiled and tensor_degree > 1 else args.dim  # the reduced-scattered sum is kept in its place
    of_w2 = 0 if compiled else args.dim  # which no backward reads: a compiled block drops it
    reduced = 2 * residual if tensor_degree > 1 else 0
    products = residual + 2 * query + 2 * key + 2 * width + of_wo + of_w2 + reduced
    # torchtitan's list drops every second product, of those without a bias: wk, wo and w3, or w1 and w2.
    biased = block.attention.wq.bias is not None
    selected = products - (width + of_w2 if biased else key + of_wo + width)

    # At the product of gate and up projection: a compiled block computes both gradients in place.
    gradients = residual + (1 if compiled and mode == "none" else 2) * width
    return BlockActivations(
        input=int(tokens * residual * itemsize),
        selected=int(tokens * (selected * itemsize + log_sum_exp)),
        products=int(tokens * (products * itemsize + log_sum_exp)),
        saved=int(tokens * saved),
        gradients=int(tokens * gradients * itemsize),
    )


def kept_activations(config: JobConfig, block: BlockActivations, layers: int) -> tuple[int, int]:
    """Bytes that all blocks keep from forward to backward, and that one block computes again in its backward."""
    checkpoint = config.activation_checkpoint
    if checkpoint.mode == "none":
        return layers * block.saved, 0
    if checkpoint.mode == "full":
        return layers * block.input, block.saved - block.input
    if checkpoint.mode == "memory_budget":  # torch.compile's: a share of what could be recomputed is saved
        each = block.input + int(checkpoint.memory_budget * (block.saved - block.input))
        return layers * each, block.saved - each
    if checkpoint.selective_ac_option in ("op", "matmul"):
        each = block.selected if checkpoint.selective_ac_option == "op" else block.products
        return layers * each, block.saved - each
    interval = int(checkpoint.selective_ac_option)
    whole = layers // interval if interval else layers  # every n-th block is checkpointed whole
    return whole * block.input + (layers - whole) * block.saved, block.saved - block.input if whole else 0


def memory_bytes(config: JobConfig, world_size: int) -> Memory:
    """What one of `world_size` ranks holds at each moment of a step. Sharded tensors are taken to divide evenly, rows
    to be full.

    Raises:
        UserError: The model folder cannot be read.
    """
    from torchtitan.grpo.model.source import resolve_model

    source = resolve_model(config.model, config.training.seq_len)
    with torch.device("meta"):
        model = source.build()
    rank = _Rank(config, world_size, source.model_args, model)
    moments = {
        "log-probabilities' backward": rank.logprobs_backward(),
        "last block's backward": rank.block_backward(rank.layers),
        "first block's backward": rank.block_backward(1),
        "embedding's backward": rank.embedding_backward(),
        "optimizer step": rank.optimizer_step(),
    }
    if config.grpo.kl_coef:
        moments["reference's log-probabilities"] = rank.reference_logprobs()
    return Memory(rank.parameters, moments)


class _Rank:
    """The sizes of one rank's parts, and what it holds when."""

    def __init__(self, config: JobConfig, world_size: int, args: "ModelArgs", model: nn.Module) -> None:
        training, parallelism = config.training, config.parallelism
        self.config, self.args = config, args
        self.held, self.computed, self.reduced = (
            TORCH_DTYPE_MAP[name].itemsize
            for name in (training.dtype, training.mixed_precision_param, training.mixed_precision_reduce)
        )
        ranks, tensor = data_ranks(config, world_size), parallelism.tensor_parallel_degree
        shards = ranks // parallelism.data_parallel_replicate_degree
        self.replicated = parallelism.data_parallel_replicate_degree > 1
        self.uses_fsdp = ranks > 1 or training.mixed_precision_param != training.dtype
        self.never_resharded = parallelism.fsdp_reshard_after_forward == "never"
        self.several_rows = optimizer_step_rows(config, world_size) > 1
        once = reduces_once(training.reduce_gradients, model)
        self.reduced_once = self.uses_fsdp and self.several_rows and once
        self.compiled = config.compile.enable

        # Parameters, of one tensor-parallel rank but for the first line.
        self.parameters = sum(parameter.numel() for parameter in model.parameters())
        self.whole = math.ceil(self.parameters / tensor)
        self.local = math.ceil(self.whole / shards)
        block = next(iter(model.layers.values()))
        self.layers = len(model.layers)
        self.block = math.ceil(sum(parameter.numel() for parameter in block.parameters()) / tensor)
        self.outside = self.whole - self.block * self.layers  # embedding, last norm, output
        self.vocabulary = math.ceil(args.vocab_size / tensor)
        # FSDP2 gathers a block ahead of its use, and frees a gathered buffer late; one rank gathers nothing.
        self.ahead = 1 if shards > 1 else 0

        # Activations of one row, bytes.
        self.tokens = row_tokens(config)
        mode = config.activation_checkpoint.mode
        self.activations = block_activations(args, block, self.tokens, self.computed, tensor, self.compiled, mode)
        self.kept, self.recomputed = kept_activations(config, self.activations, self.layers)
        self.hidden = self.tokens * args.dim * self.computed
        rope = model.rope_cache
        self.rope = self.tokens * rope.shape[-1] * (rope.dtype.itemsize if rope.is_complex() else self.computed)
        self.last_norm = self.hidden // tensor + self.hidden  # its input, its output where answers are

    def always(self, in_window: bool = False) -> Parts:
        """Held all the while; `in_window`: while the reference's log-probabilities are computed."""
        offload, sync = self.config.offload, self.config.weight_sync
        state_away = offload.optimizer_states == "host" or (in_window and offload.offload_optimizer_states_for_logprob)
        reference_here = self.config.grpo.kl_coef and (in_window or offload.reference_weights == "device")
        sent = sent_bytes(self.config)
        return {
            "weights": self.local * self.held,
            "AdamW state": 0 if state_away else 2 * self.local * self.held,
            # What FSDP2 gathers for a forward and would free after a backward, the reference keeps.
            "reference model": self.local * self.held + self._gathered(0) if reference_here else 0,
            "snapshots": self.local * sent * (2 if sync.async_weight_update else 1),
            "buckets, at most": min(_bucket_share(self.config), self.parameters * sent),
        }

    def logprobs_backward(self) -> Parts:
        """Every activation is saved, and a chunk of logits and gradients of the output layer come on top."""
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
        """In the backward pass of block `number`, counted from 1, when those after it are done."""
        first = number == 1
        stay_gathered = self.reduced_once and first  # of a row that is not the last, all blocks do
        return (
            self.always()
            | (self._all_gradients() if first else self._earlier_gradients())
            | {
                "activations": self.kept * number // self.layers + self.rope,
                "recomputed activations": self.recomputed,
                "activations' gradients": self.activations.gradients,
                "gathered weights": self._gathered(self.layers if stay_gathered else 1 + self.ahead * (not first)),
                "output weight's gradient": self._output_gradient(),
                "gradients to reduce": self.block * self.reduced if self.uses_fsdp and not stay_gathered else 0,
            }
        )

    def embedding_backward(self) -> Parts:
        """At the end: embedding and output are one group to FSDP2, whose gradients are reduced together."""
        sharded = self.uses_fsdp and not self.reduced_once
        return (
            self.always()
            | self._all_gradients()
            | {
                "gathered weights": self._gathered(self.layers if self.reduced_once else 0),
                "output weight's gradient": 0 if sharded else self._output_gradient(),
                "gradients to reduce": self.outside * (self.computed + self.reduced) if sharded else 0,
            }
        )

    def optimizer_step(self) -> Parts:
        """Fused AdamW needs no memory of its own, foreach a square root of the second moments."""
        foreach = self.config.optimizer.implementation == "foreach"
        return self.always() | {
            "gradients": self.local * self.held,
            "AdamW's temporaries": self.local * self.held if foreach else 0,
        }

    def reference_logprobs(self) -> Parts:
        """A forward without autograd, beside the last step's gradients."""
        return self.always(in_window=True) | {
            "gradients": self.local * self.held,
            "activations": self.hidden + self.activations.gradients + self.rope,
            "logits chunk": self._logits_chunk(backward=False),
            "gathered weights": self._gathered(1 + self.ahead) - self._gathered(0),
        }

    def _earlier_gradients(self) -> Parts:
        """Sums over the rows before this one."""
        if self.reduced_once:
            return {"whole gradients": self.whole * self.reduced}
        return {"gradients": self.local * self.held if self.several_rows else 0}

    def _all_gradients(self) -> Parts:
        """Sums over the rows, this one included, when its backward is almost done."""
        if self.reduced_once:
            return {"whole gradients": self.whole * self.reduced}
        # Until the end FSDP2 keeps what replicas add up; in the first row that becomes the gradient itself.
        summing = self.replicated and self.several_rows
        return {
            "gradients": self.local * self.held,
            "gradients of replicas": self.local * self.reduced if summing else 0,
        }

    def _gathered(self, blocks: int) -> int:
        """Whole weights in compute dtype: embedding, last norm and output from forward to backward, some blocks."""
        if not self.uses_fsdp:
            return 0
        if self.never_resharded:
            return self.whole * self.computed
        return (self.outside + min(blocks, self.layers) * self.block) * self.computed

    def _output_gradient(self) -> int:
        return self.vocabulary * self.args.dim * self.computed

    def _kept_logits(self) -> int:
        """Whole chunks of `[training] kept_logits_mib`, of rows that are answers all over."""
        chunk = min(_chunk_tokens(), self.tokens) * self.vocabulary * self.computed
        room = self.config.training.kept_logits_mib << 20
        return min(room // chunk * chunk, self.tokens * self.vocabulary * self.computed)

    def _logits_chunk(self, backward: bool) -> int:
        """What `logprobs.token_logprobs` holds of one chunk: fused two copies at most, else float32 temporaries."""
        if self.compiled:
            each = self.computed * (2 if backward else 1)
        else:
            each = self.computed + 4 * (5 if backward and self.config.grpo.entropy_coef else 4)
        return min(_chunk_tokens(), self.tokens) * self.vocabulary * each


def sent_bytes(config: JobConfig) -> int:
    """Bytes of one parameter on its way to a server."""
    return {"float32": 4, "bfloat16": 2, "auto": 2 if torch.cuda.is_available() else 4}[config.weight_sync.dtype]


def _bucket_share(config: JobConfig) -> int:
    """Bytes that all buckets in flight may take."""
    from torchtitan.grpo.weight_sync.sync import device_memory_bytes
    from torchtitan.grpo.weight_wire.buckets import bucket_bytes

    sync = config.weight_sync
    memory = device_memory_bytes(torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu"))
    return sync.num_buffers * bucket_bytes(memory, sync.buffer_memory_ratio, sync.num_buffers, sync.bucket_mib_max)


def _chunk_tokens() -> int:
    from torchtitan.grpo.model.logprobs import token_logprobs

    return inspect.signature(token_logprobs).parameters["chunk_tokens"].default
