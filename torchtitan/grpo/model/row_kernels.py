"""Copies and sums of rows on a GPU, as Triton kernels: keys and values of whole documents, and their gradients.

torch's `index_select` and `index_add_` handle element by element. For attention over shared prompts they took longer
than the attention.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 1024


@triton.jit(do_not_specialize=["width"])
def _gather(source, result, index, width, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    from_row = tl.load(index + row)
    values = tl.load(source + from_row * width + column, mask=column < width)
    tl.store(result + row * width + column, values, mask=column < width)


@triton.jit(do_not_specialize=["width"])
def _sum(source, result, order, bounds, width, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    for i in range(tl.load(bounds + row), tl.load(bounds + row + 1)):
        from_row = tl.load(order + i)
        total += tl.load(source + from_row * width + column, mask=column < width, other=0).to(tl.float32)
    tl.store(result + row * width + column, total.to(result.dtype.element_ty), mask=column < width)


def gather_rows(source: Tensor, index: Tensor) -> Tensor:
    """source[index]. source: [T, ...], contiguous. index: int64 [K]."""
    result = source.new_empty((index.shape[0], *source.shape[1:]))
    width = source[0].numel()
    with torch.cuda.device_of(source):
        _gather[(index.shape[0], triton.cdiv(width, _BLOCK))](source, result, index, width, _BLOCK)
    return result


def sum_rows(source: Tensor, order: Tensor, bounds: Tensor) -> Tensor:
    """Row t is the sum of source[order[i]] for bounds[t] <= i < bounds[t + 1], in float32 and in that order.

    source: [K, ...], contiguous. order: int64 [K]. bounds: int32 [T + 1].
    """
    rows = bounds.shape[0] - 1
    result = source.new_empty((rows, *source.shape[1:]))
    width = source[0].numel()
    with torch.cuda.device_of(source):
        _sum[(rows, triton.cdiv(width, _BLOCK))](source, result, order, bounds, width, _BLOCK)
    return result
