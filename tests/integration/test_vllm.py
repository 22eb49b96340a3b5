"""What is vLLM's own, against a real server on CPU; test_engine_conformance.py has what every engine must do.

Most of it is what happens to answers under way when weights change: which weights sampled each token, and with which
keys and values. What the server says is held against transformers, which computes the log-probabilities of an answer's
tokens from the whole sequence under each version's weights. The model is a mixture of experts.

To run that part against a server that already runs, an older vLLM on a GPU or the embedded one, set SERVER_URL and
SERVER_MODEL (the folder that it serves, made by `save_tiny_qwen3_moe`); its weights then travel through files, and
SERVER_TOLERANCE is the largest difference in nat that its arithmetic explains (default 1e-4):

    python -c "from pathlib import Path; from tests.helpers.servers import *; save_tiny_qwen3_moe(Path('/tmp/A'))"
    torchtitan-grpo serve vllm /tmp/A --gpu 0 --dtype float32 --skip-tokenizer-init --max-model-len 1024
    SERVER_URL=http://127.0.0.1:8000 SERVER_MODEL=/tmp/A SERVER_TOLERANCE=0.03 \
        python -m pytest -s tests/integration/test_vllm.py
"""

import asyncio
import functools
import itertools
import os
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import requests
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

import torchtitan  # noqa: F401  the overlay's shims come first
from tests.helpers import counted_versions
from tests.helpers.ranks import free_port
from tests.helpers.served_logprobs import answer_logprobs, worst_logprob_difference
from tests.helpers.servers import (
    RunningServer,
    command_of,
    declare_plugin,
    parent_of,
    save_tiny_qwen3_moe,
    serve_vllm,
)
from tests.helpers.weight_senders import CPU, SYNC, AdapterTrainer, changed, fleet_of, trainer_of, weights_of
from torchtitan.grpo.engines.fleet_view import FleetError
from torchtitan.grpo.engines.http_control import ServerError
from torchtitan.grpo.engines.protocol import Completion, SamplingParams
from torchtitan.grpo.engines.vllm import GENERATE_ROUTE, VllmClient
from torchtitan.grpo.engines.vllm_control import VllmControl
from torchtitan.grpo.errors import UserError
from torchtitan.grpo.model.source import load_hf_weights
from torchtitan.grpo.weight_sync.link import WeightSyncError
from torchtitan.grpo.weight_sync.sync import WeightSync
from torchtitan.grpo.weight_wire.receiver import PROTOCOL
from torchtitan.grpo.weight_wire.version_names import own_run, version_name

pytestmark = pytest.mark.vllm

PROMPT = [5 + i % 400 for i in range(300)]
"""Longer than two blocks of vLLM's cache (128 tokens on CPU): a request that shares it would find them there."""
LONG = SamplingParams(n=3, temperature=1.0, max_tokens=280, ignore_eos=True)
"""Without a seed: vLLM's CPU build (0.32) ends when it computes a seeded request again in more than one pass."""
TOLERANCE = float(os.environ.get("SERVER_TOLERANCE", "1e-4"))
DIFFERENT = 0.1
"""Mean difference in nat from which weights, or keys and values, count as others."""


class Control(VllmControl):
    """Pauses with the `clear_cache` of the test."""

    clear_cache = True

    def pause(self, mode: str, clear_cache: bool, *args: float) -> None:
        super().pause(mode, self.clear_cache, *args)


