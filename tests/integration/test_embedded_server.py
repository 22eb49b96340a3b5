"""The embedded server as a real process, through the trainer's own clients."""

import asyncio
import json
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Coroutine, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import requests
import torch
from aiohttp import web
from transformers import AutoModelForCausalLM

from tests.helpers import ROOT
from tests.helpers.embedded_servers import ServerThread
from tests.helpers.servers import RunningServer, save_tiny_qwen3, serve_embedded, supervised
from tests.helpers.trainer_runs import embedded_server
from torchtitan.grpo.engines.embedded import server as embedded_module
from torchtitan.grpo.engines.embedded.generator import Generator
from torchtitan.grpo.engines.embedded.model import load_model
from torchtitan.grpo.engines.embedded.server import EmbeddedApp
from torchtitan.grpo.engines.http_control import ServerError
from torchtitan.grpo.engines.protocol import Completion, EngineError, SamplingParams
from torchtitan.grpo.engines.vllm import VllmClient
from torchtitan.grpo.engines.vllm_control import VllmControl
from torchtitan.grpo.errors import UserError
from torchtitan.grpo.weight_wire.buckets import Checksum, TensorSpec, combine_checksums, plan_buckets, plan_to_json
from torchtitan.grpo.weight_wire.receiver import PROTOCOL
from torchtitan.grpo.weight_wire.rendezvous import host_store
from torchtitan.grpo.weight_wire.transport import Group, in_thread, wait
from torchtitan.grpo.weight_wire.version_names import own_run, version_name

LONG = 900
"""Answer tokens of a request that is still running when the test does something else: about 1 s."""


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_qwen3(tmp_path_factory.mktemp("embedded") / "model", seed=0)


@pytest.fixture(scope="module")
def reference(model_dir: Path):
    return AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def shared_server(model_dir: Path) -> Iterator[RunningServer]:
    with serve_embedded(model_dir.parent, model_dir) as server:
        yield server


@pytest.fixture
def server(shared_server: RunningServer) -> Iterator[RunningServer]:
    yield shared_server
    requests.post(f"{shared_server.url}/resume", timeout=10).raise_for_status()


def run(coroutine: Coroutine) -> Any:
    return asyncio.run(asyncio.wait_for(coroutine, 60))


class Client(VllmClient):
    """A client that may be used in `async with`."""

    def __init__(self, url: str, api_key: str | None = None, request_timeout_s: float = 60.0) -> None:
        super().__init__(url, api_key, request_timeout_s, lambda: -1)

    async def __aenter__(self) -> "Client":
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()


async def generate(url: str, prompt: list[int], params: SamplingParams, **kwargs: Any) -> list[Completion]:
    async with Client(url, **kwargs) as client:
        return await client.generate(prompt, params, "one")


@torch.no_grad()
def assert_logprobs(model, prompt: list[int], completion: Completion, temperature: float, start: int = 0) -> None:
    logits = model(torch.tensor([prompt + completion.token_ids])).logits[0, len(prompt) - 1 : -1] / temperature
    expected = torch.log_softmax(logits, -1).gather(1, torch.tensor(completion.token_ids)[:, None]).squeeze(1)
    torch.testing.assert_close(torch.tensor(completion.logprobs)[start:], expected[start:], atol=1e-4, rtol=0)


@pytest.mark.parametrize("temperature", [0.7, 1.0])
def test_logprobs_over_http(server: RunningServer, reference, temperature: float) -> None:
    prompt = [5, 9, 300, 17]
    params = SamplingParams(n=4, temperature=temperature, max_tokens=10, seed=3, ignore_eos=True)
    completions = run(generate(server.url, prompt, params))
    assert [len(c.token_ids) for c in completions] == [10] * 4
    assert len({tuple(c.token_ids) for c in completions}) == 4
    for completion in completions:
        assert completion.finish_reason == "length"
        assert completion.versions == [-1] * 10  # the server has had no update
        assert_logprobs(reference, prompt, completion, temperature)
    assert run(generate(server.url, prompt, params))[2].token_ids == completions[2].token_ids


def test_greedy_over_http(server: RunningServer, reference) -> None:
    prompt = torch.tensor([[5, 9, 300, 17]])
    expected = reference.generate(prompt, max_new_tokens=12, do_sample=False, pad_token_id=0)[0, 4:].tolist()
    (completion,) = run(generate(server.url, prompt[0].tolist(), SamplingParams(1, 0.0, 12)))
    assert completion.token_ids == expected


