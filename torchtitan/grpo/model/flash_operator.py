"""FlashAttention's kernels, of both versions, as one operator that `torch.compile` and activation checkpointing know.

In a row that holds a prompt once, documents are shorter than what they attend to. Keys and values of whole documents
are gathered then. With fewer queries than keys the kernels' causal mask ends at the last key, so the queries are those
of a document's last positions, as they should be.
"""

import functools
import importlib
from collections.abc import Callable
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torchtitan.tools.logging import logger

MODULE = "flash_attn.cute.interface"


@functools.cache
def package() -> ModuleType:
    """The package of version 4. Its import takes seconds."""
    return importlib.import_module(MODULE)


class Lengths(NamedTuple):
    """Where documents start among queries and keys, int32 [docs + 1], and upper bounds of their lengths."""

    starts_q: Tensor
    starts_k: Tensor
    longest_q: int
    longest_k: int


class Kernels(NamedTuple):
    """One version's causal attention on documents laid end to end.

    forward(q, k, v, lengths, scale, window) -> output [T, heads, head_dim], and the log of each softmax's sum, float32
    [heads, T]. backward(grad, q, k, v, out, lse, lengths, scale, window) -> gradients of q, k and v. Each token attends
    to itself and `window - 1` before it; 0: to all before it.
    """

    forward: Callable[..., tuple[Tensor, Tensor]]
    backward: Callable[..., tuple[Tensor, Tensor, Tensor]]


def _forward_2(
    q: Tensor, k: Tensor, v: Tensor, lengths: Lengths, scale: float | None, window: int
) -> tuple[Tensor, Tensor]:
    found = torch.ops.aten._flash_attention_forward(q, k, v, *lengths, 0.0, True, False, scale=scale, **_left(window))
    return found[0], found[1]


def _backward_2(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    lengths: Lengths,
    scale: float | None,
    window: int,
) -> tuple[Tensor, Tensor, Tensor]:
    no_dropout = torch.zeros(2, dtype=torch.uint64, device=q.device), q.new_empty(0)
    settings = *lengths, 0.0, True, *no_dropout
    return torch.ops.aten._flash_attention_backward(grad, q, k, v, out, lse, *settings, scale=scale, **_left(window))


def _left(window: int) -> dict[str, int]:
    """How many tokens before itself one attends to, as the kernels of both versions call it."""
    return {"window_size_left": window - 1, "window_size_right": 0} if window else {}


def _forward_4(
    q: Tensor, k: Tensor, v: Tensor, lengths: Lengths, scale: float | None, window: int
) -> tuple[Tensor, Tensor]:
    settings = {"softmax_scale": scale, "causal": True} | _left(window) | _named(lengths)
    found = package()._flash_attn_fwd(q, k, v, return_lse=True, **settings)
    return found[0], found[1].contiguous()  # newer releases return more


def _backward_4(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    lengths: Lengths,
    scale: float | None,
    window: int,
) -> tuple[Tensor, Tensor, Tensor]:
    settings = {"softmax_scale": scale, "causal": True} | _left(window) | _named(lengths)
    settings["deterministic"] = torch.are_deterministic_algorithms_enabled()
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
    starts_q: Tensor,
    starts_k: Tensor,
    longest_q: int,
    longest_k: int,
    keys: Tensor | None,
    order: Tensor | None,
    bounds: Tensor | None,
    scale: float | None,
    window: int,
    version: int,
) -> tuple[Tensor, Tensor]:
    """Output, and the log of each softmax's sum, float32 [heads, T].

    Args:
        starts_q, starts_k, longest_q, longest_k: See `Lengths`.
        keys: int64 [K], the positions of k and v that documents attend to; None: all, once.
        order, bounds: See `DocumentKeys`.
        scale, window: See `Kernels`.
    """
    if keys is not None:
        k, v = _gather(k, keys), _gather(v, keys)
    return KERNELS[version].forward(q, k, v, Lengths(starts_q, starts_k, longest_q, longest_k), scale, window)


