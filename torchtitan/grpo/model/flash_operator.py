"""FlashAttention's kernels, of both versions, as one operator that `torch.compile` and activation checkpointing know.

No kernel of theirs knows documents that share a prompt. So a second call computes their attention to the prompt, and
the operator merges the two.
"""

import functools
import importlib
from collections.abc import Callable
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torchtitan.grpo.model.documents import is_empty

MODULE = "flash_attn.cute.interface"


@functools.cache
def package() -> ModuleType:
    """The package of version 4. Its import takes seconds."""
    return importlib.import_module(MODULE)


class Lengths(NamedTuple):
    """Where sequences start among queries and keys, int32 [n + 1], and upper bounds of their lengths."""

    starts_q: Tensor
    starts_k: Tensor
    longest_q: int
    longest_k: int


class Kernels(NamedTuple):
    """One version's kernels on sequences laid end to end.

    forward(q, k, v, lengths, causal, scale) -> output [T, heads, head_dim], and the log of each softmax's sum, float32
    [heads, T]. backward(grad, q, k, v, out, lse, lengths, causal, scale) -> gradients of q, k and v.
    """

    forward: Callable[..., tuple[Tensor, Tensor]]
    backward: Callable[..., tuple[Tensor, Tensor, Tensor]]


def _forward_2(
    q: Tensor, k: Tensor, v: Tensor, lengths: Lengths, causal: bool, scale: float | None
) -> tuple[Tensor, Tensor]:
    found = torch.ops.aten._flash_attention_forward(q, k, v, *lengths, 0.0, causal, False, scale=scale)
    return found[0], found[1]


def _backward_2(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    lengths: Lengths,
    causal: bool,
    scale: float | None,
) -> tuple[Tensor, Tensor, Tensor]:
    no_dropout = torch.zeros(2, dtype=torch.uint64, device=q.device), q.new_empty(0)
    return torch.ops.aten._flash_attention_backward(
        grad, q, k, v, out, lse, *lengths, 0.0, causal, *no_dropout, scale=scale
    )


def _forward_4(
    q: Tensor, k: Tensor, v: Tensor, lengths: Lengths, causal: bool, scale: float | None
) -> tuple[Tensor, Tensor]:
    found = package()._flash_attn_fwd(q, k, v, return_lse=True, softmax_scale=scale, causal=causal, **_named(lengths))
    return found[0], found[1].contiguous()  # newer releases return more


def _backward_4(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    lengths: Lengths,
    causal: bool,
    scale: float | None,
) -> tuple[Tensor, Tensor, Tensor]:
    deterministic = torch.are_deterministic_algorithms_enabled()
    settings = {"softmax_scale": scale, "causal": causal, "deterministic": deterministic} | _named(lengths)
    found = package()._flash_attn_bwd(q, k, v, out, grad, lse, **settings)
    return found[0], found[1], found[2]


def _named(lengths: Lengths) -> dict[str, Any]:
    return dict(zip(("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k"), lengths, strict=True))


KERNELS = {2: Kernels(_forward_2, _backward_2), 4: Kernels(_forward_4, _backward_4)}


@torch.library.custom_op("torchtitan_grpo::flash_attention", mutates_args=())
def flash_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    starts: Tensor,
    longest: int,
    tails: Tensor | None,
    prompts: Tensor | None,
    cu_tails: Tensor | None,
    cu_prompts: Tensor | None,
    longest_tails: int,
    longest_prompt: int,
    scale: float | None,
    version: int,
) -> tuple[Tensor, Tensor]:
    """Output, and the log of each softmax's sum, float32 [heads, T].

    Documents that lack their prompt attend to themselves and to the prompt apart. The two parts of a softmax are
    weighted by the sums of theirs, as ring attention does (arXiv 2310.01889).
    """
    run = KERNELS[version].forward
    out, lse = run(q, k, v, Lengths(starts, starts, longest, longest), True, scale)
    if tails is None or is_empty(tails, cu_tails):
        return out, lse
    lengths = Lengths(cu_tails, cu_prompts, longest_tails, longest_prompt)
    queries, keys, values = q.index_select(0, tails), k.index_select(0, prompts), v.index_select(0, prompts)
    other, other_lse = run(queries, keys, values, lengths, False, scale)
    own_lse = lse.index_select(1, tails)
    both = torch.logaddexp(own_lse, other_lse)
    own_share, other_share = ((part - both).exp().t()[..., None] for part in (own_lse, other_lse))
    merged = (out.index_select(0, tails) * own_share).addcmul_(other, other_share)  # float32
    return out.index_copy_(0, tails, merged.to(out.dtype)), lse.index_copy_(1, tails, both)


@torch.library.custom_op("torchtitan_grpo::flash_attention_backward", mutates_args=())
def _backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    starts: Tensor,
    longest: int,
    tails: Tensor | None,
    prompts: Tensor | None,
    cu_tails: Tensor | None,
    cu_prompts: Tensor | None,
    longest_tails: int,
    longest_prompt: int,
    scale: float | None,
    version: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v. With output and sum of the whole softmax, a kernel gives its part of them."""
    run = KERNELS[version].backward
    grad = grad.contiguous()
    dq, dk, dv = run(grad, q, k, v, out, lse, Lengths(starts, starts, longest, longest), True, scale)
    if tails is None or is_empty(tails, cu_tails):
        return dq, dk, dv
    lengths = Lengths(cu_tails, cu_prompts, longest_tails, longest_prompt)
    grad, q, out = (x.index_select(0, tails) for x in (grad, q, out))
    k, v = k.index_select(0, prompts), v.index_select(0, prompts)
    more_q, more_k, more_v = run(grad, q, k, v, out, lse.index_select(1, tails), lengths, False, scale)
    # No position is there twice, so sums repeat.
    return dq.index_add_(0, tails, more_q), dk.index_add_(0, prompts, more_k), dv.index_add_(0, prompts, more_v)


@flash_attention.register_fake
def _forward_fake(q: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return torch.empty_like(q), q.new_empty((q.shape[1], q.shape[0]), dtype=torch.float32)


@_backward.register_fake
def _backward_fake(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, *_: Any) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, starts, ctx.longest, *indices, ctx.longest_tails, ctx.longest_prompt, ctx.scale, ctx.version = inputs
    ctx.save_for_backward(q, k, v, *output, starts, *indices)


def _autograd(ctx: Any, grad: Tensor, _: Tensor | None) -> tuple[Tensor | None, ...]:
    q, k, v, out, lse, starts, *indices = ctx.saved_tensors
    settings = ctx.longest_tails, ctx.longest_prompt, ctx.scale, ctx.version
    return *_backward(grad, q, k, v, out, lse, starts, ctx.longest, *indices, *settings), *[None] * 10


flash_attention.register_autograd(_autograd, setup_context=_setup_context)

KEPT_BY_SELECTIVE_CHECKPOINTING = torch.ops.torchtitan_grpo.flash_attention.default
"""Kept so that attention is never recomputed, as torchtitan keeps `varlen_attn`."""
