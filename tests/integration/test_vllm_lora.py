"""LoRA adapters in a real vLLM on CPU: its answers are those of `peft` with the adapters of each version."""

import asyncio
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3ForCausalLM

from tests.helpers import TINY_QWEN3
from tests.helpers.forked_engines import import_uncollected
from tests.helpers.served_logprobs import answer_logprobs, worst_logprob_difference
from tests.helpers.servers import ONE_PROCESS, RunningServer, declare_plugin, serve_vllm
from tests.helpers.trainer_runs import train
from tests.helpers.weight_senders import CPU, SYNC, AdapterTrainer, changed, fleet_of, trainer_of, weights_of
from torchtitan.grpo.engines.protocol import Completion, SamplingParams
from torchtitan.grpo.engines.vllm import VllmClient
from torchtitan.grpo.engines.vllm_control import VllmControl
from torchtitan.grpo.errors import UserError
from torchtitan.grpo.weight_sync.published import PublishedWeights
from torchtitan.grpo.weight_sync.sync import WeightSync
from torchtitan.grpo.weight_wire.version_names import version_name

pytest.importorskip("peft")
pytestmark = pytest.mark.vllm

PROMPT = [5 + i % 50 for i in range(300)]
"""Longer than two blocks of vLLM's cache."""
LONG = SamplingParams(n=3, temperature=1.0, max_tokens=250, ignore_eos=True)
TOLERANCE = 1e-4
VERSIONS = 50


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    folder, base = tmp_path_factory.mktemp("server"), tmp_path_factory.mktemp("weights") / "base"
    shutil.copytree(TINY_QWEN3, base)  # with a tokenizer
    torch.manual_seed(0)
    config = Qwen3Config.from_pretrained(base, max_position_embeddings=1024, initializer_range=0.15)
    Qwen3ForCausalLM(config).save_pretrained(base)
    forked = "tests.helpers.forked_engines:vllm"  # its start takes half as long
    import_uncollected(declare_plugin(folder / "plugin", "vllm.general_plugins", "forked", forked))
    lora = ("--enable-lora", "--max-lora-rank", "8")
    with serve_vllm(folder, base, "--max-num-seqs", "16", *lora, *ONE_PROCESS) as server:
        yield server


def connected(server: RunningServer, published: PublishedWeights) -> WeightSync:
    sync = WeightSync(published, SYNC, fleet_of(VllmControl(server.url, None, 60.0)), CPU)
    try:
        sync.connect()
    except BaseException:
        sync.close()
        raise
    return sync


def test_what_does_not_fit_is_refused_and_named(server: RunningServer, tmp_path: Path):
    cases = {
        r"--max-lora-rank 8: start the server with a greater one": AdapterTrainer(server.model_dir, 16).published(),
        r"set \[lora\] enable = true, or start the server without": weights_of(*trainer_of(server.model_dir)),
        r"the trainer has those of 'B' with .* this server those of 'base' with .* names$": AdapterTrainer(
            changed(server.model_dir, 7, tmp_path / "B")
        ).published(),
    }
    for why, published in cases.items():
        with pytest.raises(UserError, match=rf"{server.url}: \[lora\] .*{why}"):
            connected(server, published)
    base = AutoModelForCausalLM.from_pretrained(server.model_dir).eval()
    assert worst_logprob_difference(server.url, base) <= TOLERANCE, "without a version it is the base"


def test_versions_replace_one_another_also_under_running_answers(server: RunningServer):
    trainer = AdapterTrainer(server.model_dir)
    sync, models = connected(server, trainer.published()), {}

    def publish(version: int) -> None:
        models[version] = trainer.learn(version)
        sync.publish(version)

    async def answers(*versions: int, every_s: float = 0.0) -> list[Completion]:
        client = VllmClient(server.url, None, 120.0, lambda: max(models))
        running = asyncio.create_task(client.generate(PROMPT, LONG, f"r{max(models)}"))
        for version in versions:
            await asyncio.sleep(every_s)
            await asyncio.to_thread(publish, version)
        try:
            return await running
        finally:
            await client.close()

    def check(completions: list[Completion]) -> None:
        for answer in completions:
            for version in set(answer.versions):
                expected = answer_logprobs(models[version], PROMPT, answer.token_ids)
                own = [at for at, of_token in enumerate(answer.versions) if of_token == version]
                assert (torch.tensor(answer.logprobs) - expected)[own].abs().max() <= TOLERANCE, version

    publish(1)
    check(asyncio.run(answers()))
    started = time.monotonic()
    check(asyncio.run(answers()))
    took_s = time.monotonic() - started
    first = 2
    for parts in (4, 8, 16, 32):
        across = asyncio.run(answers(first, first + 1, every_s=took_s / parts))
        check(across)
        if all(len(set(answer.versions)) == 3 for answer in across):
            break
        first += 2
    else:
        pytest.fail("not every update came while all answers were running")
    differing = answer_logprobs(models[1], PROMPT, across[0].token_ids) - torch.tensor(across[0].logprobs)
    assert differing.abs().mean() > 0.05, "the adapters differ"
    sync.close()


def test_fifty_versions_take_no_more_memory_than_five(server: RunningServer):
    trainer = AdapterTrainer(server.model_dir)
    sync = connected(server, trainer.published())
    sizes, seconds = [], []
    for version in range(1, VERSIONS + 1):
        model = trainer.learn(version) if version == VERSIONS else None
        started = time.monotonic()
        sync.publish(version)
        seconds.append(time.monotonic() - started)
        if version in (5, VERSIONS):
            sizes.append(sum(resident_bytes(pid) for pid in server.process.running()))
    assert VllmControl(server.url).weight_version() == version_name(VERSIONS)
    assert worst_logprob_difference(server.url, model) <= TOLERANCE
    print(f"grew by {(sizes[1] - sizes[0]) >> 10} KiB; {1e3 * sorted(seconds)[VERSIONS // 2]:.0f} ms a version")
    assert sizes[1] - sizes[0] < 32 << 20
    sync.close()


def test_a_run_trains_on_its_answers(server: RunningServer, tmp_path: Path):
    flags = {"model.weights": "hf", "model.hf_assets_path": server.model_dir, "sft.steps": 0, "optimizer.lr": 1e-2}
    flags |= {"lora.enable": None, "lora.rank": 8, "rollout.engine": "vllm", "rollout.urls": server.url}
    lines = train(
        tmp_path / "run", {f"--{name}": value if value is None else str(value) for name, value in flags.items()}
    )
    assert len(lines) == 3 and all(line["policy/mismatch_abs"] < TOLERANCE for line in lines)


def resident_bytes(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * 4096
