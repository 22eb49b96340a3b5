"""What an update does to running answers: WeightSync with the embedded server and long answers."""

import asyncio
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from transformers import Qwen3ForCausalLM

import torchtitan  # noqa: F401  the overlay's shims come first
from tests.helpers.servers import save_tiny_qwen3
from tests.helpers.trainer_runs import embedded_server
from tests.helpers.weight_senders import weights_of
from torchtitan.grpo.config import job_config
from torchtitan.grpo.engines.fleet import Fleet
from torchtitan.grpo.engines.fleet_view import FleetError
from torchtitan.grpo.engines.http_control import ServerError
from torchtitan.grpo.engines.protocol import Completion, SamplingParams
from torchtitan.grpo.engines.registry import make_server
from torchtitan.grpo.engines.vllm import VllmClient
from torchtitan.grpo.model.source import load_hf_weights, resolve_model
from torchtitan.grpo.weight_sync.sync import WeightSync

CPU = torch.device("cpu")
PROMPT = [3, 4]
TOKENS = 900
"""Length of an answer that is running when the weights change: at least 0.7 s."""
LONG = 2 * TOKENS
"""Of one that takes over 1 s on any machine."""


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> list[Path]:
    """Two models of one shape."""
    folder = tmp_path_factory.mktemp("models")
    return [save_tiny_qwen3(folder / str(seed), seed=seed, positions=2 * LONG) for seed in (0, 1)]


@pytest.fixture(scope="module")
def urls(folders) -> Iterator[list[str]]:
    with ExitStack() as stack:
        logs = [folders[0].parent / f"server{number}.log" for number in range(2)]
        yield [stack.enter_context(embedded_server(folders[0], log, "--max-sequences", 8)) for log in logs]


class Trainer:
    """A WeightSync whose model is the first of `folders` at odd versions, else the second; blocking."""

    def __init__(self, folders: list[Path], urls: list[str], timeout_s: float, **modes):
        self._folders = folders
        self._source = resolve_model(SimpleNamespace(hf_assets_path=str(folders[0]), weights="hf"), 64)
        self._model = self._source.build()
        with torch.no_grad():
            self._model.init_weights(buffer_device=CPU)
        self.fleet = Fleet(urls, lambda url: make_server("embedded", url, None, timeout_s, 60.0), len(urls))
        settings = job_config.WeightSync(timeout_seconds=timeout_s, straggler_seconds=0.4, buffer_memory_ratio=1e-9)
        self.sync = WeightSync(weights_of(self._source, self._model), settings, self.fleet, CPU, **modes)
        self.sync.connect()

    def publish(self, version: int) -> dict[str, dict[str, float]]:
        """Seconds of each server by phase."""
        load_hf_weights(self._model, self._source, self._folders[(version + 1) % 2])
        self.sync.publish(version)
        (report,) = self.sync.finished()
        assert report.version == version
        assert report.missed == 0
        return report.servers


@contextmanager
def trainer(folders, urls, timeout_s: float = 20.0, **modes) -> Iterator[Trainer]:
    trainer = Trainer(folders, urls, timeout_s, **modes)
    try:
        yield trainer
    finally:
        trainer.sync.close()
        for server in trainer.fleet.servers:
            with suppress(ServerError):  # an update that the end cut short; the next one makes it whole
                server.control.resume()


def answer_across(url: str, update, tokens: int = TOKENS, count: int = 1) -> tuple[Completion, object]:
    """The first of `count` answers that run across `update`, and what `update` returned."""

    async def scenario() -> tuple[Completion, object]:
        client = VllmClient(url, None, 60.0, lambda: 1)
        params = SamplingParams(count, 0.7, tokens, seed=1, ignore_eos=True)
        task = asyncio.create_task(client.generate(PROMPT, params, "r"))
        # The server takes them in order: the other one runs when this one is answered.
        await client.generate(PROMPT, SamplingParams(1, 0.7, 1, ignore_eos=True), "after it")
        updated = await asyncio.to_thread(update)
        completion = (await task)[0]
        await client.close()
        return completion, updated

    return asyncio.run(asyncio.wait_for(scenario(), 60))


@torch.no_grad()
def worst_difference(folder: Path, completion: Completion, start: int) -> float:
    """Largest difference of the served log-probabilities, from token `start` on, from the model's for the answer."""
    model = Qwen3ForCausalLM.from_pretrained(folder).eval()
    logits = model(torch.tensor([PROMPT + completion.token_ids])).logits[0, len(PROMPT) - 1 : -1] / 0.7
    expected = torch.log_softmax(logits, -1).gather(1, torch.tensor(completion.token_ids)[:, None]).squeeze(1)
    return (torch.tensor(completion.logprobs) - expected)[start:].abs().max().item()


@pytest.mark.parametrize("recompute_kv", [True, False])
def test_in_flight_an_answer_goes_on_under_the_new_weights(folders, urls, recompute_kv):
    with trainer(folders, urls[:1], recompute_kv=recompute_kv) as ours:
        ours.publish(1)
        completion, phases = answer_across(urls[0], lambda: ours.publish(2))
    cut = completion.versions.index(2)
    assert 0 < cut < TOKENS
    assert completion.versions == [1] * cut + [2] * (TOKENS - cut)
    assert "drain" not in phases[urls[0]]
    exact = worst_difference(folders[1], completion, cut) < 1e-4
    assert exact is recompute_kv, "kept keys and values are those of the old weights"


def test_running_answers_finish_under_their_weights_and_draining_is_not_straggling(folders, urls):
    """One server is idle. The other answers for longer than `straggler_seconds` and `timeout_seconds`."""
    with trainer(folders, urls, timeout_s=1.0, in_flight=False, drain_timeout_s=30.0) as ours:
        ours.publish(1)
        started = time.monotonic()
        completion, phases = answer_across(urls[0], lambda: ours.publish(2), LONG, count=7)
        took_s = time.monotonic() - started
        assert all(server.in_traffic and server.version == 2 for server in ours.fleet.servers)
        after, _ = answer_across(urls[0], lambda: None, tokens=4)
    assert completion.versions == [1] * LONG
    assert completion.finish_reason == "length"
    assert after.versions == [2] * 4
    busy, idle = phases[urls[0]], phases[urls[1]]
    assert busy["drain"] > 1.0, "the answers must take longer than the bounds that do not count here"
    assert busy["drain"] + busy["stopped"] == pytest.approx(busy["total"], abs=1e-3)
    assert idle["drain"] < busy["drain"] / 2
    assert idle["stopped"] > busy["stopped"]
    assert busy["total"] <= took_s


def test_an_answer_that_takes_too_long_to_finish_is_an_error_that_names_it(folders, urls):
    with trainer(folders, urls[:1], in_flight=False, drain_timeout_s=0.2) as ours:
        ours.publish(1)

        def fails() -> str:
            with pytest.raises(FleetError) as error:
                ours.publish(2)
            return str(error.value)

        completion, said = answer_across(urls[0], fails)
    assert completion.versions == [1] * TOKENS
    for part in (urls[0], "phase drain", "version 2", "over 0.2 s", "[rollout] request_timeout_seconds"):
        assert part in said
