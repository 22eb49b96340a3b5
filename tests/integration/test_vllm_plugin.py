"""The plug-in in a vLLM that is, or is not, started with our weight-transfer backend. No server: vLLM's own classes.

test_vllm.py has a whole server with the backend.
"""

import json
import os
import subprocess

import numpy as np
import pytest

from tests.helpers import ROOT
from tests.helpers.servers import PLUGIN_MODULE, plugin_path, save_tiny_qwen3
from torchtitan.grpo.data.routes import RouteShape

pytestmark = pytest.mark.vllm

PROGRAM = """
import gc, json, logging, sys
from types import SimpleNamespace

OURS = "torchtitan.grpo.inside_vllm.", "torchtitan.grpo.weight_wire"

from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.entrypoints.openai.completion.protocol import CompletionRequest
from vllm.entrypoints.openai.completion.serving import OpenAIServingCompletion
from vllm.entrypoints.scale_out.token_in_token_out.serving import ServingTokens
from vllm.v1.engine import async_llm, core
from vllm.v1.engine.core_client import AsyncMPClient
from vllm.v1.engine.output_processor import OutputProcessor, RequestState

def parts():
    '''Everything that the project replaces somewhere, besides `__init__`.'''
    classes = ServingTokens, OutputProcessor, RequestState, CompletionRequest, OpenAIServingCompletion
    classes += async_llm.AsyncLLM, core.EngineCore, core.EngineCoreProc
    return {f"{c.__name__}.{name}": value for c in classes for name, value in vars(c).items() if name != "__init__"}

def configuration(**others):
    return AsyncEngineArgs(
        model, skip_tokenizer_init=True, max_model_len=64, dtype="float32", load_format="dummy",
        weight_transfer_config={"backend": backend} if backend else None, **others,
    ).create_engine_config()

before = parts()
config = configuration()
loaded_early = sorted(name for name in sys.modules if name.startswith(OURS))

class Stop(Exception): pass
def stop(*_, **__): raise Stop

async_llm.EngineCoreClient.make_async_mp_client = stop  # no engine
try:
    async_llm.AsyncLLM(config, None, log_stats=False)
except Stop:
    started = True

def of(): pass
no_slots = SimpleNamespace(
    coordinator=SimpleNamespace(single_type_managers=[]), num_kv_cache_groups=0, evict_blocks=of,
    block_pool=SimpleNamespace(get_cached_block=of),
)
scheduler = SimpleNamespace(requests={}, update_from_output=of, finish_requests=of, kv_cache_manager=no_slots)
scheduler.set_pause_state = scheduler.add_request = of
engine = SimpleNamespace(
    vllm_config=config, scheduler=scheduler, collective_rpc=of, pause_scheduler=of, _handle_shutdown=lambda: False,
    set_weight_version=of,
)
try:
    core.EngineCoreProc.run_busy_loop(engine)
except SystemExit:
    ran = True

def reply():
    '''As the server makes it of what the engine gives: a prompt of 2 tokens, an answer of 3.'''
    import asyncio
    import numpy as np
    from vllm.logprobs import FlatLogprobs, Logprob
    from vllm.outputs import CompletionOutput, RequestOutput
    from vllm.sampling_params import RequestOutputKind, SamplingParams
    params = SamplingParams(logprobs=0, flat_logprobs=True, detokenize=False, output_kind=RequestOutputKind.FINAL_ONLY)
    request = SimpleNamespace(
        sampling_params=params, output_mode="tokens", return_token_ids=False, _response_mm_placeholders=None
    )
    flat = FlatLogprobs()
    for token in (5, 6, 7):
        flat.append({token: Logprob(-0.5, 1, None)})
    routes = (np.arange(4 * 3 * 2) * 11).astype(np.uint16).reshape(4, 3, 2)
    answer = CompletionOutput(0, "", [5, 6, 7], None, flat, routed_experts=routes, finish_reason="stop")
    async def results():
        yield RequestOutput("r", None, [1, 2], None, [answer], True)
    server = ServingTokens.__new__(ServingTokens)
    server.enable_log_outputs = server.enable_prompt_tokens_details = False
    server._logprobs_tokenizer = lambda text_mode: None
    server.engine_client = SimpleNamespace(engine_core=SimpleNamespace(client_count=2))  # vLLM before 0.32 looks
    made = server.serve_tokens_full_generator(request, results(), "r", "m", SimpleNamespace())
    return asyncio.run(made).model_dump()["choices"]

def pause():
    '''What a pause does, in order.'''
    import asyncio
    done = []
    async def clear_mm_cache_async(): done.append("cleared")
    async def pause_scheduler_async(mode, clear_cache): done.append([mode, clear_cache])
    async def sleep(seconds): done.append(seconds)
    asyncio.sleep = sleep
    engine = async_llm.AsyncLLM.__new__(async_llm.AsyncLLM)
    engine.renderer = SimpleNamespace(clear_mm_cache_async=clear_mm_cache_async, shutdown=of)
    engine.engine_core = SimpleNamespace(
        pause_scheduler_async=pause_scheduler_async,
        pause_generation_async=pause_scheduler_async,  # from 0.33 on
        shutdown=lambda **_: None,
    )
    asyncio.run(engine.pause_generation(mode="keep", clear_cache=True))
    asyncio.run(engine.pause_generation(mode="wait", clear_cache=False))
    asyncio.run(engine.pause_generation())
    return done

def update():
    '''What updates do, in order: in an engine core of two workers, and in API servers of one engine and of two.'''
    import asyncio
    from torchtitan.grpo.inside_vllm.whole_update import in_worker
    done, info = [], {"version": 7, "run": "r", "resume": True}
    class Worker:
        _weight_update_active, fails = True, ""
        def __getattr__(self, name): return lambda *_: done.append(name)
        def finish_weight_update(self):
            done.append("finish_weight_update")
            if self.fails: raise ValueError(self.fails)
    workers = [Worker(), Worker()]
    engine = core.EngineCoreProc.__new__(core.EngineCoreProc)
    engine.set_weight_version, engine.is_scheduler_paused = done.append, lambda: paused
    engine.collective_rpc = lambda _, args: [in_worker(worker, *args) for worker in workers]
    engine.resume_scheduler = lambda: done.append("resumed")
    for paused, workers[0].fails in ((True, ""), (True, "torn"), (False, "")):
        try: engine.take_version(info, True)
        except RuntimeError as error: done.append(str(error))
    done.append([worker._weight_update_active for worker in workers])
    async def call_utility_async(*arguments): done.append(arguments)
    async def resume_generation(): done.append("resumed")
    server = async_llm.AsyncLLM.__new__(async_llm.AsyncLLM)
    server.engine_core = SimpleNamespace(call_utility_async=call_utility_async, shutdown=lambda **_: None)
    server.renderer, server.resume_generation = SimpleNamespace(shutdown=of), resume_generation
    for engines in (1, 2):
        parallel = SimpleNamespace(data_parallel_size=engines)
        server.vllm_config = SimpleNamespace(parallel_config=parallel, weight_transfer_config=None)
        asyncio.run(server.update_weights(SimpleNamespace(update_info=info)))
    return done

def slots():
    from tests.helpers.scheduled_twice import compare
    drafting = configuration(
        speculative_config={"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3},
    )
    return [compare(config, overlapping) for overlapping in (False, True)] + [compare(drafting, False, steps=50)]

def found():
    from tests.helpers.scheduled_twice import found_after_pause
    return [found_after_pause(config, ours) for ours in (False, True)]

print(json.dumps({
    "pause": pause(),
    "update": update() if backend else None,
    "found": found() if backend else None,
    "slots": slots() if backend else None,
    "reply": reply() if backend else None,
    "loaded_early": loaded_early,
    "loaded": sorted(name for name in sys.modules if name.startswith(OURS)),
    "replaced": sorted(name for name, value in parts().items() if before.get(name) is not value),
    "young": gc.get_threshold()[0],
    "bundled": scheduler.update_from_output is not of,
    "forgets": scheduler.set_pause_state is not of,
    "started": started and ran,
}))
"""
ENTRY = ["torchtitan.grpo.inside_vllm.backend", PLUGIN_MODULE]
HOOKS = ["EngineCoreProc.run_busy_loop", "EngineCoreProc.take_version"]
REPLACED = {
    "AsyncLLM.update_weights",
    *("ServingTokens._create_tokens_logprobs", "ServingTokens.serve_tokens_full_generator"),
    *("CompletionRequest.to_sampling_params", "OpenAIServingCompletion.request_output_to_completion_response"),
}


