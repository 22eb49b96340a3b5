"""Plain broadcasts, with which a refit is compared. Imports little: a child process starts from here."""

import time
from collections.abc import Callable

import torch

from torchtitan.grpo.weight_wire.rendezvous import join_store
from torchtitan.grpo.weight_wire.transport import Group, wait

LOCALHOST = "127.0.0.1"


def receive(port: int, size: int, backend: str, pieces: list[int], rounds: int, timeout_s: float, device, _):
    """The other end of `refit.raw_broadcasts`."""
    store = join_store(LOCALHOST, port, timeout_s)
    flat = torch.empty(size, dtype=torch.uint8, device=device)
    group = Group(backend, store, 1, 2, device, timeout_s, LOCALHOST)
    for count in pieces:
        for _ in range(rounds):
            broadcast(group, flat, count, timeout_s)


def broadcast(
    group: Group, flat: torch.Tensor, pieces: int, timeout_s: float, check: Callable[[], None] = lambda: None
) -> float:
    """Seconds of one broadcast, from when both ends are ready until the receiver has confirmed all of it."""
    deadline = time.monotonic() + timeout_s
    ready = torch.ones(1, dtype=torch.int64, device=flat.device)
    wait(group.all_reduce(ready), deadline, "the other end of a raw broadcast", check)
    _synchronize(flat.device)
    started = time.perf_counter()
    works = [group.broadcast(piece) for piece in flat.tensor_split(pieces)]
    for work in [*works, group.all_reduce(ready)]:
        wait(work, deadline, "a raw broadcast", check)
    _synchronize(flat.device)
    return time.perf_counter() - started


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