@torch.library.custom_op("torchtitan_grpo::flash_attention_backward", mutates_args=())
def _backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    starts_q: Tensor,
    starts_k: Tensor,
    longest_q: int,
    longest_k: int,
    keys: Tensor | None,
    order: Tensor | None,
    bounds: Tensor | None,
    scale: float | None,
    window: int,
    version: int,
) -> tuple[Tensor, Tensor, Tensor]:
    of_documents = (k, v) if keys is None else (_gather(k, keys), _gather(v, keys))
    lengths = Lengths(starts_q, starts_k, longest_q, longest_k)
    dq, dk, dv = KERNELS[version].backward(grad.contiguous(), q, *of_documents, out, lse, lengths, scale, window)
    if keys is None or order is None or bounds is None:
        return dq, dk, dv
    return dq, _sum(dk, order, bounds), _sum(dv, order, bounds)


def _gather(x: Tensor, index: Tensor) -> Tensor:
    if (kernels := row_kernels(x.device)) is not None:
        return kernels.gather_rows(x, index)
    return x.index_select(0, index)


def _sum(grads: Tensor, order: Tensor, bounds: Tensor) -> Tensor:
    """[K, ...] -> [T, ...]: a position that several documents attend to has the sum of its gradients."""
    if (kernels := row_kernels(grads.device)) is not None:
        return kernels.sum_rows(grads, order, bounds)
    owner = torch.arange(len(bounds) - 1, device=grads.device)
    owner = owner.repeat_interleave(bounds.diff().long(), output_size=len(order))
    sums = torch.zeros(
        (len(bounds) - 1, *grads.shape[1:]), dtype=torch.promote_types(grads.dtype, torch.float32), device=grads.device
    )
    return sums.index_add_(0, owner, grads.index_select(0, order).to(sums.dtype)).to(grads.dtype)


@functools.cache
def row_kernels(device: torch.device) -> ModuleType | None:
    """The Triton kernels, if they run on this device and agree with torch."""
    if device.type != "cuda":
        return None
    source = torch.arange(24.0, device=device).view(6, 4)
    order, bounds = torch.tensor([5, 0, 2], device=device), torch.tensor([0, 2, 2, 3], dtype=torch.int32, device=device)
    try:
        from torchtitan.grpo.model import row_kernels as kernels

        gathered, sums = kernels.gather_rows(source, order), kernels.sum_rows(source, order, bounds)
        expected = torch.stack([source[5] + source[0], torch.zeros_like(source[0]), source[2]])
        if torch.equal(gathered, source[order]) and torch.equal(sums, expected):
            return kernels
        why = "they compute other values than torch"
    except Exception as error:  # Triton's own, and a compiler's
        why = f"{type(error).__name__}: {error}"
    logger.warning("attention over shared prompts takes longer, because Triton kernels do not run here: %s", why)
    return None


@flash_attention.register_fake
def _forward_fake(q: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return torch.empty_like(q), q.new_empty((q.shape[1], q.shape[0]), dtype=torch.float32)


@_backward.register_fake
def _backward_fake(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, *_: Any) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, starts_q, starts_k, ctx.longest_q, ctx.longest_k, *indices, ctx.scale, ctx.window, ctx.version = inputs
    ctx.save_for_backward(q, k, v, *output, starts_q, starts_k, *indices)


def _autograd(ctx: Any, grad: Tensor, _: Tensor | None) -> tuple[Tensor | None, ...]:
    *inputs, keys, order, bounds = ctx.saved_tensors
    lengths = ctx.longest_q, ctx.longest_k
    settings = ctx.scale, ctx.window, ctx.version
    return *_backward(grad, *inputs, *lengths, keys, order, bounds, *settings), *[None] * 10


flash_attention.register_autograd(_autograd, setup_context=_setup_context)

KEPT_BY_SELECTIVE_CHECKPOINTING = torch.ops.torchtitan_grpo.flash_attention.default
"""Kept so that attention is never recomputed, as torchtitan keeps `varlen_attn`."""
