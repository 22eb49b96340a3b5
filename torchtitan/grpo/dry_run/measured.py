"""What autograd saves for a block of a model of transformers, whose shapes only its class knows: by running it.

It runs on the meta device, so it takes milliseconds and no memory, whatever the model's size.
"""

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from torchtitan.grpo.dry_run.activations import BlockActivations

if TYPE_CHECKING:
    from torchtitan.grpo.model.hf_model import TransformersModel


def measured_activations(
    model: "TransformersModel", tokens: int, dtype: torch.dtype, width: int
) -> tuple[BlockActivations, int]:
    """Activations of the first block for a row of `tokens`, and the bytes that all blocks share (rotary embeddings).

    Args:
        model: On the meta device. It is cast to `dtype`.
        dtype: The compute dtype.
        width: Of the feed-forward layer. The most gradients at once are taken to be two of this and one hidden state.
    """
    from torchtitan.grpo.model.documents import Documents

    block = next(iter(model.to(dtype).layers))
    given: dict[str, Any] = {}

    def see(_: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        given.update(args=args, kwargs=kwargs)

    with torch.device("meta"):
        starts = torch.empty(2, dtype=torch.int32)
        ids, positions = torch.empty(2, tokens, dtype=torch.int64).unbind()
        handle = block.register_forward_pre_hook(see, with_kwargs=True)
        with torch.no_grad():
            model.final_states(ids, positions, Documents(starts, starts, tokens, tokens))
        handle.remove()
    hidden = given["args"][0].detach().requires_grad_()
    shared = _storages(given["kwargs"])
    apart = shared | _storages(list(block.parameters()))
    saved: dict[int, Tensor] = {}

    def keep(tensor: Tensor) -> Tensor:
        saved.update({key: value for key, value in _storages(tensor).items() if key not in apart})
        return tensor

    with _Products() as products, torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        block(hidden, *given["args"][1:], **given["kwargs"])
    itemsize = hidden.element_size()
    kept = hidden.nbytes + products.attention
    activations = BlockActivations(
        input=hidden.nbytes,
        selected=kept + sum(products.matrices[::2]),  # torchtitan recomputes every second product
        matmuls=kept + sum(products.matrices),
        saved=sum(tensor.untyped_storage().nbytes() for tensor in (saved | _storages(hidden)).values()),
        gradients=tokens * itemsize * (hidden.shape[-1] + 2 * width),
    )
    return activations, sum(tensor.untyped_storage().nbytes() for tensor in shared.values())


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
