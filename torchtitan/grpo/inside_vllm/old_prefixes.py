"""A request that was asked before an update of weights finds no prefix that the old weights computed.

A request's salt is the version that the server had when it was asked. If an update in flight keeps keys and values, the
new weights alone sample the answer of a request that waited in vLLM's queue, or came during the update or a moment
after. But it would read what the old ones have cached under that salt. `SamplerCheck` would then find its
log-probabilities wrong for their version, and the server faulty. So those that waited find none. A request that comes
with another salt than the served version, or with none, gets one that has both: it shares with its like. Only of a
prompt that was half computed then, a request that waited may still find the rest.
"""

import functools
from typing import Any


def install(engine: Any) -> None:
    """In an engine core.

    Args:
        engine: The `EngineCoreProc`, with `set_weight_version`.
    """
    from vllm.v1.core.sched.interface import PauseState
    from vllm.v1.request import Request, RequestStatus

    scheduler = engine.scheduler
    manager, set_state, add = scheduler.kv_cache_manager, scheduler.set_pause_state, scheduler.add_request
    _ = Request.update_block_hashes
    find, evict, groups = manager.block_pool.get_cached_block, manager.evict_blocks, manager.num_kv_cache_groups
    set_version, salt = engine.set_weight_version, ""

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

    @functools.wraps(set_version)
    def note_version(name: str) -> None:
        nonlocal salt
        salt = name.partition("@")[0]
        set_version(name)

    @functools.wraps(add)
    def add_request(request: Any) -> None:
        if salt and request.cache_salt != salt and request.request_id not in scheduler.requests:  # no session goes on
            request.cache_salt = f"{request.cache_salt or ''} under {salt}"
            request.block_hashes.clear()
            request.update_block_hashes()
        add(request)

    scheduler.set_pause_state, scheduler.add_request = forget_and_set, add_request
    engine.set_weight_version = note_version
