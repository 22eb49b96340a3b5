"""Time and peak memory of steps."""

import gc
import math
import statistics
import time
from typing import Any

import torch
import torch.distributed as dist

from torchtitan.grpo.policy.gradients import clip_gradients

from .contenders import Contender
from .setup import Setup

GIB = 2**30


class Stopwatch:
    """Marks on the device's time line. The host waits for them only when they are read."""

    def __init__(self, device: torch.device):
        self._cuda = device.type == "cuda"
        self._marks: list[Any] = []

    def mark(self) -> None:
        if self._cuda:
            self._marks.append(torch.cuda.Event(enable_timing=True))
            self._marks[-1].record()
        else:
            self._marks.append(time.perf_counter())

    def laps_ms(self) -> list[float]:
        """Milliseconds between each mark and the next one."""
        if self._cuda:
            torch.cuda.synchronize()
            return [a.elapsed_time(b) for a, b in zip(self._marks, self._marks[1:], strict=False)]
        return [1e3 * (b - a) for a, b in zip(self._marks, self._marks[1:], strict=False)]


def update(setup: Setup, contender: Contender, watch: Stopwatch | None = None) -> torch.Tensor:
    """One step. The watch is marked at its start, before gradients are clipped, and at its end."""
    mark = watch.mark if watch else lambda: None
    mark()
    contender.optimizers.zero_grad()
    negative_logprobs = contender.gradients()
    mark()
    clip_gradients(contender.model, setup.config.training.max_norm)
    contender.optimizers.step()
    mark()
    return negative_logprobs


def measure(setup: Setup, contender: Contender) -> dict[str, Any]:
    """Medians over `--steps` steps after `--warmup`, on this rank, and the peak memory of the rank that needs most.

    Raises:
        RuntimeError: It trains other tokens, or its log-probabilities are not finite.
    """
    job, work = setup.job, setup.work
    if (contender.tokens, contender.trained_tokens) != (work.tokens, work.trained_tokens):
        found = f"{contender.trained_tokens} of {contender.tokens}"
        raise RuntimeError(f"trains {found} tokens, not {work.trained_tokens} of {work.tokens}")
    started = time.monotonic()
    first = update(setup, contender)
    for _ in range(job["warmup"] - 1):
        update(setup, contender)
    synchronize(setup.device)
    warmup_s = time.monotonic() - started
    gc.collect()
    gc.disable()  # as the trainer does, which collects between some steps
    reset_peak(setup.device)
    watch = Stopwatch(setup.device)
    for _ in range(job["steps"]):
        last = update(setup, contender, watch)
    laps = watch.laps_ms()
    step_ms = statistics.median([laps[i] + laps[i + 1] for i in range(0, len(laps), 3)])
    if not math.isfinite(last.item()):
        raise RuntimeError(f"the last step's log-probabilities sum to {last.item()}")
    losses = first.double().clone()
    if setup.data_ranks > 1:
        dist.all_reduce(losses, group=setup.dims.get_mesh("batch").get_group())

    world = dist.get_world_size()
    tokens = work.tokens * setup.data_ranks
    flops = (contender.flops or setup.flops) * setup.data_ranks
    return {
        "parameters": setup.parameters,
        "lora": job["lora"],
        "gpus": world,
        "work": f"{work.microbatches} x {job['tokens']:,}",
        "tokens": tokens,
        "trained_tokens": work.trained_tokens * setup.data_ranks,
        "ac": contender.ac,
        "compile": "yes" if contender.compiled else "no",
        "tokens_per_s_gpu": tokens / world / step_ms * 1e3,
        "mfu_percent": 100 * flops / world / (step_ms / 1e3) / (job["peak_tflops"] * 1e12),
        "step_ms": step_ms,
        "forward_backward_ms": statistics.median(laps[0::3]),
        "optimizer_ms": statistics.median(laps[1::3]),
        "first_loss": losses.item() * setup.token_weight,
        "warmup_s": warmup_s,
        "note": contender.note,
        "device": device_name(setup.device),
        "torch": torch.__version__,
        **peaks(setup.device),
    }


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def reset_peak(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)


def peaks(device: torch.device) -> dict[str, float]:
    """Largest over the ranks, GiB; empty on a CPU."""
    if device.type != "cuda":
        return {}
    values = [torch.cuda.max_memory_allocated(device) / GIB, torch.cuda.max_memory_reserved(device) / GIB]
    largest = torch.tensor(values, device=device)
    dist.all_reduce(largest, dist.ReduceOp.MAX)
    return dict(zip(("peak_gib", "peak_reserved_gib"), largest.tolist(), strict=True))


def device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