def test_control_knows_the_server(server: RunningServer) -> None:
    control = VllmControl(server.url, None, 30.0)
    control.wait_healthy(5.0)
    assert control.world_size() == 1
    assert control.model_info()["max_model_len"] == 1024
    assert control.weight_version() == "default"
    for top_k in (0, 2, 3, 20):
        control.check_sampling([5, 6, 7], top_k=top_k)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"token_ids": [1] * 1024, "sampling_params": {"max_tokens": 1}}, "1024 tokens, --max-model-len is 1024"),
        ({"token_ids": [1] * 1000, "sampling_params": {"max_tokens": 25}}, r"1000 \+ 25 tokens, --max-model-len"),
        ({"token_ids": []}, "at least one"),
        ({"token_ids": [512]}, r"0\.\.511"),
        ({"token_ids": [1], "sampling_params": {"top_k": -2}}, r"Expected `int` >= -1 - at `\$.top_k`"),
        ({"token_ids": [1], "sampling_params": {}, "return_sampling_mask": True}, "needs top_k over 0"),
        ({"token_ids": [1], "sampling_params": {"top_p": 1.5}}, r"Expected `float` <= 1.0 - at `\$.top_p`"),
        ({"token_ids": [1], "sampling_params": {"stop": ["x"]}}, "no tokenizer.json"),
        ({"token_ids": [1], "sampling_params": {"best_of": 2}}, "unknown field `best_of`"),
        ({"token_ids": [1], "sampling_params": {"\ud800": 2}}, "surrogates not allowed"),
        ({"token_ids": [1], "sampling_params": {"stop": ["\ud800"]}}, "surrogates not allowed"),
        (
            {"token_ids": [1], "sampling_params": {"temperature": -1}},
            "temperature must be 0, or a number from 1e-06 to",
        ),
        (
            {"token_ids": [1], "sampling_params": {"temperature": 1e-45}},
            "temperature must be 0, or a number from 1e-06",
        ),
        ({"token_ids": [1], "sampling_params": {"temperature": 10**400}}, r"out of range - at `\$.temperature`"),
        ({"token_ids": [1], "sampling_params": {"temperature": float("nan")}}, "temperature must be 0, or a number"),
        (
            {"token_ids": [1], "sampling_params": {"seed": 2**63}},
            r"Expected `int.* - at `\$.seed`",
        ),
        ({"token_ids": [1], "sampling_params": {"seed": 1.5}}, r"Expected `int.* - at `\$.seed`"),
        (
            {"token_ids": [1], "sampling_params": {"n": 10**9}},
            r"Expected `int` <= 65536 - at `\$.n`",
        ),
        ({"token_ids": [1], "sampling_params": {"n": "x" * 5000}}, r"Expected `int`, got `str` - at `\$.n`"),
        (
            {"token_ids": [1], "sampling_params": {"stop_token_ids": 7}},
            r"Expected `array`, got `int` - at `\$.stop_token_ids`",
        ),
        ([], "must be a JSON object"),
        (b"\xff{}", "the body is not JSON"),
        (b"[" * 100000, "the body is not JSON"),
        (b'{"token_ids": [' + b"9" * 5000 + b"]}", "the body is not JSON"),
    ],
    ids=lambda value: str(value)[:60],
)
def test_bad_requests(server: RunningServer, body: Any, message: str) -> None:
    data = body if isinstance(body, bytes) else json.dumps(body)
    reply = requests.post(f"{server.url}/inference/v1/generate", data=data, timeout=10)
    assert reply.status_code == 400
    assert len(reply.text) < 400
    with pytest.raises(AssertionError, match=message):
        raise AssertionError(reply.json()["error"]["message"])


def test_client_turns_a_refusal_into_a_user_error(server: RunningServer) -> None:
    with pytest.raises(UserError, match=rf"{server.url} refuses request one: the prompt has 1024 tokens"):
        run(generate(server.url, [1] * 1024, SamplingParams(1, 1.0, 1)))


def test_a_prompt_just_under_the_limit(server: RunningServer) -> None:
    (completion,) = run(generate(server.url, [1] * 1023, SamplingParams(1, 1.0, 1)))
    assert len(completion.token_ids) == 1


