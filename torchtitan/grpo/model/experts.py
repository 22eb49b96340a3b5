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

    def forward(self, x: Tensor, counts: Tensor, weights: Tensor) -> Tensor:
        """Apply to each row its expert, times its weight.

        Args:
            x: [rows, dim], by the rank that they come from, and those of a rank by expert.
            counts: int32 [ranks, experts of this rank]: how many of each.
            weights: float32 [rows].
        """
        matrices = tuple(local(w) for w in (self.w1, self.w2, self.w3))
        if x.shape[0] == 0:  # no token chose an expert of this rank. Other ranks wait for its gradients, which are zero
            return x + 0 * (weights.sum() + sum(w.sum() for w in matrices))
        return self.compute(x, counts, weights, *matrices)

    @staticmethod
    def compute(x: Tensor, counts: Tensor, weights: Tensor, w1: Tensor, w2: Tensor, w3: Tensor) -> Tensor:
        """See `forward`. A graph of its own with expert parallelism."""
        if counts.shape[0] == 1:
            return _of_sorted(x, counts[0], weights, w1, w2, w3)
        # Where the rows of a rank and an expert begin, as they come and by expert, tells where each row goes.
        chunks = torch.arange(counts.numel(), device=x.device).repeat_interleave(
            counts.flatten(), output_size=x.shape[0]
        )
        come = counts.flatten().cumsum(0) - counts.flatten()
        by_expert = counts.t().flatten().cumsum(0) - counts.t().flatten()
        moved = by_expert.view(counts.shape[1], -1).t().flatten() - come
        inverse = torch.arange(x.shape[0], device=x.device) + moved[chunks]
        order = _inverse(inverse)
        x, weights = _Permute.apply(x, order, inverse), _Permute.apply(weights, order, inverse)
        return _Permute.apply(_of_sorted(x, counts.sum(0), weights, w1, w2, w3), inverse, order)


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
        weights, order, inverse, counts, self.chosen = self.route(tokens)
        rows = _Dispatch.apply(tokens, order, inverse)
        if self.ep_mesh is None:
            out = self.experts(rows, counts[None], weights)
        else:
            out = self._on_other_ranks(self.ep_mesh, rows, counts, weights)
        return _Combine.apply(out, order, inverse, self.router.top_k).view_as(x)

    def route(self, tokens: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """[T, dim] -> weights by expert, float32 [T top_k]; the order by expert and its inverse; the number of rows of
        each expert, int32; and `chosen`."""
        weights, selected, *_ = self.router(tokens)
        experts, order = selected.flatten().int().sort(stable=True)  # a radix sort of half the passes
        inverse = _inverse(order)
        numbers = torch.arange(self.router.num_experts, dtype=torch.int32, device=tokens.device)
        ends = torch.searchsorted(experts, numbers, right=True, out_int32=True)
        counts = ends.diff(prepend=ends.new_zeros(1))
        return _Permute.apply(weights.flatten(), order, inverse), order, inverse, counts, selected.detach().short()

    def _on_other_ranks(self, mesh: DeviceMesh, rows: Tensor, counts: Tensor, weights: Tensor) -> Tensor:
        """`experts`, of whichever rank has them. The host waits for the numbers of rows, which shapes depend on."""
        group, size = mesh.get_group(), mesh.size()
        received = torch.empty_like(counts)
        dist.all_to_all_single(received, counts, group=group)
        received = received.view(size, -1)
        to_rank, from_rank = torch.stack([counts.view(size, -1).sum(1), received.sum(1)]).tolist()
        rows = _Exchange.apply(rows, from_rank, to_rank, group)
        weights = _Exchange.apply(weights, from_rank, to_rank, group)
        return _Exchange.apply(self.experts(rows, received, weights), to_rank, from_rank, group)

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


def _of_sorted(x: Tensor, counts: Tensor, weights: Tensor, w1: Tensor, w2: Tensor, w3: Tensor) -> Tensor:
    """Of rows by expert, `counts` [experts] for each."""
    w1, w2, w3 = (w.transpose(1, 2) for w in (w1, w2, w3))
    ends = counts.cumsum(0, dtype=torch.int32)
    gate, up = torch._grouped_mm(x, w1, offs=ends), torch._grouped_mm(x, w3, offs=ends)
    # The weight is applied here, where rows are narrow and autograd needs no copy of the result.
    gated = (F.silu(gate.float()) * up.float() * weights[:, None]).to(gate.dtype)
    return torch._grouped_mm(gated, w2, offs=ends)


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


class _Exchange(torch.autograd.Function):
    """Rows go to the ranks of a group, in order: `to_rank[i]` of them to rank i, from which `from_rank[i]` come.

    torch's own operator gives a tensor that is waited for later. Behind FSDP2's hooks, a compiled graph of torch 2.13
    takes that for one without a gradient.
    """

    @staticmethod
    def forward(ctx: Any, rows: Tensor, from_rank: list[int], to_rank: list[int], group: dist.ProcessGroup) -> Tensor:
        ctx.back = to_rank, from_rank, group
        received = rows.new_empty(sum(from_rank), *rows.shape[1:])
        dist.all_to_all_single(received, rows.contiguous(), from_rank, to_rank, group=group)
        return received

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        return _Exchange.forward(ctx, grads[0], *ctx.back), None, None, None


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
