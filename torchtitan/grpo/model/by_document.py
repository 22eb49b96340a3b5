"""Layers that run along a document, such as a convolution or a recurrent state: each document on its own.

Attention of packed rows is told where documents begin; these layers are not. Documents of similar length are padded to
one length and go through the layer together: what follows a position does not change its state. A prompt that a row
holds once is computed for each of its documents.
"""

import contextlib
import functools
import sys
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from torchtitan.grpo.model.documents import Documents


class ByDocument:
    """Comes before a layer's own class, which takes hidden states [documents, length, dim]."""

    @torch.compiler.disable  # lengths differ from row to row
    def forward(self, hidden_states: Tensor, *args: Any, documents: Documents | None = None, **kwargs: Any) -> Tensor:
        """hidden_states: [1, T, dim] of a packed row -> the same."""
        if documents is None:
            raise TypeError("its blocks do not hand on to their layers which documents a row has")
        own: Any = super()
        with contextlib.nullcontext() if hidden_states.is_cuda else plain_functions(type(self)):
            padded = documents.padded
            sizes = [count * length for count, length in padded.shapes]
            slots = hidden_states[0].index_select(0, padded.slots).split(sizes)
            computed = [own.forward(each.unflatten(0, shape)) for each, shape in zip(slots, padded.shapes, strict=True)]
        return torch.cat([each.flatten(0, 1) for each in computed]).index_select(0, padded.taken)[None]


def split_by_document(block: nn.Module) -> bool:
    """Let those layers of a block that have a convolution compute each document on its own. Whether it has one."""
    found = [m for m in block.modules() if any(isinstance(child, nn.Conv1d) for child in m.children())]
    for layer in found:
        layer.__class__ = class_before(ByDocument, layer.__class__)
    return bool(found)


@functools.cache
def class_before(first: type, cls: type) -> Any:
    """A class with the methods of `first` before those of `cls`. It is one for all blocks, or each would be compiled by
    itself."""
    return type(cls.__name__, (first, cls), {"__module__": cls.__module__})


@contextlib.contextmanager
def plain_functions(cls: type) -> Iterator[None]:
    """Without kernels for CUDA in this class: transformers takes them wherever their package is installed."""
    names = vars(sys.modules[cls.__module__])
    kernels = {name: f for name, f in names.items() if hasattr(f, "__wrapped__") and f.__module__ == cls.__module__}
    names.update({name: f.__wrapped__ for name, f in kernels.items()})
    try:
        yield
    finally:
        names.update(kernels)
