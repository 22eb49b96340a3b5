"""`[lora]` in checkpoints: the adapters alone, and what says which frozen weights they belong to."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
from torch.distributed.checkpoint.stateful import Stateful

from torchtitan.grpo.errors import UserError
from torchtitan.grpo.model.lora import Lora, is_adapter
from torchtitan.grpo.model.peft_folder import adapter_state
from torchtitan.grpo.model.shards import whole
from torchtitan.grpo.weight_wire.buckets import ALIGNMENT_BYTES, Checksum, combine_checksums

BASE = "base"
"""Name of `BaseState` among a checkpoint's states."""


class AdapterState(Stateful):
    """The adapters of a model."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model

    def state_dict(self) -> dict[str, Any]:
        return adapter_state(self._model)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        set_model_state_dict(self._model, state_dict, options=StateDictOptions(strict=False))


class BaseState(Stateful):
    """Which frozen weights a checkpoint's adapters belong to, and how strongly they apply: nothing that is loaded.

    The first `state_dict` gathers the weights one at a time. It is collective.
    """

    def __init__(self, model: nn.Module, lora: Lora) -> None:
        self._model, self._scaling = model, lora.scaling
        self._checksum: int | None = None

    def state_dict(self) -> dict[str, Any]:
        if self._checksum is None:
            self._checksum = base_checksum(self._model)
        # New tensors: DCP reads what a checkpoint has into them.
        return {"checksum": torch.tensor(self._checksum), "scaling": torch.tensor(self._scaling, dtype=torch.float64)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """
        Raises:
            UserError: The checkpoint's adapters are of other weights, or apply with another factor.
        """
        if int(state_dict["checksum"]) != self._checksum:
            found = f"{int(state_dict['checksum']):016x}, and these have {self._checksum:016x}"
            raise UserError(
                f"the checkpoint's adapters belong to weights with the checksum {found}: restore [model], [training] "
                "mixed_precision_param, and for random weights [debug] seed and the number of ranks"
            )
        if float(state_dict["scaling"]) != self._scaling:
            raise UserError(
                f"the checkpoint's adapters apply with [lora] alpha / rank = {float(state_dict['scaling']):g}, not "
                f"{self._scaling:g}: restore both"
            )


@torch.no_grad()
def base_checksum(model: nn.Module) -> int:
    """Of all frozen weights, whatever their shards: 64 bits, signed. Collective."""
    sums: list[Tensor] = []
    for name, value in get_model_state_dict(model).items():
        if not is_adapter(name):
            full = whole(value).contiguous().flatten().view(torch.uint8)
            full = torch.nn.functional.pad(full, (0, -len(full) % ALIGNMENT_BYTES))
            sums.append(Checksum(full.device, len(full))(full))
    return combine_checksums(torch.stack(sums).tolist())
