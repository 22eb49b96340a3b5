"""DCP's writer of files, with several files of a rank at the same time."""

import math
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

from torch.distributed.checkpoint import FileSystemWriter, SavePlan, SavePlanner
from torch.distributed.checkpoint.planner import WriteItem
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

FILES = 4
"""Of a rank, at most."""
FILE_BYTES = 256 << 20
"""What a further file is worth."""


class ParallelWriter(FileSystemWriter):
    """Writes a rank's tensors as up to `FILES` files of about the same size, in a thread each.

    DCP's own `thread_count` loses what a thread raises: after a full disk the checkpoint would lack tensors. And where
    there is CUDA, DCP's single thread waits for its stream at each 10 MB, also for tensors that are on the host. Beside
    training that is training's stream, and a write would take a step for every 10 MB. Here a tensor is copied to the
    host when its turn comes, if it is not there.

    Args:
        enter_thread: Called first in each thread.
    """

    def __init__(self, path: Path, enter_thread: Callable[[], None] = lambda: None) -> None:
        super().__init__(path, per_thread_copy_ahead=0)
        self._enter_thread = enter_thread

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """See `StorageWriter.write_data`. It returns when all is written, or raises what the first thread raised."""
        parts = split_by_bytes(plan.items)
        plans = [plan]
        if len(parts) > 1:
            prefix = plan.storage_data.prefix  # "__RANK_", as each file's name begins
            names = [replace(plan.storage_data, prefix=f"{prefix}{number}_") for number in range(len(parts))]
            plans = [replace(plan, items=items, storage_data=name) for items, name in zip(parts, names, strict=True)]
        write = super().write_data
        with ThreadPoolExecutor(len(plans), "checkpoint-file", self._enter_thread) as threads:
            written = list(threads.map(lambda part: write(part, planner).wait(), plans))
        future: Future[list[WriteResult]] = Future()
        future.set_result([result for of_part in written for result in of_part])
        return future


def split_by_bytes(items: list[WriteItem]) -> list[list[WriteItem]]:
    """Parts of about the same size; one for each `FILE_BYTES`, at least one and at most `FILES`."""
    count = max(1, min(FILES, sum(map(_bytes, items)) // FILE_BYTES))
    parts: list[list[WriteItem]] = [[] for _ in range(count)]
    sizes = [0] * count
    for item in sorted(items, key=_bytes, reverse=True):
        smallest = sizes.index(min(sizes))
        parts[smallest].append(item)
        sizes[smallest] += _bytes(item)
    return parts


def _bytes(item: WriteItem) -> int:
    if item.tensor_data is None:  # some bytes, whose number only the planner knows
        return 0
    return math.prod(item.tensor_data.chunk.sizes) * item.tensor_data.properties.dtype.itemsize
