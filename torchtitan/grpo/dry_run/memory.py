"""Peak device memory of a rank, computed from shapes. Nothing is allocated.

The peak is the largest of a few moments, not the sum of everything. What autograd saves for a block is
`activations.py`'s. What FSDP2 holds follows from the order in which it gathers, frees and reduces. The estimate is of
`torch.cuda.max_memory_allocated`. The allocator's reserve, the CUDA context, NCCL's buffers and a server on the same
device come on top.

torch 2.13's `FSDPMemTracker` under `FakeTensorMode` does not replace it. torch.compile refuses to run below its
dispatch mode, so it sees eager blocks: at 0.6B without checkpointing 32.5 GiB where 29.3 were measured, with `op` 76.4
at 4B (73.0 measured) and 91.5 at 8B on two GPUs (83.5 measured). That takes 20 to 40 s of CPU. Under it fused AdamW
makes four more copies of what is trained. Snapshots and buckets are not in a model's step.
"""

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import nn

from torchtitan.config import TORCH_DTYPE_MAP, JobConfig
from torchtitan.grpo.config.batch import data_ranks, optimizer_step_rows, row_tokens
from torchtitan.grpo.config.jobs import Job
from torchtitan.grpo.config.target import Target, this_machine
from torchtitan.grpo.dry_run.activations import block_activations, kept_activations
from torchtitan.grpo.dry_run.measured import measured_activations
from torchtitan.grpo.model.logprobs import CHUNK_TOKENS
from torchtitan.grpo.model.lora import adapter_parameters
from torchtitan.grpo.policy.assignment import MOST_COPIES
from torchtitan.grpo.policy.gradients import reduces_once
from torchtitan.grpo.weight_wire.buckets import NUM_BUFFERS, bucket_bytes

if TYPE_CHECKING:  # torchtitan's models take seconds to import
    from torchtitan.grpo.model.source import ModelSource

