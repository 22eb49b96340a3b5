"""From rank 0 to every rank over gloo, without pickle: packed rows and small JSON values."""

import json
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from torchtitan.grpo.policy.rows import FLOAT_ROWS, INT_ROWS, PackedRow


class Broadcaster:
    """Sends from rank 0 over a gloo group of its own, so that a long rollout does not need a long NCCL timeout.

    Args:
        timeout_s: Longest time rank 0 may spend between two calls, in rollouts, validation or a checkpoint.
    """

    def __init__(self, timeout_s: float) -> None:
        self.is_source = dist.get_rank() == 0
        self._group = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_s))

    def json(self, value: Any = None) -> Any:
        """Rank 0's JSON value on every rank; the others' argument is ignored."""
        data = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8) if self.is_source else None
        return json.loads(self._tensor(data, torch.uint8).numpy().tobytes())

    def barrier(self) -> None:
        """Wait for rank 0, which may validate or push for longer than NCCL lets other ranks wait."""
        self.json()

    def rows(self, rows_by_rank: list[list[PackedRow]] | None, rank: int) -> list[PackedRow]:
        """The rows of data-parallel rank `rank`, from `packing.pack`'s result on rank 0 (None elsewhere)."""
        if rows_by_rank is not None and dist.get_world_size(self._group) == 1:
            return rows_by_rank[rank]
        ints, floats = None, None
        if rows_by_rank is not None:
            parts = [row.to_tensors() for rows in rows_by_rank for row in rows]
            ints, floats = (torch.cat([part.flatten() for part in kind]) for kind in zip(*parts, strict=True))
        lengths = self.json([[len(row.tokens) for row in rows] for rows in rows_by_rank or []])
        ints, floats = self._tensor(ints, torch.int64), self._tensor(floats, torch.float32)
        if rows_by_rank is not None:
            return rows_by_rank[rank]
        before = sum(map(sum, lengths[:rank]))
        result = []
        for length in lengths[rank]:
            own_ints = ints[before * len(INT_ROWS) :][: length * len(INT_ROWS)].view(len(INT_ROWS), length)
            own_floats = floats[before * len(FLOAT_ROWS) :][: length * len(FLOAT_ROWS)].view(len(FLOAT_ROWS), length)
            result.append(PackedRow.from_tensors(own_ints, own_floats))
            before += length
        return result

    def _tensor(self, tensor: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor:
        """Rank 0's flat tensor on every rank; only rank 0 knows its length beforehand."""
        length = torch.tensor([len(tensor) if tensor is not None else 0])
        dist.broadcast(length, src=0, group=self._group)
        if tensor is None:
            tensor = torch.empty(int(length), dtype=dtype)
        dist.broadcast(tensor, src=0, group=self._group)
        return tensor
