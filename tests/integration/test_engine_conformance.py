"""What every engine has to do, against real servers on CPU: `[rollout] engine` is all that differs.

Each engine serves a tiny random Qwen2.5 as a trainer exports it, whose biases engines fuse into one. It is tied with
SGLang and untied with the others, because a server takes a minute to start; tests/integration/test_vllm.py has a tied
model. The model learns the quickstart's task in the end. transformers is the judge.
"""

import asyncio
import copy
import dataclasses
import functools
import json
import os
import pkgutil
import re
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import requests
import torch
from faults.harness import Harness
from faults.planted import NORM, plug_in
from transformers import AutoModelForCausalLM, PreTrainedModel

import torchtitan  # noqa: F401  the overlay's shims come first
from tests.helpers import ROOT
from tests.helpers.kept import worst_difference
from tests.helpers.served_logprobs import answer_distributions, answer_logprobs
from tests.helpers.servers import ONE_PROCESS, save_tiny_qwen2, save_tiny_qwen3, server_pids, supervised
from tests.helpers.trainer_runs import embedded_server, train
from tests.helpers.weight_senders import CPU, SYNC, changed, trainer_of, weights_of
from torchtitan.grpo.data.tokenizer import load_tokenizer
from torchtitan.grpo.engines.fleet import Fleet
from torchtitan.grpo.engines.protocol import Completion, SamplingParams
from torchtitan.grpo.engines.registry import make_server
from torchtitan.grpo.engines.server import Server
from torchtitan.grpo.errors import UserError
from torchtitan.grpo.model.source import gather_hf, load_hf_weights, write_hf
from torchtitan.grpo.rollouts.teachers.connect import check_tokenizer, served_by, vocabulary_probes
from torchtitan.grpo.rollouts.teachers.scorers import Scores
from torchtitan.grpo.servers.supervisor import Supervisor
from torchtitan.grpo.weight_sync.link import WeightSyncError
from torchtitan.grpo.weight_sync.sync import WeightSync
from torchtitan.grpo.weight_wire import version_names
from torchtitan.grpo.weight_wire.version_names import version_name

TINY = ROOT / "train_configs" / "tiny_qwen3"
EXACT = 1e-4
DIFFERENT = 0.1
"""Mean difference in nat from which on weights, or keys and values, count as different."""
PROMPT = [5 + i % 400 for i in range(140)]
"""Longer than a block of vLLM's cache (128 tokens on CPU): a request that shares it finds it there."""
LONG = SamplingParams(n=2, temperature=1.0, max_tokens=300, ignore_eos=True)

ENGINES = [
    "embedded",
    pytest.param("vllm", marks=pytest.mark.vllm),
    pytest.param("sglang", marks=pytest.mark.sglang),
]


@dataclass
class Served:
    """A server of weights "A", and other weights of the same shape."""

    engine: str
    running: Supervisor
    folders: dict[str, Path]

    @property
    def url(self) -> str:
        return self.running.urls[0]

    def server(self) -> Server:
        return make_server(self.engine, self.url, None, 120.0, 240.0)

    @functools.cached_property
    def references(self) -> dict[str, PreTrainedModel]:
        return {name: AutoModelForCausalLM.from_pretrained(folder).eval() for name, folder in self.folders.items()}

    def ask(self, *requests: tuple[list[int], SamplingParams], version: int = -1) -> list[list[Completion]]:
        async def run() -> list[list[Completion]]:
            server = self.server()
            server.version = version
            client = server.client
            try:
                asked = [client.generate(prompt, params, f"r{i}") for i, (prompt, params) in enumerate(requests)]
                return await asyncio.gather(*asked)
            finally:
                await client.close()

        return asyncio.run(run())

    def differences(
        self, name: str, completion: Completion, prompt: list[int] = PROMPT, temperature: float = 1.0
    ) -> torch.Tensor:
        """|served - computed under the weights `name`| of every token, in nat."""
        expected = answer_logprobs(self.references[name], prompt, completion.token_ids, temperature)
        return (torch.tensor(completion.logprobs) - expected).abs()