def test_cohorts_are_equal_to_the_last_bit(server: RunningServer) -> None:
    prompts = [[7 + i] * (1 + 3 * i) for i in range(6)]

    async def cohort(name: str, order: list[int]) -> list[list[Completion]]:
        async with Client(server.url) as client:
            tasks: dict[int, asyncio.Task] = {}
            for i in order:
                params = SamplingParams(n=3, temperature=1.0, max_tokens=20 + i, seed=i, ignore_eos=True)
                tasks[i] = asyncio.create_task(client.generate(prompts[i], params, f"r{i}", (name, len(order))))
                if len(tasks) < len(order):  # held until all have come
                    await asyncio.sleep(0.05)
                    assert not any(task.done() for task in tasks.values())
            return [await tasks[i] for i in range(len(prompts))]

    first = run(cohort("a", [0, 1, 2, 3, 4, 5]))
    assert first == run(cohort("b", [4, 0, 5, 2, 1, 3]))  # tokens and log-probabilities, exactly


def test_an_incomplete_cohort_is_not_held_forever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(embedded_module, "COHORT_TIMEOUT_S", 1.0)
    server = ServerThread(0)

    async def alone() -> float:
        async with Client(server.url) as client:
            begin = time.monotonic()
            await client.generate([1, 2], SamplingParams(1, 1.0, 1), "r", ("c", 2))
            return time.monotonic() - begin

    assert 0.9 < run(alone()) < 20.0
    server.close()


async def started(client: Client, prompt: list[int], params: SamplingParams, name: str = "r") -> asyncio.Task:
    """A request that the server is answering. It starts with another one, as a cohort, and that one has its answer."""
    cohort = (name, 2)
    task = asyncio.create_task(client.generate(prompt, params, name, cohort))
    await client.generate([3], SamplingParams(1, 1.0, 1), f"{name} runs", cohort)
    return task


def test_pause_keep_freezes_running_and_queued_requests(server: RunningServer, reference) -> None:
    control = VllmControl(server.url, None, 30.0)

    async def scenario() -> list[Completion]:
        async with Client(server.url) as client:
            params = SamplingParams(1, 0.7, LONG, seed=1, ignore_eos=True)
            running = await started(client, [3, 4], params)
            assert not running.done()
            await asyncio.to_thread(control.pause)
            assert await asyncio.to_thread(control.is_paused)
            queued = asyncio.create_task(client.generate([5], SamplingParams(1, 0.7, 3, seed=2), "queued"))
            await asyncio.sleep(1.5)
            assert not running.done() and not queued.done()
            await asyncio.to_thread(control.resume)
            return (await running) + (await queued)

    running, queued = run(scenario())
    assert_logprobs(reference, [3, 4], running, 0.7)
    assert_logprobs(reference, [5], queued, 0.7)
    (undisturbed,) = run(generate(server.url, [3, 4], SamplingParams(1, 0.7, LONG, seed=1, ignore_eos=True)))
    assert undisturbed.token_ids == running.token_ids


def test_pause_abort_ends_answers_and_the_client_takes_none_of_them(server: RunningServer) -> None:
    async def scenario() -> None:
        async with Client(server.url) as client:
            task = await started(client, [3], SamplingParams(1, 1.0, LONG, ignore_eos=True))
            await asyncio.to_thread(VllmControl(server.url, None, 30.0).pause, "abort")
            await task

    with pytest.raises(EngineError, match=rf"{server.url}: request r: .*the server aborted it after [1-9]\d* tokens"):
        run(scenario())


def test_pause_wait_drains(server: RunningServer) -> None:
    async def scenario() -> Completion:
        async with Client(server.url) as client:
            task = await started(client, [3], SamplingParams(1, 1.0, 200, ignore_eos=True))
            await asyncio.to_thread(VllmControl(server.url, None, 30.0).pause, "wait")
            return (await asyncio.wait_for(task, 20.0))[0]  # on its way

    assert len(run(scenario()).token_ids) == 200


