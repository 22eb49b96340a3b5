"""Steps of ours after a pass of log-probabilities, with the optimizer state on the device or on the host."""

import statistics
from collections.abc import Callable, Iterator
from typing import Any

import torch

from torchtitan.grpo.host_memory.optimizer_states import HostOptimizerStates, OptimizerStateOffload
from torchtitan.grpo.host_memory.pinned import local_tensor

from .contenders import Contender, ours
from .measure import GIB, Stopwatch, allocated, device_name, peak_allocated, reset_peak, synchronize, update
from .setup import Setup

Call = Callable[[], object]


def offload_pass(setup: Setup) -> Iterator[dict[str, Any]]:
    """One row for each way, on the same model; `exposed_ms` is its step time over that of `off`.

    `freed_gib` is memory allocated during the pass less than before it, `window_gib` the most held during the pass.
    """
    contender = ours(setup)
    update(setup, contender)  # makes the state
    state = sum(local_tensor(state[name]).nbytes for state, name in _moments(contender))

    def move(device: torch.device | str) -> None:
        """As trainers do that offload with `.to()`: to pageable memory, and the host waits for each copy."""
        for held, name in _moments(contender):
            held[name] = held[name].to(device)

    base_ms = None

    def row(way: str, before: Call = lambda: None, after: Call = lambda: None, **known: float) -> dict[str, Any]:
        nonlocal base_ms
        found = _measure(setup, contender, before, after) | known
        base_ms = base_ms or found["step_ms"]
        found |= {"exposed_ms": found["step_ms"] - base_ms, "state_gib": state / GIB}
        return {"way": way, **found, "device": device_name(setup.device)}

    yield row("off")
    yield row("blocking .to()", lambda: move("cpu"), lambda: move(setup.device))
    ahead = OptimizerStateOffload(contender.optimizers, setup.device)
    yield row("offload_optimizer_states_for_logprob", ahead.begin_out, ahead.begin_in)
    ahead.metrics()
    # Last: from then on the state stays on the host.
    host = HostOptimizerStates(contender.optimizers, setup.device)
    host.to_host()
    contender.optimizers.step = host.step
    yield row('optimizer_states = "host"', freed_gib=state / GIB)


def _measure(setup: Setup, contender: Contender, before: Call, after: Call) -> dict[str, float]:
    steps = []
    for _ in range(setup.job["warmup"] + setup.job["steps"]):
        contender.optimizers.zero_grad()
        synchronize(setup.device)
        held = allocated(setup.device)
        watch = Stopwatch(setup.device)
        watch.mark()
        before()
        freed = held - allocated(setup.device)
        reset_peak(setup.device)
        contender.logprobs()
        window = peak_allocated(setup.device)
        reset_peak(setup.device)
        after()
        update(setup, contender)
        watch.mark()
        steps.append(watch.laps_ms()[0])
        peak = peak_allocated(setup.device)
    step_ms = statistics.median(steps[setup.job["warmup"] :])
    return {"step_ms": step_ms, "freed_gib": freed / GIB, "window_gib": window / GIB, "peak_gib": peak / GIB}


def _moments(contender: Contender) -> Iterator[tuple[dict[str, Any], str]]:
    """(state of a parameter, name of a moment in it)."""
    for optimizer in contender.optimizers:
        for state in optimizer.state.values():
            yield from ((state, name) for name in ("exp_avg", "exp_avg_sq"))
