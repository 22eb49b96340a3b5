"""What the servers get: named tensors, and how the trainer's sharded parameters become them.

The rest of weight sync sees a `PublishedWeights` and knows nothing of models, state-dict adapters or tied weights.
`model_weights` makes one of a model, `adapter_weights` one of its LoRA adapters. Anything else that servers can load
(experts that are one parameter in the trainer and many tensors in a checkpoint) is published by making another.
"""

import functools
import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
import torch.nn as nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.fsdp import FSDPModule

from torchtitan.grpo.errors import UserError
from torchtitan.grpo.model.lora import Lora, PeftNames, is_adapter
from torchtitan.grpo.model.shards import Slices, canonical_name
from torchtitan.grpo.model.shards import whole as full_tensor
from torchtitan.grpo.model.source import ModelSource
from torchtitan.grpo.weight_wire.adapters import AdapterInfo, fingerprint
from torchtitan.grpo.weight_wire.buckets import TensorSpec


@dataclass(frozen=True)
class PublishedTensor:
    """One tensor on the wire, and the part of a parameter that it is made from.

    Attributes:
        spec: Hugging Face name, dtype and shape.
        parameter: Name of the parameter in `PublishedWeights.parameters`.
        box: The part of the full (unsharded) parameter: (start, length) in each dimension.
        rearrange: Turns the values of the box, in the box's shape, into a tensor of `spec.shape`. None if the tensor
            holds the same elements in the same (row-major) order.
    """

    spec: TensorSpec
    parameter: str
    box: Slices
    rearrange: Callable[[torch.Tensor], torch.Tensor] | None = None

    @property
    def box_shape(self) -> tuple[int, ...]:
        return tuple(length for _, length in self.box)


@dataclass(frozen=True)
class PublishedWeights:
    """Everything that a server gets with one version.

    Construct it on every rank with the same names, shapes and order: the plan of the transfer follows from them (I7).
    It keeps references to the sharded parameters, so construct it after `fully_shard`, `to_empty` and the optimizer.
    FSDP2 replaces what the modules show while they are gathered, but it updates and keeps these.

    Attributes:
        parameters: The trainer's tensors, by any name that is unique: DTensors, or plain tensors that every rank has in
            full. All on one device.
        tensors: What is sent, in this order. All of one dtype, to which parameters are cast.
        announced: What servers are told of it when they connect: fields of `receiver.InitInfo`.

    Raises:
        ValueError: The parts contradict each other.
    """

    parameters: dict[str, torch.Tensor]
    tensors: tuple[PublishedTensor, ...]
    announced: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        names = {tensor.spec.name for tensor in self.tensors}
        if not names or len(names) < len(self.tensors):
            raise ValueError(f"{len(self.tensors)} tensors to publish have {len(names)} names")
        if len(dtypes := {tensor.spec.dtype for tensor in self.tensors}) > 1:
            raise ValueError(f"tensors to publish have several dtypes: {sorted(map(str, dtypes))}")
        for tensor in self.tensors:
            shape = self.parameters[tensor.parameter].shape
            inside = len(tensor.box) == len(shape) and all(
                start >= 0 and start + length <= size for (start, length), size in zip(tensor.box, shape, strict=True)
            )
            if not inside or math.prod(tensor.box_shape) != math.prod(tensor.spec.shape):
                raise ValueError(
                    f"{tensor.spec.name} {tensor.spec.shape} cannot be the part {tensor.box} of {tensor.parameter} "
                    f"{tuple(shape)}"
                )

    def whole_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Hugging Face name and tensor of each, as it is sent. Collective."""
        for name, of_parameter in itertools.groupby(self.tensors, lambda tensor: tensor.parameter):
            full = full_tensor(self.parameters[name].detach())
            for tensor in of_parameter:
                part = full[tuple(slice(start, start + length) for start, length in tensor.box)]
                part = tensor.rearrange(part) if tensor.rearrange is not None else part.reshape(tensor.spec.shape)
                yield tensor.spec.name, part.to(tensor.spec.dtype).contiguous()

    @property
    def dtype(self) -> torch.dtype:
        """On the wire."""
        return self.tensors[0].spec.dtype


def whole(shape: torch.Size | tuple[int, ...]) -> Slices:
    """The box that is all of a parameter."""
    return tuple((0, size) for size in shape)


def published_weights(model: nn.Module, source: ModelSource, dtype: torch.dtype) -> PublishedWeights:
    """What a run publishes: its adapters with `[lora]`, else all weights of its model. Collective."""
    if source.lora is not None:
        return adapter_weights(model, source.adapter, source.lora, dtype, source.folder.name)
    return model_weights(model, source.adapter, dtype, source.tied)


def model_weights(model: nn.Module, adapter: Any, dtype: torch.dtype, tied: bool) -> PublishedWeights:
    """All weights of a model, in the model's order.

    The adapter is called with meta tensors to learn names and shapes: no weights move. A parameter that it drops (a
    tied output layer) is not sent. One that it takes apart (stacked experts) is sent in these parts.

    Args:
        model: Parallelised model, with its optimizer made.
        adapter: torchtitan's state-dict adapter; `to_hf` takes partial state dicts.
        dtype: Precision on the wire.
        tied: The model's output layer is its embedding.

    Raises:
        UserError: `tied` contradicts the adapter.
        ValueError: The adapter makes several tensors of a parameter that are not its rows.
    """
    _reshard(model)
    parameters, tensors = {}, []
    for raw_name, parameter in model.named_parameters():
        name = canonical_name(raw_name)
        probe = torch.empty(parameter.shape, dtype=dtype, device="meta")
        converted = adapter.to_hf({name: probe})
        if len(converted) > 1:
            parameters[name] = parameter
            tensors += _rows(name, parameter, converted, dtype)
            continue
        for hf_name, value in converted.items():
            parameters[name] = parameter
            rearrange = None if value is probe else functools.partial(_converted, adapter, name)
            spec = TensorSpec(hf_name, dtype, tuple(value.shape))
            tensors.append(PublishedTensor(spec, name, whole(parameter.shape), rearrange))
    sends_output = any(tensor.spec.name == "lm_head.weight" for tensor in tensors)
    if sends_output == tied:
        raise UserError(
            f"[model] tied is {tied}, but the adapter {'gives' if sends_output else 'drops'} lm_head.weight"
        )
    return PublishedWeights(parameters, tuple(tensors))


def _rows(
    name: str, parameter: torch.Tensor, converted: dict[str, torch.Tensor], dtype: torch.dtype
) -> list[PublishedTensor]:
    """Each row of a stacked parameter as a tensor of its own, in the adapter's order, which is that of the rows."""
    rows, shape = parameter.shape[0], parameter.shape[1:]
    if len(converted) != rows or any(value.shape != shape for value in converted.values()):
        raise ValueError(f"{name} {tuple(parameter.shape)} becomes {len(converted)} tensors that are not its rows")
    boxes = [((row, 1), *whole(shape)) for row in range(rows)]
    specs = [TensorSpec(hf_name, dtype, tuple(shape)) for hf_name in converted]
    return [PublishedTensor(spec, name, box) for spec, box in zip(specs, boxes, strict=True)]


