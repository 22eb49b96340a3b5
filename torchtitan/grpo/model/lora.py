"""LoRA: frozen weights, and beside each adapted layer two small matrices that are trained (arXiv:2106.09685).

The layers stay what they were: `add_adapters` gives torchtitan's linear layers two more parameters and another forward.
So names, checkpointing, compilation, FSDP2 and tensor parallelism know nothing of adapters. Tensors and results are
those of the `peft` package; `peft_folder` writes its files.
"""

import contextlib
import dataclasses
import re
import zlib
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, distribute_tensor

from torchtitan.grpo.errors import UserError, did_you_mean
from torchtitan.grpo.model.shards import canonical_name, local, shard_of
from torchtitan.grpo.weight_wire.adapters import PREFIX

if TYPE_CHECKING:  # a server needs the layers only, and no model of upstream
    from torchtitan.protocols.state_dict_adapter import StateDictAdapter

A, B = ".lora_A", ".lora_B"
"""Ends of the adapters' parameter names. Before them stands the name of the linear layer."""
ALL_LINEAR = "all-linear"
_OF_A_BLOCK = re.compile(r"model\.layers\.\{\}\.(?:\w+\.)*(\w+)\.weight")


@dataclasses.dataclass(frozen=True)
class Lora:
    """Which layers are adapted, and how.

    Attributes:
        rank: r, the columns of B and rows of A.
        alpha: The update of a weight is alpha / r times B A.
        layers: Of each block: Hugging Face name of the layer ("q_proj") -> torchtitan's ("attention.wq").
    """

    rank: int
    alpha: float
    layers: Mapping[str, str]

    @property
    def scaling(self) -> float:
        return self.alpha / self.rank


def resolve_lora(lora_cfg: Any, adapter: "StateDictAdapter", block: nn.Module) -> Lora:
    """The layers that `[lora]` names.

    Args:
        lora_cfg: The `[lora]` section.
        adapter: The model's state-dict adapter, which knows the names of both sides.
        block: One of the model's blocks, on any device.

    Raises:
        UserError: The model has no linear layer of a name.
    """
    modules, found = dict(block.named_modules()), {}
    for theirs, ours in cast(Any, adapter).from_hf_map.items():
        match = _OF_A_BLOCK.fullmatch(theirs)
        path = (ours or "").removeprefix("layers.{}.").removesuffix(".weight")
        # A mixture of experts trains adapters of its attention. Router and experts stay as they are.
        if match and isinstance(modules.get(path), nn.Linear) and not path.startswith("moe."):
            found[match[1]] = path
    wanted = list(found) if lora_cfg.target_modules == [ALL_LINEAR] else lora_cfg.target_modules
    for name in wanted:
        if name not in found:
            raise UserError(
                f'[lora] target_modules: the blocks of this model have no linear layer "{name}"'
                f'{did_you_mean(name, [*found, ALL_LINEAR])}; they have {", ".join(found)}, and "{ALL_LINEAR}" is all'
            )
    return Lora(lora_cfg.rank, lora_cfg.alpha, {name: path for name, path in found.items() if name in wanted})


def adapter_parameters(lora: Lora | None, block: nn.Module) -> int:
    """Parameters of the adapters of one block; 0 without any."""
    return sum(lora.rank * sum(block.get_submodule(p).weight.shape) for p in lora.layers.values()) if lora else 0


class LoraLinear(nn.Linear):
    """y = x W^T + b + scaling (x A^T) B^T: W [out, in] and b are frozen, A [rank, in] and B [out, rank] are trained.

    Under tensor parallelism x and y are DTensors, as in `nn.Linear`. A layer that is cut by outputs has B cut like W,
    and A whole. A layer that is cut by inputs has A cut like W, and B whole: each rank adds its part of the sum that
    the layer's output is anyway, so adapters cost no further communication in the forward pass.
    """

    lora_A: nn.Parameter
    lora_B: nn.Parameter
    scaling: float
    adapts: bool

    @classmethod
    def adapt(cls, linear: nn.Linear, lora: Lora, dtype: torch.dtype) -> None:
        """Turn `linear` into one of these, in place: hooks, names and weights stay."""
        weight = linear.weight
        down = torch.empty(lora.rank, weight.shape[1], dtype=dtype, device=weight.device)
        up = torch.empty(weight.shape[0], lora.rank, dtype=dtype, device=weight.device)
        if isinstance(weight, DTensor):
            whole: list[Placement] = [Replicate()]
            by_outputs = weight.placements[0].is_shard(0)
            mesh, cut = weight.device_mesh, list(weight.placements)
            down = distribute_tensor(down, mesh, whole if by_outputs else cut)
            up = distribute_tensor(up, mesh, cut if by_outputs else whole)
        linear.__class__ = cls
        linear.lora_A, linear.lora_B = nn.Parameter(down), nn.Parameter(up)
        linear.scaling, linear.adapts = lora.scaling, True

    def forward(self, x: Tensor) -> Tensor:
        out = F.linear(x, self.weight, self.bias)
        if not self.adapts:
            return out
        if not isinstance(out, DTensor):
            return self._updated(out, x, self.lora_A, self.lora_B)
        of_rank = self._updated(*(_to_local(each) for each in (out, x, self.lora_A, self.lora_B)))
        return DTensor.from_local(of_rank, out.device_mesh, out.placements, run_check=False)

    def _updated(self, out: Tensor, x: Tensor, down: Tensor, up: Tensor) -> Tensor:
        """One multiply-add into the output: no second tensor of its size."""
        inner = F.linear(x, down).flatten(0, -2)
        return torch.addmm(out.flatten(0, -2), inner, up.t(), alpha=self.scaling).view_as(out)