# Two processes are forked from one that has imported vLLM, and no plug-in.
FORKING = """
import gc, os, sys
gc.disable()  # a tenth of what imports take
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.entrypoints.openai.completion.serving import OpenAIServingCompletion
from vllm.entrypoints.scale_out.token_in_token_out.serving import ServingTokens
from vllm.v1.engine import async_llm
assert not any(name.startswith("torchtitan.grpo") for name in sys.modules), "the plug-in came with an import"
program, model, *files = sys.argv[1:]
for backend, before, file in zip(("", "torchtitan_grpo"), ("", "import vllm; vllm.__version__ = '0.99.0'"), files):
    if os.fork() == 0:
        for stream in (1, 2):
            os.dup2(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND), stream)
        exec(before)
        exec(program)
        sys.stdout.flush()
        os._exit(0)
    if os.wait()[1]:
        sys.exit(f"{file} ended badly")
"""


@pytest.fixture(scope="module")
def looks(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[dict, str]]:
    """What a process of vLLM's environment says of itself, and its log, without our backend ("vllm") and with it
    ("ours", under a version that is too new)."""
    if not os.environ.get("VLLM_PYTHON"):
        pytest.skip("set VLLM_PYTHON to a Python that has vLLM (CPU build) to run this")
    tmp_path = tmp_path_factory.mktemp("plugin")
    model = save_tiny_qwen3(tmp_path / "model")
    paths = os.pathsep.join([str(ROOT), str(plugin_path(tmp_path / "plugin"))])
    environment = os.environ | {"PYTHONPATH": paths, "VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1"}
    files = {name: tmp_path / name for name in ("vllm", "ours")}
    command = [os.environ["VLLM_PYTHON"], "-c", FORKING, PROGRAM, str(model), *map(str, files.values())]
    done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=240)
    logs = {name: file.read_text() if file.exists() else "" for name, file in files.items()}
    assert done.returncode == 0, f"{done.stderr[-4000:]}{str(logs)[-4000:]}"
    return {name: (json.loads(log.splitlines()[-1]), log) for name, log in logs.items()}


