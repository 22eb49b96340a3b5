"""The same requests in two of vLLM's schedulers, one with `quick_slots`: every step must be the same. vLLM's Python
imports it. And requests that wait through a pause or come late, with and without `old_prefixes`."""

import random
from types import SimpleNamespace
from typing import Any

import torch
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

from torchtitan.grpo.inside_vllm import old_prefixes, quick_slots

BLOCK, BLOCKS, END = 4, 60, 2
"""So few blocks that requests are preempted, and so small ones that each answer fills several."""


class _Run:
    """One scheduler, whose answers have the lengths that they were drawn with."""

    def __init__(self, config: Any, kind: type[Scheduler]) -> None:
        spec = FullAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=8, dtype=torch.float32)
        cache = KVCacheConfig(num_blocks=BLOCKS, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(["0"], spec)])
        config.cache_config.num_gpu_blocks = BLOCKS
        self.scheduler = kind(config, cache, StructuredOutputManager(config), block_size=BLOCK)
        hash_function = get_hash_fn_by_name(config.cache_config.prefix_caching_hash_algo)
        init_none_hash(hash_function)
        self._hasher = get_request_block_hasher(BLOCK, hash_function)
        self._ahead = kind is AsyncScheduler
        self._under_way: list[tuple[Any, list[int]]] = []
        self._lengths: dict[str, int] = {}
        self.long_ways = 0
        allocate = self.scheduler.kv_cache_manager.allocate_slots

        def counted(*args: Any, **kwargs: Any) -> Any:
            self.long_ways += 1
            return allocate(*args, **kwargs)

        self.scheduler.kv_cache_manager.allocate_slots = counted

    def add(self, name: str, prompt: list[int], length: int, salt: str | None = None) -> None:
        params = SamplingParams(max_tokens=40, detokenize=False, output_kind=RequestOutputKind.FINAL_ONLY)
        params._all_stop_token_ids = {END}
        params.stop_token_ids = [END]
        self._lengths[name] = length
        request = Request(name, list(prompt), params, None, 0.0, cache_salt=salt, block_hasher=self._hasher)
        self.scheduler.add_request(request)

    def step(self) -> dict[str, Any]:
        """Schedule one, and give the step before its tokens if steps overlap."""
        scheduler = self.scheduler
        made = scheduler.schedule()
        cached = made.scheduled_cached_reqs
        seen = {
            "tokens": made.num_scheduled_tokens,
            "new": [(new.req_id, new.block_ids, new.num_computed_tokens) for new in made.scheduled_new_reqs],
            "cached": [cached.req_ids, cached.new_block_ids, cached.num_computed_tokens],
            "finished": sorted(made.finished_req_ids),
            "preempted": sorted(made.preempted_req_ids or ()),
        }
        self._under_way.append((made, list(made.num_scheduled_tokens)))
        if len(self._under_way) > self._ahead:
            self._answer(*self._under_way.pop(0))
        pool = scheduler.kv_cache_manager.block_pool
        return seen | {"free": pool.get_num_free_blocks(), "prefixes": len(pool.cached_block_hash_to_block)}

    def _answer(self, made: Any, names: list[str]) -> None:
        tokens = []
        for name in names:
            request = self.scheduler.requests.get(name)
            whole = request is not None and request.num_computed_tokens >= request.num_prompt_tokens
            count = 0 if request is None else request.num_output_tokens + 1
            tokens.append([END if count >= self._lengths[name] else 5 + count % 3] if whole else [])
        rows = {name: row for row, name in enumerate(names)}
        output = ModelRunnerOutput(names, rows, sampled_token_ids=tokens, prompt_logprobs_dict={}, pooler_output=[])
        self.scheduler.update_from_output(made, output)


def compare(config: Any, overlapping: bool, seed: int = 0, steps: int = 400) -> dict[str, int]:
    """Counts of what happened in them: the allocations that vLLM made with and without, preemptions, prefix hits.

    Raises:
        AssertionError: A step differs.
    """
    kind = AsyncScheduler if overlapping else Scheduler
    plain, quick = _Run(config, kind), _Run(config, kind)
    quick_slots.install(quick.scheduler)
    random_ = random.Random(seed)
    prompts = [random_.choices(range(10, 100), k=random_.randint(1, 17)) for _ in range(6)]
    count = preempted = hits = 0
    for _ in range(steps):
        if random_.random() < 0.3:
            prompt, length, count = random_.choice(prompts), random_.randint(1, 40), count + 1
            for run in (plain, quick):
                run.add(f"r{count}", prompt, length)
        if random_.random() < 0.02 and (names := sorted(plain.scheduler.requests)):
            name = random_.choice(names)
            for run in (plain, quick):
                run.scheduler.finish_requests(name, RequestStatus.FINISHED_ABORTED)
        if random_.random() < 0.01:  # as an update in flight does that has keys and values computed again
            for run in (plain, quick):
                run.scheduler.reset_prefix_cache(reset_running_requests=True)
        seen = plain.step()
        assert seen == (other := quick.step()), (seen, other)
        preempted += len(seen["preempted"])
        hits += sum(computed > 0 for *_, computed in seen["new"])
    return {"plain": plain.long_ways, "quick": quick.long_ways, "preempted": preempted, "hits": hits}


def found_after_pause(config: Any, ours: bool) -> list[list[str]]:
    """Whose blocks requests have of the same prompt: two that waited through an update beside an answer that goes on,
    two that came after it with the salt from before, and two with the new salt."""
    run = _Run(config, Scheduler)
    engine = SimpleNamespace(scheduler=run.scheduler, set_weight_version=lambda name: None)
    if ours:
        old_prefixes.install(engine)
    prompt = list(range(10, 10 + 2 * BLOCK + 1))
    names = ["runs", "waits", "waits too", "late", "late too", "new", "new too"]
    run.add(names[0], prompt, 20, "6")
    run.step()
    run.scheduler.set_pause_state(PauseState.PAUSED_ALL)
    for name in names[1:3]:
        run.add(name, prompt, 20, "6")
    run.step()
    engine.set_weight_version("7@r")
    run.scheduler.set_pause_state(PauseState.UNPAUSED)
    for name, salt in zip(names[3:], "6677", strict=True):
        run.add(name, prompt, 20, salt)
    seen = run.step()
    assert seen["cached"][0] == names[:1], "the answer does not go on"
    owners: dict[int, str] = {}
    found = []
    for name in names:
        (blocks,) = run.scheduler.kv_cache_manager.get_block_ids(name)
        found.append([owners.setdefault(block, name) for block in blocks])
    return found[1:]
