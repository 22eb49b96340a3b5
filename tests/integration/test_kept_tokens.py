"""Top-k, top-p and min-p in training: probabilities of sampler and trainer are among the same tokens."""

import asyncio
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.helpers import interpreted_kernels
from tests.helpers.embedded_servers import ServerThread
from tests.helpers.kept import worst_difference
from tests.helpers.microbatches import microbatches
from tests.helpers.ranks import Ranks
from tests.helpers.servers import ONE_PROCESS, declare_plugin, save_tiny_qwen2, supervised
from tests.helpers.trainer_runs import environment, small_run, steps, train, without_times
from tests.helpers.weight_senders import CPU, SYNC, changed, fleet_of, trainer_of, weights_of
from torchtitan.grpo.data.kept_tokens import KeptTokens
from torchtitan.grpo.engines.embedded.generator import Generator, Request
from torchtitan.grpo.engines.protocol import Completion, SamplingParams
from torchtitan.grpo.engines.vllm import VllmClient
from torchtitan.grpo.engines.vllm_control import VllmControl
from torchtitan.grpo.model.packed import make_packed
from torchtitan.grpo.model.source import load_hf_weights, resolve_model
from torchtitan.grpo.policy.rows import PackedSample
from torchtitan.grpo.servers.supervisor import Supervisor
from torchtitan.grpo.weight_sync.sync import WeightSync