def test_a_lost_client_frees_its_place(model_dir: Path) -> None:
    generator = Generator(
        load_model(model_dir, torch.device("cpu"), torch.float32), max_sequences=1, max_model_len=1024
    )
    steps, step = [], generator.step
    generator.step = lambda **how: steps.append(1) or step(**how)  # type: ignore[method-assign]

    async def scenario() -> None:
        # Served within this process, so that the batch can be looked at.
        app = EmbeddedApp(generator, "tiny")
        runner = web.AppRunner(app.application(), handler_cancellation=True)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        async with Client(f"http://127.0.0.1:{runner.addresses[0][1]}") as client:
            long = SamplingParams(1, 1.0, 1000, seed=0, ignore_eos=True)
            tasks = [asyncio.create_task(client.generate([3], long, f"r{i}")) for i in range(3)]
            while not generator.running:
                await asyncio.sleep(0.01)
            for task in tasks:
                task.cancel()
            while generator.busy:
                await asyncio.sleep(0.01)
            assert not generator._running and not app._waiting
            answers = await client.generate([3], SamplingParams(1, 1.0, 2, ignore_eos=True), "next")
            assert len(answers[0].token_ids) == 2
        await runner.cleanup()
        assert not app.worker.is_alive()

    run(scenario())
    assert len(steps) < 2000, "three answers of 1000 tokens, one after the other, take 3000"


def test_killed_server_is_an_error_with_its_address(model_dir: Path, tmp_path: Path) -> None:
    with serve_embedded(tmp_path, model_dir) as server:

        async def scenario() -> None:
            async with Client(server.url, request_timeout_s=20.0) as client:
                task = await started(client, [3], SamplingParams(1, 1.0, LONG, ignore_eos=True))
                server.process.kill()
                with pytest.raises(EngineError, match=rf"{server.url}: request r"):
                    await asyncio.wait_for(task, 5.0)
                with pytest.raises(EngineError, match=rf"{server.url}: request s"):
                    await asyncio.wait_for(client.generate([3], SamplingParams(1, 1.0, 1), "s"), 5.0)

        run(scenario())


def test_stuck_server_is_an_error_within_the_timeout(model_dir: Path, tmp_path: Path) -> None:
    with serve_embedded(tmp_path, model_dir) as server:
        server.process.send_signal(signal.SIGSTOP)
        begin = time.monotonic()
        with pytest.raises(EngineError, match=rf"{server.url}: no answer to request one within 1\.5 s"):
            run(generate(server.url, [3], SamplingParams(1, 1.0, 1), request_timeout_s=1.5))
        assert time.monotonic() - begin < 4.0
        server.process.kill()  # a stopped process does not see SIGTERM


def test_sigterm_ends_in_order(model_dir: Path, tmp_path: Path) -> None:
    with serve_embedded(tmp_path, model_dir) as server:

        async def scenario() -> None:
            async with Client(server.url) as client:
                task = await started(client, [3], SamplingParams(1, 1.0, LONG, ignore_eos=True))
                server.process.send_signal(signal.SIGTERM)
                await task

        with pytest.raises(EngineError, match="the server aborted it"):
            run(scenario())
        assert server.process.wait(10) == 0


def test_server_ends_with_its_parent_and_its_import_is_light(model_dir: Path, tmp_path: Path) -> None:
    """It loads nothing of upstream but what `torchtitan_overlay` prepares: no models, no trainer."""
    python = [sys.executable, "-X", "importtime"]  # it prints each module
    command = [*python, "-m", "torchtitan.grpo.engines.embedded", "--model", str(model_dir), "--parent-pid"]
    script = f"""
import os, subprocess
server = subprocess.Popen([*{command!r}, str(os.getpid())], stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
while b"serving" not in (line := server.stdout.readline()):
    assert server.poll() is None
    print(line.decode(), end="")
print(server.pid, flush=True)
os.kill(os.getpid(), 9)
"""
    result = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, stdout=subprocess.PIPE, timeout=60, check=False, text=True
    )
    *said, pid = result.stdout.splitlines()
    deadline = time.monotonic() + 15
    while _alive(int(pid)):
        assert time.monotonic() < deadline, "the server outlived its parent"
        time.sleep(0.1)
    modules = {line.rpartition("|")[2].strip() for line in said if line.startswith("import time:")}
    assert "torchtitan.grpo.engines.embedded.server" in modules
    upstream = {m for m in modules if m.startswith("torchtitan.") and not m.startswith("torchtitan.grpo")}
    assert upstream <= {"torchtitan.tools", "torchtitan.tools.logging", "torchtitan.tools.utils"} | {
        "torchtitan.models.moe.kernels"  # an empty stand-in, see torchtitan_overlay
    }


