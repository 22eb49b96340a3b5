"""FlashAttention on packed rows: version 2 from torch, or version 4 where its package is installed.

FlashAttention 4 (the CuTe DSL kernels of Dao-AILab/flash-attention, `flash-attn-4` on PyPI) is for Hopper and
Blackwell, where version 2 reaches less than half of the hardware's peak. torch 2.11's adapter for it has no backward
pass for causal documents and supports only some of its releases. So it is wrapped here as an operator that
`torch.compile` and activation checkpointing know. It is young: its results are compared with version 2's before use.
"""

import functools
import importlib
import importlib.util
import inspect
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn

from torchtitan.grpo.errors import UserError
from torchtitan.tools.logging import logger

PACKAGE, MODULE = "flash-attn-4", "flash_attn.cute.interface"
CAPABILITIES = (9, 10)
"""Major compute capabilities with forward and backward kernels of version 4: Hopper and Blackwell."""
TOLERANCE = 0.02
"""Largest relative difference (Frobenius norms) between two kernels' bfloat16 results. Rounding gives a fifth of it."""

_VARLEN_TAKES_GQA = "enable_gqa" in inspect.signature(varlen_attn).parameters

Attention = Callable[..., Tensor]
"""attention(q, k, v, starts, longest, scale): causal, within each document of a packed row.

q: [T, heads, head_dim], k and v: [T, kv_heads, head_dim], float16 or bfloat16 on CUDA. starts: int32 [documents + 1],
the first position of each document, then T. longest: upper bound for a document's length. scale: of the scores, by
default head_dim ** -0.5. Returns [T, heads, head_dim].
"""


def choose_attention(wanted: str, device: torch.device, heads: int, kv_heads: int, head_dim: int) -> Attention:
    """Choose the attention kernels for a model's packed rows.

    Args:
        wanted: `[training] flash_attention`: "FA2", "FA4", or "auto" for FA4 where it is installed and works.
        heads, kv_heads, head_dim: The model's on this rank. The kernels are compiled and tried with them.

    Raises:
        UserError: FA4 is wanted, but it is missing, does not support this device or disagrees with FA2.
    """
    if wanted == "FA2" or (wanted == "auto" and (device.type != "cuda" or not _installed())):
        return flash_attention_2
    why_not = _unfit(device, heads, kv_heads, head_dim)
    if not why_not:
        logger.info("Attention by FlashAttention 4")
        return flash_attention_4
    if wanted == "auto":
        logger.warning(f"{PACKAGE} is installed and cannot be used: {why_not}. Attention by FlashAttention 2")
        return flash_attention_2
    raise UserError(f'[training] flash_attention = "{wanted}": {why_not}. "auto" runs without it')


def _installed() -> bool:
    try:
        return importlib.util.find_spec(MODULE) is not None
    except Exception:  # find_spec imports the parent packages, which may fail
        return False


@functools.cache
def _unfit(device: torch.device, heads: int, kv_heads: int, head_dim: int) -> str:
    """Why FlashAttention 4 cannot be used here, or an empty string."""
    if device.type != "cuda":
        return f"it needs a GPU, and this is a {device.type}"
    capability = torch.cuda.get_device_capability(device)
    if capability[0] not in CAPABILITIES:
        return f"it is for compute capabilities {' and '.join(f'{c}.x' for c in CAPABILITIES)}, not {capability}"
    try:
        _kernels()
        example = _example(device, heads, kv_heads, head_dim)
        pairs = zip(_results(flash_attention_4, *example), _results(flash_attention_2, *example), strict=True)
        worst = max(((new - old).norm() / old.norm()).item() for new, old in pairs)
    except Exception as error:  # an import, a compiler or a changed signature may raise anything
        said = str(error).strip().splitlines()
        return f"{type(error).__name__}: {said[0] if said else 'no message'}"
    if not worst <= TOLERANCE:  # NaN too
        return f"its attention or gradients differ from FlashAttention 2's by {worst:.2g} of their norm"
    return ""


