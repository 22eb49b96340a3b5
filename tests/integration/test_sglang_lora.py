"""LoRA adapters in a real SGLang on CPU: each answer is `peft`'s under the version that it began with."""

import asyncio
import dataclasses
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import nn
from transformers import Qwen3Config, Qwen3ForCausalLM

from tests.helpers import TINY_QWEN3
from tests.helpers.served_logprobs import answer_logprobs
from tests.helpers.servers import parent_of, server_pids, supervised
from tests.helpers.trainer_runs import train
from tests.helpers.weight_senders import CPU, SYNC, AdapterTrainer, changed
from torchtitan.grpo.engines.fleet import Fleet
from torchtitan.grpo.engines.protocol import Completion, SamplingParams
from torchtitan.grpo.engines.registry import make_server
from torchtitan.grpo.engines.sglang_adapters import SglangAdapterControl
from torchtitan.grpo.errors import UserError
from torchtitan.grpo.weight_sync import worker
from torchtitan.grpo.weight_sync.disk import DiskFeed
from torchtitan.grpo.weight_sync.link import WeightSyncError
from torchtitan.grpo.weight_sync.published import PublishedWeights
from torchtitan.grpo.weight_sync.sync import WeightSync
from torchtitan.grpo.weight_wire.version_names import version_name

pytest.importorskip("peft")
pytestmark = pytest.mark.sglang