def _to_local(tensor: Tensor) -> Tensor:
    """This rank's part. Gradients of what all ranks have whole are partial sums, and the other way round."""
    tensor = cast(DTensor, tensor)
    opposite = {Replicate(): Partial(), Partial(): Replicate()}
    return tensor.to_local(grad_placements=[opposite.get(placement, placement) for placement in tensor.placements])


def add_adapters(model: nn.Module, lora: Lora, dtype: torch.dtype) -> None:
    """Freeze a model and give the linear layers of its blocks adapters in `dtype`, not initialised.

    Call it after tensor parallelism and before everything else that wraps layers.
    """
    model.requires_grad_(False)
    for block in model.layers.children():
        for path in lora.layers.values():
            LoraLinear.adapt(block.get_submodule(path), lora, dtype)


@torch.no_grad()
def init_adapters(model: nn.Module, seed: int) -> None:
    """Draw A from PEFT's distribution, uniform within 1 / sqrt(in), and set B to zero: the model is its base.

    Each A follows from `seed` and its name, on any number of ranks and any device.
    """
    for name, parameter in model.named_parameters():
        if name.endswith(B):
            parameter.zero_()
        elif name.endswith(A):
            generator = torch.Generator().manual_seed(zlib.crc32(f"{seed} {canonical_name(name)}".encode()))
            bound = parameter.shape[1] ** -0.5
            full = torch.empty(parameter.shape).uniform_(-bound, bound, generator=generator)
            local(parameter).copy_(shard_of(full, parameter))


def is_adapter(name: str) -> bool:
    """Whether the parameter of this name is an adapter's."""
    return name.endswith((A, B))


@contextlib.contextmanager
def adapters_off(model: nn.Module) -> Iterator[None]:
    """Within it the model is its base, to the bit. Not for a forward pass whose backward pass comes after."""
    layers = [module for module in model.modules() if isinstance(module, LoraLinear)]
    for layer in layers:
        layer.adapts = False
    try:
        yield
    finally:
        for layer in layers:
            layer.adapts = True


def without_adapters(model: nn.Module) -> Callable[..., Any]:
    """The model's forward pass as that of its base; see `adapters_off`."""

    def forward(*args: Any) -> Any:
        with adapters_off(model):
            return model(*args)

    return forward


def merged(weight: Tensor, down: Tensor, up: Tensor, scaling: float) -> Tensor:
    """The weight that computes what layer and adapter do, in float32: in bfloat16 an update would be rounded away."""
    return torch.addmm(weight.float(), up.float(), down.float(), alpha=scaling)


class PeftNames:
    """Adapters under PEFT's names and in Hugging Face's order of rows.

    A state-dict adapter may rearrange the rows of a weight (Llama's queries and keys). B's rows follow them.

    Args:
        adapter: The model's state-dict adapter.
        shapes: Name -> shape of all adapters; the same names as in a state dict of the model.
    """

    def __init__(self, adapter: "StateDictAdapter", shapes: Mapping[str, torch.Size]) -> None:
        self._adapter, self._orders = adapter, dict[str, Tensor | None]()
        self._names: dict[str, str] = {}
        self._of_weight: dict[str, str] = {}
        for name in shapes:
            layer = name.removesuffix(A).removesuffix(B)
            if layer not in self._of_weight:
                size = shapes[layer + B][0], shapes[layer + A][1]
                self._of_weight[layer] = self._look(layer, size)
            self._names[name] = f"{PREFIX}{self._of_weight[layer]}{A if name.endswith(A) else B}.weight"

    def name(self, name: str) -> str:
        """PEFT's name of an adapter."""
        return self._names[name]

    def order(self, name: str) -> Tensor | None:
        """For a B whose rows lie in another order: which of its rows is at each place of PEFT's. None for others."""
        return self._orders[_any_layer(name.removesuffix(B))] if name.endswith(B) else None

    def convert(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Full tensors under PEFT's names."""
        result = {}
        for name, value in tensors.items():
            order = self.order(name)
            result[self.name(name)] = value if order is None else value[order.to(value.device)]
        return result

    def _look(self, layer: str, size: tuple[int, int]) -> str:
        """Hugging Face's name of a linear layer. What its rows become is found out once for all blocks."""
        probe = torch.empty(size, device="meta")
        ((name, value),) = self._adapter.to_hf({f"{layer}.weight": probe}).items()
        kind = _any_layer(layer)
        if kind not in self._orders:
            self._orders[kind] = None
            if value is not probe:
                rows = torch.arange(size[0], dtype=torch.int32)[:, None].expand(size)
                (moved,) = self._adapter.to_hf({f"{layer}.weight": rows}).values()
                self._orders[kind] = moved[:, 0].long()
        return name.removesuffix(".weight")


def _any_layer(name: str) -> str:
    return re.sub(r"\d+", "{}", name, count=1)