def adapter_weights(model: nn.Module, adapter: Any, lora: Lora, dtype: torch.dtype, base_name: str) -> PublishedWeights:
    """The LoRA adapters of a model under PEFT's names, in the model's order. Servers have the frozen weights already.

    The weights are gathered one at a time for their fingerprints. It is collective.

    Args:
        model: Parallelised model with adapters, with its optimizer made and its frozen weights loaded.
        adapter: torchtitan's state-dict adapter.
        lora: How the adapters apply.
        dtype: Precision on the wire.
        base_name: Of the folder that the frozen weights are from.
    """
    _reshard(model)
    named = ((canonical_name(name), parameter) for name, parameter in model.named_parameters())
    parameters = {name: parameter for name, parameter in named if is_adapter(name)}
    names, tensors = PeftNames(adapter, {name: value.shape for name, value in parameters.items()}), []
    for name, parameter in parameters.items():
        order = names.order(name)
        rearrange = None if order is None else functools.partial(_ordered, order)
        spec = TensorSpec(names.name(name), dtype, tuple(parameter.shape))
        tensors.append(PublishedTensor(spec, name, whole(parameter.shape), rearrange))
    info = AdapterInfo(lora.rank, lora.alpha, base_name, base_fingerprints(model, adapter))
    return PublishedWeights(parameters, tuple(tensors), {"adapter": asdict(info)})


def base_fingerprints(model: nn.Module, adapter: Any) -> dict[str, str]:
    """Hugging Face name -> fingerprint of each frozen weight, whatever its shards. Collective."""
    found: dict[str, str] = {}
    for name, value in get_model_state_dict(model).items():
        if not is_adapter(name):
            converted = adapter.to_hf({name: full_tensor(value)})
            found |= {hf_name: fingerprint(tensor) for hf_name, tensor in converted.items()}
    return found


def _reshard(model: nn.Module) -> None:
    """An evaluation may have left parameters gathered."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def _ordered(order: torch.Tensor, full: torch.Tensor) -> torch.Tensor:
    return full[order.to(full.device)]


def _converted(adapter: Any, name: str, full: torch.Tensor) -> torch.Tensor:
    (value,) = adapter.to_hf({name: full}).values()
    return value
