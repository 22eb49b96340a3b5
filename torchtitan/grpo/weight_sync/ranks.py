"""The trainer ranks' own process groups for weight sync: one for bytes, one for short messages.

Neither is the default group or part of the model's meshes, so a push can run beside a training step.
"""

import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from torchtitan.grpo.process.collectives import Wait, broadcast_json, gather_json
from torchtitan.grpo.weight_wire.transport import wait

_GROUP_TIMEOUT_FACTOR = 2.0


class Ranks:
    """Collective to construct. With one trainer rank there are no groups and nothing to wait for.

    Args:
        device: Where gathered bytes lie. They go over NCCL on CUDA and over gloo on CPU; messages always over gloo.
        timeout_s: Longest wait of rank 0 for the others, which have nothing else to do.
        others_timeout_s: Longest wait of the others for rank 0, which may be waiting for a server. The groups' own
            timeouts are twice as long: the waits here fire first, since their errors say what was waited for (I6).

    Attributes:
        check: Called in the waits of `command`, `all_values` and `all_to_first`. What it raises ends the wait.
    """

    def __init__(self, device: torch.device, timeout_s: float, others_timeout_s: float):
        initialised = dist.is_available() and dist.is_initialized()
        self.rank = dist.get_rank() if initialised else 0
        self.size = dist.get_world_size() if initialised else 1
        self.device = device
        self.check: Callable[[], None] | None = None
        self._timeout_s = timeout_s if self.rank == 0 else others_timeout_s
        if self.size == 1:
            return
        timeout = timedelta(seconds=_GROUP_TIMEOUT_FACTOR * others_timeout_s)
        backend = "nccl" if device.type == "cuda" else "gloo"
        self._bytes = dist.new_group(backend=backend, timeout=timeout)
        self._messages = dist.new_group(backend="gloo", timeout=timeout)
        # The first collective creates NCCL's communicator. Run it here, where all ranks take part.
        mine, all_ranks = torch.zeros(1, device=device), torch.zeros(self.size, device=device)
        self.all_to_first(mine, all_ranks, [1] * self.size, "the set-up of weight sync")

    def all_to_first(self, own: torch.Tensor, gathered: torch.Tensor, counts: list[int], what: str) -> None:
        """Collect every rank's `own` (flat, `counts[rank]` elements) in `gathered` on rank 0, in rank order.

        This is an all-to-all in which every rank sends to rank 0 only. It is the one gather of unequal shards that both
        backends have. `gathered` is used on rank 0 only. On CUDA the current stream is ordered after the result.

        Raises:
            TimeoutError: Another rank did not take part in time.
        """
        size = own.element_size()  # as bytes, since not every backend has every dtype
        sends = [own.numel() * size] + [0] * (self.size - 1)
        receives = [n * size for n in counts] if self.rank == 0 else [0] * self.size
        target = (gathered if self.rank == 0 else own.new_empty(0)).view(torch.uint8)
        work = dist.all_to_all_single(target, own.view(torch.uint8), receives, sends, group=self._bytes, async_op=True)
        wait(work, time.monotonic() + self._timeout_s, f"the trainer's ranks in {what}", self.check)

    def share(self, value: Any, what: str) -> Any:
        """Rank 0's JSON value on every rank. The others' argument is ignored."""
        if self.size == 1:
            return value
        whom = "trainer rank 0" if self.rank else "the trainer's other ranks"
        return broadcast_json(value, self.rank == 0, self._messages, self._bounded(f"{whom} in {what}", None))

    def all_values(self, value: Any, what: str) -> list[Any]:
        """Every rank's JSON value on every rank, in rank order."""
        if self.size == 1:
            return [value]
        return gather_json(value, self._messages, self._bounded(f"the trainer's ranks in {what}", self.check))

    def command(self, kind: int, check: Callable[[], None] | None = None) -> int:
        """Rank 0's `kind` on every rank. The others wait for it, and rank 0 until they have taken it, bounded."""
        if self.size == 1:
            return kind
        tensor = torch.tensor([kind])
        work = dist.broadcast(tensor, group=self._messages, group_src=0, async_op=True)
        whom = "a command from trainer rank 0" if self.rank else "the trainer's other ranks to take a command"
        self._bounded(f"{whom} in weight sync", check or self.check)(work)
        return int(tensor)

    def _bounded(self, whom: str, check: Callable[[], None] | None) -> Wait:
        return lambda work: wait(work, time.monotonic() + self._timeout_s, whom, check)
