"""Training steps of several projects on the same work. Each builds a model and says how it makes gradients."""

import contextlib
import copy
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from torchtitan.components.optimizer import OptimizersContainer, build_optimizers
from torchtitan.config import TORCH_DTYPE_MAP
from torchtitan.distributed import utils as dist_utils
from torchtitan.grpo.errors import UserError
from torchtitan.grpo.model.flops import TrainingFlops
from torchtitan.grpo.model.parallelize import build_model
from torchtitan.grpo.policy.gradients import accumulate_gradients, reduces_once
from torchtitan.grpo.policy.losses import row_loss
from torchtitan.grpo.policy.microbatch import Microbatch
from torchtitan.grpo.policy.packing import pack
from torchtitan.grpo.policy.rows import PackedSample
from torchtitan.tools.utils import set_default_dtype

from .setup import Setup, checkpointing

IGNORED = -100  # PyTorch's label of a token that is not trained


@dataclass
class Contender:
    """A built model.

    Attributes:
        gradients: Forward and backward of all microbatches; returns the sum of -log p over this rank's trained tokens,
            on the device.
        tokens, trained_tokens: Of one step on this rank, counted in its own tensors.
        ac, compiled: What it really does, which may be less than was asked for.
        note: Anything else that a reader of the table should know.
        flops: Of one step on this rank, if it computes less than whole documents.
    """

    model: nn.Module
    optimizers: OptimizersContainer
    gradients: Callable[[], Tensor]
    tokens: int
    trained_tokens: int
    ac: str
    compiled: bool
    note: str = ""
    flops: int | None = None


def ours(setup: Setup) -> Contender:
    """The policy update of grpo_train.py: its model, rows, loss, accumulation of gradients, optimizer."""
    config, work = setup.config, setup.work
    model = build_model(setup.source, config, setup.dims, setup.device)
    once = reduces_once(config.training.reduce_gradients, model)
    unsure = -torch.log(torch.tensor(float(setup.source.model_args.vocab_size))).item()
    samples = []
    pairs = zip(setup.sequences.flatten(0, 1).tolist(), setup.advantages.flatten().tolist(), strict=True)
    for tokens, advantage in pairs:
        answer = tokens[work.prompt :]
        samples.append(
            PackedSample(tokens[: work.prompt], answer, advantage, setup.token_weight, [unsure] * len(answer))
        )
    row_tokens = config.training.tokens_per_microbatch
    multiple = row_tokens if config.compile.enable else setup.dims.tp * setup.dims.cp
    (packed,) = pack(samples, row_tokens, 1, multiple)
    lengths, shared = ([n for row in packed for n in getattr(row, name).tolist()] for name in ("lengths", "shared"))
    rows = [Microbatch.of(row, setup.device) for row in packed]
    if len(rows) > work.microbatches:
        raise RuntimeError(f"packed into {len(rows)} rows, not {work.microbatches}")

    def loss_of(index: int, row: Microbatch) -> tuple[Tensor, dict[str, Tensor]]:
        logprobs, entropy = model(row, config.rollout.temperature)
        loss, sums = row_loss(logprobs, entropy, row, config.grpo)
        return loss, sums | {"negative_logprobs": -logprobs.detach().sum()}

    def gradients() -> Tensor:
        return accumulate_gradients(model, rows, loss_of, once)["negative_logprobs"]

    return Contender(
        model,
        build_optimizers([model], config.optimizer, setup.dims),
        gradients,
        sum(lengths) + sum(shared),
        sum(len(row.targets) for row in rows),
        checkpointing(config),
        config.compile.enable,
        f"{len(rows)} rows" if any(shared) else "",
        flops=TrainingFlops.of(model)(lengths, work.trained_tokens, shared),
    )


def torchtitan(setup: Setup) -> Contender:
    """torchtitan's pre-training step: its model with varlen attention, cross-entropy over full logits."""
    from torchtitan.models.llama4.infra.parallelize import apply_fsdp
    from torchtitan.protocols.train_spec import get_train_spec

    config, dims = copy.deepcopy(setup.config), setup.dims
    if setup.device.type == "cpu":
        raise UserError("torchtitan's varlen attention needs CUDA: leave it out of --what")
    if checkpointing(config) == "matmul":
        config.activation_checkpoint.selective_ac_option = "op"
    spec = get_train_spec("qwen3")
    with torch.device("meta"), set_default_dtype(TORCH_DTYPE_MAP[config.training.dtype]):
        model = spec.model_cls(setup.source.model_args)
    model = spec.parallelize_fn(model, dims, config)
    note, precision = "", contextlib.nullcontext()
    if dims.fsdp_enabled or dims.dp_replicate_enabled:
        precision = dist_utils.maybe_enable_amp(dims, config.training.mixed_precision_param, setup.device.type)
    else:
        # On one rank torchtitan does not shard but autocasts. Then float32 reaches varlen attention, which fails.
        note = "sharded over its one rank"
        apply_fsdp(
            model,
            init_device_mesh(setup.device.type, (1,), mesh_dim_names=("fsdp",)),
            TORCH_DTYPE_MAP[config.training.mixed_precision_param],
            TORCH_DTYPE_MAP[config.training.mixed_precision_reduce],
            pp_enabled=False,
            reshard_after_forward_policy=config.parallelism.fsdp_reshard_after_forward,
        )
    model.to_empty(device=setup.device)
    with torch.no_grad():
        model.init_weights(buffer_device=None)
    model.train()
    loss_fn = spec.build_loss_fn(config, parallel_dims=dims)
    inputs, labels = _inputs_and_labels(setup)

    class Tokenizer:  # each row is one document, without an end token
        eos_id = 0

    def gradients() -> Tensor:
        total = torch.zeros((), device=setup.device)
        for tokens, targets in zip(inputs, labels, strict=True):
            masks = model.get_attention_masks(input_batch=tokens, tokenizer=Tokenizer(), extra_inputs={})
            with precision:
                logits = model(tokens, attention_masks=masks)
                loss_sum = loss_fn(logits, targets)
            del logits
            (loss_sum * setup.token_weight).backward()
            total += loss_sum.detach()
        return total

    return Contender(
        model,
        spec.build_optimizers_fn([model], config.optimizer, dims),
        gradients,
        inputs.numel(),
        int((labels != IGNORED).sum()),
        checkpointing(config),
        config.compile.enable,
        note,
    )


def _inputs_and_labels(setup: Setup) -> tuple[Tensor, Tensor]:
    """[microbatches, B, T] each, on the device; a label that is not trained is `IGNORED`."""
    sequences = setup.sequences.to(setup.device)
    labels = sequences[..., 1:].clone()
    labels[..., : setup.work.prompt - 1] = IGNORED
    return sequences[..., :-1].contiguous(), labels


CONTENDERS: dict[str, Callable[[Setup], Contender]] = {
    "torchtitan": torchtitan,
    "ours": ours,
}
