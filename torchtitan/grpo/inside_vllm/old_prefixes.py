"""A request that waits through an update of weights finds no prefix that the old weights computed.

A request's salt is the version that the server had when it was asked. If an update in flight keeps keys and values, the
new weights alone sample the answer of a request that waited in vLLM's queue, but it would read what the old ones have
cached under that salt. `SamplerCheck` would then find its log-probabilities wrong for their version, and the server
faulty. Only of a prompt that was half computed then, such a request may still find the rest.
"""

import functools
from typing import Any


def install(scheduler: Any) -> None:
    """In an engine core.

    Args:
        scheduler: vLLM's `Scheduler`.
    """
    from vllm.v1.core.sched.interface import PauseState
    from vllm.v1.request import RequestStatus

    manager, set_state = scheduler.kv_cache_manager, scheduler.set_pause_state
    find, evict, groups = manager.block_pool.get_cached_block, manager.evict_blocks, manager.num_kv_cache_groups

    def forget() -> None:
        """Running answers keep the blocks, but nobody finds them."""
        waiting = (request for request in scheduler.requests.values() if request.status == RequestStatus.WAITING)
        for known in {block for request in waiting for block in request.block_hashes}:
            for group in range(groups):
                evicted = None
                while (blocks := find(known, [group])) and blocks != evicted:  # several may have the same tokens
                    evict({block.block_id for block in blocks})
                    evicted = blocks

    @functools.wraps(set_state)
    def forget_and_set(state: Any) -> None:
        if state == PauseState.UNPAUSED:
            forget()
        set_state(state)

    scheduler.set_pause_state = forget_and_set
