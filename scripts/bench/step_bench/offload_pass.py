"""Steps of ours with a pass of log-probabilities before them, the optimizer state on the host meanwhile or not."""

import statistics
from collections.abc import Callable, Iterator
from typing import Any

import torch

from torchtitan.grpo.offload.optimizer_states import HostOptimizerStates, OptimizerStateOffload
from torchtitan.grpo.offload.pinned import local_tensor

from .contenders import Contender, ours
from .measure import GIB, Stopwatch, device_name, reset_peak, synchronize, update
from .setup import Setup

MOMENTS = ("exp_avg", "exp_avg_sq")


def offload_pass(setup: Setup) -> Iterator[dict[str, Any]]:
    """One row for each way, on the same model; what a way exposes is its step's time over that of `off`.

    `freed` is memory allocated within the window less than before it; `window` the most that is held within it.
    """
    contender = ours(setup)
    update(setup, contender)  # makes the state
    state = sum(local_tensor(tensor).nbytes for _, tensor in _moments(contender))
    ahead = OptimizerStateOffload(contender.optimizers, setup.device)
    ways: dict[str, tuple[Callable[[], None], Callable[[], None]]] = {
        "off": (_nothing, _nothing),
        "blocking .to()": (lambda: _move(contender, "cpu"), lambda: _move(contender, setup.device)),
        "offload_optimizer_states_for_logprob": (ahead.begin_out, ahead.begin_in),
    }
    base_ms = None
    for way, (before, after) in ways.items():
        found = _measure(setup, contender, before, after)
        base_ms = base_ms or found["step_ms"]
        ahead.metrics()
        yield _row(setup, way, found, state, base_ms)
    # Last: from then on the state is the host's.
    host = HostOptimizerStates(contender.optimizers, setup.device)
    host.to_host()
    contender.optimizers = _Stepper(contender.optimizers, host)
    found = _measure(setup, contender, _nothing, _nothing)
    yield _row(setup, 'optimizer_states = "host"', found | {"freed_gib": state / GIB}, state, base_ms)


class _Stepper:
    """An optimizer whose step is another's."""

    def __init__(self, optimizers: Any, steps: HostOptimizerStates):
        self.zero_grad, self.step = optimizers.zero_grad, steps.step


def _measure(
    setup: Setup, contender: Contender, before: Callable[[], None], after: Callable[[], None]
) -> dict[str, float]:
    steps = []
    for i in range(setup.job["warmup"] + setup.job["steps"]):
        contender.optimizers.zero_grad()
        synchronize(setup.device)
        held = _allocated(setup.device)
        watch = Stopwatch(setup.device)
        watch.mark()
        before()
        freed = held - _allocated(setup.device)
        reset_peak(setup.device)
        contender.logprobs()
        window = torch.cuda.max_memory_allocated(setup.device) if setup.device.type == "cuda" else 0
        reset_peak(setup.device)
        after()
        update(setup, contender)
        watch.mark()
        synchronize(setup.device)
        peak = torch.cuda.max_memory_allocated(setup.device) if setup.device.type == "cuda" else 0
        if i >= setup.job["warmup"]:
            steps.append(watch.laps_ms()[0])
    return {
        "step_ms": statistics.median(steps),
        "freed_gib": freed / GIB,
        "window_gib": window / GIB,
        "peak_gib": peak / GIB,
    }


def _row(setup: Setup, way: str, found: dict[str, float], state: int, base_ms: float) -> dict[str, Any]:
    exposed = {"exposed_ms": found["step_ms"] - base_ms}
    return {"way": way, **found, **exposed, "state_gib": state / GIB, "device": device_name(setup.device)}


def _allocated(device: torch.device) -> int:
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else 0


def _moments(contender: Contender) -> Iterator[tuple[dict[str, Any], torch.Tensor]]:
    for optimizer in contender.optimizers:
        for state in optimizer.state.values():
            for name in MOMENTS:
                yield state, state[name]


def _move(contender: Contender, device: torch.device | str) -> None:
    """What trainers do that offload with `.to()`: pageable memory, and the host waits for each copy."""
    for optimizer in contender.optimizers:
        for state in optimizer.state.values():
            for name in MOMENTS:
                state[name] = state[name].to(device)


def _nothing() -> None:
    pass
