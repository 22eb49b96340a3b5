"""Optimizer state on the host: during the log-probability passes, or permanently.

Copies run on streams of their own and are ordered by device events. The host waits for none of them, except where a
docstring says so. On CPU the same code copies at once.
"""

import enum
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from torchtitan.grpo.host_memory.pinned import FLAT_BYTES, CopyStream, PinnedTwin, local_tensor, put_together

_POLL_S = 0.001


class Phase(enum.Enum):
    """Where the optimizer state is."""

    ON_DEVICE = "on the device"
    LEAVING = "on the device, to leave when the link is free"
    ON_HOST = "on the host"
    RETURNING = "on the host, to return when the link is free"
    ARRIVING = "being copied to the device"


class OptimizerStateOffload:
    """`[offload] offload_optimizer_states_for_logprob`: optimizer state on the host during the log-probability passes.

    Call `begin_out` before the passes, `begin_in` when the last one has been enqueued, and `finish` before the step.
    Calls may be left out or repeated. A step or a `state_dict` (a checkpoint) calls `finish` itself, so the state is
    never missing. Before the first step there is no state, and nothing happens.

    Args:
        optimizers: All optimizers, for instance torchtitan's container.
        device: Where the state lives.
        link_free: Whether the link to the host is free; None means always. While it is busy, no copy starts.
        link_patience_s: Longest wait of the host for the link, in `finish`, where the step needs the state. After it,
            the state is copied beside the other traffic.
    """

    def __init__(
        self,
        optimizers: Iterable[torch.optim.Optimizer],
        device: torch.device,
        link_free: Callable[[], bool] | None = None,
        link_patience_s: float = 1.0,
    ):
        self._optimizers = list(optimizers)
        self._device = device
        self._link_free = link_free or (lambda: True)
        self._link_patience_s = link_patience_s
        self._copies = CopyStream(device)
        self._tensors: list[Tensor] = []
        self._twin: PinnedTwin | None = None
        self._host_s = 0.0
        self._freed = 0
        self._windows = self._skipped = 0
        self.phase = Phase.ON_DEVICE
        for optimizer in self._optimizers:
            optimizer.register_step_pre_hook(lambda *_: self.finish())
            optimizer.register_state_dict_pre_hook(lambda *_: self.finish())
            optimizer.register_load_state_dict_pre_hook(lambda *_: self.finish())

    def begin_out(self) -> None:
        """Copy the state to the host and free its device memory. If the link is busy, `poll` does it later.

        The first call takes seconds: it allocates pinned host memory of the state's size.
        """
        if self.phase in (Phase.LEAVING, Phase.ON_HOST):
            return
        self.finish()
        with self._host_time():
            tensors = [
                tensor
                for optimizer in self._optimizers
                for group in optimizer.param_groups
                for tensor in state_tensors(optimizer, group["params"], self._device)
            ]
            if not tensors:
                return
            if not same_objects(tensors, self._tensors):
                self._twin, self._tensors = None, []  # their memory can be reused
                self._twin = PinnedTwin(put_together(tensors), self._copies)
                self._tensors = tensors
        self._windows += 1
        self.phase = Phase.LEAVING
        self.poll()

    def begin_in(self) -> None:
        """Start copying the state back, after what the compute stream holds now, or later if the link is busy."""
        if self.phase is Phase.LEAVING:
            self.phase = Phase.ON_DEVICE
            self._skipped += 1
        if self.phase is Phase.ON_HOST:
            self.phase = Phase.RETURNING
            self.poll()

    def poll(self) -> None:
        """Start a copy that waits for the link, if the link is free now. Cheap: call it between rows."""
        if self.phase in (Phase.LEAVING, Phase.RETURNING) and self._link_free():
            self._start()

    def finish(self) -> None:
        """From now on, work on the compute stream finds the state on the device."""
        self.begin_in()
        if self.phase is Phase.RETURNING:
            with self._host_time():
                deadline = time.monotonic() + self._link_patience_s
                while not self._link_free() and time.monotonic() < deadline:
                    time.sleep(_POLL_S)
            self._start()
        if self.phase is Phase.ARRIVING:
            self._twin.use()
            self.phase = Phase.ON_DEVICE

    def metrics(self) -> dict[str, float]:
        """Metrics since the last call; empty if there was no window. Waits for copies: call it after the step.

        Returns:
            `offload/freed_gib`: device memory freed.
            `offload/out_s`, `offload/in_s`: seconds of copying each way.
            `offload/exposed_s`: seconds that the compute stream waited for them (on CPU all of them).
            `offload/hidden_s`: the other copy seconds.
            `offload/host_s`: host seconds spent here.
            `offload/skipped`: windows without a free link.
        """
        if not self._windows:
            return {}
        seconds = self._copies.take_seconds()
        out_s, in_s, exposed_s = (seconds.get(name, 0.0) for name in ("out", "in", "exposed"))
        result = _copy_metrics(self._freed, out_s, in_s, exposed_s, self._host_s)
        result["offload/skipped"] = float(self._skipped)
        self._windows = self._skipped = self._freed = 0
        self._host_s = 0.0
        return result

    def _start(self) -> None:
        with self._host_time():
            if self.phase is Phase.LEAVING:
                self._twin.save()
                self._twin.empty()
                self._freed = self._twin.nbytes
                self.phase = Phase.ON_HOST
            else:
                self._twin.load()
                self.phase = Phase.ARRIVING

    @contextmanager
    def _host_time(self) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self._host_s += time.perf_counter() - start