class Trainer:
    """Sends the weights of folders; every publish waits for the server, unless in the `background`."""

    def __init__(self, served: Served, transport: str = "gloo", background: bool = False, **modes):
        self.served = served
        self.source, self.model = trainer_of(served.folders["A"])
        self.server = served.server()
        # In the background the trainer goes on without a server that is lost.
        self.fleet = Fleet([served.url], lambda url: self.server, min_servers=int(not background))
        settings = dataclasses.replace(
            SYNC, transport=transport, buffer_memory_ratio=1e-9, async_weight_update=background
        )
        self.sync = WeightSync(weights_of(self.source, self.model), settings, self.fleet, CPU, **modes)

    def __enter__(self) -> "Trainer":
        self.sync.connect()
        return self

    def __exit__(self, *error) -> None:
        self.sync.close()

    def publish(self, version: int, name: str) -> None:
        load_hf_weights(self.model, self.source, self.served.folders[name])
        self.sync.publish(version)


@pytest.fixture(scope="module")
def planted(tmp_path_factory) -> Path:
    """Says which fault the servers have; see scripts/faults/planted.py."""
    return tmp_path_factory.mktemp("planted") / "fault"


@pytest.fixture(scope="module")
def start(tmp_path_factory, planted) -> Iterator[Callable[..., Supervisor]]:
    """Start a server of an engine for a folder, and keep it alive."""
    with ExitStack() as stack:

        def start(engine: str, model: Path, *flags: str) -> Supervisor:
            stack.enter_context(plug_in(engine, tmp_path_factory.mktemp("plugins"), planted))
            return stack.enter_context(supervised(engine, tmp_path_factory.mktemp(engine), model, *flags))

        yield start


@pytest.fixture(scope="module", params=ENGINES)
def engine(request) -> str:
    return request.param


@pytest.fixture(scope="module")
def served(engine, start, tmp_path_factory) -> Served:
    folder = tmp_path_factory.mktemp("model")
    drawn = save_tiny_qwen2(folder / "drawn", vocab_size=4096, tied=engine == "sglang")  # in several buckets
    source, model = trainer_of(drawn)
    write_hf(gather_hf(model, source, torch.float32), source, folder / "A", load_tokenizer(str(TINY)))
    flags = ONE_PROCESS if engine == "vllm" else ()  # test_vllm.py has a worker of its own
    running = start(engine, folder / "A", *flags)
    return Served(engine, running, {"A": folder / "A", "B": changed(drawn, 7, folder / "B")})


def test_the_server_is_as_the_trainer_needs_it(served: Served):
    control = served.server().control
    trained = trainer_of(served.folders["A"])[0].identity
    control.check(1024, 5, trained=trained)
    if served.engine != "embedded":  # it needs no flag
        with pytest.raises(UserError, match=f"{served.url}: does not tell which experts .*--enable-return-routed-exp"):
            control.check(1024, 5, trained=trained, routes=True)
    if served.engine == "vllm":  # test_vllm.py has one that tells
        with pytest.raises(UserError, match=f"{served.url}: does not tell which tokens it kept.*--return-sampling-ma"):
            control.check(1024, 5, trained=trained, top_k=20)
    else:
        control.check(1024, 5, trained=trained, top_k=20, min_p=0.1)
    other = dataclasses.replace(trained, name="mine", config=trained.config | {"num_hidden_layers": 3})
    with pytest.raises(
        UserError, match=r"another model: .*A \(num_hidden_layers 2\), and the trainer has mine \(num_h"
    ):
        control.check(1024, 5, trained=other)
    assert control.world_size() == 1
    with pytest.raises(UserError, match=rf"{served.url}: serves at most 1024 tokens.*100000"):
        control.check(100_000, 5)


@pytest.mark.parametrize("temperature", [0.7, 1.0])
def test_samples_and_their_logprobs(served: Served, temperature):
    params = SamplingParams(n=4, temperature=temperature, max_tokens=9, ignore_eos=True, top_tokens=20)
    prompts = [[5, 9, 300, 17], [8], PROMPT]
    for prompt, group in zip(prompts, served.ask(*[(prompt, params) for prompt in prompts]), strict=True):
        assert len({tuple(completion.token_ids) for completion in group}) == 4
        for completion in group:
            assert (len(completion.token_ids), completion.finish_reason) == (9, "length")
            assert served.differences("A", completion, prompt, temperature).max() <= EXACT
            expected = answer_distributions(served.references["A"], prompt, completion.token_ids, temperature)
            ids, logprobs = (torch.from_numpy(part) for part in (completion.top.ids, completion.top.logprobs))
            assert ids.shape == (9, 20) and all(len(set(own)) == 20 for own in ids.tolist())
            assert (expected.gather(1, ids.long()) - logprobs).abs().max() <= EXACT
            assert (expected.topk(20).values - logprobs.sort(descending=True).values).abs().max() <= EXACT