def _pauses(rest: list[float]) -> list:
    """Those that weight sync asks for, and vLLM's own, which aborts."""
    return ["cleared", ["keep", True], *rest, ["wait", False], *rest, "cleared", ["abort", True], 0.02]


def test_without_our_backend_vllm_is_its_own(looks: dict[str, tuple[dict, str]]) -> None:
    found, log = looks["vllm"]
    assert found["started"]
    assert found["replaced"] == HOOKS and not found["bundled"] and not found["forgets"]
    assert found["pause"] == _pauses(rest=[0.02]) and found["young"] < 10_000
    assert found["loaded"] == ENTRY  # the plug-in was there, and nothing that it would use
    assert "outside the range" not in log


def test_with_our_backend_a_server_is_set_up_when_it_starts(looks: dict[str, tuple[dict, str]]) -> None:
    found, log = looks["ours"]
    assert found["started"]
    assert found["loaded_early"] == ENTRY
    assert set(found["replaced"]) >= {*HOOKS, *REPLACED} and found["bundled"] and found["forgets"]
    assert found["pause"] == _pauses(rest=[]) and found["young"] == 100_000
    assert log.count("vLLM 0.99.0 is outside the range") == 1
    # Routed experts are beside the plug-in's own field. vLLM's CPU backend captures none, so they are made up here.
    (choice,) = found["reply"]
    assert choice["token_logprobs"] == [-0.5] * 3
    routes = RouteShape(3, 2, 300).from_npy(choice["routed_experts"], 4)
    assert routes.dtype == np.int16 and routes.ravel().tolist() == [11 * i for i in range(24)]


def test_an_update_is_one_call_and_resumes_the_server_unless_it_fails(looks: dict[str, tuple[dict, str]]) -> None:
    found, _ = looks["ours"]
    workers, info = 2 * ["start_weight_update", "update_weights", "finish_weight_update"], {"version": 7, "run": "r"}
    info["resume"] = True
    engine = [*workers, "7@r", "resumed", *workers, "torn", "pause the server before a weight update", [False, True]]
    server = [["take_version", info, True], ["take_version", info, False], "resumed"]
    assert found["update"] == engine + server


def test_slots_are_found_with_less_work_and_every_step_is_the_same(looks: dict[str, tuple[dict, str]]) -> None:
    *counts, drafting = looks["ours"][0]["slots"]
    for count in counts:  # blocks are of four tokens: one of four takes the long way, as prompts do
        assert count["quick"] < 0.6 * count["plain"]
        assert min(count["preempted"], count["hits"]) > 10
    assert drafting["quick"] == drafting["plain"] > 100  # with drafts all do, from n-grams too


def test_who_waited_through_an_update_finds_the_new_weights_prefix_alone(looks: dict[str, tuple[dict, str]]) -> None:
    plain, ours = looks["ours"][0]["found"]  # the prompt fills two blocks, and begins a third
    waits, late, new = ([[kind] * 3, [kind, kind, f"{kind} too"]] for kind in ("waits", "late", "new"))
    assert plain == [["runs", "runs", name] for name in ("waits", "waits too", "late", "late too")] + new
    assert ours == waits + late + new