@dataclass
class _Part:
    """Parameters whose state moves together. `twin` is None before their first step."""

    optimizer: torch.optim.Optimizer
    group: int
    parameters: list[Tensor]
    tensors: list[Tensor]
    twin: PinnedTwin | None = None


class HostOptimizerStates:
    """`[offload] optimizer_states = "host"`: the state lives on the host, and a step streams it through the device.

    While one part is stepped, the next is copied in and the previous one is copied out, so the device holds at most
    three parts. Adam is elementwise, so the result is bitwise that of `optimizer.step()`.

    A `state_dict` (a checkpoint) brings the whole state to the device; `to_host` sends it back.

    Args:
        optimizers: All optimizers, for instance torchtitan's container. From now on only `step` steps them.
        device: Where parameters and gradients are.
        part_bytes: State that moves together. The state of a larger parameter moves alone.
    """

    def __init__(self, optimizers: Iterable[torch.optim.Optimizer], device: torch.device, part_bytes: int = FLAT_BYTES):
        self._device = device
        # One stream each way: the link carries both at once.
        self._out, self._in = CopyStream(device), CopyStream(device)
        self._parts: list[_Part] = []
        self._host_s = 0.0
        for optimizer in optimizers:
            optimizer.register_state_dict_pre_hook(lambda *_: self.to_device())
            optimizer.register_load_state_dict_pre_hook(lambda *_: self.to_device())
            for index, group in enumerate(optimizer.param_groups):
                filled = part_bytes
                for parameter in group["params"]:
                    local = local_tensor(parameter)
                    size = 2 * local.numel() * local.itemsize  # both moments
                    if filled + size > part_bytes:
                        self._parts.append(_Part(optimizer, index, [], []))
                        filled = 0
                    self._parts[-1].parameters.append(parameter)
                    filled += size

    def step(self) -> None:
        """Step all parameters. The host waits for the part before the previous one: three parts fit on the device."""
        start = time.perf_counter()
        for index, part in enumerate(self._parts):
            if index >= 2:
                self._wait_emptied(self._parts[index - 2])
            if index == 0:
                self._load(part)
            if index + 1 < len(self._parts):
                self._load(self._parts[index + 1])
            self._step(part)
            self._to_host(part)
        self._host_s += time.perf_counter() - start

    def to_device(self) -> None:
        """From now on, work on the compute stream finds the whole state on the device."""
        for part in self._parts:
            self._load(part)
        for part in self._parts:
            if part.twin is not None:
                part.twin.use()

    def to_host(self) -> None:
        """Move the whole state to the host and free its device memory."""
        for part in self._parts:
            self._to_host(part)

    def metrics(self) -> dict[str, float]:
        """Metrics since the last call, with the names of `OptimizerStateOffload.metrics`. Waits for copies."""
        seconds_out, seconds_in = self._out.take_seconds(), self._in.take_seconds()
        if not (seconds_out or seconds_in):
            return {}
        out_s, in_s = seconds_out.get("out", 0.0), seconds_in.get("in", 0.0)
        exposed_s = seconds_in.get("exposed", 0.0) + seconds_out.get("exposed", 0.0)
        freed = sum(part.twin.nbytes for part in self._parts if part.twin and not part.twin.on_device)
        result = _copy_metrics(freed, out_s, in_s, exposed_s, self._host_s)
        self._host_s = 0.0
        return result

    def _step(self, part: _Part) -> None:
        if part.twin is not None:
            part.twin.use()
        groups = part.optimizer.param_groups
        # Read the group now: the scheduler changes its learning rate, and a loaded state dict replaces it.
        part.optimizer.param_groups = [{**groups[part.group], "params": part.parameters}]
        try:
            part.optimizer.step()
        finally:
            part.optimizer.param_groups = groups

    def _load(self, part: _Part) -> None:
        if part.twin is not None and not part.twin.on_device:
            part.twin.load()

    def _to_host(self, part: _Part) -> None:
        if part.twin is not None and not part.twin.on_device:
            return
        tensors = state_tensors(part.optimizer, part.parameters, self._device)
        if not same_objects(tensors, part.tensors):
            part.twin = PinnedTwin(put_together(tensors), self._out, self._in)
            part.tensors = tensors
        if part.twin is not None:
            part.twin.save()
            part.twin.empty()

    def _wait_emptied(self, part: _Part) -> None:
        """Keep the host from running a whole step ahead: the allocator would find nothing free and hold every part."""
        if part.twin is not None:
            for event in part.twin.emptied:
                event.synchronize()


def _copy_metrics(freed: int, out_s: float, in_s: float, exposed_s: float, host_s: float) -> dict[str, float]:
    return {
        "offload/freed_gib": freed / 2**30,
        "offload/out_s": out_s,
        "offload/in_s": in_s,
        "offload/exposed_s": exposed_s,
        "offload/hidden_s": max(0.0, out_s + in_s - exposed_s),
        "offload/host_s": host_s,
    }


def state_tensors(optimizer: torch.optim.Optimizer, parameters: Iterable[Tensor], device: torch.device) -> list[Tensor]:
    """The parameters' optimizer state that grows with them (moments, not step counters), as local tensors."""
    found = []
    for parameter in parameters:
        for value in optimizer.state.get(parameter, {}).values():
            local = local_tensor(value) if isinstance(value, Tensor) else None
            if local is not None and local.dim() and local.numel() and local.device.type == device.type:
                found.append(local)
    return found


def same_objects(some: Sequence[Tensor], others: Sequence[Tensor]) -> bool:
    """Whether both hold the same tensors. A loaded state dict may have replaced them."""
    return len(some) == len(others) and all(a is b for a, b in zip(some, others, strict=True))
