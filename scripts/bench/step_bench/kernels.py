"""Where a step's device time goes, kernel by kernel."""

import re
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from .measure import synchronize

CLASSES = {
    "communication": r"nccl|c10d::|gloo",
    "attention": r"flash|fmha|scaled_dot_product|varlen|attention",
    "optimizer": r"adam|lpnorm|_foreach_norm|clip_grad",
    "matmul": r"gemm|nvjet|cutlass|cublas|xmma|splitk|aten::(mm|addmm|bmm|addmm_|matmul|linear)$",
    "copy": r"memcpy|memset|copy_|catarray|aten::cat$",
}
"""A kernel's class is the first whose pattern matches its name. The rest is elementwise work, norms and look-ups."""
OTHER = "elementwise and other"
TOP = 20


def kernel_class(name: str) -> str:
    return next((title for title, pattern in CLASSES.items() if re.search(pattern, name, re.IGNORECASE)), OTHER)


def profile_step(step: Callable[[], object], device: torch.device, trace: Path) -> dict[str, list[dict[str, Any]]]:
    """Run `step` under torch.profiler and write a Chrome trace.

    Returns:
        `shares` of each class, and the `kernels` that take most time. On a CPU these are operators.
    """
    on_cuda = device.type == "cuda"
    activities = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if on_cuda else [])
    with profile(activities=activities) as profiler:
        step()
        synchronize(device)
    trace.parent.mkdir(parents=True, exist_ok=True)
    profiler.export_chrome_trace(str(trace))
    times_ms: dict[str, float] = {}
    counts: dict[str, int] = {}
    for event in profiler.key_averages():
        if on_cuda and event.device_type != torch.autograd.DeviceType.CUDA:
            continue  # an operator: its kernels have lines of their own
        if on_cuda and getattr(event, "is_user_annotation", False):
            continue  # a range on the device's time line, not a kernel
        own_us = event.self_device_time_total if on_cuda else event.self_cpu_time_total
        times_ms[event.key] = times_ms.get(event.key, 0.0) + own_us / 1e3
        counts[event.key] = counts.get(event.key, 0) + event.count
    total = sum(times_ms.values()) or 1.0
    by_class: dict[str, float] = defaultdict(float)
    for name, spent in times_ms.items():
        by_class[kernel_class(name)] += spent

    def row(name: str, spent: float) -> dict[str, Any]:
        return {"name": name, "ms": spent, "percent": 100 * spent / total}

    longest = sorted(times_ms.items(), key=lambda item: -item[1])[:TOP]
    return {
        "shares": [row(*item) for item in sorted(by_class.items(), key=lambda item: -item[1])],
        "kernels": [row(*item) | {"class": kernel_class(item[0]), "count": counts[item[0]]} for item in longest],
    }
