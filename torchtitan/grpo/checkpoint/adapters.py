"""`[lora]` in checkpoints: the adapters alone, and what says which frozen weights they belong to."""

import zlib
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.checkpoint.stateful import Stateful

from torchtitan.grpo.errors import UserError
from torchtitan.grpo.model.lora import Lora
from torchtitan.grpo.model.peft_folder import adapter_state, base_checksum

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
    """Which frozen weights a checkpoint's adapters belong to, where they are and how they apply: nothing is loaded.

    The first `state_dict` gathers the weights one at a time. It is collective.
    """

    def __init__(self, model: nn.Module, lora: Lora) -> None:
        self._model, self._lora = model, lora
        self._checksum: int | None = None

    def state_dict(self) -> dict[str, Any]:
        if self._checksum is None:
            self._checksum = base_checksum(self._model)
        # New tensors: DCP reads what a checkpoint has into them.
        return {
            "checksum": torch.tensor(self._checksum),
            "rank": torch.tensor(self._lora.rank),
            "alpha": torch.tensor(self._lora.alpha, dtype=torch.float64),
            "layers": torch.tensor(zlib.crc32(" ".join(sorted(self._lora.layers)).encode())),
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """
        Raises:
            UserError: The checkpoint's adapters are of other weights or layers, or have another rank or `alpha`.
        """
        saved, own = ({name: each.item() for name, each in of.items()} for of in (state_dict, self.state_dict()))
        if saved["checksum"] != own["checksum"]:
            found, here = (f"{each['checksum'] % 2**64:016x}" for each in (saved, own))
            raise UserError(
                f"the checkpoint's adapters belong to weights with the checksum {found}, and these have {here}: "
                "restore [model], [training] mixed_precision_param, and for random weights [debug] seed and the "
                "number of ranks"
            )
        # DCP would leave out what this run has no place for: fewer layers would lose trained adapters in silence.
        if saved["layers"] != own["layers"]:
            layers = ", ".join(self._lora.layers)
            raise UserError(f"the checkpoint adapts other layers than {layers}: restore [lora] target_modules")
        for key in ("rank", "alpha"):
            if saved[key] != own[key]:
                raise UserError(f"the checkpoint's adapters have [lora] {key} = {saved[key]:g}, not {own[key]:g}")
