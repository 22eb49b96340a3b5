"""Per-token log-probabilities and entropy from hidden states, without the full logits.

For T tokens and a vocabulary of V, float32 logits take T x V x 4 bytes (16k x 152k: 10 GB), more than a small model.
Here only `chunk_tokens` rows of them exist at a time. Backward recomputes them, except as many as may be kept. The
gradient of a log-softmax has a closed form: forward and backward each take one pass over a chunk, and no autograd
graph is needed.
"""

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed.device_mesh import DeviceMesh

from torchtitan.grpo.policy.microbatch import Kept

CHUNK_TOKENS = 1024
"""Rows of logits that exist at a time."""

CUT = -1e30
"""The logit of a token that the sampler could not draw. It has probability 0, and unlike -inf no gradient of NaN."""


def token_logprobs(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    temperature: float,
    *,
    chunk_tokens: int = CHUNK_TOKENS,
    mesh: DeviceMesh | None = None,
    compile: bool = False,
    kept_bytes: int = 0,
    others: Tensor | None = None,
    predictions: bool = False,
    softcap: float = 0.0,
    round_logits: bool = False,
    kept: Kept | None = None,
) -> tuple[Tensor, ...]:
    """log softmax(hidden @ weight.T / temperature)[targets], and the entropy of that distribution, in nats.

    The matrix multiplication takes hidden's dtype. Logits and what is computed from them are float32 (float64 if hidden
    is float64): see `product`. The gradient by the logits is rounded to hidden's dtype for its two multiplications.

    Args:
        hidden: [T, D], the final hidden states at the positions that predict `targets`. T may be 0.
        weight: [V, D], the output layer's; with `mesh` this rank's slice [V_local, D] in the layout of DTensor's
            `Shard(0)` (slices of equal size, the last ones may be smaller).
        targets: [T] int64 in 0..V-1.
        temperature: The sampler's, above 0.
        chunk_tokens: Rows of logits that exist at a time.
        mesh: 1-D tensor-parallel mesh; hidden and targets are the same on all its ranks, and so are the results.
            Every rank must backpropagate the same loss: hidden's gradient is then the full one on each rank,
            weight's is this rank's slice.
        compile: Fuse the elementwise work with torch.compile. Unfused, that work is memory-bound and takes longer
            than the matrix multiplications (2.6 times the total time on an H200, V = 152k, D = 1024).
        kept_bytes: Memory for chunks of logits that backward need not recompute.
        others: [T, K], further tokens at each position, each at most once. -1 is none: 0 is returned for it.
        predictions: Return whether each target is a likeliest token, too.
        softcap: Logits become softcap * tanh(logit / softcap) before the temperature, as in Gemma 2. 0: they stay.
        round_logits: Round logits to hidden's dtype, which halves their memory. In bfloat16 log-probabilities then move
            by 0.025 nat on average (SmolLM2-135M, whose sampled tokens have logits of 25).
        kept: The softmax, and so every result, is over these tokens alone; targets are among them. None: over all.

    Returns:
        logprobs [T] and entropy [T]. With `others` also [T, K + 1]: their log-probabilities, and in the last column
        that of all tokens that are not among them, which is not computed as a difference from 1. All are differentiable
        in hidden and weight. Second derivatives are not available. The weight's gradient is summed over chunks in
        hidden's dtype. With `predictions` also bool [T], exact at a temperature of 1.
    """
    if not temperature > 0:
        raise ValueError(f"log-probabilities need a temperature above 0, got {temperature}")
    if hidden.ndim != 2 or targets.shape != hidden.shape[:1]:
        raise ValueError(f"hidden must be [T, D] and targets [T], got {tuple(hidden.shape)} and {tuple(targets.shape)}")
    if others is not None and (others.ndim != 2 or others.shape[0] != targets.shape[0]):
        raise ValueError(f"others must be [T, K] with T = {targets.shape[0]}, got {tuple(others.shape)}")
    group = mesh.get_group() if mesh is not None and mesh.size() > 1 else None
    known = targets.new_empty(len(targets), 0) if others is None else others.long()
    options = temperature, chunk_tokens, group, compile, kept_bytes, softcap, round_logits, kept
    logprobs, entropy, is_likeliest, of_others = _TokenLogprobs.apply(hidden, weight, targets, known, *options)
    found = (logprobs, entropy) if others is None else (logprobs, entropy, of_others)
    return (*found, is_likeliest) if predictions else found


