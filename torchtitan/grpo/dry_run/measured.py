"""What autograd saves for a block of a model of transformers, whose shapes only its class knows: by running it.

It runs on the meta device, so it takes milliseconds and no memory, whatever the model's size.
"""

import dataclasses
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from torchtitan.grpo.dry_run.activations import BlockActivations

if TYPE_CHECKING:
    from torchtitan.grpo.model.families import ModelArgs
    from torchtitan.grpo.model.hf_model import TransformersModel
CHUNK_TOKENS = 1024
"""All sizes are proportional to a row's tokens. Where a longer row would take seconds, it is so many parts of these."""


def measured_activations(
    model: "TransformersModel", tokens: int, dtype: torch.dtype, args: "ModelArgs", chunk: int, copies: float = 1.0
) -> tuple[BlockActivations, int]:
    """Activations of a block for a row of `tokens`, and the bytes that all blocks share (rotary embeddings).

    Of blocks of several kinds it is the most that any of them takes.

    Args:
        model: On the meta device. It is cast to `dtype`.
        dtype: The compute dtype.
        args: The model's. The most gradients at once are taken to be two of the feed-forward layer's width and one
            hidden state.
        chunk: Tokens that a feed-forward layer computes at a time.
        copies: Tokens of whole documents over those of the row, which has shared prompts once. Layers that run along a
            document compute whole ones.
    """
    from torchtitan.grpo.model.documents import Documents, PaddedDocuments
    from torchtitan.grpo.model.mlp_chunks import chunk_mlps

    if model.by_document and tokens > CHUNK_TOKENS:  # these layers go through a row in steps, each an operation
        of_part = max(1, chunk * CHUNK_TOKENS // tokens)
        part, rotary = measured_activations(model, CHUNK_TOKENS, dtype, args, of_part, copies)
        factor = -(-tokens // CHUNK_TOKENS)
        sizes = {name: size * factor for name, size in dataclasses.asdict(part).items()}
        return BlockActivations(**sizes), rotary * factor
    blocks = {str(block): block for block in reversed(model.to(dtype).layers)}  # the first of each kind
    given: dict[nn.Module, tuple[tuple[Any, ...], dict[str, Any]]] = {}
    for block in blocks.values():
        block.register_forward_pre_hook(lambda block, *inputs: given.update({block: inputs}), with_kwargs=True)
    with torch.device("meta"):
        starts = torch.empty(2, dtype=torch.int32)
        ids, positions = torch.empty(2, tokens, dtype=torch.int64).unbind()
        slots = torch.empty(int(tokens * copies), dtype=torch.int64)
        whole = PaddedDocuments(slots, [(1, len(slots))], positions)
        with torch.no_grad():
            model.final_states(ids, positions, Documents(starts, starts, tokens, tokens, None, whole))
    found = [_of_block(block, *given[block], args.hidden_dim) for block in blocks.values()]
    if chunk < tokens:
        chunk_mlps(blocks.values(), chunk)
        apart = [_of_block(block, *given[block], 0) for block in blocks.values()]
        at_attention = 4 * tokens * (args.n_heads + args.n_kv_heads) * args.head_dim * dtype.itemsize
        weight = args.dim * args.hidden_dim * dtype.itemsize
        found = [_in_chunks(*pair, chunk / tokens, at_attention, weight) for pair in zip(found, apart, strict=True)]
    shared = _storages([kwargs for _, kwargs in given.values()])
    largest = {each.name: max(getattr(of, each.name) for of in found) for each in dataclasses.fields(BlockActivations)}
    return BlockActivations(**largest), sum(tensor.untyped_storage().nbytes() for tensor in shared.values())


def _of_block(block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], width: int) -> BlockActivations:
    hidden = args[0].detach().requires_grad_()
    apart = _storages([kwargs, list(block.parameters())])
    saved: dict[int, Tensor] = {}

    def keep(tensor: Tensor) -> Tensor:
        saved.update({key: value for key, value in _storages(tensor).items() if key not in apart})
        return tensor

    with _Products() as products, torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        block(hidden, *args[1:], **kwargs)
    kept = hidden.nbytes + products.attention
    return BlockActivations(
        input=hidden.nbytes,
        selected=kept + sum(products.matrices[::2]),  # torchtitan recomputes every second product
        matmuls=kept + sum(products.matrices),
        saved=sum(tensor.untyped_storage().nbytes() for tensor in (saved | _storages(hidden)).values()),
        gradients=hidden.shape[1] * hidden.element_size() * (hidden.shape[-1] + 2 * width),
    )


def _in_chunks(
    whole: BlockActivations, apart: BlockActivations, share: float, at_attention: int, weight: int
) -> BlockActivations:
    """Of a block whose feed-forward layer computes this share of a row at a time.

    Args:
        apart: Without what that layer saves and its wide gradients.
        at_attention: Gradients there, as `block_activations` has them.
        weight: Gradient of one weight by a chunk.
    """
    saved = apart.saved + (whole.saved - apart.saved) * share
    at_mlp = apart.gradients + (whole.gradients - apart.gradients) * share + whole.input + weight
    return dataclasses.replace(whole, saved=int(saved), gradients=int(max(at_mlp, whole.input + at_attention)))


def _storages(values: Any) -> dict[int, Tensor]:
    """The floating-point tensors among them, each storage once."""
    floats = (leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor) and leaf.is_floating_point())
    return {tensor.untyped_storage()._cdata: tensor for tensor in floats}


class _Products(TorchDispatchMode):
    """Bytes of the results of matrix products, in order, and of attention."""

    def __init__(self) -> None:
        super().__init__()
        self.matrices: list[int] = []
        self.attention = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        if func in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default):
            self.matrices.append(found.nbytes)
        elif func is torch.ops.torchtitan_grpo.flash_attention.default:
            self.attention += sum(each.nbytes for each in found)
        return found