def test_greedy(served: Served):
    prompt = torch.tensor([[5, 9, 300, 17]])
    expected = served.references["A"].generate(prompt, max_new_tokens=10, do_sample=False, pad_token_id=0)
    [[completion]] = served.ask((prompt[0].tolist(), SamplingParams(1, 0.0, 10)))
    assert completion.token_ids == expected[0, 4:].tolist()
    assert served.differences("A", completion, prompt[0].tolist()).max() <= EXACT


def test_a_stop_token_is_part_of_the_answer(served: Served):
    [[completion]] = served.ask(([6, 7], SamplingParams(1, 0.0, 20, ignore_eos=True)))
    stop = completion.token_ids[8]
    [[stopped]] = served.ask(([6, 7], SamplingParams(1, 0.0, 20, stop_token_ids=(stop,), ignore_eos=True)))
    assert stopped.finish_reason == "stop"
    assert stopped.token_ids == completion.token_ids[: completion.token_ids.index(stop) + 1]
    assert len(stopped.logprobs) == len(stopped.token_ids)


def test_a_stop_string_ends_an_answer_and_changes_no_logprob(served: Served):
    tokenizer = load_tokenizer(str(TINY))  # it has 64 of the model's 4096 tokens; the others have no text
    texts = {token: tokenizer.decode([token], skip_special_tokens=True) for token in range(len(tokenizer))}
    special = tokenizer.decode(tokenizer.all_special_ids)  # SGLang looks for stop strings in these too
    stop = tuple(dict.fromkeys(text for text in texts.values() if text.strip() and text not in special))[:32]
    enders = {token for token, text in texts.items() if text in stop}
    [group] = served.ask((PROMPT, SamplingParams(8, 1.0, 200, ignore_eos=True, stop=stop)))
    ends = [[i for i, token in enumerate(answer.token_ids) if token in enders] for answer in group]
    for answer, found in zip(group, ends, strict=True):
        reason = ("stop", found[0] + 1) if found else ("length", 200)
        assert (answer.finish_reason, len(answer.token_ids)) == reason
        assert served.differences("A", answer).max() <= EXACT
    assert any(ends)


def test_top_p_keeps_the_likeliest_tokens(served: Served):
    probabilities = served.references["A"](torch.tensor([PROMPT])).logits[0, -1].softmax(-1)
    values, order = probabilities.sort(descending=True)
    by_top_p = order[: int((values.cumsum(0) < 0.5).sum()) + 1]
    assert 1 < len(by_top_p) < 500
    one = SamplingParams(n=32, temperature=1.0, max_tokens=1, ignore_eos=True)
    shapes = [dataclasses.replace(one, top_p=0.5), one]
    seen = [{c.token_ids[0] for c in group} for group in served.ask(*[(PROMPT, shape) for shape in shapes])]
    assert seen[0] <= set(by_top_p.tolist())
    assert not seen[1] <= seen[0], "without it, other tokens are sampled too"


@pytest.mark.parametrize(("top_p", "min_p"), [(0.2, 0.0), (1.0, 0.3), (0.2, 0.2)])
def test_kept_tokens_are_those_of_transformers_logits(served: Served, top_p, min_p):
    if served.engine == "vllm":
        pytest.skip("test_vllm.py has one that tells")
    shape = {"top_k": 60, "top_p": top_p, "min_p": min_p, "kept": True}
    params = SamplingParams(n=3, temperature=0.8, max_tokens=8, ignore_eos=True, **shape)
    for answer in served.ask((PROMPT, params))[0]:
        assert worst_difference(served.references["A"], PROMPT, answer, params, served.engine == "sglang") <= EXACT
    greedy = SamplingParams(1, 0.0, 8, ignore_eos=True)
    [[one], [other]] = served.ask((PROMPT, greedy), (PROMPT, dataclasses.replace(greedy, top_k=60)))
    assert one.token_ids == other.token_ids