class _TokenLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        others: Tensor,
        temperature: float,
        chunk_tokens: int,
        group: dist.ProcessGroup | None,
        compile: bool,
        kept_bytes: int,
        softcap: float,
        round_logits: bool,
        kept_tokens: Kept | None,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        projection = weight.to(hidden.dtype).T  # [D, V_local]
        dtype = torch.promote_types(hidden.dtype, torch.float32)
        logits_dtype = hidden.dtype if round_logits else dtype
        columns, are_local = _localize(torch.cat([targets[:, None], others], 1), weight.shape[0], group)
        local_targets, is_local, columns, are_local = columns[:, 0], are_local[:, 0], columns[:, 1:], are_local[:, 1:]
        stats = torch.empty(5 if others.shape[1] else 4, len(targets), dtype=dtype, device=hidden.device)
        other_logits = torch.empty(others.shape, dtype=dtype, device=hidden.device)
        first_column = 0 if kept_tokens is None else _first_column(weight.shape[0], group, weight.device)
        kept: list[Tensor] = []
        room = kept_bytes if any(ctx.needs_input_grad[:2]) else 0
        for rows in _chunks(len(targets), chunk_tokens):
            logits = _capped(product(hidden[rows], projection, logits_dtype), softcap)
            if kept_tokens is not None:
                logits = _cut(logits, kept_tokens.part(rows), first_column)
            if len(kept) * chunk_tokens == rows.start and logits.nbytes <= room:  # a prefix of the chunks
                kept.append(logits)
                room -= logits.nbytes
            row_stats = _compiled(_row_stats, len(logits) == chunk_tokens) if compile else _row_stats
            stats[0, rows], stats[1, rows], stats[2, rows] = row_stats(logits, temperature, dtype)
            target_logits = logits.gather(1, local_targets[rows, None])[:, 0].to(dtype) / temperature
            stats[3, rows] = target_logits.where(is_local[rows], 0)
            if others.shape[1]:
                gathered = logits.gather(1, columns[rows]).to(dtype) / temperature
                other_logits[rows] = gathered.where(are_local[rows], 0)
                rest_mass = _compiled(_rest_mass, len(logits) == chunk_tokens) if compile else _rest_mass
                stats[4, rows] = rest_mass(logits, stats[0, rows], columns[rows], are_local[rows], temperature)
        highest, mass, moment, target_logit, *rest = stats if group is None else _combine(stats, group)
        log_mass = mass.log()
        other_logprobs = other_logits
        if rest:
            if group is not None:
                dist.all_reduce(other_logits, group=group)
            of_known = ((other_logits - highest[:, None]) - log_mass[:, None]).where(others >= 0, 0)
            of_rest = rest[0].clamp(min=torch.finfo(dtype).tiny).log() - log_mass
            other_logprobs = torch.cat([of_known, of_rest[:, None]], 1)
        logprobs = (target_logit - highest) - log_mass  # in this order: the log-sum-exp rounds more
        entropy = log_mass - moment / mass
        at_target = is_local, local_targets, others == targets[:, None]
        at_others = others >= 0, are_local, columns, other_logprobs
        of_rows = highest, log_mass, logprobs, entropy
        ctx.save_for_backward(hidden, weight, *at_target, *at_others, *of_rows, *kept)
        ctx.temperature, ctx.chunk_tokens, ctx.group, ctx.compile = temperature, chunk_tokens, group, compile
        ctx.softcap, ctx.logits_dtype, ctx.kept, ctx.first_column = softcap, logits_dtype, kept_tokens, first_column
        ctx.set_materialize_grads(False)
        is_likeliest = target_logit >= highest
        ctx.mark_non_differentiable(is_likeliest)
        return logprobs, entropy, is_likeliest, other_logprobs

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, grad_logprobs: Tensor | None, grad_entropy: Tensor | None, _: None, grad_others: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        hidden, weight, is_local, local_targets, are_targets, *saved = ctx.saved_tensors
        known, are_local, columns, other_logprobs, highest, log_mass, logprobs, entropy, *kept = saved
        need_hidden, need_weight = ctx.needs_input_grad[:2]
        compute_weight = weight.to(hidden.dtype)
        grad_hidden = torch.zeros_like(hidden) if need_hidden else None
        grad_weight = torch.zeros_like(compute_weight) if need_weight else None
        if grad_logprobs is None:
            grad_logprobs = torch.zeros_like(logprobs)
        # d/d logit of row t: (one_hot - p) g / T, the same for each other token with its own g, for the rest of the
        # tokens (share in the rest - p) g / T, and for the entropy H: -p (log p + H) g_H / T
        at_target = -grad_logprobs * logprobs.expm1()
        grad_sum = grad_logprobs  # what -p is multiplied by
        if grad_others is not None:
            other_logprobs, rest, grad_others, grad_rest = *_last_apart(other_logprobs), *_last_apart(grad_others)
            grad_others = grad_others.where(known, 0)
            added = grad_others.sum(1) + grad_rest
            grad_sum = grad_logprobs + added
            at_target = at_target - added * logprobs.exp() + grad_rest * _share(logprobs, rest)
            at_others = grad_others + grad_logprobs[:, None] * are_targets - grad_sum[:, None] * other_logprobs.exp()
        if grad_entropy is not None:
            at_target = at_target - grad_entropy * logprobs.exp() * (logprobs + entropy)
            if grad_others is not None:
                spread = other_logprobs.exp() * (other_logprobs + entropy[:, None])
                at_others = at_others - grad_entropy[:, None] * spread
        at_target = (at_target / ctx.temperature).to(hidden.dtype)
        if grad_others is not None:
            at_others = (at_others / ctx.temperature).to(hidden.dtype)
        for i, rows in enumerate(_chunks(len(hidden), ctx.chunk_tokens)):
            if i < len(kept):
                logits = kept[i]
            else:
                logits = _capped(product(hidden[rows], compute_weight.T, ctx.logits_dtype), ctx.softcap)
                if ctx.kept is not None:
                    logits = _cut(logits, ctx.kept.part(rows), ctx.first_column)
            row_grads = _compiled(_row_grads, len(logits) == ctx.chunk_tokens) if ctx.compile else _row_grads
            of_entropy: tuple[Tensor | None, Tensor | None] = (None, None)
            if grad_entropy is not None:
                of_entropy = entropy[rows], grad_entropy[rows]
            own_rest: tuple[Tensor | None, Tensor | None] = (None, None)
            if grad_others is not None:
                own_rest = rest[rows], grad_rest[rows]
            of_rows = highest[rows], log_mass[rows], grad_sum[rows]
            grad = row_grads(logits, *of_rows, *of_entropy, *own_rest, ctx.temperature, hidden.dtype)
            column = local_targets[rows, None]
            grad.scatter_(1, column, at_target[rows, None].where(is_local[rows, None], grad.gather(1, column)))
            if grad_others is not None:
                _put(grad, columns[rows], at_others[rows], are_local[rows])
            if ctx.softcap:
                grad = (grad * (1 - (logits / ctx.softcap).clamp(min=-1) ** 2)).to(hidden.dtype)
            if grad_hidden is not None:
                grad_hidden[rows] = grad @ compute_weight
            if grad_weight is not None:
                grad_weight.addmm_(grad.T, hidden[rows])
        if grad_hidden is not None and ctx.group is not None and len(hidden):
            dist.all_reduce(grad_hidden, group=ctx.group)
        return grad_hidden, grad_weight.to(weight.dtype) if grad_weight is not None else None, *[None] * 10


