"""torchrun `--max-restarts`: each attempt of a run finds its own ranks."""

import contextlib
import os
from collections.abc import Iterator
from typing import Any

import torch.distributed as dist


@contextlib.contextmanager
def store_of_this_attempt() -> Iterator[None]:
    """Around `init_process_group`: keys in torchrun's store get the number of the attempt.

    torchrun keeps its store over restarts, with the addresses that the ended ranks have left there. gloo would connect
    to those, and wait for them as long as it may.
    """
    prefix = f"attempt-{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"
    module = dist.distributed_c10d
    rendezvous = module.rendezvous

    def of_attempt(*args: Any, **kwargs: Any) -> Iterator[tuple[dist.Store, int, int]]:
        for store, rank, world_size in rendezvous(*args, **kwargs):
            yield dist.PrefixStore(prefix, store), rank, world_size

    module.rendezvous = of_attempt
    try:
        yield
    finally:
        module.rendezvous = rendezvous