@pytest.mark.parametrize("temperature", [0.7, 1.0])
def test_log_probabilities_of_given_tokens_for_which_a_teacher_is_asked(served: Served, temperature, monkeypatch):
    """vLLM and SGLang give those of temperature 1, whatever the request says: [distill] refuses others with them."""
    [model] = served.server().control.models()
    scorer = pkgutil.resolve_name(served.server().engine.scorer)
    client = scorer(served.url, None, model["id"], 60.0, temperature, top_k=5)
    asked = [(PROMPT, [7, 9, 11]), ([5, 9], [4000, 17, 300, 8]), (PROMPT, PROMPT[:40])]
    arrays, as_arrays = [], getattr(client, "_of_arrays", None)

    def request(asked: list, plain=client._request) -> tuple:
        route, body = plain(asked)
        if not arrays:
            body.pop("vllm_xargs", None)  # as a vLLM without the plug-in takes it
        if "sampling_params" not in body:
            return route, body | {"temperature": temperature}
        return route, body | {"sampling_params": [p | {"temperature": temperature} for p in body["sampling_params"]]}

    monkeypatch.setattr(client, "_request", request)
    monkeypatch.setattr(client, "_of_arrays", lambda *sent: arrays.append(1) or as_arrays(*sent), raising=False)

    async def run() -> list[Scores]:
        one_by_one = await client.score(asked, "plain")
        assert not arrays
        arrays.append(0)
        found = await asyncio.gather(*(client.score(asked, f"r{i}") for i in range(2)))
        assert sum(arrays) == (len(asked) * 2 if served.engine == "vllm" else 0)
        await client.close()
        for score, plain in zip(found[1], one_by_one, strict=True):
            assert np.allclose(score.logprobs, plain.logprobs, rtol=0, atol=EXACT)
            assert np.allclose(score.top.logprobs, plain.top.logprobs, rtol=0, atol=EXACT)
        return found[1]

    computed = temperature if served.engine == "embedded" else 1.0
    for (prompt, answer), found in zip(asked, asyncio.run(run()), strict=True):
        expected = answer_logprobs(served.references["A"], prompt, answer, computed)
        assert (torch.tensor(found.logprobs) - expected).abs().max() <= EXACT
        with torch.no_grad():
            logits = served.references["A"](torch.tensor([prompt + answer])).logits[0, len(prompt) - 1 : -1]
        whole = (logits.float() / computed).log_softmax(-1)
        ids, logprobs = torch.from_numpy(found.top.ids).long(), torch.from_numpy(found.top.logprobs)
        assert (whole.gather(1, ids) - logprobs).abs().max() <= EXACT
        assert (whole.topk(5).values - logprobs).abs().max() <= EXACT


def test_the_tokenizer_by_which_a_teacher_is_known(served: Served):
    folder = str(served.folders["A"])
    control, tokenizer = served.server().control, load_tokenizer(folder)
    name, served_model = served_by(control, 1024)
    assert served_model.config["vocab_size"] == 4096
    probes = list(vocabulary_probes(tokenizer))
    check_tokenizer(control, name, tokenizer, probes)
    other = load_tokenizer(folder)
    other.add_tokens(["12"])
    with pytest.raises(UserError, match=rf"{served.url} serves .*whose tokenizer is not that of the trained model"):
        check_tokenizer(control, name, other, [*probes, "12+3="])
    with pytest.raises(UserError, match=rf"{served.url}: serves at most 1024 tokens.*up to 1025"):
        served_by(control, 1025)


def test_a_prompt_that_is_too_long_is_refused(served: Served):
    with pytest.raises(UserError, match=rf"{served.url} refuses request r0"):
        served.ask(([5] * 1100, SamplingParams(1, 1.0, 4)))


def test_a_cancelled_request_ends_at_the_server(served: Served):
    """Sixteen long answers fill the server. Once cancelled, they must not delay other requests."""
    many = SamplingParams(n=16, temperature=1.0, max_tokens=800, ignore_eos=True)

    async def run() -> tuple[float, float]:
        client, clock = served.server().client, asyncio.get_running_loop().time

        async def seconds(name: str) -> float:
            started = clock()
            await client.generate(PROMPT, dataclasses.replace(many, max_tokens=100), name)
            return clock() - started

        whole_s = await seconds("whole")
        cancelled = asyncio.create_task(client.generate(PROMPT, many, "cancelled"))
        await asyncio.sleep(whole_s / 4)
        cancelled.cancel()
        await asyncio.gather(cancelled, return_exceptions=True)
        await asyncio.sleep(0.5)
        next_s = await seconds("next")
        whole_s = max(whole_s, await seconds("after"))  # a machine that is idle at first may be busy since
        await client.close()
        return whole_s, next_s

    whole_s, next_s = asyncio.run(run())
    print(f"16 answers of 100 tokens: {whole_s:.2f} s, after 16 of 800 were cancelled: {next_s:.2f} s")
    assert next_s < 3 * whole_s