def _chunks(num_tokens: int, chunk_tokens: int) -> list[slice]:
    return [slice(start, min(start + chunk_tokens, num_tokens)) for start in range(0, num_tokens, chunk_tokens)]


def product(a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
    """a [T, D] @ b [D, V] of one dtype, in `dtype`. bfloat16 factors give float32 logits that were never rounded.

    That is an output layer in float32 by `head_dtype` of vLLM on a GPU, or `--enable-fp32-lm-head` of SGLang: a weight
    in bfloat16, as it is published, and sums in float32. It is no product with the optimizer's float32 weight.
    """
    if a.dtype == dtype:
        return a @ b
    if a.is_cuda:
        return torch.mm(a, b, out_dtype=dtype)  # tensor cores' own sums; no copy of the weight in float32
    return a.to(dtype) @ b.to(dtype)


def _capped(logits: Tensor, softcap: float) -> Tensor:
    return softcap * torch.tanh(logits / softcap) if softcap else logits


def _cut(logits: Tensor, kept: Kept, first_column: Tensor | int) -> Tensor:
    """Put `CUT` for the logits [C, V_local] of all tokens that are not kept, in place. Nothing waits for the device.

    Args:
        first_column: The id of this slice's first token.
    """
    rows = torch.repeat_interleave(kept.counts, output_size=len(kept.ids))
    columns = kept.ids.long() - first_column
    is_local = (columns >= 0) & (columns < logits.shape[1])
    places = rows * logits.shape[1] + columns.where(is_local, 0)
    values = logits.view(-1)[places].where(is_local, CUT)
    logits.masked_fill_((kept.counts > 0)[:, None], CUT)
    logits.view(-1).scatter_reduce_(0, places, values, "amax")  # ids of other slices change nothing
    return logits


def _row_stats(logits: Tensor, temperature: float, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """[C, V] -> three [C], with z = logits / temperature and d = z - highest: highest z, sum exp(d), sum d exp(d)."""
    scaled = logits.to(dtype) / temperature
    highest = scaled.amax(-1)
    below = scaled - highest[:, None]
    mass = below.exp()
    return highest, mass.sum(-1), (mass * below).sum(-1)


def _row_grads(
    logits: Tensor,
    highest: Tensor,
    log_mass: Tensor,
    grad: Tensor,
    entropy: Tensor | None,
    grad_entropy: Tensor | None,
    rest: Tensor | None,
    grad_rest: Tensor | None,
    temperature: float,
    dtype: torch.dtype,
) -> Tensor:
    """Gradient [C, V] of the logits in `dtype`, correct in every column except those of target and other tokens."""
    logp = (logits.to(highest.dtype) / temperature - highest[:, None]) - log_mass[:, None]
    p = logp.exp()
    grads = -p * grad[:, None]
    if entropy is not None and grad_entropy is not None:
        grads = grads - p * (logp + entropy[:, None]) * grad_entropy[:, None]
    if rest is not None and grad_rest is not None:
        grads = grads + _share(logp, rest[:, None]) * grad_rest[:, None]
    return (grads / temperature).to(dtype)


def _rest_mass(logits: Tensor, highest: Tensor, columns: Tensor, are_local: Tensor, temperature: float) -> Tensor:
    """[C, V] -> [C]: `_row_stats`'s sum exp(d), less the columns [C, K] that are of this slice."""
    mass = (logits.to(highest.dtype) / temperature - highest[:, None]).exp()
    left_out = torch.zeros_like(columns, dtype=mass.dtype).where(are_local, torch.inf)
    return mass.scatter_reduce(1, columns, left_out, "amin").sum(-1)  # of several writes, the 0 wins


def _share(logprobs: Tensor, rest: Tensor) -> Tensor:
    """The share of a token in the rest, 1 at most: what it is for tokens that are not in the rest is not used."""
    return (logprobs - rest).clamp(max=0).exp()


def _last_apart(values: Tensor) -> tuple[Tensor, Tensor]:
    return values[:, :-1], values[:, -1]


def _put(grad: Tensor, columns: Tensor, values: Tensor, are_local: Tensor) -> None:
    """Set grad[t, columns[t, k]] = values[t, k] where it is of this slice. All others write to column 0 what it has in
    the end: which of several writes wins is not defined."""
    is_first = are_local & (columns == 0)
    first = values.where(is_first, 0).sum(1).where(is_first.any(1), grad[:, 0])
    grad.scatter_(1, columns, values.where(are_local, first[:, None]))


@cache
def _compiled(function: Callable[..., Any], whole_chunk: bool) -> Callable[..., Any]:
    # Twice as fast for static shapes. The last chunk is shorter, and its size varies.
    return torch.compile(function, dynamic=not whole_chunk)


def _localize(targets: Tensor, local_width: int, group: dist.ProcessGroup | None) -> tuple[Tensor, Tensor]:
    """Targets as columns of this rank's slice (0 if elsewhere or -1), and whether they are in it. No host sync."""
    if group is None:
        return targets.clamp(min=0), targets >= 0
    columns = targets - _first_column(local_width, group, targets.device)
    is_local = (columns >= 0) & (columns < local_width) & (targets >= 0)
    return columns.where(is_local, 0), is_local


def _first_column(local_width: int, group: dist.ProcessGroup | None, device: torch.device) -> Tensor | int:
    """Of this rank's slice, in the whole vocabulary. No host sync."""
    if group is None:
        return 0
    # Shard(0) cuts equal slices, so the widest one gives each rank's offset.
    width = torch.full((), local_width, dtype=torch.int64, device=device)
    dist.all_reduce(width, dist.ReduceOp.MAX, group=group)
    return dist.get_rank(group) * width


def _combine(stats: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """Statistics [4 or 5, T] of each rank's slice -> those of the whole vocabulary, with two all-reduces."""
    if stats.shape[1] == 0:
        return stats
    local_highest, local_mass, local_moment, local_target, *local_rest = stats
    highest = local_highest.clone()
    dist.all_reduce(highest, dist.ReduceOp.MAX, group=group)
    below = local_highest - highest
    scale = below.exp()
    local_sums = [scale * local_mass, scale * (local_moment + below * local_mass), local_target]
    sums = torch.stack([*local_sums, *(scale * rest for rest in local_rest)])
    dist.all_reduce(sums, group=group)
    return torch.cat([highest[None], sums])
