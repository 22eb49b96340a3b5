"""A GPU that the trainer shares with its server (`[rollout] colocate`): what each takes, and whether both fit.

The server takes its share at once and keeps it. The trainer is held to the rest, less what neither side counts. So two
things can be too small: the rest for the trainer's peak, and the share for the served model. A server that sleeps while
the trainer trains (`[rollout] sleep_while_training`) leaves the peak all but the part that neither side counts. The
rest must then hold what the trainer keeps between two steps.
"""

from dataclasses import dataclass

import torch

from torchtitan.config import JobConfig
from torchtitan.grpo.config.tables import longest_tokens
from torchtitan.grpo.config.target import Target, beside_bytes, this_machine, trainer_bytes
from torchtitan.grpo.dry_run.memory import Memory, memory_bytes
from torchtitan.grpo.errors import UserError

_SERVED_ITEMSIZE = 2
"""Servers on a GPU hold weights, keys and values in bfloat16."""
_WORKSPACE_BYTES = 1 << 30
"""Of a server: activations of one batch, and the sampler's logits."""


@dataclass(frozen=True)
class SharedGpu:
    """Bytes of one GPU.

    Attributes:
        total: All of it.
        server: The server's share.
        weights, token: Of which the served weights take so many, and keys and values so many for each token.
        trainer: The trainer's peak.
        kept: What the trainer has while the server samples: its peak too, if that does not sleep.
        left: What the trainer may take beside the server.
        alone: What the trainer may take while it trains.
    """

    total: int
    server: int
    weights: int
    token: int
    trainer: int
    kept: int
    left: int
    alone: int

    @property
    def tokens(self) -> int:
        """Of running answers, prompts included, whose keys and values fit."""
        return max(0, self.server - self.weights - _WORKSPACE_BYTES) // self.token


def shared_gpu(config: JobConfig, memory: Memory, target: Target) -> SharedGpu:
    """Both sides of a run on that machine.

    Args:
        memory: The trainer's.

    Raises:
        UserError: Both do not fit, or the server alone does not fit into its share.
    """
    from torchtitan.grpo.model.source import resolve_model  # torchtitan's models take seconds to import

    args = resolve_model(config.model, config.training.seq_len, config.lora).model_args
    share, total, needs = config.rollout.memory_share, target.memory_bytes, memory.total(memory.peak)
    sleeps, left = config.rollout.sleep_while_training, trainer_bytes(share, total, config.rollout.replicas)
    shared = SharedGpu(
        total,
        int(total * share),
        memory.parameters * _SERVED_ITEMSIZE,
        2 * args.n_layers * args.n_kv_heads * args.head_dim * _SERVED_ITEMSIZE,
        needs,
        memory.kept if sleeps else needs,
        left,
        trainer_bytes(0.0, total, config.rollout.replicas) if sleeps else left,
    )
    longest = longest_tokens(config)
    if shared.tokens < longest:
        least = shared.weights + _WORKSPACE_BYTES + longest * shared.token
        raise UserError(
            f"[rollout] memory_share = {share:g} of {target.name} is {_gib(shared.server)}, and the colocated server "
            f"needs {_gib(least)}: weights {_gib(shared.weights)}, one answer of {longest} tokens "
            f"{_gib(longest * shared.token)}, workspace {_gib(_WORKSPACE_BYTES)}. Raise memory_share"
        )
    moments = {"at its peak": (shared.trainer, shared.alone), "between two steps": (shared.kept, shared.left)}
    for moment, (wanted, is_left) in moments.items():
        if wanted > is_left:
            key = "sleep_while_training" if sleeps else "colocate"
            raise UserError(
                f"[rollout] {key} = true: {moment} the trainer needs {_gib(wanted)} of {target.name}, and "
                f"{_gib(is_left)} are left beside the server and CUDA. Lower memory_share or [training] "
                'tokens_per_microbatch, or set [activation_checkpoint] mode = "full", [offload] optimizer_states = '
                '"host", or for a sync run of all weights [rollout] sleep_while_training = true'
            )
    return shared


def check_shared_gpu(config: JobConfig, device: torch.device, ranks: int) -> None:
    """Refuse a run of which a rank and its server do not both fit on the GPU that they share.

    Raises:
        UserError: As for `shared_gpu`.
    """
    if config.rollout.colocate and device.type == "cuda":
        target = this_machine()
        shared_gpu(config, memory_bytes(config, ranks, target), target)


def shared_gpu_lines(config: JobConfig, memory: Memory, target: Target) -> list[str]:
    """What `--dry_run` says of both sides."""
    shared = shared_gpu(config, memory, target)
    rows = {
        "the server's share": shared.server,
        "CUDA, of both processes": beside_bytes(config.rollout.replicas),
        "left for the trainer": shared.left,
    }
    if config.rollout.sleep_while_training:
        rows["kept by the trainer"] = shared.kept
        rows["left while it sleeps"] = shared.alone
    each = "its server" if config.rollout.replicas > 1 else "the server"
    lines = [f"  {each} is on the same device ([rollout] colocate)"]
    lines += [f"    {name:<26}{size / 2**20:>14,.1f} MiB" for name, size in rows.items()]
    lines.append(f"    the share holds the weights and keys and values of {shared.tokens:,} tokens")
    return lines


def _gib(size: int) -> str:
    return f"{size / 2**30:,.1f} GiB"
