"""vLLM's engine core finds the slot of a running answer's next token with less work.

For each token that it schedules, vLLM's KV cache manager goes through each of its steps. Nearly always they find that
the last block of the request has room. With many answers at once the engine core's one thread bounds generation
(docs/benchmarks.md, section 19), and a fifth of its time goes there. `install` looks at the last block first.
"""

import functools
from typing import Any


def install(scheduler: Any) -> None:
    """In an engine core. Where attention is not full attention throughout, or tokens are drafted, nothing changes.

    Args:
        scheduler: vLLM's `Scheduler`.
    """
    from vllm.v1.core.single_type_kv_cache_manager import FullAttentionManager

    manager = scheduler.kv_cache_manager
    kinds = manager.coordinator.single_type_managers
    plain = [type(kind) for kind in kinds] == [FullAttentionManager]
    # Blocks of refused drafts stay, so the last block is not always the one that is filled.
    if not plain or scheduler.num_spec_tokens or scheduler.connector is not None:
        return
    blocks_of, block_size = kinds[0].req_to_blocks, kinds[0].block_size
    allocate, no_blocks = manager.allocate_slots, manager.empty_kv_cache_blocks

    @functools.wraps(allocate)
    def look_first(request: Any, num_new_tokens: int, **others: Any) -> Any:
        if num_new_tokens == 1 and len(others) == 1:  # of a request that does not run yet, more is told
            blocks = blocks_of.get(request.request_id, ())
            # A token that fills its block takes the long way: vLLM puts full blocks into its prefix cache there.
            if request.num_computed_tokens + 1 < len(blocks) * block_size:
                return no_blocks
        return allocate(request, num_new_tokens, **others)

    manager.allocate_slots = look_first
