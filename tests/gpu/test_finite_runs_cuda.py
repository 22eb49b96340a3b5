"""Whole runs on two GPUs, in which a gradient or a weight is not finite: two ranks, or a trainer and a vLLM server."""

import json
import math
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.helpers import ROOT
from tests.helpers.nan_weight import STEP
from tests.helpers.ranks import Ranks
from tests.helpers.trainer_runs import arguments, environment, steps

EVERY = 19
"""A prompt in so many has a reward so large that the norm of the gradient overflows."""
FLAGS: dict[str, str | None] = {
    "--sft.steps": "1",
    "--validation.no-enable": None,
    "--checkpoint.interval": "1",
    "--checkpoint.keep_latest_k": "0",
    "--metrics.samples_per_step": "1000",
}
SMALL = [
    "--enforce-eager",
    "--dtype",
    "float32",
    "--gpu-memory-utilization",
    "0.2",
    "--kv-cache-memory-bytes",
    "500000000",
]
"""Flags of a small server."""
VLLM: dict[str, str | None] = {
    "--rollout.engine": "vllm",
    "--rollout.replicas": "1",
    f"--rollout.server_flags={','.join(SMALL)}": None,
}
PLACES = pytest.mark.parametrize(("ranks", "server"), [(2, {}), (1, VLLM)], ids=["two_ranks", "vllm"])

pytestmark = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")


def run(script: Path, folder: Path, ranks: int, flags: dict[str, str | None]) -> tuple[int, str]:
    process = Ranks(
        ranks, script, *arguments(folder, FLAGS | flags), log=folder.parent / "log", environment=environment()
    )
    return process.wait(240), process.log


def exports(folder: Path) -> dict[int, dict[str, torch.Tensor]]:
    """The weights of each complete checkpoint by step."""
    complete = [path.parent for path in folder.glob("checkpoint/step-*/complete.json")]
    return {int(path.name[5:]): load_file(path / "hf" / "model.safetensors") for path in complete}


def all_finite(weights: dict[str, torch.Tensor]) -> bool:
    return all(bool(tensor.isfinite().all()) for tensor in weights.values())


@PLACES
def test_a_step_without_a_finite_gradient_is_left_out_counted_and_the_run_goes_on(ranks, server, tmp_path, monkeypatch):
    (tmp_path / "huge_rewards.py").write_text(
        "def huge(answer, prompt):\n"
        f"    return (1e36 if prompt.index % {EVERY} == 0 else 1.0) * (1 + sum(map(ord, answer)) % 97)\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=":")
    flags = server | {"--reward.functions": "huge_rewards:huge", "--training.steps": "6"}
    status, said = run(ROOT / "grpo_train.py", tmp_path / "run", ranks, flags)
    assert status == 0, said[-4000:]
    samples = [json.loads(line) for line in (tmp_path / "run" / "samples.jsonl").read_text().splitlines()]
    spoilt = {sample["step"] for sample in samples if sample["prompt_index"] % EVERY == 0}
    assert 0 < len(spoilt) < 6
    lines, saved = steps(tmp_path / "run"), exports(tmp_path / "run")
    assert [line["train/skipped_steps"] for line in lines] == [len(spoilt & set(range(n + 1))) for n in range(1, 7)]
    assert all(math.isfinite(line["policy/mismatch_abs"]) and line["policy/mismatch_abs"] < 0.05 for line in lines)
    assert sorted(saved) == [1, 2, 3, 4, 5, 6] and all(map(all_finite, saved.values()))
    for step in range(2, 7):
        same = all(torch.equal(saved[step][name], saved[step - 1][name]) for name in saved[step])
        assert same == (step in spoilt), step


@PLACES
def test_a_weight_that_is_not_finite_is_neither_published_nor_saved(ranks, server, tmp_path):
    script = ROOT / "tests" / "helpers" / "nan_weight.py"
    status, said = run(script, tmp_path / "run", ranks, server | {"--training.steps": "6"})
    assert status == 2 and f"version {STEP} of the weights is not finite and is not published" in said, said[-4000:]
    versions = [line.get("sync/version", 0) for line in steps(tmp_path / "run")]
    assert versions[: STEP - 1] == list(range(1, STEP)) and max(versions) < STEP  # the step itself is logged
    saved = exports(tmp_path / "run")
    assert max(saved) == STEP - 1 and all(map(all_finite, saved.values()))