@dataclass
class Served:
    """A server, a trainer that feeds it, and what transformers makes of every version that it was given."""

    control: Control
    folders: dict[str, Path]
    models: dict[str, PreTrainedModel]
    transport: str = "gloo"
    versions: dict[int, str] = field(default_factory=dict)
    numbers: Iterator[int] = field(default_factory=lambda: itertools.count(1))

    def __post_init__(self) -> None:
        self.source, self.model = trainer_of(self.folders["A"])
        settings = replace(SYNC, transport=self.transport)
        self.sync = WeightSync(weights_of(self.source, self.model), settings, fleet_of(self.control), CPU)
        self.sync.connect()
        self.publish("A")

    def publish(self, name: str, *, clear_cache: bool = True) -> int:
        """Give the server the weights `name`; returns their version."""
        self.control.clear_cache = clear_cache
        load_hf_weights(self.model, self.source, self.folders[name])
        version = next(self.numbers)
        self.sync.publish(version)
        self.versions[version] = name
        return version

    @functools.cached_property
    def answer_s(self) -> float:
        """Seconds that LONG's answers take."""
        self.ask(replace(LONG, max_tokens=20))  # the first ones take longer
        return self.ask(LONG)[1]

    def ask_across(self, *updates: str, clear_cache: bool) -> tuple[int, list[Completion]]:
        """LONG's answers, begun under the weights A and finished under the last of `updates`, and A's version."""
        for parts in (4, 8, 16, 32):  # a machine that is busy at one moment and idle at the next may need another try
            first = self.publish("A")
            answers, _ = self.ask(LONG, updates, self.answer_s / parts, clear_cache=clear_cache)
            versions = range(first, first + len(updates) + 1)
            if all(set(answer.versions) == set(versions) for answer in answers):
                return first, answers
        pytest.fail(
            f"not every update came while all answers were running: {[set(answer.versions) for answer in answers]}"
        )

    def ask(
        self, params: SamplingParams, updates: tuple[str, ...] = (), every_s: float = 0.0, **how: bool
    ) -> tuple[list[Completion], float]:
        """Answers to PROMPT, and the seconds until they came; meanwhile the weights `updates`, one each `every_s`."""

        async def run() -> tuple[list[Completion], float]:
            started, version = time.monotonic(), max(self.versions)
            client = VllmClient(self.control.url, None, 120.0, lambda: version)
            answers = asyncio.create_task(client.generate(PROMPT, params, f"r{version}"))
            for name in updates:
                await asyncio.sleep(every_s)
                await asyncio.to_thread(self.publish, name, **how)
            try:
                return await answers, time.monotonic() - started
            finally:
                await client.close()

        return asyncio.run(run())

    def differences(self, answer: Completion, name: str) -> torch.Tensor:
        """|served - computed under the weights `name`| of every token, in nat."""
        return (torch.tensor(answer.logprobs) - answer_logprobs(self.models[name], PROMPT, answer.token_ids)).abs()


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("weights")
    given = os.environ.get("SERVER_MODEL") if "SERVER_URL" in os.environ else None
    first = Path(given) if given else save_tiny_qwen3_moe(folder / "A", tied=True)
    return {"A": first, "B": changed(first, 7, folder / "B"), "C": changed(first, 8, folder / "C")}


