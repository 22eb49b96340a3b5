"""What DCP writes and reads of a run: weights, optimizer state and learning-rate schedule."""

from typing import Any, Protocol

from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from torch.distributed.checkpoint.stateful import Stateful

from torchtitan.components.lr_scheduler import LRSchedulersContainer
from torchtitan.components.optimizer import OptimizersContainer
from torchtitan.grpo.checkpoint.adapters import BASE, AdapterState, BaseState
from torchtitan.grpo.checkpoint.together import Together
from torchtitan.grpo.host_memory.host_copy import HostCopy
from torchtitan.grpo.model.lora import Lora


class _ModelState(Stateful):
    def __init__(self, model: nn.Module) -> None:
        self.model = model

    def state_dict(self) -> dict[str, Any]:
        return get_model_state_dict(self.model)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        set_model_state_dict(self.model, state_dict)


class Trained(Protocol):
    """The part of `run.policy.Policy` that is saved."""

    model: nn.Module
    reference: nn.Module | None
    optimizers: OptimizersContainer
    lr_schedulers: LRSchedulersContainer


def states_of(policy: Trained, lora: Lora | None) -> dict[str, Stateful]:
    """The states by name. With `lora` the model's adapters are saved, not its frozen weights."""
    of_model = _ModelState(policy.model) if lora is None else AdapterState(policy.model)
    states = {"model": of_model, "optimizer": policy.optimizers, "lr_scheduler": policy.lr_schedulers}
    if lora is not None:
        states[BASE] = BaseState(policy.model, lora)
    if policy.reference is not None:
        states["reference"] = _ModelState(policy.reference)
    return states


def collect(states: dict[str, Stateful], together: Together, host_copy: HostCopy | None = None) -> dict[str, Any]:
    """What DCP writes and reads. DCP would collect it itself, but its ranks do not learn of a failure there.

    Args:
        host_copy: It takes the tensors, so that they may change. None: they are the run's own.

    Raises:
        StageFailed: On every rank.
    """
    collected: dict[str, Any] = {}

    def collect_own() -> None:
        own = {name: state.state_dict() for name, state in states.items()}
        collected.update(own if host_copy is None else host_copy.take(own))

    together.locally("collecting weights and optimizer state", collect_own)
    return collected