TOP_TOKEN_BYTES = 48
"""Of each of `[distill] top_k` or `[grpo] score_centering` tokens at a position: ids, log-probabilities, float32 copies
in the backward pass."""
KEPT_TOKEN_BYTES = 24
"""Of each of `[rollout] top_k` tokens at a position of the computed chunk: places and logits, in both passes."""
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
        active: Parameters that a token goes through: of experts those that it chooses.
        on_host: Bytes of host memory by holder. All is pinned, but for the copy of `async_mode = "async"`.
    """

    parameters: int
    trained: int
    moments: dict[str, Parts]
    kept: int = 0
    active: int = 0
    on_host: Parts = field(default_factory=dict)

    def total(self, moment: str) -> int:
        return sum(self.moments[moment].values())

    @property
    def peak(self) -> str:
        """The moment that needs the most memory."""
        return max(self.moments, key=self.total)


def memory_bytes(config: JobConfig, world_size: int, target: Target | None = None, job: Job = "grpo") -> Memory:
    """What one of `world_size` ranks holds at each moment of a step.

    Assumes that sharded tensors divide evenly and that rows are full.

    Args:
        target: The machine of the run; by default this one.

    Raises:
        UserError: The model folder cannot be read, or the model cannot do what the configuration asks for.
    """
    from torchtitan.grpo.model.flops import used
    from torchtitan.grpo.model.source import check_model, resolve_model

    source, target = resolve_model(config.model, config.training.seq_len, config.lora), target or this_machine()
    check_model(source, config, target.cuda)
    with torch.device("meta"):
        model = source.build()
    rank = _Rank(config, world_size, source, model, target, job)
    moments = {
        "log-probabilities' backward": rank.logprobs_backward(),
        "last block's backward": rank.block_backward(rank.layers),
        "first block's backward": rank.block_backward(1),
        "embedding's backward": rank.embedding_backward(),
        "optimizer step": rank.optimizer_step(),
    }
    if rank.together == rank.layers:
        moments["blocks' reduction"] = rank.only_reduction()
    elif rank.together > 1:
        moments["second group's backward"] = rank.block_backward(rank.layers - rank.together)
    if config.grpo.kl_coef:
        moments["reference's log-probabilities"] = rank.reference_logprobs()
    kept = sum(rank.always().values())
    active = sum(used(parameter, source.model_args) for parameter in model.parameters())
    return Memory(rank.parameters, rank.trained or rank.parameters, moments, kept, active, rank.on_host())


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
        self.logit = self.computed if training.logits_dtype == "model" else max(self.computed, 4)
        ranks, tensor = data_ranks(config, world_size), parallelism.tensor_parallel_degree
        copies = parallelism.data_parallel_replicate_degree or 1
        context = parallelism.context_parallel_degree
        self.shards = shards = ranks * context // copies
        self.replicated = copies > 1
        self.uses_fsdp = ranks * context > 1 or training.mixed_precision_param != training.dtype
        self.several_rows = optimizer_step_rows(config, world_size, job) > 1
        once = reduces_once(training.reduce_gradients, model)
        self.reduced_once = self.uses_fsdp and self.several_rows and once
        self.compiled = config.compile.enable

        # Parameter counts. The first is the whole model's, the others are one tensor-parallel rank's.
        self.parameters = sum(parameter.numel() for parameter in model.parameters())
        blocks = list(model.layers.children())
        block, self.layers = blocks[0], len(blocks)
        self.local = math.ceil(self.parameters / tensor / shards)
        # Experts of other ranks are never gathered here.
        experts = sum(p.numel() for p in block.moe.experts.parameters()) if source.has_experts else 0
        elsewhere = experts - experts // parallelism.expert_parallel_degree
        self.whole = math.ceil(self.parameters / tensor) - elsewhere * self.layers
        # Adapters. Under tensor parallelism each rank has one of the two matrices whole; here it has both.
        self.adapter = adapter_parameters(lora, block)
        self.trained = self.adapter * self.layers
        self.trained_here = math.ceil(self.trained / shards) if lora else self.local
        self.published = self.trained or self.parameters
        in_blocks = sum(parameter.numel() for parameter in model.layers.parameters())  # blocks may be of several kinds
        self.block = math.ceil(in_blocks / self.layers / tensor) - elsewhere
        with_adapters = self.block + self.adapter // tensor
        self.together = 1 if elsewhere else blocks_together(self.layers, with_adapters, self.computed)
        self.outside = self.whole - self.block * self.layers  # embedding, last norm, output
        self.vocabulary = math.ceil(args.vocab_size / tensor)
        # FSDP2 prefetches a group and frees a gathered buffer late. One rank gathers nothing.
        self.ahead = self.together if shards > 1 else 0

        # Activations of one row, bytes.
        self.tokens = row_tokens(config) // context
        mode = config.activation_checkpoint.mode
        chunk = min(config.activation_checkpoint.mlp_chunk_tokens or self.tokens, self.tokens)
        widths, documents = (self.tokens, self.computed, tensor), _document_copies(config, job)
        if hasattr(model, "final_states"):  # of transformers
            dtype = TORCH_DTYPE_MAP[training.mixed_precision_param]
            self.activations, self.rope = measured_activations(model, self.tokens, dtype, args, chunk, documents)
        else:
            share = chunk / self.tokens
            self.activations = block_activations(args, block, *widths, self.compiled, mode, lora, documents, share)
            rope = model.rope_cache
            self.rope = self.tokens * rope.shape[-1] * (rope.dtype.itemsize if rope.is_complex() else self.computed)
        # An exchange of heads has what it sends beside what comes; the rotary table is of the whole row.
        sent = self.tokens * args.n_heads * args.head_dim * self.computed
        self.of_context = (sent + getattr(model, "rope_cache", torch.empty(0)).nbytes) * (context > 1)
        self.inputs_leave = config.activation_checkpoint.offload
        self.kept, self.recomputed = kept_activations(config, self.activations, self.layers)
        self.hidden = self.tokens * args.dim * self.computed
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
        buckets = NUM_BUFFERS * bucket_bytes(self.target.memory_bytes, sync.buffer_memory_ratio)  # in flight, at most
        return parts | {
            "snapshots": self.trained_here * sent * (2 if sync.async_weight_update else 1),
            "buckets, at most": min(buckets, self.published * sent),
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
                "activations": self._kept_until(number) + self.rope,
                "recomputed activations": self.recomputed,
                "activations' gradients": self.activations.gradients,
                "context parallelism": self.of_context,
                "gathered weights": self._gathered(self.layers if stay_gathered else gathered),
                "output weight's gradient": self._output_gradient(),
                "gradients to reduce": self._to_reduce(number),
            }
        )

    def only_reduction(self) -> Parts:
        """All blocks are one group. It frees its weights, then copies its gradients to reduce them."""
        # Those summed before are among the whole gradients. Else copies of new ones, and then what comes of them.
        new = 0 if self.reduced_once else max(self.computed, self.reduced // self.shards)
        return (
            self.always()
            | self._earlier_gradients()
            | {
                "activations": self.hidden + self.rope,
                "gathered weights": self._gathered(0),
                "output weight's gradient": self._output_gradient(),
                "gradients to reduce": self._of_blocks(self.layers) * (self.reduced + new) * self.uses_fsdp,
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

    def on_host(self) -> Parts:
        """What `[offload]`, `[checkpoint] async_mode` and `[activation_checkpoint] offload` keep there."""
        checkpoint, offload, trained = self.config.checkpoint, self.config.offload, self.trained_here * self.held
        leaves = offload.optimizer_states == "host" or offload.offload_optimizer_states_for_logprob
        reference = bool(self.config.grpo.kl_coef) and not self.frozen
        in_background = checkpoint.enable and checkpoint.async_mode != "disabled"
        return {
            "AdamW state": 2 * trained * leaves,
            "reference model": self.local * self.held * (reference and offload.reference_weights == "host"),
            "copy for checkpoints": trained * (3 + reference) * in_background,  # with both moments of AdamW
            "blocks' inputs": self.activations.input * (self.layers - 1) * self.inputs_leave,
        }

    def optimizer_step(self) -> Parts:
        """Fused AdamW needs no temporaries."""
        return self.always() | {"gradients": self.trained_here * self.held}

    def reference_logprobs(self) -> Parts:
        """A forward without autograd. The last step's gradients still exist."""
        return self.always(in_window=True) | {
            "gradients": self.trained_here * self.held,
            "activations": self.hidden + self.activations.gradients + self.rope,
            "logits chunk": self._logits_chunk(backward=False),
            "gathered weights": self._gathered(self.together + self.ahead) - self._gathered(0),
        }

    def _kept_until(self, number: int) -> int:
        """What is kept of blocks up to this one in its backward pass. With offload, the block before is on its way."""
        return self.kept * min(number, 2) if self.inputs_leave else self.kept * number // self.layers

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

    def _of_blocks(self, number: int) -> int:
        """Trained parameters of `number` blocks."""
        return number * (self.adapter if self.frozen else self.block)

    def _to_reduce(self, number: int) -> int:
        """Gradients of the group of blocks before, on their way, and of this group's other blocks."""
        if not self.uses_fsdp:
            return 0
        if number == self.layers:
            return self._of_blocks(1) * self.reduced
        # Those of a whole step have left the whole gradients for it.
        before = 0 if self.reduced_once or self.together == self.layers else self.together
        return self._of_blocks(before) * self.reduced + self._of_blocks(self.together - 1) * self.computed

    def _gathered(self, blocks: int) -> int:
        """Unsharded weights in compute dtype: `blocks` blocks, and the embedding, last norm and output."""
        if not self.uses_fsdp:
            return 0
        return (self.outside + min(blocks, self.layers) * (self.block + self.adapter)) * self.computed

    def _output_gradient(self) -> int:
        return 0 if self.frozen else self.vocabulary * self.args.dim * self.computed

    def _kept_logits(self) -> int:
        """Whole chunks that fit into `[training] kept_logits_mib`, if every token is an answer token."""
        chunk = min(CHUNK_TOKENS, self.tokens) * self.vocabulary * self.logit
        room = self.config.training.kept_logits_mib << 20
        return min(room // chunk * chunk, self.tokens * self.vocabulary * self.logit)

    def _logits_chunk(self, backward: bool) -> int:
        """What `logprobs.token_logprobs` holds for one chunk: logits and gradient if fused, else temporaries too."""
        likeliest = self.config.distill.top_k or self.config.grpo.score_centering
        all_kept = self._kept_logits() == self.tokens * self.vocabulary * self.logit
        each = 0 if backward and all_kept else self.logit
        if self.compiled:
            each += self.computed * backward
        else:
            terms = self.config.grpo.entropy_coef or likeliest
            each += 4 * (5 if backward and terms else 4)
        chunk, kept = min(CHUNK_TOKENS, self.tokens), self.config.rollout.top_k
        likeliest_bytes = self.tokens * likeliest * TOP_TOKEN_BYTES
        return chunk * (self.vocabulary * each + kept * KEPT_TOKEN_BYTES) + self.tokens * kept * 4 + likeliest_bytes


def _document_copies(config: JobConfig, job: Job) -> float:
    """Tokens of a row's whole documents over its own, which has a prompt once: if a row has whole groups, the longest
    prompts, and answers of a quarter of their longest length. Rows of supervised training rarely share any."""
    if job == "sft":
        return 1.0
    group, prompt, answer = config.grpo.group_size, config.data.max_prompt_tokens, config.rollout.max_answer_tokens / 4
    return min(MOST_COPIES, group * (prompt + answer) / (prompt + group * answer))


def sent_bytes(config: JobConfig, target: Target) -> int:
    """Bytes per parameter of a weight update."""
    return {"float32": 4, "bfloat16": 2, "auto": 2 if target.cuda else 4}[config.weight_sync.dtype]
