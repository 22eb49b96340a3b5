"""Gradients of one optimizer step, summed over its packed rows."""

from collections.abc import Callable, Sequence

from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from torchtitan.distributed import utils as dist_utils
from torchtitan.grpo.policy.microbatch import Microbatch
from torchtitan.grpo.policy.sums import route_sums

SMALL_MODEL = 1_000_000_000
"""Parameters up to which `[training] reduce_gradients = "auto"` means `"step"`, which costs 6 bytes each in bfloat16.
At 0.6B the host's work in FSDP2's hooks is the bottleneck of a row (docs/performance.md). The limit between 0.6B and
1.7B is a choice, not a measurement."""


def reduces_once(choice: str, model: nn.Module) -> bool:
    """Whether this model's gradients are reduced once a step, by `[training] reduce_gradients`."""
    parameters = sum(parameter.numel() for parameter in model.parameters())
    return choice == "step" or (choice == "auto" and parameters <= SMALL_MODEL)


def clip_gradients(model: nn.Module, max_norm: float) -> Tensor:
    """Scale all gradients so that their norm is at most `max_norm`. Collective.

    Returns:
        Their norm before, of the whole model on all ranks.
    """
    parameters = list(model.parameters())
    by_expert = any(isinstance(p, DTensor) and "ep" in (p.device_mesh.mesh_dim_names or ()) for p in parameters)
    return dist_utils.clip_grad_norm_(parameters, max_norm, foreach=True, ep_enabled=by_expert)


def accumulate_gradients(
    model: nn.Module,
    rows: Sequence[Microbatch],
    loss_of: Callable[[int, Microbatch], tuple[Tensor, dict[str, Tensor]]],
    reduce_once: bool,
) -> dict[str, Tensor]:
    """Run forward and backward of every row. The host runs ahead of the device: nothing here waits for it.

    Args:
        loss_of: (index, row) -> the row's share of the step's loss, and detached sums for metrics.
        reduce_once: Under FSDP2, gather parameters and reduce gradients once a step, not once a row (ZeRO stage 1).
            Every rank then holds the whole model's parameters in the compute dtype and gradients in the reduce dtype.
    Returns:
        The sums over the rows, on the device.
    """
    sharded = isinstance(model, FSDPModule)
    sums: dict[str, Tensor] = {}
    for index, row in enumerate(rows):
        last = index == len(rows) - 1
        if sharded:
            model.set_requires_gradient_sync(last or not reduce_once)
            model.set_reshard_after_backward(last or not reduce_once)
        loss, row_sums = loss_of(index, row)
        if row.routes is not None:
            row_sums = row_sums | route_sums(model.agrees, row.weights)
        if (tokens := getattr(model, "expert_tokens", None)) is not None:
            row_sums = row_sums | {"expert_tokens": tokens}
        loss.backward()
        sums = added(sums, row_sums)
    return sums


def added(sums: dict[str, Tensor], more: dict[str, Tensor]) -> dict[str, Tensor]:
    """Sums by name, with those of one more row."""
    return sums | {name: sums[name] + value if name in sums else value for name, value in more.items()}