@pytest.mark.parametrize("transport", ["gloo", "disk"])
def test_weights_b_a_b(served: Served, transport):
    with Trainer(served, transport) as trainer:
        for version, name in ((1, "B"), (2, "A"), (3, "B")):
            trainer.publish(version, name)
            assert trainer.sync.finished()[0].bytes >= sum(p.numel() * 4 for p in trainer.model.parameters())
            assert trainer.server.control.weight_version() in (version_name(version), None)
            [[completion]] = served.ask((PROMPT, SamplingParams(1, 0.0, 12, ignore_eos=True)), version=version)
            assert completion.versions == [version] * 12
            assert served.differences(name, completion).max() <= EXACT
            other = served.differences("B" if name == "A" else "A", completion)
            assert other.mean() > DIFFERENT, "A and B must differ for this test to mean much"


@pytest.mark.parametrize("recompute_kv", [True, False])
def test_an_update_in_flight(served: Served, recompute_kv):
    """Each token has the version that sampled it, and old keys and values are gone, or only where they may stay."""
    with Trainer(served, recompute_kv=recompute_kv) as trainer:
        answers = across_update(served, trainer)
        for answer in answers:
            versions = torch.tensor(answer.versions)
            first = versions[0].item()
            assert versions.unique_consecutive().tolist() == [first, first + 1]
            assert served.differences("A", answer)[versions == first].max() <= EXACT
            after = served.differences("B", answer)[versions == first + 1]
            if recompute_kv:
                assert after.max() <= EXACT
            else:
                assert after.mean() > DIFFERENT, "the keys and values that were kept are those of the old weights"
        version = trainer.server.version
        [[fresh]] = served.ask((PROMPT, SamplingParams(1, 0.0, 12, ignore_eos=True)), version=version)
        assert served.differences("B", fresh).max() <= EXACT, "a cached prefix outlived its weights"


def across_update(served: Served, trainer: Trainer, params: SamplingParams = LONG) -> list[Completion]:
    """Long answers, begun under the weights A and finished under B."""

    async def run(wait_s: float) -> tuple[list[Completion], float]:
        client, clock = trainer.server.client, asyncio.get_running_loop().time
        started = clock()
        answers = asyncio.create_task(client.generate(PROMPT, params, f"long{trainer.server.version}"))
        if wait_s:
            await asyncio.sleep(wait_s)
            await asyncio.to_thread(trainer.publish, trainer.server.version + 1, "B")
        return await answers, clock() - started

    async def scenario() -> list[Completion]:
        await asyncio.to_thread(trainer.publish, 1, "A")
        _, whole_s = await run(0)
        for parts in (
            3,
            6,
            12,
            24,
            48,
        ):  # a machine that is busy at one moment and idle at the next may need another try
            await asyncio.to_thread(trainer.publish, trainer.server.version + 1, "A")
            answers, _ = await run(whole_s / parts)
            if all(len(set(answer.versions)) == 2 for answer in answers):
                break
        await trainer.server.client.close()
        return answers

    return asyncio.run(scenario())


def test_running_answers_can_finish_under_their_weights(served: Served):
    """Without in-flight updates, one version samples the whole answer. New requests wait for the next version."""
    with Trainer(served, in_flight=False, drain_timeout_s=60.0) as trainer:

        async def scenario() -> tuple[list[Completion], list[Completion]]:
            client, server = trainer.server.client, trainer.server
            await asyncio.to_thread(trainer.publish, 1, "A")
            running = asyncio.create_task(client.generate(PROMPT, LONG, "running"))
            server.in_flight = 1  # as the collector counts
            running.add_done_callback(lambda _: setattr(server, "in_flight", 0))
            # Engines take requests in order: the other one runs when this one is answered.
            await client.generate(PROMPT, SamplingParams(1, 1.0, 1, ignore_eos=True), "after it")
            await asyncio.to_thread(trainer.publish, 2, "B")
            done = running.done()
            after = await client.generate(PROMPT, dataclasses.replace(LONG, max_tokens=8), "after")
            answers = await running
            await client.close()
            assert done, "the update did not wait"
            return answers, after

        answers, after = asyncio.run(scenario())
    assert {version for answer in answers for version in answer.versions} == {1}
    assert max(served.differences("A", answer).max() for answer in answers) <= EXACT
    assert {version for answer in after for version in answer.versions} == {2}
    assert max(served.differences("B", answer).max() for answer in after) <= EXACT


