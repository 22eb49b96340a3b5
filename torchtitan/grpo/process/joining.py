"""Joining the process group: each attempt finds its own ranks, and nobody waits for a rank 0 that has failed."""

import contextlib
import json
import os
import secrets
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from functools import partial
from typing import Any

import torch.distributed as dist

from torchtitan.grpo.errors import UserError, written_out

_PREFIX = "torchtitan-grpo/joining"
_FAILED = f"{_PREFIX}/failed"
_OFFER = f"{_PREFIX}/offer"
_POLL_S = 0.02
_TELL_S = 10.0


@contextlib.contextmanager
def store_of_this_attempt() -> Iterator[None]:
    """Around `init_process_group`: keys in torchrun's store get a prefix that only this attempt's ranks have.

    torchrun keeps its store over restarts, with the addresses that the ended ranks have left there. gloo would connect
    to those, and wait for them as long as it may. The number of the attempt is no such prefix: each node's torchrun
    counts its own, and one that was started anew begins at 0.
    """
    module = dist.distributed_c10d
    rendezvous = module.rendezvous

    def of_attempt(*args: Any, **kwargs: Any) -> Iterator[tuple[dist.Store, int, int]]:
        for store, rank, world_size in rendezvous(*args, **kwargs):
            yield dist.PrefixStore(agree(store, rank, world_size, kwargs["timeout"]), store), rank, world_size

    module.rendezvous = of_attempt
    try:
        yield
    finally:
        module.rendezvous = rendezvous


def agree(store: dist.Store, rank: int, world_size: int, limit: timedelta) -> str:
    """A name for this attempt, the same on all of its ranks and on no others.

    Rank 0 offers a new name. The others accept it, each with a number of its own, and rank 0 confirms these numbers. So
    what an earlier attempt has left binds nobody: no rank of this one is in it.

    Raises:
        UserError: Rank 0 has failed (`tell_waiting_ranks`).
        TimeoutError: Not all ranks came within the limit.
    """
    own, deadline = secrets.token_hex(8), time.monotonic() + limit.total_seconds()

    def wait_for(whom: str, look: Callable[[], str | None]) -> str:
        while (found := look()) is None:  # not the store's `wait`, which signals do not interrupt
            if time.monotonic() > deadline:
                seconds = f"{limit.total_seconds():g} s ([comm] init_timeout_seconds)"
                raise TimeoutError(f"waited {seconds} for {whom} to join the run")
            time.sleep(_POLL_S)
        return found

    def value(key: str) -> str | None:
        return store.get(key).decode() if store.check([key]) else None

    if rank == 0:
        store.set(_OFFER, own)
        numbers = [own]
        for other in range(1, world_size):
            numbers.append(wait_for(f"rank {other}", partial(value, f"{_PREFIX}/{own}/{other}")))
        store.set(f"{_PREFIX}/{own}", json.dumps(numbers))
        return f"attempt-{own}"

    def confirmed() -> str | None:
        if failed := value(_FAILED):
            raise UserError(f"rank 0 has failed at its start: {failed}")
        offered = value(_OFFER)
        if offered is None:
            return None
        store.set(f"{_PREFIX}/{offered}/{rank}", own)
        numbers = value(f"{_PREFIX}/{offered}")
        return offered if numbers and json.loads(numbers)[rank] == own else None

    return f"attempt-{wait_for('rank 0', confirmed)}"


def tell_waiting_ranks(error: BaseException) -> None:
    """On a rank 0 that fails before it joins: end the wait of the ranks on other nodes. It needs torchrun's store.

    Only rank 0 reads the data, and torchrun ends the ranks of its own node alone. Nothing is told before the last
    attempt (`--max-restarts`): the next one may succeed.
    """
    variables = os.environ
    attempt, attempts = (int(variables.get(f"TORCHELASTIC_{name}", "0")) for name in ("RESTART_COUNT", "MAX_RESTARTS"))
    one_node = variables.get("LOCAL_WORLD_SIZE") == variables.get("WORLD_SIZE")
    if variables.get("TORCHELASTIC_USE_AGENT_STORE") != "True" or one_node or attempt < attempts:
        return
    address = variables["MASTER_ADDR"], int(variables["MASTER_PORT"])
    with contextlib.suppress(RuntimeError):  # they learn of the store's end themselves
        store = dist.TCPStore(*address, is_master=False, timeout=timedelta(seconds=_TELL_S))
        said = str(error) if isinstance(error, UserError) else f"{type(error).__name__}: {error}"
        store.set(_FAILED, written_out(said, "\n"))  # it takes no half of a character
