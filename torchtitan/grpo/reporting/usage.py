"""What the trainers' devices did in a step: tokens and FLOPs a second, memory, GPU hours."""

import os
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from torchtitan.config import JobConfig
from torchtitan.grpo.config.machine import shares_gpu
from torchtitan.grpo.engines.fleet import Fleet
from torchtitan.tools.utils import device_module, get_peak_flops

_GIB = 2**30
_KINDS = ("allocated", "reserved")
_STARTED = time.monotonic()


class Usage:
    """Tokens, FLOPs, memory and GPU hours of the steps. For rank 0, but for `peaks`. Nothing here waits for a device.

    Args:
        flops: Of documents' lengths, the number of answer tokens, and what documents share, see `model/flops.py`.
        device: This rank's. Memory, MFU and GPU hours are of GPUs only.
        ranks: Trainer processes, each with a device.
        spent_gpu_hours: By earlier runs that this one continues.
    """

    def __init__(
        self,
        config: JobConfig,
        flops: Callable[[Sequence[int], int, Sequence[int]], float],
        device: torch.device,
        ranks: int,
        spent_gpu_hours: float = 0.0,
    ) -> None:
        self._flops, self._device, self._ranks = flops, device, ranks
        self._on_gpu = self._device.type != "cpu"
        name = device_module.get_device_name(self._device) if self._on_gpu else ""
        self._peak_flops = get_peak_flops(name) if self._on_gpu else 0.0
        self._gpu_hours, self._counted_until = spent_gpu_hours, _STARTED
        trainers_here = int(os.environ.get("LOCAL_WORLD_SIZE", ranks))
        self._shares = self._on_gpu and shares_gpu(config, torch.cuda.device_count(), trainers_here)

    def work(self, lengths: Sequence[int], shared: Sequence[int], answer_tokens: int) -> dict[str, float]:
        """Tokens and FLOPs of a step's packed rows, of which `rows.documents` tells this."""
        return {"train/tokens": sum(lengths), "train/tflop": self._flops(lengths, answer_tokens, shared) / 1e12}

    def metrics(self, step: dict[str, Any], times: dict[str, float], fleet: Fleet | None) -> dict[str, float]:
        """Speeds of the step, memory and GPU hours now.

        Args:
            step: The step's other metrics. Without `train/tokens` no step was trained, and there are no speeds.
            times: Its seconds, from `Ledger.close_step`.
            fleet: Whose GPU hours count too.
        """
        result = speeds(step, times, self._ranks, self._peak_flops)
        return (result | self._memory() | self._cost(fleet)) if self._on_gpu else result

    def peaks(self, rank: int, ranks: int) -> dict[str, torch.Tensor]:
        """On each of `ranks` data-parallel ranks: the most memory since the last call, for a sum over ranks.

        Returns:
            `memory_peaks` of this device; nothing without a GPU.
        """
        if not self._on_gpu:
            return {}
        stats = device_module.memory_stats(self._device)
        device_module.reset_peak_memory_stats(self._device)
        return memory_peaks(stats, rank, ranks, self._device)

    def _memory(self) -> dict[str, float]:
        """Of rank 0's device now, by torch's allocator."""
        stats = device_module.memory_stats(self._device)
        return {
            "memory/allocated_gib": stats["allocated_bytes.all.current"] / _GIB,
            "memory/reserved_gib": stats["reserved_bytes.all.current"] / _GIB,
            "memory/alloc_retries": stats["num_alloc_retries"],
        }

    def _cost(self, fleet: Fleet | None) -> dict[str, float]:
        others = fleet.servers if fleet and not self._shares else []  # a replay has none
        servers = sum(server.control.workers for server in others)
        now = time.monotonic()
        self._gpu_hours += (now - self._counted_until) / 3600 * (self._ranks + servers)
        self._counted_until = now
        return {"cost/gpu_hours": self._gpu_hours}


def memory_peaks(stats: Mapping[str, int], rank: int, ranks: int, device: torch.device) -> dict[str, torch.Tensor]:
    """Peak bytes as vectors by rank, `[ranks]`, with this rank's entry. So their sum over ranks has every rank's."""
    vectors = {}
    for kind in _KINDS:
        vectors[f"{kind}_peak"] = torch.zeros(ranks, dtype=torch.float64, device=device)
        vectors[f"{kind}_peak"][rank] = stats[f"{kind}_bytes.all.peak"]  # does not wait for the device
    return vectors


def highest_peaks(sums: Mapping[str, Any]) -> dict[str, float]:
    """Metrics of the sums of `memory_peaks` over ranks: the fullest device's. Nothing if they are not among `sums`."""
    return {f"memory/{kind}_peak_gib": max(sums[f"{kind}_peak"]) / _GIB for kind in _KINDS if f"{kind}_peak" in sums}


def speeds(step: dict[str, Any], times: dict[str, float], ranks: int, peak_flops: float) -> dict[str, float]:
    """Tokens a second and MFU; empty for a step that trained nothing.

    Args:
        step, times: See `Usage.metrics`.
        peak_flops: Of one device, 0 if there is no MFU.
    """
    step_s, update_s = times.get("time/step_s"), times.get("time/train_s")
    if "train/tokens" not in step or not step_s or not update_s:
        return {}
    sampled = step.get("rollout/answer_tokens")  # supervised training samples none
    result = {} if sampled is None else {"throughput/answer_tokens_per_s": sampled / step_s}
    result |= {
        "throughput/answer_tokens_per_s_per_gpu": step["train/answer_tokens"] / step_s / ranks,
        "throughput/tokens_per_s_per_gpu": step["train/tokens"] / step_s / ranks,
        "throughput/update_tokens_per_s_per_gpu": step["train/tokens"] / update_s / ranks,
    }
    if peak_flops:
        share = step["train/tflop"] * 1e12 / peak_flops / ranks
        result |= {"throughput/mfu": share / update_s, "throughput/step_mfu": share / step_s}
    return result