def test_a_torn_update_takes_the_server_out_and_a_complete_one_brings_it_back(served: Served, monkeypatch):
    """The trainer fails between two buckets of a version. The server has half of it and must not answer with it."""
    with Trainer(served) as trainer:
        trainer.publish(1, "A")
        packer = trainer.sync._packer
        assert len(packer.buckets) > 1

        def pack(bucket, snapshot, pack=packer.pack):
            if bucket.index > 0:
                raise RuntimeError("the trainer failed here")
            return pack(bucket, snapshot)

        monkeypatch.setattr(packer, "pack", pack)
        with pytest.raises(RuntimeError, match="the trainer failed here"):
            trainer.publish(2, "B")
        assert trainer.server.version == 1
    served.server().control.check(1024, 5)  # the next run finds it paused, and takes it
    with Trainer(served) as trainer:
        trainer.publish(3, "B")
        [[completion]] = served.ask((PROMPT, SamplingParams(1, 0.0, 12, ignore_eos=True)), version=3)
        assert completion.versions == [3] * 12
        assert served.differences("B", completion).max() <= EXACT


def test_another_run_is_refused_while_the_first_lives(served: Served, monkeypatch):
    first = version_names.own_run()
    with Trainer(served) as trainer:
        trainer.publish(1, "A")
        with monkeypatch.context() as patch:
            second = version_names._run_of_process(os.getppid())
            patch.setattr(version_names, "_run_of_process", lambda pid: second)
            with pytest.raises(UserError, match=rf"{served.url}: this server gets its weights from run {first} "):
                served.server().control.check(1024, 5)
                Trainer(served).__enter__()
        trainer.publish(2, "B")
        assert trainer.server.control.weight_version() in (version_name(2), None)
        [[completion]] = served.ask((PROMPT, SamplingParams(1, 0.0, 12, ignore_eos=True)), version=2)
        assert completion.versions == [2] * 12
        assert served.differences("B", completion).max() <= EXACT


def test_a_server_that_samples_from_another_policy_is_asked_why(served: Served, planted):
    """One server with one fault after another: the cause is named in the first step that samples from it."""
    said_by_check = f"nat on average at {served.url}, over .*: {served.url}: "
    causes = {"tensor": f"{said_by_check}weights: 1 of .* trainer's: {NORM}"}
    causes |= {"top_p": f"{said_by_check}sampling mask: ", "prefix": f"{said_by_check}old prefix: "}
    if served.engine == "embedded":
        del causes["prefix"]  # it caches none
    elif served.engine == "vllm":
        causes["tensor"] = f"{said_by_check}weights, as it seems: .* 27 tensors cannot be read back"  # on a CPU
    else:
        causes["tensor"] = f"never in traffic: .* phase verify, .* 1 of .* not those sent, such as {NORM}"
        causes["top_p"] = (
            "not draws from the policy: .*: sampling mask or temperature: "  # its log-probabilities are of all tokens
        )
    with Harness(served.engine, served.url, served.folders["A"], moves=0.02) as harness:
        for fault, cause in causes.items():
            said = harness.step_with(fault, planted)
            assert re.search(cause, said), (fault, said)


def test_the_quickstart_learns_and_a_checkpoint_goes_on_with_another_engine(served: Served, tmp_path):
    flags = {
        "--model.hf_assets_path": str(served.folders["A"]),
        "--data.source_args": '{"max": 6}',
        "--sft.steps": "15",
        "--sft.batch_size": "32",
        "--grpo.prompts_per_step": "32",
        "--grpo.group_size": "8",
        "--training.steps": "12",
        "--lr_scheduler.total_steps": "20",
        "--optimizer.lr": "2e-3",
    }
    if served.engine == "sglang":  # it goes by the name of the weights: those of this process, which lives
        requests.post(
            f"{served.url}/update_weight_version", json={"new_version": "free"}, timeout=30
        ).raise_for_status()
    lines = train(tmp_path, flags | {"--rollout.engine": served.engine, "--rollout.urls": served.url})
    assert all(line["policy/mismatch_abs"] <= EXACT for line in lines)
    assert [line["sync/version"] for line in lines] == list(range(1, 13))
    rewards = [line["reward/mean"] for line in lines]
    print(f"{served.engine}: rewards {rewards}")
    assert sum(rewards[-4:]) / 4 > sum(rewards[:4]) / 4 + 0.1

    if served.engine != "embedded":
        flags |= {"--training.steps": "15", "--checkpoint.resume": None}
        with embedded_server(served.folders["A"], tmp_path / "embedded.log") as url:
            resumed = train(tmp_path, flags | {"--rollout.urls": url})[12:]
        assert [line["step"] for line in resumed] == [13, 14, 15]
        assert all(line["policy/mismatch_abs"] <= EXACT for line in resumed)
        assert sum(line["reward/mean"] for line in resumed) / 3 > sum(rewards[:4]) / 4 + 0.1


