"""The machine that a dry run is about. It need not be the one that the dry run is on."""

import os
from dataclasses import dataclass, replace

import torch

from torchtitan.config import JobConfig
from torchtitan.grpo.weight_wire.transports import needs_own_gpus


@dataclass(frozen=True)
class Target:
    """A machine.

    Attributes:
        name: In messages.
        cuda: It has CUDA, whose defaults differ: bfloat16 for published weights, NCCL.
        memory_bytes: Of the device of one rank, as CUDA reports it.
        here: It is this machine.
        why: Why it was assumed, if nobody named it.
    """

    name: str
    cuda: bool
    memory_bytes: int
    here: bool = False
    why: str = ""


def _gpu(name: str, gib: float) -> Target:
    return Target(name, True, int(gib * 2**30))


GPUS = {
    "a100": _gpu("A100 (80 GB)", 79.1),
    "h100": _gpu("H100 (80 GB)", 79.1),
    "h200": _gpu("H200 (141 GB)", 139.8),
    "b200": _gpu("B200 (192 GB)", 178.3),
}
NAMES = (*GPUS, "cpu")
"""What may follow `--dry_run`."""
ASSUMED = "h100"


NODE_GPUS = 8
"""Of a node of these machines, as its makers sell it."""


BESIDE_BYTES = 5 << 29
"""Of a GPU that a trainer and a server share: CUDA's contexts, libraries and graphs, which neither side counts."""


RECEIVED_BYTES = 3 << 30
"""The same, if other ranks have servers too: buckets that one receives over NCCL, and NCCL's own memory."""


def beside_bytes(servers: int) -> int:
    """What neither a trainer nor the server on its GPU counts, in a run with so many colocated servers."""
    return BESIDE_BYTES + (RECEIVED_BYTES if servers > 1 else 0)


def trainer_bytes(memory_share: float, memory_bytes: int, servers: int = 1) -> int:
    """What a trainer may take of a GPU beside a server with `[rollout] memory_share`. It can be negative."""
    return int(memory_bytes * (1 - memory_share)) - beside_bytes(servers)


def find_target(name: str, config: JobConfig) -> Target:
    """The machine of that name. Without a name: this one, or a GPU if this one has none and the run is made for one."""
    if name in GPUS:
        return GPUS[name]
    why = "" if name or torch.cuda.is_available() else _made_for_cuda(config)
    if why:
        return replace(GPUS[ASSUMED], why=f"{why}, and this machine has no GPU")
    return this_machine() if name != "cpu" else replace(_cpu(), here=False)


def node_gpus_of(target: Target) -> int:
    """GPUs of a node of this target; 0 without CUDA."""
    return torch.cuda.device_count() if target.here else NODE_GPUS * target.cuda


def this_machine() -> Target:
    if not torch.cuda.is_available():
        return _cpu()
    device = torch.cuda.get_device_properties(0)
    return Target(device.name, True, device.total_memory, here=True)


def _cpu() -> Target:
    return Target("this machine's CPU", False, host_bytes(), here=True)


def host_bytes() -> int:
    """Memory of this machine."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _made_for_cuda(config: JobConfig) -> str:
    """The key by which a run is meant for a GPU; "" if there is none."""
    keys = {
        "[compile] enable = true": config.compile.enable,
        f'[weight_sync] transport = "{config.weight_sync.transport}"': needs_own_gpus(config.weight_sync.transport),
        '[training] mixed_precision_param = "bfloat16"': config.training.mixed_precision_param == "bfloat16",
    }
    return next((key for key, is_set in keys.items() if is_set), "")