@pytest.fixture(scope="module")
def vllm_server(folders, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    if "SERVER_URL" in os.environ:
        pytest.skip("SERVER_URL names the server")
    folder = tmp_path_factory.mktemp("server")
    declare_plugin(
        folder / "plugin", "vllm.general_plugins", "counted_versions", f"{counted_versions.__name__}:register"
    )
    with serve_vllm(folder, folders["A"], "--max-num-seqs", "16") as server:
        yield server


@pytest.fixture(scope="module")
def served(folders, request: pytest.FixtureRequest) -> Iterator[Served]:
    """After the tests that send weights by themselves: this trainer stays connected."""
    models = {name: AutoModelForCausalLM.from_pretrained(path).eval() for name, path in folders.items()}
    if "SERVER_URL" in os.environ:
        served = Served(Control(os.environ["SERVER_URL"], None, 60.0), folders, models, "disk")
    else:
        served = Served(Control(request.getfixturevalue("vllm_server").url, None, 60.0), folders, models)
    yield served
    served.sync.close()


def test_a_missing_weight_is_an_error_and_the_server_recovers(vllm_server: RunningServer):
    control = VllmControl(vllm_server.url, None, 60.0)
    source, model = trainer_of(vllm_server.model_dir)

    def without(name: str):
        def to_hf(state: dict) -> dict:
            return {key: value for key, value in source.adapter.to_hf(state).items() if key != name}

        return SimpleNamespace(to_hf=to_hf)

    for name in ("model.layers.1.self_attn.k_proj.weight", "model.norm.weight"):
        sync = WeightSync(weights_of(source, model, without(name)), SYNC, fleet_of(control), CPU)
        with pytest.raises(WeightSyncError, match=rf"phase connect.*lacks 1 weights.*{name}"):
            sync.connect()
        sync.close()
    assert not control.is_paused()

    sync = WeightSync(weights_of(source, model), SYNC, fleet_of(control), CPU)
    sync.connect()
    sync.publish(6)
    reference = AutoModelForCausalLM.from_pretrained(vllm_server.model_dir).eval()
    assert worst_logprob_difference(vllm_server.url, reference) <= 1e-4
    sync.close()


def test_a_trainer_that_is_gone_before_the_server_joins_does_not_block_it(vllm_server: RunningServer):
    """As when it fails, or is stopped, while it connects. A worker that waits for it would answer nobody."""
    control = VllmControl(vllm_server.url, None, 60.0)
    plan = [[["model.norm.weight", "float32", [64], 0]]]
    info = {"protocol": PROTOCOL, "run": own_run(), "backend": "gloo", "master_address": "127.0.0.1", "plan": plan}
    info |= {"rank_offset": 1, "world_size": 2, "num_buffers": 1, "timeout_seconds": 60.0}
    started = time.monotonic()
    with pytest.raises(ServerError, match="given the connection up"):
        control.init_transfer(info | {"master_port": free_port()})
    assert not control.is_paused()
    assert time.monotonic() - started < 20


def test_a_name_the_server_does_not_know_leaves_it_paused_until_a_good_update(vllm_server: RunningServer):
    control = VllmControl(vllm_server.url, None, 60.0)
    source, model = trainer_of(vllm_server.model_dir)

    model.register_parameter("spare", torch.nn.Parameter(torch.zeros(3)))
    adapter = SimpleNamespace(
        to_hf=lambda state: {"model.spare": state["spare"]} if "spare" in state else source.adapter.to_hf(state)
    )
    sync = WeightSync(weights_of(source, model, adapter), SYNC, fleet_of(control), CPU)
    sync.connect()
    with pytest.raises(FleetError, match=r"version 7.*spare"):
        sync.publish(7)
    assert control.is_paused()
    sync.close()

    del model.spare
    sync = WeightSync(weights_of(source, model), SYNC, fleet_of(control), CPU)
    sync.connect()
    sync.publish(8)
    assert not control.is_paused()
    assert control.weight_version() == version_name(8)
    reference = AutoModelForCausalLM.from_pretrained(vllm_server.model_dir).eval()
    assert worst_logprob_difference(vllm_server.url, reference) <= 1e-4
    sync.close()


def test_adapters_need_a_server_that_has_a_place_for_them(vllm_server: RunningServer):
    sync = WeightSync(
        AdapterTrainer(vllm_server.model_dir).published(), SYNC, fleet_of(VllmControl(vllm_server.url)), CPU
    )
    with pytest.raises(UserError, match=r"\[lora\] .* start it with --enable-lora --max-loras 1 --max-lora-rank 4"):
        sync.connect()
    sync.close()


def test_weights_of_another_shape_leave_nothing_behind(vllm_server: RunningServer, tmp_path: Path):
    """The check of models refuses them before. Without it, the next trainer's first update must work."""
    control = VllmControl(vllm_server.url, None, 60.0)
    source, model = trainer_of(save_tiny_qwen3_moe(tmp_path, hidden_size=96, tied=True))
    with pytest.raises(UserError, match=rf"hidden_size 64.*, and the trainer has {tmp_path} \(hidden_size 96"):
        control.check(1024, 5, trained=source.identity)
    sync = WeightSync(weights_of(source, model), SYNC, fleet_of(control), CPU)
    sync.connect()
    with pytest.raises(FleetError, match="version 9"):
        sync.publish(9)
    sync.close()

    source, model = trainer_of(vllm_server.model_dir)
    control.check(1024, 5, trained=source.identity)
    sync = WeightSync(weights_of(source, model), SYNC, fleet_of(control), CPU)
    sync.connect()
    sync.publish(10)
    reference = AutoModelForCausalLM.from_pretrained(vllm_server.model_dir).eval()
    assert worst_logprob_difference(vllm_server.url, reference) <= 1e-4
    sync.close()


def test_the_plug_in_says_what_it_changed(vllm_server: RunningServer):
    """In a process each: the API server and the engine core."""
    log = vllm_server.log_path.read_text(errors="replace")
    assert log.count("Changed in this vLLM: flat log-probabilities") == 1
    assert log.count("leave the engine 32 tokens at a time") == 1
    assert "outside the range" not in log and "not as expected" not in log


def test_the_server_passes_the_sampling_check(vllm_server: RunningServer):
    VllmControl(vllm_server.url, None, 60.0).check(1024)
    log = vllm_server.log_path.read_text(errors="replace")
    assert "GET /v1/models" in log and GENERATE_ROUTE not in log.split('"GET /v1/models', 1)[1]
    with pytest.raises(UserError, match="max-model-len"):
        VllmControl(vllm_server.url, None, 60.0).check(100_000)


def test_refusals(vllm_server: RunningServer) -> None:
    async def ask(prompt: list[int], params: SamplingParams) -> None:
        client = VllmClient(vllm_server.url, None, 60.0, lambda: -1)
        try:
            await client.generate(prompt, params, "r0")
        finally:
            await client.close()

    with pytest.raises(UserError, match=rf"{vllm_server.url} refuses request r0: .*length 1100"):
        asyncio.run(ask([5] * 1100, SamplingParams(1, 1.0, 4)))
    with pytest.raises(UserError, match="max_num_seqs"):
        asyncio.run(ask([5], SamplingParams(17, 1.0, 4)))


def test_log_probabilities_are_one_list_where_that_is_asked(vllm_server: RunningServer) -> None:
    sampling = {"max_tokens": 12, "n": 2, "seed": 3, "logprobs": 0, "detokenize": False, "output_kind": 2}

    def choices(**more: object) -> list[dict]:
        body = {"token_ids": PROMPT, "sampling_params": sampling | more}
        reply = requests.post(f"{vllm_server.url}{GENERATE_ROUTE}", json=body, timeout=60)
        reply.raise_for_status()
        return sorted(reply.json()["choices"], key=lambda choice: choice["index"])

    for flat, usual in zip(choices(flat_logprobs=True), choices(), strict=True):
        assert flat["token_ids"] == usual["token_ids"] and len(flat["token_ids"]) == 12
        assert flat["logprobs"] is None and "token_logprobs" not in usual
        expected = [entry["logprob"] for entry in usual["logprobs"]["content"]]
        assert flat["token_logprobs"] == pytest.approx(expected, abs=1e-5)
    for choice in choices(flat_logprobs=True, logprobs=1):
        assert choice["logprobs"] is None and len(choice["token_logprobs"]) == 12
        assert choice["top_tokens"].keys() == {"ids", "logprobs"}, "and each position's likeliest token"


def test_pause_keep_holds_requests(vllm_server: RunningServer) -> None:
    control = VllmControl(vllm_server.url, None, 30.0)

    async def scenario() -> None:
        client = VllmClient(vllm_server.url, None, 60.0, lambda: -1)
        await asyncio.to_thread(control.pause)
        task = asyncio.create_task(client.generate([5, 6], SamplingParams(1, 0.7, 5, ignore_eos=True), "held"))
        await asyncio.sleep(1.0)
        assert not task.done()
        await asyncio.to_thread(control.resume)
        [completion] = await asyncio.wait_for(task, 30)
        await client.close()
        assert len(completion.token_ids) == 5

    asyncio.run(scenario())


def test_what_comes_first_does_not_wait_behind_others(vllm_server: RunningServer) -> None:
    ended: list[str] = []

    async def scenario() -> None:
        client = VllmClient(vllm_server.url, None, 60.0, lambda: -1)
        usual = SamplingParams(1, 1.0, 60, ignore_eos=True)

        async def ask(name: str, params: SamplingParams) -> None:
            await client.generate([5, 6], params, name)
            ended.append(name)

        others = [asyncio.create_task(ask(f"other-{i}", usual)) for i in range(64)]  # 16 run at a time
        while not ended:
            await asyncio.sleep(0.005)
        await ask("first", replace(usual, first=True))
        await asyncio.gather(*others)
        await client.close()

    asyncio.run(scenario())
    assert ended.index("first") < 40  # behind those that run, and those that began before it came


def test_every_token_has_the_version_that_sampled_it(served: Served):
    first, answers = served.ask_across("B", "C", clear_cache=True)
    own, others = [], []
    for answer in answers:
        versions = torch.tensor(answer.versions)
        assert versions.unique_consecutive().tolist() == [first, first + 1, first + 2]
        for version in (first, first + 1, first + 2):
            differences = served.differences(answer, served.versions[version])
            own.append(differences[versions == version].max())
            others += [differences[versions == other].mean() for other in versions.unique() if other != version]
    print(f"under its own version: worst {max(own):.1e} nat; under another: mean {min(others):.2f} nat or more")
    assert max(own) <= TOLERANCE
    assert min(others) > DIFFERENT


def test_without_recomputation_old_keys_and_values_stay_but_the_prefix_cache_does_not(served: Served):
    first, answers = served.ask_across("B", clear_cache=False)
    before, after = [], []
    for answer in answers:
        versions = torch.tensor(answer.versions)
        assert versions.unique_consecutive().tolist() == [first, first + 1]
        before.append(served.differences(answer, "A")[versions == first])
        after.append(served.differences(answer, "B")[versions == first + 1])
    before, after = torch.cat(before), torch.cat(after)
    print(f"after the update: mean {after.mean():.2f}, max {after.max():.2f} nat; before: max {before.max():.1e} nat")
    assert before.max() <= TOLERANCE
    assert after.mean() > DIFFERENT

    # A new request with the same prompt must not find the old blocks: its salt is the new version.
    short = replace(LONG, max_tokens=16)
    answers, _ = served.ask(short)
    assert max(served.differences(answer, "B").max() for answer in answers) <= TOLERANCE
    assert {version for answer in answers for version in answer.versions} == {first + 1}


def test_a_request_that_comes_late_with_the_salt_from_before_finds_no_old_blocks(served: Served):
    """In vLLM without the plug-in it would: test_vllm_plugin.py has both."""
    old = served.publish("A")
    served.ask(replace(LONG, max_tokens=1))
    served.publish("B", clear_cache=False)
    for salt in (old, old + 1):
        [choice] = choices(served, salt=str(salt))
        assert served.differences(completion_of(choice), "B").max() <= TOLERANCE


def test_answers_beside_a_request_that_asks_for_more_log_probabilities(served: Served):
    """vLLM gives each token of a step as many as the batch's greediest request asks for."""
    served.publish("A")
    with ThreadPoolExecutor() as pool:
        answers = pool.submit(served.ask, LONG)
        while not answers.done():
            served.ask(replace(LONG, n=1, max_tokens=5, top_tokens=5))
    for answer in answers.result()[0]:
        assert served.differences(answer, "A").max() <= TOLERANCE


def test_our_count_is_vllms(served: Served):
    """What the plug-in gives to vLLM before 0.32, beside what 0.32 reports, in the same replies."""
    bodies = [{"n": 3, "max_tokens": 420}, {"n": 1, "max_tokens": 390}, {"n": 4, "max_tokens": 320}]
    most_spans = 0
    for wait_s in (served.answer_s / parts for parts in (6, 12, 24, 48)):  # see `ask_across`
        served.publish("A")
        with ThreadPoolExecutor() as pool:
            replies = [pool.submit(choices, served, **body) for body in bodies]
            for name in "BCAB":
                time.sleep(wait_s)
                served.publish(name, clear_cache=name != "C")
            compared = [choice for reply in replies for choice in reply.result()]
        if counted_versions.KEY not in compared[0]:
            pytest.skip("this vLLM reports no versions of its own: the other tests check the count")
        assert len(compared) == 8
        for choice in compared:
            assert choice[counted_versions.KEY] == choice["weight_versions"]
            most_spans = max(most_spans, len(choice["weight_versions"]))
        if most_spans >= 3:
            return
    pytest.fail(f"no answer ran across more than {most_spans - 1} updates")


def test_a_worker_ends_with_its_engine_core(vllm_server: RunningServer) -> None:
    """The last test here: the server ends too."""

    def children(pid: int) -> list[int]:
        return [int(name) for name in os.listdir("/proc") if name.isdecimal() and parent_of(int(name)) == pid]

    named = {command_of(child).partition("\0")[0]: child for child in children(vllm_server.process.pid)}
    core = next(child for name, child in named.items() if "EngineCore" in name)
    worker = next(child for child in children(core) if "Worker" in command_of(child))
    os.kill(core, signal.SIGKILL)
    deadline = time.monotonic() + 4.5  # without the plug-in vLLM takes more than 5 s
    while "Worker" in command_of(worker):
        assert time.monotonic() < deadline, f"the worker outlives its engine core: {command_of(worker)}"
        time.sleep(0.05)


def choices(served: Served, *, salt: str = "none", **sampling: int) -> list[dict]:
    """Choices of the server's reply as they are; by default one answer of 16 tokens."""
    params = {"n": 1, "max_tokens": 16, "temperature": 1.0, "logprobs": 0, "ignore_eos": True}
    body = {"token_ids": PROMPT, "cache_salt": salt, "sampling_params": params | {"output_kind": 2} | sampling}
    reply = requests.post(served.control.url + GENERATE_ROUTE, json=body, timeout=120)
    reply.raise_for_status()
    return reply.json()["choices"]


def completion_of(choice: dict) -> Completion:
    logprobs = [entry["logprob"] for entry in choice["logprobs"]["content"]]
    return Completion(choice["token_ids"], logprobs, choice["finish_reason"], [])
