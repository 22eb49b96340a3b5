"""A mixture of experts: each token goes through the `top_k` feed-forward layers that its router chooses.

The parts are torchtitan's, so parameters, names and state dicts are too. The computation is ours. torchtitan 0.2.2 pads
each expert's tokens with a Triton kernel, and computes in bfloat16 whatever the model does. Here tokens are sorted by
expert, multiplied in one grouped matrix multiplication, and sorted back. Every step is a permutation or a sum over a
token's own experts, backwards too. So results repeat to the bit, and a CPU computes them.

Nothing balances the load of experts: no bias of the router is learned, and there is no auxiliary loss. Either would
move the policy for reasons other than the reward.
"""

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed._functional_collectives import all_to_all_single_autograd
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard, distribute_tensor

from torchtitan.grpo.model.replay import replayed, same_experts
from torchtitan.grpo.model.shards import local
from torchtitan.models.moe import MoEArgs
from torchtitan.models.moe.moe import GroupedExperts, TokenChoiceTopKRouter


class Router(TokenChoiceTopKRouter):
    """Chooses experts by the softmax of a linear layer, in float32.

    Attributes:
        routes: [T, top_k], the experts of the row that is computed, set by `replay.set_routes`. They stay set until the
            next row, so that activation checkpointing computes the same again. None: the router chooses.
        agrees: bool [T], whether it would have chosen the same.
    """

    routes: Tensor | None = None
    agrees: Tensor | None = None

    def forward(self, x: Tensor, expert_bias: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """x: [T, dim] -> weights of the chosen experts, float32 [T, top_k], and which they are, int64 [T, top_k]."""
        scores = F.softmax(self.gate(x).float(), dim=-1)
        selected = self.select(scores)
        weights = scores.gather(1, selected)
        if self.route_norm:
            weights = weights / weights.sum(-1, keepdim=True)
        return weights * self.route_scale, selected

    def select(self, scores: Tensor) -> Tensor:
        """[T, experts] -> int64 [T, top_k], the experts of each token in any order: `routes` where it names some."""
        own = scores.topk(self.top_k, dim=-1, sorted=False).indices
        if self.routes is None:
            return own
        selected = replayed(self.routes, own, self.num_experts)
        self.agrees = same_experts(selected, own)
        return selected


class Experts(GroupedExperts):
    """Feed-forward layers, stacked: w1 and w3 are [experts, width, dim], w2 is [experts, dim, width]."""

    def __init__(self, dim: int, hidden_dim: int, num_experts: int) -> None:
        super().__init__(dim, hidden_dim, num_experts, use_grouped_mm=True)
        self.gated = _gated

    def forward(self, x: Tensor, ends: Tensor, weights: Tensor) -> Tensor:
        """Apply to each row its expert, times its weight.

        Args:
            x: [rows, dim], sorted by expert.
            ends: int32 [experts of this rank]: the row behind each expert's last one.
            weights: float32 [rows].
        """
        w1, w2, w3 = (local(w).transpose(1, 2) for w in (self.w1, self.w2, self.w3))
        if x.shape[0] == 0:  # no token chose an expert of this rank. Other ranks wait for its gradients, which are zero
            return x + 0 * (w1.sum() + w2.sum() + w3.sum())
        gate, up = torch._grouped_mm(x, w1, offs=ends), torch._grouped_mm(x, w3, offs=ends)
        # The weight is applied here, where rows are narrow and autograd needs no copy of the result.
        return torch._grouped_mm(self.gated(gate, up, weights), w2, offs=ends)


class MoE(nn.Module):
    """Router and experts. With expert parallelism each rank has some of the experts, and rows travel to theirs.

    Attributes:
        chosen: int16 [T, top_k], the experts of each token in the last pass.
    """

    chosen: Tensor | None = None

    def __init__(self, args: MoEArgs, dim: int, hidden_dim: int) -> None:
        super().__init__()
        self.experts = Experts(dim, hidden_dim, args.num_experts)
        self.router = Router(
            dim,
            args.num_experts,
            num_expert_groups=None,
            num_limited_groups=None,
            top_k=args.top_k,
            score_func="softmax",
            route_norm=args.route_norm,
            route_scale=args.route_scale,
            gate_bias=False,
        )
        self.ep_mesh: DeviceMesh | None = None

    def forward(self, x: Tensor) -> Tensor:
        """[1, T, dim] -> [1, T, dim]."""
        tokens = x.flatten(0, 1)
        weights, selected, *_ = self.router(tokens)
        self.chosen = selected.detach().short()
        experts, order = selected.flatten().int().sort(stable=True)  # a radix sort of half the passes
        inverse = _inverse(order)
        rows = _Dispatch.apply(tokens, order, inverse)
        weights = _Permute.apply(weights.flatten(), order, inverse)
        numbers = torch.arange(self.experts.num_experts, dtype=torch.int32, device=x.device)
        ends = torch.searchsorted(experts, numbers, right=True, out_int32=True)
        if self.ep_mesh is None:
            out = self.experts(rows, ends, weights)
        else:
            out = self._on_other_ranks(self.ep_mesh, rows, ends, weights)
        return _Combine.apply(out, order, inverse, self.router.top_k).view_as(x)

    def _on_other_ranks(self, mesh: DeviceMesh, rows: Tensor, ends: Tensor, weights: Tensor) -> Tensor:
        """`experts`, of whichever rank has them. The host waits for the numbers of rows, which shapes depend on."""
        group, size = mesh.get_group(), mesh.size()
        sent = ends.diff(prepend=ends.new_zeros(1))
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent, group=group)
        counts = torch.stack([sent.view(size, -1).sum(1), received.view(size, -1).sum(1)])
        to_rank, from_rank = counts.tolist()
        rows = all_to_all_single_autograd(rows, from_rank, to_rank, group)
        weights = all_to_all_single_autograd(weights, from_rank, to_rank, group)
        # They come by rank, then by expert.
        expert = torch.arange(received.numel(), device=rows.device) % (received.numel() // size)
        order = expert.repeat_interleave(received, output_size=len(rows)).argsort(stable=True)
        inverse = _inverse(order)
        own_ends = received.view(size, -1).sum(0).cumsum(0, dtype=torch.int32)
        out = self.experts(_Permute.apply(rows, order, inverse), own_ends, _Permute.apply(weights, order, inverse))
        return all_to_all_single_autograd(_Permute.apply(out, inverse, order), to_rank, from_rank, group)

    def init_weights(self, init_std: float, buffer_device: torch.device | None = None) -> None:
        self.experts.init_weights(init_std)
        self.router.init_weights(init_std)


def expert_tokens(model: nn.Module, positions: Tensor) -> Tensor | None:
    """float64 [layers, experts], after a forward pass: how many of the tokens at `positions` [A] each computed.

    None if the model has no experts.
    """
    layers = [block.moe for block in model.layers.children() if getattr(block, "moe", None) is not None]
    if not layers:
        return None
    experts = layers[0].experts.num_experts
    chosen = torch.stack([moe.chosen for moe in layers])[:, positions]  # [layers, A, top_k]
    first = experts * torch.arange(len(layers), dtype=torch.int32, device=chosen.device)
    numbers = (chosen + first[:, None, None]).flatten()
    counts = torch.zeros(len(layers) * experts, dtype=torch.float64, device=chosen.device)
    # Not `bincount`, for which the host would wait.
    return counts.index_add(0, numbers, counts.new_ones(1).expand(len(numbers))).view(len(layers), experts)


def apply_expert_parallel(model: nn.Module, mesh: DeviceMesh) -> None:
    """Give each rank of a 1-D mesh its experts of every layer, in place."""
    for block in model.layers.children():
        block.moe.ep_mesh = mesh
        for name, parameter in block.moe.experts.named_parameters():
            sharded = nn.Parameter(distribute_tensor(parameter, mesh, [Shard(0)]))
            block.moe.experts.register_parameter(name, sharded)


def _inverse(order: Tensor) -> Tensor:
    """The permutation that undoes `order`."""
    return torch.empty_like(order).scatter_(0, order, torch.arange(order.shape[0], device=order.device))


def _gated(gate: Tensor, up: Tensor, weights: Tensor) -> Tensor:
    return (F.silu(gate.float()) * up.float() * weights[:, None]).to(gate.dtype)


class _Dispatch(torch.autograd.Function):
    """A copy of a token for each of its experts, by expert: [T, dim] -> [T top_k, dim].

    A token's gradient is the sum over its copies. Autograd would add them up one by one, in any order.
    """

    @staticmethod
    def forward(ctx: Any, tokens: Tensor, order: Tensor, inverse: Tensor) -> Tensor:
        ctx.save_for_backward(inverse)
        ctx.num_tokens = tokens.shape[0]
        return tokens.index_select(0, order // (order.shape[0] // tokens.shape[0]))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        (inverse,) = ctx.saved_tensors
        return grads[0].index_select(0, inverse).unflatten(0, (ctx.num_tokens, -1)).sum(1), None, None


class _Combine(torch.autograd.Function):
    """The sum over each token's copies: [T top_k, dim] by expert -> [T, dim]."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, order: Tensor, inverse: Tensor, top_k: int) -> Tensor:
        ctx.save_for_backward(order)
        ctx.top_k = top_k
        return rows.index_select(0, inverse).unflatten(0, (-1, top_k)).sum(1)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        (order,) = ctx.saved_tensors
        return grads[0].index_select(0, order // ctx.top_k), None, None, None


class _Permute(torch.autograd.Function):
    """Rows in another order. `inverse` is the order back."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, order: Tensor, inverse: Tensor) -> Tensor:
        ctx.save_for_backward(inverse)
        return rows.index_select(0, order)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        (inverse,) = ctx.saved_tensors
        return grads[0].index_select(0, inverse), None, None
