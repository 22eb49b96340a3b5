"""A version of the trainer's LoRA adapters in a worker: tensors that have arrived become vLLM's adapter.

vLLM computes with slots, buffers that its CUDA graphs know. `ServedAdapters` keeps the tensors of the version in
service, and puts them into the one slot. vLLM may drop an adapter and ask for it again: at the end of its start, and
from 0.32 on after each weight update. It then asks `WorkerLoRAManager._load_adapter`, which would read files. For our
adapter the hook here answers from the tensors, and with an adapter of zeros before there are any.
"""

import functools
from typing import Any

import torch
from vllm.lora.lora_model import LoRAModel
from vllm.lora.peft_helper import PEFTHelper
from vllm.lora.worker_manager import WorkerLoRAManager

from torchtitan.grpo.inside_vllm.adapter_requests import ID
from torchtitan.grpo.weight_wire.adapters import AdapterInfo, adapted_layers
from torchtitan.grpo.weight_wire.refusals import ADAPTERS

_ZEROS_RANK = 8
_served: "ServedAdapters | None" = None
"""Of this process, which has one worker."""


class ServedAdapters:
    """The adapters of the version in service.

    Args:
        manager: vLLM's manager of the model's slots.
        config: vLLM's configuration of LoRA.
        device: Where the model computes.
    """

    def __init__(self, manager: Any, config: Any, device: torch.device) -> None:
        self._manager, self._config, self._device = manager, config, device
        self._info: AdapterInfo | None = None
        self._tensors: dict[str, torch.Tensor] = {}

    def check(self, info: AdapterInfo, names: list[str], every_layer_is_here: bool) -> None:
        """Whether the server has a place for adapters of these names.

        Args:
            every_layer_is_here: Not with pipeline parallelism: a worker then has a part of the layers.

        Raises:
            ValueError: It has not. vLLM itself would leave out layers that it does not adapt.
        """
        if info.rank > self._config.max_lora_rank:
            raise ValueError(
                f"{ADAPTERS} rank = {info.rank} is over the server's --max-lora-rank {self._config.max_lora_rank}: "
                "start the server with a greater one, or lower the rank"
            )
        packed = {part for parts in self._manager.packed_modules.values() for part in parts}
        unknown = [layer for layer in adapted_layers(names) if layer not in packed | set(self._manager.modules)]
        if unknown and every_layer_is_here:
            raise ValueError(f"{ADAPTERS} this server has no place for an adapter of {unknown[0]}")

    def serve(self, info: AdapterInfo, tensors: dict[str, torch.Tensor]) -> None:
        """Put a version into the slot, in place of the one before. No step of the model may run."""
        self._info, self._tensors = info, tensors
        self._manager.remove_adapter(ID)
        self._manager.add_adapter(self.model())
        self._manager.activate_adapter(ID)

    def model(self) -> LoRAModel:
        """The adapters as vLLM's object, which owns its tensors: vLLM scales them in place."""
        if self._info is None:
            embeddings = getattr(self._manager.model, "embedding_modules", {})
            return self._manager.create_dummy_lora(ID, min(_ZEROS_RANK, self._config.max_lora_rank), embeddings)
        layers = sorted({layer.rpartition(".")[2] for layer in adapted_layers(self._tensors)})
        own = {name: value.to(self._config.lora_dtype, copy=True) for name, value in self._tensors.items()}
        helper = PEFTHelper(r=self._info.rank, lora_alpha=self._info.alpha, target_modules=layers)
        return LoRAModel.from_lora_tensors(ID, own, helper, device=self._device, dtype=self._config.lora_dtype)


def install(model: torch.nn.Module, config: Any, device: torch.device) -> ServedAdapters:
    """Serve the trainer's adapters in this worker.

    Args:
        model: With vLLM's LoRA layers.
        config: vLLM's configuration of LoRA.
    """
    global _served
    _served = ServedAdapters(model.lora_manager, config, device)
    load = WorkerLoRAManager._load_adapter
    if not getattr(load, "knows_ours", False):

        @functools.wraps(load)
        def load_ours_or_files(self: Any, lora_request: Any) -> Any:
            ours = lora_request.lora_int_id == ID and _served is not None
            return _served.model() if ours else load(self, lora_request)

        load_ours_or_files.knows_ours = True  # type: ignore[attr-defined]
        WorkerLoRAManager._load_adapter = load_ours_or_files
    return _served
