"""What rank 0 decides reaches every rank: packed rows and small JSON values, over gloo, without pickle."""

import json
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from torchtitan.grpo.policy.packing import Microbatch


class Broadcaster:
    """Sends from rank 0 over a process group of its own, so that a long rollout needs no long NCCL timeout.

    Args:
        timeout_s: Longest time that rank 0 may spend between two calls (rollouts, validation, a checkpoint).
    """

    def __init__(self, timeout_s: float) -> None:
        self.is_source = dist.get_rank() == 0
        self._group = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_s))

    def json(self, value: Any = None) -> Any:
        """Rank 0's JSON value on every rank; the others' argument is ignored."""
        data = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8) if self.is_source else None
        return json.loads(self._tensor(data, torch.uint8).numpy().tobytes())

    def microbatches(self, rows_by_rank: list[list[Microbatch]] | None, rank: int) -> list[Microbatch]:
        """The rows of data-parallel rank `rank`, from `packing.pack`'s result on rank 0 (None elsewhere)."""
        if rows_by_rank is not None and dist.get_world_size(self._group) == 1:
            return rows_by_rank[rank]
        headers, ints, floats = [], [], []
        for row in (row for rows in rows_by_rank or [] for row in rows):
            header, row_ints, row_floats = row.to_tensors()
            headers.append(header)
            ints.append(row_ints.flatten())
            floats.append(row_floats.flatten())
        header = self._tensor(torch.stack(headers).flatten() if headers else None, torch.int64).view(-1, 3)
        all_ints = self._tensor(torch.cat(ints) if ints else None, torch.int64)
        all_floats = self._tensor(torch.cat(floats) if floats else None, torch.float32)
        rows_per_rank = int(self.json(len(rows_by_rank[0]) if rows_by_rank else None))
        if rows_by_rank is not None:
            return rows_by_rank[rank]
        int_parts = all_ints.split((header[:, 0] * header[:, 2]).tolist())
        float_parts = all_floats.split((header[:, 1] * header[:, 2]).tolist())
        return [
            Microbatch.from_tensors(int_parts[i].view(-1, header[i, 2]), float_parts[i].view(-1, header[i, 2]))
            for i in range(rank * rows_per_rank, (rank + 1) * rows_per_rank)
        ]

    def _tensor(self, tensor: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor:
        """Rank 0's flat tensor on every rank; only rank 0 knows its length beforehand."""
        length = torch.tensor([len(tensor) if tensor is not None else 0])
        dist.broadcast(length, src=0, group=self._group)
        if tensor is None:
            tensor = torch.empty(int(length), dtype=dtype)
        dist.broadcast(tensor, src=0, group=self._group)
        return tensor