def _alive(pid: int) -> bool:
    with suppress(OSError):  # it has ended
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


def test_api_key(model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TEST_SERVER_KEY", "a-secret-key")
    with serve_embedded(tmp_path, model_dir, "--api-key-env", "TEST_SERVER_KEY") as server:
        with pytest.raises(UserError, match=r"HTTP 401.*\[rollout\] api_key_env"):
            run(generate(server.url, [3], SamplingParams(1, 1.0, 1)))
        assert run(generate(server.url, [3], SamplingParams(1, 1.0, 1), api_key="a-secret-key"))
        assert requests.get(f"{server.url}/health", timeout=5).status_code == 200
        assert requests.post(f"{server.url}/pause", timeout=5).status_code == 401
    assert "a-secret-key" not in (tmp_path / "server.log").read_text()


def test_a_server_that_cannot_start_says_why(tmp_path: Path) -> None:
    said = r"ended with exit status 1 before it served.*(\n.*)*has no config\.json"
    with pytest.raises(UserError, match=said), supervised("embedded", tmp_path, tmp_path):
        pass


class Trainer:
    """The sending end of one weight transfer, over the project's buckets and groups."""

    def __init__(self, control: VllmControl, tensors: dict[str, torch.Tensor]) -> None:
        specs = [TensorSpec(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()]
        self.control = control
        self.buckets = plan_buckets(specs, 64 << 10)
        store, port = host_store("127.0.0.1", 20.0)
        info = {
            "protocol": PROTOCOL,
            "run": own_run(),
            "backend": "gloo",
            "master_address": "127.0.0.1",
            "master_port": port,
        }
        info |= {"rank_offset": 1, "world_size": 2, "num_buffers": 2, "timeout_seconds": 20.0}
        joined = threading.Thread(target=control.init_transfer, args=(info | {"plan": plan_to_json(self.buckets)},))
        joined.start()
        self.group = Group("gloo", store, 0, 2, torch.device("cpu"), 20.0, "127.0.0.1")
        joined.join()

    def send(self, tensors: dict[str, torch.Tensor], version: int, spoil: bool = False, misses: int = 0) -> list[int]:
        """Send all tensors and return the server's acknowledgement. `spoil` flips a byte after the checksum. With
        `misses` the trainer expects another checksum of all."""
        checksums = []
        failure: list[Exception] = []

        def update() -> None:
            try:
                self.control.update({"version": version, "run": own_run(), "resume": True})
            except ServerError as error:
                failure.append(error)

        thread = threading.Thread(target=update)
        thread.start()
        for bucket in self.buckets:
            wire = torch.zeros(bucket.wire_bytes, dtype=torch.uint8)
            for name, view in bucket.views(wire):
                view.copy_(tensors[name])
            payload = wire[: bucket.payload_bytes]
            checksum = int(Checksum(torch.device("cpu"), bucket.payload_bytes)(payload))
            checksums.append(checksum)
            bucket.trailer(wire).copy_(torch.tensor([version, bucket.index, bucket.payload_bytes, checksum]))
            if spoil and bucket.index == 1:
                wire[100] ^= 1
            wait(self.group.broadcast(wire), time.monotonic() + 20, "a bucket")
        self.combined = combine_checksums(checksums)
        table = torch.zeros(2, 5, dtype=torch.int64)
        size = sum(bucket.payload_bytes for bucket in self.buckets)
        table[0] = torch.tensor([1, version, len(tensors), size, self.combined])
        table[0, 4] += misses
        wait(self.group.all_reduce(table), time.monotonic() + 20, "the acknowledgement")
        thread.join()
        if failure:
            raise failure[0]
        return table[1].tolist()


def test_weight_update_under_running_requests(model_dir: Path, reference, tmp_path: Path) -> None:
    """Pause, update, resume: tokens before and after carry their versions, and those after are an exact recompute."""
    other = AutoModelForCausalLM.from_pretrained(save_tiny_qwen3(tmp_path / "other", seed=1)).eval()
    tensors = dict(other.named_parameters())
    with embedded_server(model_dir, tmp_path / "server.log") as url:
        control = VllmControl(url, None, 30.0)
        with pytest.raises(ServerError, match="init_weight_transfer_engine first"):
            control.update({"version": 11})
        trainer = Trainer(control, tensors)
        with pytest.raises(ServerError, match="pause the server"):
            control.update({"version": 11})

        def publish() -> list[int]:
            control.pause("keep", clear_cache=True)
            return trainer.send(tensors, 12)

        async def scenario() -> tuple[Completion, list[int]]:
            async with Client(url) as client:
                params = SamplingParams(1, 0.7, LONG, seed=1, ignore_eos=True)
                task = await started(client, [3, 4], params)
                acknowledgement = await asyncio.to_thread(publish)
                return (await task)[0], acknowledgement

        completion, acknowledgement = run(scenario())
        payload_bytes = sum(bucket.payload_bytes for bucket in trainer.buckets)
        assert acknowledgement == [1, 12, len(tensors), payload_bytes, trainer.combined]
        assert control.weight_version() == version_name(12)
        cut = completion.versions.index(12)
        assert 0 < cut < LONG
        assert completion.versions == [-1] * cut + [12] * (LONG - cut)
        before = Completion(completion.token_ids[:cut], completion.logprobs[:cut], "length", [])
        assert_logprobs(reference, [3, 4], before, 0.7)
        assert_logprobs(other, [3, 4], completion, 0.7, start=cut)

        # A torn update is refused, keeps the server out of service, and can be repeated.
        control.pause()
        for torn, why in (({"spoil": True}, "checksum of its"), ({"misses": 1}, "is not the trainer's")):
            with pytest.raises(ServerError, match=why):
                trainer.send(dict(reference.named_parameters()), 13, **torn)
            with pytest.raises(ServerError, match="mix of two versions"):
                control.resume()
            assert control.weight_version() == version_name(12) and control.is_paused()
        assert trainer.send(dict(reference.named_parameters()), 14)[:2] == [1, 14]
        (completion,) = run(generate(url, [8, 9], SamplingParams(1, 1.0, 8, seed=0, ignore_eos=True)))
        assert completion.versions == [14] * 8
        assert_logprobs(reference, [8, 9], completion, 1.0)


def test_an_update_that_leaves_something_out_is_refused(model_dir: Path, reference, tmp_path: Path) -> None:
    tensors = dict(list(reference.named_parameters())[:-1])
    with embedded_server(model_dir, tmp_path / "server.log") as url:
        control = VllmControl(url, None, 30.0)
        trainer = Trainer(control, tensors)
        control.pause()
        with pytest.raises(ServerError, match=r"1 parameters were never sent: lm_head\.weight"):
            trainer.send(tensors, 1)
        with pytest.raises(ServerError, match="mix of two versions"):
            control.resume()


def test_a_trainer_that_never_joins_stops_no_answers(server: RunningServer) -> None:
    """Its store answers, but it does not come. Once it is gone, so is its connection."""
    store, port = host_store("127.0.0.1", 20.0)
    info = {
        "protocol": PROTOCOL,
        "run": own_run(),
        "backend": "gloo",
        "master_address": "127.0.0.1",
        "master_port": port,
    }
    info |= {"rank_offset": 1, "world_size": 2, "num_buffers": 1, "timeout_seconds": 20.0}
    info["plan"] = plan_to_json(plan_buckets([TensorSpec("weight", torch.float32, (8,))], 1 << 10))
    joining = in_thread(lambda: VllmControl(server.url, None, 30.0).init_transfer(info), "test-join")
    while not store.check(["torchtitan_grpo/here/1"]):
        time.sleep(0.01)
    started = time.monotonic()
    assert run(generate(server.url, [3], SamplingParams(1, 1.0, 1)))
    assert time.monotonic() - started < 5 and not joining.done()
    del store
    assert isinstance(joining.exception(10), ServerError)


def test_nan_weights_are_an_error_for_every_request(reference, tmp_path: Path) -> None:
    broken = save_tiny_qwen3(tmp_path / "broken", seed=0)
    model = AutoModelForCausalLM.from_pretrained(broken)
    torch.nn.init.constant_(model.model.norm.weight, float("nan"))
    model.save_pretrained(broken)
    with embedded_server(broken, tmp_path / "server.log") as url:
        with pytest.raises(EngineError, match=rf"{url}.*HTTP 500.*NaN"):
            run(generate(url, [3], SamplingParams(2, 1.0, 4)))
        assert requests.get(f"{url}/health", timeout=5).status_code == 200
