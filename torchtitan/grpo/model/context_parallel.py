"""Context parallelism on packed rows, after DeepSpeed-Ulysses (arXiv:2309.14509).

All ranks of a group have the same row. Each computes its part of the positions, but in attention, where it computes its
part of the heads for the whole row: there positions and heads change places, by all-to-all. Log-probabilities are
gathered, so what comes behind the model knows nothing of parts, as with tensor parallelism.
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import _resolve_process_group


@torch.library.custom_op("torchtitan_grpo::exchange", mutates_args=())
def exchange(sent: Tensor, group: str) -> Tensor:
    """[degree, ...]: part i goes to the group's rank i, and what came from rank i takes its place.

    torch has such an operator, whose results torch 2.11's compiler keeps even where checkpointing is to compute them
    again: 0.6 GiB a block for 65,536 tokens of a 4B model on two ranks.
    """
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent, group=_resolve_process_group(group))
    return received


exchange.register_fake(lambda sent, group: torch.empty_like(sent))
exchange.register_autograd(
    lambda ctx, grad: (exchange(grad.contiguous(), ctx.group), None),
    setup_context=lambda ctx, inputs, output: setattr(ctx, "group", inputs[1]),
)


class ContextParallel:
    """A rank's part of each row.

    Args:
        mesh: The 1-D mesh of the ranks that share a row.
    """

    def __init__(self, mesh: DeviceMesh) -> None:
        self.group, self.degree, self.rank = mesh.get_group(), mesh.size(), mesh.get_local_rank()

    def part(self, values: Tensor) -> Tensor:
        """[T] -> [T / degree], this rank's."""
        return values.chunk(self.degree)[self.rank]

    def answers(self, positions: np.ndarray, tokens: int) -> list[int]:
        """Where each part's answer tokens start among those of the row, and where the last ones end: [degree + 1].

        Args:
            positions: Of the answer tokens, ascending, on the host.
            tokens: T of the row.
        """
        length = tokens // self.degree
        return [int(np.searchsorted(positions, part * length)) for part in range(self.degree + 1)]

    def heads(self, x: Tensor) -> Tensor:
        """This rank's positions of all heads -> all positions of its heads.

        x: [1, heads, T / degree, width] -> [1, heads / degree, T, width]. Fewer heads than ranks are repeated.
        """
        if x.shape[1] < self.degree:
            x = x.repeat_interleave(self.degree // x.shape[1], dim=1)
        sent = x[0].unflatten(0, (self.degree, -1))  # [rank, its heads, own positions, width]
        return self._exchange(sent).transpose(0, 1).flatten(1, 2).unsqueeze(0)

    def positions(self, x: Tensor) -> Tensor:
        """The way back: [1, T, heads / degree, width] -> [1, T / degree, heads, width]."""
        sent = x[0].unflatten(0, (self.degree, -1))  # [rank, its positions, own heads, width]
        return self._exchange(sent).transpose(0, 1).flatten(1, 2).unsqueeze(0).contiguous()  # as without it

    def _exchange(self, sent: Tensor) -> Tensor:
        return exchange(sent.contiguous(), self.group.group_name)

    def gather(self, own: Tensor, starts: Sequence[int]) -> Tensor:
        """Values of this rank's answer tokens [own, ...] -> those of all parts [A, ...], on every rank.

        Every rank computes the loss of the whole row. So the gradient of a rank's own values is that of its part.

        Args:
            starts: From `answers`.
        """
        gathered: Tensor = _Gather.apply(own, self, starts)
        return gathered


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, own: Tensor, context: ContextParallel, starts: Sequence[int]) -> Tensor:
        ctx.own = slice(starts[context.rank], starts[context.rank + 1])
        sizes = [last - first for first, last in pairwise(starts)]
        longest = max(sizes)
        if not longest:  # a row of padding
            return own.clone()
        padded = own.new_zeros(longest, *own.shape[1:])
        padded[: len(own)] = own
        every = own.new_empty(context.degree * longest, *own.shape[1:])
        dist.all_gather_into_tensor(every, padded, group=context.group)
        found = torch.cat([part[:size] for part, size in zip(every.split(longest), sizes, strict=True)])
        if not found.is_floating_point():
            ctx.mark_non_differentiable(found)
        return found

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return grads[0][ctx.own], None, None
