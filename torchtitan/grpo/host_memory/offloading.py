"""`[offload]`: the reference model's weights on the host, and the whole section as one object for the trainer."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from torchtitan.components.optimizer import OptimizersContainer
from torchtitan.grpo.config.job_config import Offload
from torchtitan.grpo.host_memory.block_inputs import BlockInputs
from torchtitan.grpo.host_memory.optimizer_states import HostOptimizerStates, OptimizerStateOffload
from torchtitan.grpo.host_memory.pinned import CopyStream, PinnedTwin, local_tensor


class HostedWeights:
    """`[offload] reference_weights = "host"`: a frozen model whose weights are on the device only while it is used.

    Call `begin_in` early, `finish` before the first forward, and `release` when the last forward has been enqueued.
    `state_dict` and `load_state_dict` bring the weights to the device, where they stay until `release`. A forward
    changes no weights, so they are copied to the host once, and again after these two calls.

    Args:
        model: With or without FSDP2; after `to_empty`. Its buffers stay on the device.
        device: Where it computes.

    Raises:
        ValueError: The model is trained.
    """

    def __init__(self, model: nn.Module, device: torch.device):
        if any(parameter.requires_grad for parameter in model.parameters()):
            raise ValueError("weights that are trained cannot be kept on the host: only those of a frozen model")
        self._model = model
        self._copies = CopyStream(device)
        self._twin: PinnedTwin | None = None
        self._changed = True
        # A checkpoint is loaded into the tensors that `state_dict` returned, so both calls may change weights.
        model.register_state_dict_pre_hook(self._hand_out)
        model.register_load_state_dict_pre_hook(self._hand_out)

    def begin_in(self) -> None:
        """Start copying the weights to the device, after what the compute stream holds now."""
        if self._twin is not None and not self._twin.on_device:
            self._twin.load()

    def finish(self) -> None:
        """From now on, work on the compute stream finds the weights on the device."""
        self.begin_in()
        if self._twin is not None:
            self._twin.use()

    @torch.no_grad()
    def release(self) -> None:
        """Free the weights' device memory, after what the compute stream holds now.

        The first call takes seconds: it allocates pinned host memory of their size.
        """
        if self._twin is not None and not self._twin.on_device:
            return
        for module in self._model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()  # the root keeps its parameters gathered after a forward
        if self._twin is None:
            storages = [local_tensor(parameter).untyped_storage() for parameter in self._model.parameters()]
            distinct = {storage._cdata: storage for storage in storages if storage.nbytes()}
            self._twin = PinnedTwin(list(distinct.values()), self._copies)
        if self._changed:
            self._twin.save()
            self._changed = False
        self._twin.empty()

    def _hand_out(self, *_: object) -> None:
        self.finish()
        self._changed = True

    def metrics(self) -> dict[str, float]:
        """Metrics since the last call. Waits for copies.

        Returns:
            `offload/reference_freed_gib`: memory freed, 0 while the weights are on the device.
            `offload/reference_in_s`: seconds of copying them to the device.
            `offload/reference_exposed_s`: seconds that the compute stream waited for it.
        """
        seconds = self._copies.take_seconds()
        on_host = self._twin is not None and not self._twin.on_device
        return {
            "offload/reference_freed_gib": self._twin.nbytes / 2**30 if on_host else 0.0,
            "offload/reference_in_s": seconds.get("in", 0.0),
            "offload/reference_exposed_s": seconds.get("exposed", 0.0),
        }


class Offloading:
    """All of `[offload]` for one trainer. Parts that are off do nothing.

    Args:
        optimizers: torchtitan's container of the model's optimizers.
        reference: The reference model, if there is one.
        link_free: See `OptimizerStateOffload`.
        inputs: The model's, with `[activation_checkpoint] offload`; for their metrics.
    """

    def __init__(
        self,
        config: Offload,
        optimizers: OptimizersContainer,
        reference: nn.Module | None,
        device: torch.device,
        link_free: Callable[[], bool],
        inputs: BlockInputs | None = None,
    ):
        window, on_host = config.offload_optimizer_states_for_logprob, config.optimizer_states == "host"
        hosted = reference is not None and config.reference_weights == "host"
        self._optimizers = optimizers
        self._window = OptimizerStateOffload(optimizers, device, link_free) if window else None
        self._states = HostOptimizerStates(optimizers, device) if on_host else None
        self._reference = HostedWeights(reference, device) if hosted else None
        self._inputs = inputs

    def settle(self) -> None:
        """Call after a checkpoint was loaded or saved, which leaves everything on the device."""
        if self._reference:
            self._reference.release()
        if self._states:
            self._states.to_host()

    def prefetch(self) -> None:
        """Call when log-probabilities will be computed soon."""
        if self._reference:
            self._reference.begin_in()

    @contextmanager
    def logprobs(self) -> Iterator[None]:
        """Surrounds the passes that compute fixed log-probabilities. Its end must not wait for the device."""
        if self._window:
            self._window.begin_out()
        if self._reference:
            self._reference.finish()
        yield
        if self._reference:
            self._reference.release()
        if self._window:
            self._window.begin_in()

    def poll(self) -> None:
        """Call between rows: starts copies that waited for the link."""
        if self._window:
            self._window.poll()

    def step(self) -> None:
        """The optimizer step, wherever the state is."""
        (self._states or self._optimizers).step()

    def metrics(self) -> dict[str, float]:
        """The metrics of all four classes. Call it once per step, on every rank."""
        parts = [part.metrics() for part in (self._window, self._states, self._reference, self._inputs) if part]
        return {name: value for part in parts for name, value in part.items()}
