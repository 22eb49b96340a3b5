"""FlashAttention on packed rows: version 2 from torch, or version 4 where its package is installed.

FlashAttention 4 (the CuTe DSL kernels of Dao-AILab/flash-attention, `flash-attn-4` on PyPI) is for Hopper and
Blackwell, where version 2 reaches less than half of the hardware's peak. torch 2.11's adapter for it has no backward
pass for causal documents and supports only some of its releases. So `flash_operator.py` calls its kernels. It is young:
its results are compared with version 2's before use.
"""

import functools
import importlib.util
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from torchtitan.grpo.errors import UserError
from torchtitan.grpo.model.documents import Documents
from torchtitan.grpo.model.flash_operator import MODULE, flash_attention, package
from torchtitan.grpo.policy.microbatch import DocumentKeys
from torchtitan.tools.logging import logger

PACKAGE = "flash-attn-4"
CAPABILITIES = (9, 10)
"""Major compute capabilities with forward and backward kernels of version 4: Hopper and Blackwell."""
TOLERANCE = 0.02
"""Largest relative difference (Frobenius norms) between two kernels' bfloat16 results. Rounding gives a fifth of it."""


def choose_attention(
    wanted: str, device: torch.device, heads: int, kv_heads: int, head_dim: int, window: int = 0
) -> int:
    """The version of FlashAttention for a model's packed rows: 2 or 4.

    Args:
        wanted: `[training] flash_attention`: "FA2", "FA4", or "auto" for FA4 where it is installed and works.
        heads, kv_heads, head_dim, window: The model's on this rank. The kernels are compiled and tried with them.

    Raises:
        UserError: FA4 is wanted, but it is missing, does not support this device or disagrees with FA2.
    """
    if wanted == "FA2" or (wanted == "auto" and (device.type != "cuda" or not _installed())):
        return 2
    why_not = _unfit(device, heads, kv_heads, head_dim, window)
    if not why_not:
        logger.info("Attention by FlashAttention 4")
        return 4
    if wanted == "auto":
        logger.warning(f"{PACKAGE} is installed and cannot be used: {why_not}. Attention by FlashAttention 2")
        return 2
    raise UserError(f'[training] flash_attention = "{wanted}": {why_not}. "auto" runs without it')


def _installed() -> bool:
    try:
        return importlib.util.find_spec(MODULE) is not None
    except Exception:  # find_spec imports the parent packages, which may fail
        return False


@functools.cache
def _unfit(device: torch.device, heads: int, kv_heads: int, head_dim: int, window: int) -> str:
    """Why FlashAttention 4 cannot be used here, or an empty string."""
    if device.type != "cuda":
        return f"it needs a GPU, and this is a {device.type}"
    capability = torch.cuda.get_device_capability(device)
    if capability[0] not in CAPABILITIES:
        return f"it is for compute capabilities {' and '.join(f'{c}.x' for c in CAPABILITIES)}, not {capability}"
    try:
        package()
        example = *_example(device, heads, kv_heads, head_dim), window
        results = [_results(partial(attention, version=version), *example) for version in (4, 2)]
        pairs = zip(*results, strict=True)
        worst = max(((new - old).norm() / old.norm()).item() for new, old in pairs)
    except Exception as error:  # an import, a compiler or a changed signature may raise anything
        said = str(error).strip().splitlines()
        return f"{type(error).__name__}: {said[0] if said else 'no message'}"
    if not worst <= TOLERANCE:  # NaN too
        return f"its attention or gradients differ from FlashAttention 2's by {worst:.2g} of their norm"
    return ""


def _example(device: torch.device, heads: int, kv_heads: int, head_dim: int) -> tuple[Any, ...]:
    """q, k, v, gradient of the output, and documents; they end at tile boundaries and inside tiles."""
    positions = torch.cat([torch.arange(n) + p for n, p in ((1, 0), (129, 0), (256, 0), (314, 200), (65, 200))])
    starts = torch.tensor([0, 1, 130, 386, 700, 765], dtype=torch.int32)
    keys = DocumentKeys.of(positions, starts)
    assert keys is not None
    generator = torch.Generator().manual_seed(0)
    shapes = [(int(starts[-1]), n, head_dim) for n in (heads, kv_heads, kv_heads, heads)]
    parts = [torch.randn(shape, generator=generator).to(device, torch.bfloat16) for shape in shapes]
    moved = DocumentKeys(*(x.to(device) for x in keys[:-1]), keys.longest)  # type: ignore[call-arg]
    return *parts, Documents(starts.to(device), moved.cu_keys, 314, keys.longest, moved)


def _results(
    attends: Callable[..., Tensor], q: Tensor, k: Tensor, v: Tensor, grad: Tensor, documents: Documents, window: int
) -> list[Tensor]:
    """Output and the gradients of q, k and v, in float32."""
    inputs = [x.clone().requires_grad_() for x in (q, k, v)]
    out = attends(*inputs, documents, None, window)
    out.backward(grad)
    return [x.float() for x in (out.detach(), *(x.grad for x in inputs))]


def attention(
    q: Tensor, k: Tensor, v: Tensor, documents: Documents, scale: float | None = None, window: int = 0, version: int = 2
) -> Tensor:
    """Causal attention within each document of a packed row: [T, heads, head_dim].

    Args:
        q, k, v: q is [T, heads, head_dim], k and v [T, kv_heads, head_dim], float16 or bfloat16 on CUDA.
        scale: Of the scores, by default head_dim ** -0.5.
        window: See `document_attention.attend`.
        version: 2 are torch's own kernels, as `varlen_attn` has them; 4 the CuTe DSL kernels of `flash-attn-4`.
    """
    q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
    keys = documents.keys
    indices = (None, None, None) if keys is None else (keys.positions, keys.order, keys.bounds)
    return flash_attention(q, k, v, *documents[:4], *indices, scale, window, version)[0]