def _example(device: torch.device, heads: int, kv_heads: int, head_dim: int) -> tuple[Tensor, ...]:
    """q, k, v, gradient of the output, and starts; documents end at tile boundaries and inside tiles."""
    starts = torch.tensor([0, 1, 130, 386, 700], dtype=torch.int32)
    generator = torch.Generator().manual_seed(0)
    shapes = [(int(starts[-1]), n, head_dim) for n in (heads, kv_heads, kv_heads, heads)]
    parts = [torch.randn(shape, generator=generator).to(device, torch.bfloat16) for shape in shapes]
    return *parts, starts.to(device)


def _results(attention: Attention, q: Tensor, k: Tensor, v: Tensor, grad: Tensor, starts: Tensor) -> list[Tensor]:
    """Output and the gradients of q, k and v, in float32."""
    inputs = [x.clone().requires_grad_() for x in (q, k, v)]
    out = attention(*inputs, starts, q.shape[0])
    out.backward(grad)
    return [x.float() for x in (out.detach(), *(x.grad for x in inputs))]


def flash_attention_2(
    q: Tensor, k: Tensor, v: Tensor, starts: Tensor, longest: int, scale: float | None = None
) -> Tensor:
    """An `Attention`: torch's `varlen_attn`."""
    grouped: dict[str, Any] = {"enable_gqa": True} if _VARLEN_TAKES_GQA and q.shape[1] != k.shape[1] else {}
    q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
    return varlen_attn(q, k, v, starts, starts, longest, longest, scale=scale, window_size=(-1, 0), **grouped)


def flash_attention_4(
    q: Tensor, k: Tensor, v: Tensor, starts: Tensor, longest: int, scale: float | None = None
) -> Tensor:
    """An `Attention`: the CuTe DSL kernels of `flash-attn-4`."""
    return _forward(q.contiguous(), k.contiguous(), v.contiguous(), starts, longest, scale)[0]


@functools.cache
def _kernels() -> ModuleType:
    return importlib.import_module(MODULE)


@torch.library.custom_op("torchtitan_grpo::flash_attention_4", mutates_args=())
def _forward(
    q: Tensor, k: Tensor, v: Tensor, starts: Tensor, longest: int, scale: float | None
) -> tuple[Tensor, Tensor]:
    """Output, and the log of each softmax's sum, float32 [heads, T]."""
    found = _kernels()._flash_attn_fwd(
        q, k, v, return_lse=True, softmax_scale=scale, causal=True, **_documents(starts, longest)
    )
    return found[0], found[1].contiguous()  # newer releases return more


@torch.library.custom_op("torchtitan_grpo::flash_attention_4_backward", mutates_args=())
def _backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    starts: Tensor,
    longest: int,
    scale: float | None,
) -> tuple[Tensor, Tensor, Tensor]:
    found = _kernels()._flash_attn_bwd(
        q,
        k,
        v,
        out,
        grad.contiguous(),
        lse,
        softmax_scale=scale,
        causal=True,
        deterministic=torch.are_deterministic_algorithms_enabled(),
        **_documents(starts, longest),
    )
    return found[0], found[1], found[2]


def _documents(starts: Tensor, longest: int) -> dict[str, Any]:
    return {
        "cu_seqlens_q": starts,
        "cu_seqlens_k": starts,
        "max_seqlen_q": longest,
        "max_seqlen_k": longest,
    }


@_forward.register_fake
def _forward_fake(
    q: Tensor, k: Tensor, v: Tensor, starts: Tensor, longest: int, scale: float | None
) -> tuple[Tensor, Tensor]:
    return torch.empty_like(q), q.new_empty((q.shape[1], q.shape[0]), dtype=torch.float32)


@_backward.register_fake
def _backward_fake(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    starts: Tensor,
    longest: int,
    scale: float | None,
) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, starts, ctx.longest, ctx.scale = inputs
    ctx.save_for_backward(q, k, v, *output, starts)


def _autograd(ctx: Any, grad: Tensor, _: Tensor | None) -> tuple[Tensor | None, ...]:
    q, k, v, out, lse, starts = ctx.saved_tensors
    return *_backward(grad, q, k, v, out, lse, starts, ctx.longest, ctx.scale), None, None, None


_forward.register_autograd(_autograd, setup_context=_setup_context)

KEPT_BY_SELECTIVE_CHECKPOINTING = torch.ops.torchtitan_grpo.flash_attention_4.default
"""Kept so that attention is never recomputed, as torchtitan keeps `varlen_attn`."""
