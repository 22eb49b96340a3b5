"""Causal attention within each document of a packed row, with what models add to it.

On CUDA, FlashAttention's kernels compute it, with a sliding window too. Elsewhere documents of similar length are
padded to one length, and torch's SDPA computes them. A softcap is computed from whole scores there: no kernel that is
used here has one.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard

from torchtitan.grpo.model.context_parallel import ContextParallel
from torchtitan.grpo.model.documents import Documents
from torchtitan.grpo.model.flash_attention import attention


class PackedAttention(nn.Module):
    """Replaces torchtitan's inner attention.

    Args:
        flash: Version of FlashAttention in bfloat16 or float16 on CUDA, from `choose_attention`.
        context: With context parallelism; T is then that of this rank's part.
    """

    def __init__(self, flash: int = 2, context: ContextParallel | None = None):
        super().__init__()
        self.flash, self.context = flash, context

    def forward(self, q: Tensor, k: Tensor, v: Tensor, documents: Documents, scale: float | None = None) -> Tensor:
        """See `attend`. Tensors may be DTensors, sharded by heads."""
        if not isinstance(q, DTensor):
            return attend(q, k, v, documents, scale, flash=self.flash, context=self.context)
        mesh = q.device_mesh  # no rank needs another's heads
        out = attend(q.to_local(), k.to_local(), v.to_local(), documents, scale, flash=self.flash)
        return DTensor.from_local(out, mesh, [Shard(2)], run_check=False)


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    documents: Documents,
    scale: float | None = None,
    *,
    window: int = 0,
    softcap: float = 0.0,
    flash: int = 2,
    context: ContextParallel | None = None,
) -> Tensor:
    """q: [1, heads, T, head_dim], k: [1, kv_heads, T, head_dim], v: [1, kv_heads, T, v_dim] -> [1, T, heads, v_dim].

    Args:
        scale: Of the scores, by default head_dim ** -0.5.
        window: A token attends to itself and to the `window - 1` tokens before it. 0: to all before it.
        softcap: Scores become softcap * tanh(score / softcap), as in Gemma 2. 0: they stay.
        context: With it, T is that of this rank's part of the row, and `documents` are those of the whole row.

    Raises:
        ValueError: A softcap on CUDA in bfloat16 or float16.
    """
    if context is not None:
        q, k, v = (context.heads(x) for x in (q, k, v))
        whole = attend(q, k, v, documents, scale, window=window, softcap=softcap, flash=flash)
        return context.positions(whole)
    q, k, v = (x[0].transpose(0, 1) for x in (q, k, v))  # [T, heads, head_dim]
    if not (q.is_meta or (q.is_cuda and q.dtype in (torch.bfloat16, torch.float16))):
        return _by_length_class(q, k, v, documents, scale, window, softcap).unsqueeze(0)
    if q.is_cuda and softcap:
        raise ValueError("no kernel here computes attention with a softcap")
    return attention(q, k, v, documents, scale, window, flash).unsqueeze(0)


def _by_length_class(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    documents: Documents,
    scale: float | None,
    window: int = 0,
    softcap: float = 0.0,
) -> Tensor:
    # index_select in place of x[slots]: on a CPU, the backward pass of x[slots] takes 50 times as long.
    padded = documents.padded
    sizes = [docs * length for docs, length in padded.shapes]
    q_slots, k_slots, v_slots = (x.index_select(0, padded.slots).split(sizes) for x in (q, k, v))
    outputs = []
    for i, shape in enumerate(padded.shapes):
        each_q, each_k, each_v = (x[i].unflatten(0, shape).transpose(1, 2) for x in (q_slots, k_slots, v_slots))
        slides = 0 < window < shape[1]
        mask = _in_window(shape[1], window if slides else shape[1], q.device) if slides or softcap else None
        if mask is not None and softcap:
            attended = _from_scores(each_q, each_k, each_v, scale, mask, softcap)
        else:
            attended = F.scaled_dot_product_attention(  # of [docs, heads, L, head_dim]
                each_q,
                each_k,
                each_v,
                attn_mask=mask,
                is_causal=mask is None,
                scale=scale,
                enable_gqa=q.shape[1] != k.shape[1],
            )
        outputs.append(attended.transpose(1, 2).flatten(0, 1))
    return torch.cat(outputs).index_select(0, padded.taken)


def _in_window(length: int, window: int, device: torch.device) -> Tensor:
    """bool [length, length]: which positions each one attends to."""
    return torch.ones(length, length, dtype=torch.bool, device=device).tril().triu(1 - window)


def _from_scores(q: Tensor, k: Tensor, v: Tensor, scale: float | None, mask: Tensor, softcap: float) -> Tensor:
    """[docs, heads, L, head_dim] each -> the same, by the formula. Scores are float32 and take [docs, heads, L, L]."""
    groups = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
    scores = (q @ k.transpose(-1, -2)).float() * (q.shape[-1] ** -0.5 if scale is None else scale)
    scores = softcap * torch.tanh(scores / softcap)
    return torch.softmax(scores.masked_fill(~mask, -torch.inf), -1).to(v.dtype) @ v