def test_a_server_that_was_killed_is_started_again_and_catches_up(served: Served):
    """kill -9. The supervisor starts it again, with the first weights: the trainer sends it the newest ones."""
    greedy = SamplingParams(1, 0.0, 12, ignore_eos=True)

    async def until(what: str, seen: Callable[[], bool], limit_s: float) -> float:
        started = time.monotonic()
        while not seen():
            trainer.sync.check()
            assert time.monotonic() < started + limit_s, f"not {what} after {limit_s} s: {trainer.fleet.describe()}"
            await asyncio.sleep(0.05)
        return time.monotonic() - started

    async def scenario() -> list[Completion]:
        server, client = trainer.server, trainer.server.client
        trainer.publish(1, "A")
        await until("in traffic", lambda: server.serves(1), 30)
        [before] = await client.generate(PROMPT, greedy, "before")

        (killed,) = server_pids(served.folders["A"])
        os.kill(killed, signal.SIGKILL)
        lost_s = await until("lost", lambda: server.lost, 20)
        assert trainer.fleet.eligible(-1) == []
        trainer.publish(2, "B")
        await until("restarted", lambda: served.running.restarts == 1, 20)
        await asyncio.to_thread(served.running.wait_healthy)
        caught_up_s = await until("in traffic again", lambda: server.serves(2), 60)
        assert server_pids(served.folders["A"]) not in ([], [killed])
        assert (server.version, server.lost) == (2, False)
        assert server.control.weight_version() in (version_name(2), None)

        [after] = await client.generate(PROMPT, greedy, "after")
        trainer.publish(3, "A")  # the new connection is good for more than one version
        await until("at version 3", lambda: server.serves(3), 30)
        [last] = await client.generate(PROMPT, greedy, "last")
        await client.close()
        print(f"{served.engine}: lost after {lost_s:.1f} s, caught up {caught_up_s:.1f} s after it was healthy")
        return [before, after, last]

    with Trainer(served, background=True) as trainer:
        answers = asyncio.run(scenario())
        trainer.sync.drain()  # the server is in traffic before its push has ended
        reports = trainer.sync.finished()
    assert [report.version for report in reports if report.servers] == [1, 2, 3]
    for version, (name, answer) in enumerate(zip("ABA", answers, strict=True), 1):
        assert answer.versions == [version] * 12
        assert served.differences(name, answer).max() <= EXACT
    assert served.differences("A", answers[1]).mean() > DIFFERENT, "A and B must differ for this test to mean much"


@pytest.mark.vllm
def test_each_version_is_quantized_anew(tmp_path):
    """vLLM's FP8 on a CPU with AMX. Its activations are bfloat16, so answers are near the reference, not equal."""
    if not torch.cpu._is_amx_tile_supported():
        pytest.skip("vLLM's FP8 kernels for CPUs need AMX")
    folders = {"A": save_tiny_qwen3(tmp_path / "A", hidden_size=128)}  # its kernels take no biases
    folders["B"] = changed(folders["A"], 7, tmp_path / "B")
    with supervised("vllm", tmp_path, folders["A"], *ONE_PROCESS, fp8=True) as running:
        served = Served("vllm", running, folders)
        for name, model in list(served.references.items()):
            served.references[f"{name} in FP8"] = in_fp8(model)
        check_a_lost_weight(served, "model.layers.1.mlp.up_proj.weight")
        with Trainer(served) as trainer:
            for version, name in ((1, "B"), (2, "A"), (3, "B")):
                trainer.publish(version, name)
                [answers] = served.ask((PROMPT, SamplingParams(8, 1.0, 16, ignore_eos=True)), version=version)
                assert {version for answer in answers for version in answer.versions} == {version}
                plain, rounded = (
                    torch.cat([served.differences(which, answer) for answer in answers]).mean()
                    for which in (name, f"{name} in FP8")
                )
                assert rounded < 0.06 and rounded < plain / 2, (rounded, plain)


