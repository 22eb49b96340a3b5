"""Feed-forward layers in chunks of a row's tokens, so that their wide activations take the memory of one chunk.

Each token's output depends on that token alone. The backward pass computes each chunk again by itself, inside of the
block that full checkpointing computes again: a third forward of these layers (tiled MLP, Arctic Long Sequence Training,
arXiv:2506.13996).
"""

import functools
from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from torchtitan.grpo.errors import UserError
from torchtitan.grpo.model.by_document import class_before

NAMES = ("feed_forward", "mlp")
"""Of the layer in torchtitan's blocks, and in most of transformers'."""


def chunk_mlps(blocks: Iterable[nn.Module], tokens: int) -> None:
    """Have each block's feed-forward layer compute so many tokens at a time.

    Raises:
        UserError: A block has no such layer.
    """
    for block in blocks:
        layers = [layer for name in NAMES if isinstance(layer := getattr(block, name, None), nn.Module)]
        if len(layers) != 1:
            raise UserError(
                "[activation_checkpoint] mlp_chunk_tokens is for blocks with one feed-forward layer, which "
                f"{type(block).__name__} has not: leave it out"
            )
        (layer,) = layers
        layer.__class__, layer.chunk_tokens = class_before(_InChunks, layer.__class__), tokens


class _InChunks(nn.Module):
    """Comes before a layer's own class."""

    chunk_tokens: int

    def forward(self, x: Tensor) -> Tensor:
        """x: [1, T, width]."""
        of_chunk: Callable[[Tensor], Tensor] = super().forward
        if torch.is_grad_enabled():
            of_chunk = functools.partial(checkpoint, of_chunk, use_reentrant=False, preserve_rng_state=False)
        return torch.cat([of_chunk(chunk) for chunk in x.split(self.chunk_tokens, dim=1)], dim=1)