PROMPT = [5 + i % 50 for i in range(100)]
SHORT = SamplingParams(n=2, temperature=1.0, max_tokens=8, ignore_eos=True)
LONG = dataclasses.replace(SHORT, max_tokens=200)
TOLERANCE = 1e-4
VERSIONS = 200
FILES = dataclasses.replace(SYNC, transport="disk")


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("weights") / "base"
    shutil.copytree(TINY_QWEN3, folder)  # with a tokenizer
    torch.manual_seed(0)
    config = Qwen3Config.from_pretrained(folder, max_position_embeddings=1024, initializer_range=0.15)
    Qwen3ForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def url(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    lora = {"lora_rank": 8, "lora_versions": 3}
    with supervised("sglang", tmp_path_factory.mktemp("server"), base, plugin="sglang_lora", **lora) as running:
        yield running.urls[0]


class Run:
    """A trainer of adapters and its server. Every publish waits for the server."""

    def __init__(self, url: str, published: PublishedWeights, trainer: AdapterTrainer, **modes: bool) -> None:
        self.server = make_server("sglang", url, None, 60.0, 120.0, adapters=True)
        self.sync = WeightSync(published, FILES, Fleet([url], lambda _: self.server), CPU, **modes)
        self.models: dict[int, nn.Module] = {}
        self._trainer = trainer

    def __enter__(self) -> "Run":
        try:
            self.sync.connect()
        except BaseException:
            self.sync.close()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        self.sync.close()

    def learn(self, *versions: int) -> None:
        """Make the models of versions to come: a publish is then no longer than that of a trainer."""
        self.models |= {version: self._trainer.learn(version) for version in versions}

    def publish(self, version: int) -> None:
        if version not in self.models:
            self.learn(version)
        self._trainer.draw(version)
        self.sync.publish(version)

    def ask(
        self, params: SamplingParams = SHORT, during: tuple[Callable[[], None], ...] = ()
    ) -> list[list[Completion]]:
        """Answers to a request, and to a short one after each of the calls that are made while the first runs."""

        async def asked() -> list[list[Completion]]:
            client = make_server("sglang", self.server.url, None, 60.0, 120.0, adapters=True).client
            client._version = lambda: self.server.version
            self.server.client = client
            try:
                running, late = asyncio.create_task(client.generate(PROMPT, params, "first")), []
                for i, call in enumerate(during):
                    await asyncio.sleep(0.1)
                    await asyncio.to_thread(call)
                    late.append(await client.generate(PROMPT, SHORT, f"late{i}"))
                assert not during or not running.done(), "it began before, and runs still"
                return [await running, *late]
            finally:
                await client.close()

        return asyncio.run(asked())

    def loaded(self) -> set[str]:
        return set(self.server.control.adapters())


def run_of(url: str, base: Path, rank: int = 4, **modes: bool) -> Run:
    trainer = AdapterTrainer(base, rank)
    return Run(url, trainer.published(), trainer, **modes)


def differences(model: nn.Module, answers: list[Completion]) -> torch.Tensor:
    """|served - computed by `model`| of every token, in nat."""
    expected = [answer_logprobs(model, PROMPT, answer.token_ids) for answer in answers]
    return (torch.tensor([answer.logprobs for answer in answers]) - torch.stack(expected)).abs()


def test_what_does_not_fit_is_refused_and_named(url: str, base: Path, tmp_path: Path):
    fits = AdapterTrainer(base)
    first, *others = (published := fits.published()).tensors
    narrow = dataclasses.replace(first.spec, shape=(4, first.spec.shape[1] // 2))
    half = dataclasses.replace(first, spec=narrow, box=(first.box[0], (0, narrow.shape[1])))
    cases = {
        r"rank = 16 is over its --max-lora-rank 8: start it with --enable-lora --max-lora-rank 16 --lora-": (
            AdapterTrainer(base, 16).published()
        ),
        r"the trainer has those of 'B' with .* this server those of 'base' with .* names$": AdapterTrainer(
            changed(base, 7, tmp_path / "B")
        ).published(),
        r"q_proj.lora_A.weight is \[4, 64\], and the server's layer .*q_proj takes \[4, 128\]": dataclasses.replace(
            published, tensors=(half, *others)
        ),
    }
    for why, weights in cases.items():
        with pytest.raises(UserError, match=rf"{url}: .*{why}"):
            Run(url, weights, fits).__enter__()
    server = make_server("sglang", url, None, 60.0, 120.0)
    sync = WeightSync(published, dataclasses.replace(SYNC, transport="gloo"), Fleet([url], lambda _: server), CPU)
    with pytest.raises(UserError, match=r"started with --enable-lora.*set \[lora\] enable = true"):
        sync.connect()
    sync.close()


def check(run: Run, version: int, answers: list[Completion]) -> None:
    assert {each for answer in answers for each in answer.versions} == {version}
    assert differences(run.models[version], answers).max() <= TOLERANCE


def test_an_answer_ends_under_the_version_that_it_began_with(url: str, base: Path):
    with run_of(url, base) as run:
        run.learn(1, 2, 3)
        run.publish(1)
        old, second, third = run.ask(LONG, (lambda: run.publish(2), lambda: run.publish(3)))
        # All have the same prompt: a cached prefix of another version would show.
        check(run, 1, old)
        check(run, 2, second)
        check(run, 3, third)
        assert differences(run.models[3], old).mean() > 0.05, "the adapters differ"
        assert run.loaded() == {version_name(version) for version in (1, 2, 3)}
        run.publish(4)
        assert run.loaded() == {version_name(version) for version in (3, 4)}, "no answer needs 1 and 2"


def test_a_cancelled_answer_does_not_hold_its_version(url: str, base: Path):
    with run_of(url, base) as run:
        run.publish(1)
        client = run.server.client

        async def cancelled() -> None:
            running = asyncio.create_task(client.generate(PROMPT, LONG, "cancelled"))
            await asyncio.sleep(0.1)
            assert client.running_versions() == {1}
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
            await client.close()

        asyncio.run(cancelled())
        for version in (2, 3):
            run.sync.publish(version)
        assert run.loaded() == {version_name(2), version_name(3)}


def test_running_answers_can_finish_before_an_update(url: str, base: Path):
    with run_of(url, base, in_flight=False) as run:
        run.learn(1, 2)
        run.publish(1)
        client, server = run.server.client, run.server

        async def asked() -> list[Completion]:
            running = asyncio.create_task(client.generate(PROMPT, dataclasses.replace(SHORT, max_tokens=100), "first"))
            server.in_flight = 1  # as the router counts
            running.add_done_callback(lambda _: setattr(server, "in_flight", 0))
            await asyncio.sleep(0.05)
            publishing = asyncio.create_task(asyncio.to_thread(run.publish, 2))
            while not (server.held or publishing.done()):
                await asyncio.sleep(0.001)
            assert server.held and not running.done(), "the update waits for it"
            await publishing
            assert running.done() and not server.held
            await client.close()
            return await running

        check(run, 1, asyncio.run(asked()))
        check(run, 2, *run.ask())


def test_a_folder_that_is_torn_leaves_the_version_before_in_service(url: str, base: Path, tmp_path: Path):
    with run_of(url, base) as run:
        run.publish(1)
        (link,) = (worker.link for worker in run.sync._board.workers)
        torn = tmp_path / "torn"
        shutil.copytree(run.sync._board.copy.feed().folder, torn)
        (file,) = torn.glob("*.safetensors")
        file.write_bytes(file.read_bytes()[:-100])
        link.stop(2)
        with pytest.raises(WeightSyncError, match=r"phase apply, version 2, .*HTTP 400 on /load_lora_adapter: Error"):
            link.update(DiskFeed(2, torn), run.sync._board.buckets, 1)
        with pytest.raises(UserError, match=r"cannot read the adapter's folder: .* disk_folder"):
            link.update(DiskFeed(2, tmp_path / "on another machine"), run.sync._board.buckets, 1)
        assert run.loaded() == {version_name(1)}
        check(run, 1, *run.ask())


def lose_adapters(control: SglangAdapterControl) -> None:
    """As a server that was restarted."""
    for name in control.adapters():
        control.unload_adapter(name, 10.0)
    control.report("default")


def test_a_server_that_has_lost_its_adapters_gets_the_newest_before_traffic(url: str, base: Path, monkeypatch):
    monkeypatch.setattr(worker, "HEALTH_S", 0.1)
    with run_of(url, base) as run:
        run.publish(1)
        run.publish(2)
        losses = run.server.losses
        lose_adapters(run.server.control)
        deadline = time.monotonic() + 20
        while not (run.server.losses > losses and run.server.in_traffic):
            assert time.monotonic() < deadline, run.server.describe()
            time.sleep(0.02)
        assert run.loaded() == {version_name(2)}
        check(run, 2, *run.ask())


def test_two_hundred_versions_take_no_more_memory_than_twenty(url: str, base: Path):
    with run_of(url, base) as run:
        sizes, seconds = {}, []
        for version in range(1, VERSIONS + 1):
            started = time.monotonic()
            run.sync.publish(version) if version < VERSIONS else run.publish(version)
            seconds.append(time.monotonic() - started)
            if version in (20, VERSIONS):
                (answers,) = run.ask()
                sizes[version] = resident_bytes(base)
        check(run, VERSIONS, answers)
        assert run.loaded() == {version_name(VERSIONS - 1), version_name(VERSIONS)}
        grew = sizes[VERSIONS] - sizes[20]
        print(f"grew by {grew >> 10} KiB; {1e3 * sorted(seconds)[VERSIONS // 2]:.0f} ms a version")
        assert grew < 16 << 20
        folder = run.sync._board.copy.feed().folder
        assert [each.name for each in folder.parent.glob("version*")] == [folder.name]
    assert not folder.parent.exists()


def test_a_run_trains_on_its_answers(url: str, base: Path, tmp_path: Path):
    lose_adapters(SglangAdapterControl(url))  # this process, which has them, lives
    flags = {"model.weights": "hf", "model.hf_assets_path": base, "sft.steps": 0, "optimizer.lr": 1e-2}
    flags |= {"lora.enable": None, "lora.rank": 8, "rollout.engine": "sglang", "rollout.urls": url}
    flags |= {"async_grpo.enabled": None, "weight_sync.async_weight_update": None, "training.steps": 2}
    lines = train(
        tmp_path / "run", {f"--{name}": value if value is None else str(value) for name, value in flags.items()}
    )
    assert len(lines) == 2
    assert all(line["policy/mismatch_abs"] < TOLERANCE for line in lines if line["rollout/age_max"] == 0)


def resident_bytes(model: Path) -> int:
    """Of the server that has this folder, with all its processes."""
    servers, total = server_pids(model), 0
    for path in Path("/proc").glob("[0-9]*/statm"):
        pid = int(path.parent.name)
        while pid > 1 and pid not in servers:
            pid = parent_of(pid)
        total += int(path.read_text().split()[1]) * 4096 if pid in servers else 0
    return total