PROMPT = list(range(5, 25))
PARAMS = SamplingParams(4, 0.8, 24, seed=3, ignore_eos=True, top_k=8, top_p=0.9, min_p=0.02, kept=True)
FLAGS = {"--rollout.top_k": "6", "--rollout.top_p": "0.9", "--rollout.min_p": "0.01"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_qwen2(tmp_path_factory.mktemp("opinions") / "model")


def test_a_trainer_agrees_with_its_sampler_among_the_kept_tokens_only(folder: Path) -> None:
    source = resolve_model(SimpleNamespace(hf_assets_path=str(folder), weights="hf"), 128)
    model = source.build()
    make_packed(model)
    with torch.no_grad():
        model.init_weights()
    load_hf_weights(model, source, folder)
    server = ServerThread(0, model=AutoModelForCausalLM.from_pretrained(folder).eval())
    client = VllmClient(server.url, None, 60.0, lambda: 0)
    try:
        answers = server.call(client.generate(PROMPT, PARAMS, "a"))
    finally:
        server.call(client.close())
        server.close()
    samples = [PackedSample(PROMPT, c.token_ids, 1.0, 1.0, c.logprobs, kept=c.kept) for c in answers]
    row = microbatches(samples, 256, 1)[0][0]

    def mismatch(row) -> torch.Tensor:
        with torch.no_grad():
            return (model(row, PARAMS.temperature)[0] - row.sampler_logprobs).abs()

    assert mismatch(row).max() < 2e-5
    assert mismatch(replace(row, kept=None)).mean() > 0.2, "among all tokens the ratio is another"


def test_each_token_is_kept_by_the_weights_that_sampled_it(folder: Path) -> None:
    """An update in the middle of the answers, whose keys and values are then computed again."""
    before, after = (AutoModelForCausalLM.from_pretrained(folder).eval() for _ in range(2))
    with torch.no_grad():
        after.model.norm.weight.mul_(torch.linspace(0.2, 2.0, after.config.hidden_size))
    serving = AutoModelForCausalLM.from_pretrained(folder)
    generator = Generator(serving, max_sequences=8, max_model_len=128)
    request = Request("r", PROMPT, PARAMS)
    generator.add([request])
    for _ in range(10):
        generator.step()
    generator.preempt()
    serving.load_state_dict(after.state_dict())
    generator.version = "1"
    while generator.busy:
        generator.step()
    for answer in request.answers:
        (_, first), (_, second) = answer.version_starts
        assert first == 0 and second == 11
        for own, reference in ((slice(0, second), before), (slice(second, None), after)):
            ids = answer.token_ids[own]
            kept = KeptTokens.of([mask.tolist() for mask in answer.kept[own]], ids, 512)
            part = Completion(ids, answer.logprobs[own], "length", [], kept=kept)
            prompt = PROMPT + answer.token_ids[: own.start]
            assert worst_difference(reference, prompt, part, PARAMS, of_all=False) < 1e-4


def test_a_run_resumes_and_replays_exactly(tmp_path: Path) -> None:
    """With minibatches, for which old log-probabilities are computed, and a reference: both among the kept tokens."""
    flags = FLAGS | {"--grpo.minibatches": "2", "--grpo.kl_coef": "0.1", "--rollout.record_gib": "1"}
    flags |= {"--lr_scheduler.total_steps": "4", "--checkpoint.interval": "2", "--validation.freq": "2"}
    whole = train(tmp_path / "whole", flags | {"--training.steps": "4"})
    train(tmp_path / "parts", flags | {"--training.steps": "2"})
    parts = train(tmp_path / "parts", flags | {"--training.steps": "4", "--checkpoint.resume": None})
    assert plain(parts) == plain(whole)
    assert all(line["policy/mismatch_abs"] < 1e-5 and line["policy/entropy"] < np.log(6) for line in whole)
    assert all(1 < line["rollout/kept_tokens_mean"] <= 6 for line in whole)

    flags |= {"--training.steps": "4"}
    replay(tmp_path / "whole", tmp_path / "again", flags)
    assert plain(steps(tmp_path / "again")) == plain(whole)
    of_hf = {"--sft.steps": "0", "--training.steps": "1"}  # random weights depend on the number of ranks
    of_hf |= {"--model.weights": "hf", "--model.hf_assets_path": str(tmp_path / "whole/checkpoint/step-4/hf")}
    for ranks, name in enumerate(("one", "two"), 1):
        of_ranks = of_hf | {"--parallelism.context_parallel_degree": str(ranks)}
        replay(tmp_path / "whole", tmp_path / name, flags | of_ranks, ranks)
    forget_kept(tmp_path / "whole")
    replay(tmp_path / "whole", tmp_path / "wrong", flags | {"--training.steps": "1"})
    one, two, wrong = (steps(tmp_path / name)[0] for name in ("one", "two", "wrong"))
    for name in ("train/loss", "train/grad_norm", "policy/mismatch_abs", "policy/entropy"):
        assert two[name] == pytest.approx(one[name], rel=1e-4), name
    assert wrong["policy/mismatch_abs"] > 0.05, "among all tokens, the first step's ratios would be wrong"


def forget_kept(run: Path) -> None:
    """Leave the kept tokens out of a run's record."""
    for path in (run / "rollouts").glob("step-*.npz"):
        with np.load(path) as arrays:
            np.savez(path, **{name: arrays[name] for name in arrays.files if not name.startswith("kept_")})


def plain(lines: list[dict]) -> list[dict]:
    """What must repeat, but for what comes from servers or a resume."""
    other = ("rollout/groups_", "rollout/retried", "rollout/process_losses", "validation/", "checkpoint/", "data/")
    return [{k: v for k, v in line.items() if not k.startswith(other)} for line in without_times(lines)]


def replay(run: Path, out: Path, flags: dict[str, str], ranks: int = 1) -> None:
    given = [part for flag in small_run(flags).items() for part in flag if part is not None]
    command, log = [run, "--out", out, *given], out.with_suffix(".log")
    ranks_of_it = Ranks(ranks, "torchtitan.grpo.commands", "replay", *command, log=log, environment=environment())
    assert ranks_of_it.wait(120) == 0, ranks_of_it.log[-4000:]


@pytest.fixture(scope="module")
def vllm_server(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Supervisor]:
    logs, module = tmp_path_factory.mktemp("vllm"), interpreted_kernels.__name__
    paths = declare_plugin(logs / "kernels", "vllm.general_plugins", "interpreted", f"{module}:register")
    (paths / "sitecustomize.py").write_text(f"import gc\n\ngc.disable()\nfrom {module} import offer\n\noffer()\n")
    flags = *ONE_PROCESS, "--max-num-seqs", "8"
    with (
        patch.dict(os.environ, interpreted_kernels.VARIABLES | {"PYTHONPATH": str(paths)}),
        supervised("vllm", logs, folder, *flags, kept=True) as running,
    ):
        yield running


@pytest.mark.vllm
def test_kept_tokens_of_vllm_are_those_of_transformers_logits(
    vllm_server: Supervisor, folder: Path, tmp_path: Path
) -> None:
    """Before an update of the weights, and after it."""
    reference = AutoModelForCausalLM.from_pretrained(folder).eval()
    (url,) = vllm_server.urls
    VllmControl(url, None, 120.0).check(128, 5, top_k=20)

    async def ask(*asked: SamplingParams) -> list[list[Completion]]:
        client = VllmClient(url, None, 240.0, lambda: -1, vocab_size=512)
        try:
            return await asyncio.gather(*(client.generate(PROMPT, each, f"r{i}") for i, each in enumerate(asked)))
        finally:
            await client.close()

    short = replace(PARAMS, n=2, max_tokens=6)
    shapes = [short, replace(short, top_p=1.0, min_p=0.3), replace(short, top_p=0.6, min_p=0.0)]
    greedy = SamplingParams(1, 0.0, 6, ignore_eos=True, top_k=8)
    *found, [picked] = asyncio.run(ask(*shapes, greedy))
    for params, answers in zip(shapes, found, strict=True):
        for answer in answers:
            assert worst_difference(reference, PROMPT, answer, params, of_all=False) < 1e-4
    expected = reference.generate(torch.tensor([PROMPT]), max_new_tokens=6, do_sample=False, pad_token_id=0)
    assert picked.token_ids == expected[0, len(PROMPT) :].tolist()

    other = changed(folder, 7, tmp_path / "other")
    source, model = trainer_of(folder)
    sync = WeightSync(weights_of(source, model), SYNC, fleet_of(VllmControl(url, None, 60.0)), CPU)
    sync.connect()
    load_hf_weights(model, source, other)
    sync.publish(1)
    sync.close()
    reference = AutoModelForCausalLM.from_pretrained(other).eval()
    [[answer, _]] = asyncio.run(ask(short))
    assert answer.versions == [1] * 6
    assert worst_difference(reference, PROMPT, answer, short, of_all=False) < 1e-4