def check_a_lost_weight(served: Served, lost: str) -> None:
    source, model = trainer_of(served.folders["A"])
    keep = SimpleNamespace(to_hf=lambda state: {k: v for k, v in source.adapter.to_hf(state).items() if k != lost})
    sync = WeightSync(weights_of(source, model, keep), SYNC, Fleet([served.url], lambda url: served.server()), CPU)
    with pytest.raises(WeightSyncError, match=f"lacks 1 weights of the served model.*{lost}"):
        sync.connect()
    sync.close()


def in_fp8(model: PreTrainedModel) -> PreTrainedModel:
    """The model with linear layers as FP8 holds them: blocks of 128 x 128 weights have a scale. vLLM fuses layers."""
    model = copy.deepcopy(model)
    for layer in model.model.layers:
        a, m = layer.self_attn, layer.mlp
        for fused in ((a.q_proj, a.k_proj, a.v_proj), (a.o_proj,), (m.gate_proj, m.up_proj), (m.down_proj,)):
            weights = [linear.weight.data for linear in fused]
            blocks = torch.cat(weights).bfloat16().float().unfold(0, 128, 128).unfold(1, 128, 128)
            scales = blocks.abs().amax((2, 3), keepdim=True) / torch.finfo(torch.float8_e4m3fn).max
            rounded = (blocks / scales).to(torch.float8_e4m3fn).float() * scales
            rows = rounded.transpose(1, 2).flatten(0, 1).flatten(1).split([len(weight) for weight in weights])
            for weight, its_rows in zip(weights, rows, strict=True):
                weight.copy_(its_rows)
    return model


@pytest.mark.vllm
def test_tokens_that_were_drafted(tmp_path, monkeypatch):
    """vLLM drafts by n-grams. With large embeddings the last token decides most, so the models repeat themselves."""
    monkeypatch.setenv("NUMBA_DISABLE_JIT", "1")  # compiling the search takes longer than searching
    folders = {"A": save_tiny_qwen2(tmp_path / "A")}
    folders["B"] = changed(folders["A"], 7, tmp_path / "B")
    for folder in folders.values():
        model = AutoModelForCausalLM.from_pretrained(folder)
        model.get_input_embeddings().weight.data *= 30
        model.save_pretrained(folder)
    drafts = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 1, "prompt_lookup_max": 3}
    flags = (*ONE_PROCESS, "--speculative-config", json.dumps(drafts))
    with supervised("vllm", tmp_path, folders["A"], *flags, plugin="vllm_ngram") as running:
        served = Served("vllm", running, folders)

        params = dataclasses.replace(LONG, n=4, temperature=0.2, max_tokens=60, seed=1)
        exact = EXACT / params.temperature
        other = dataclasses.replace(params, seed=None)
        [answers], [again, _] = served.ask((PROMPT, params)), served.ask((PROMPT, params), (PROMPT[:9], other))
        assert [a.token_ids for a in answers] == [a.token_ids for a in again], "a seed gives one answer"
        surprises = [surprise(served.references["A"], answer, params.temperature) for answer in answers]
        total, variance = map(sum, zip(*surprises, strict=True))
        assert abs(total) < 4 * variance**0.5, "they are not samples of the model's distribution"
        for answer in answers:
            assert served.differences("A", answer, temperature=params.temperature).max() <= exact

        with Trainer(served) as trainer:
            for answer in across_update(served, trainer, dataclasses.replace(other, n=2, max_tokens=120)):
                versions = torch.tensor(answer.versions)
                assert versions.unique_consecutive().tolist() == [versions[0], versions[0] + 1]
                for name, version in (("A", versions[0]), ("B", versions[0] + 1)):
                    differences = served.differences(name, answer, temperature=params.temperature)
                    assert differences[versions == version].max() <= exact
        counts = requests.get(f"{served.url}/metrics", timeout=30).text
        accepted = re.search(r"^vllm:spec_decode_num_accepted_tokens_total{.*} (.*)$", counts, re.M)
        assert accepted and float(accepted[1]) > 20


@torch.no_grad()
def surprise(model: PreTrainedModel, answer: Completion, temperature: float) -> tuple[float, float]:
    """Sum and variance of log-probability plus entropy over the tokens: of mean 0 if they are the model's samples."""
    logits = model(torch.tensor([PROMPT + answer.token_ids])).logits[0, len(PROMPT) - 1 : -1] / temperature
    logprobs = logits.double().log_softmax(-1)
    entropy = -(logprobs.exp() * logprobs).sum(-1)
    variance = (logprobs.exp() * logprobs**2).sum(-1) - entropy**2
    return (torch.tensor(answer.logprobs) + entropy).sum().item(), variance.sum().item()
