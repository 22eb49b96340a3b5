"""GRPO with LoRA: servers get adapters only, and answer as the trainer's model does."""

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import Qwen3Config, Qwen3ForCausalLM

from tests.helpers import TINY_QWEN3
from tests.helpers.trainer_runs import attempt, embedded_server, train, without_times
from torchtitan.grpo.engines.vllm_control import VllmControl


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("base") / "model"
    shutil.copytree(TINY_QWEN3, folder)
    torch.manual_seed(0)
    Qwen3ForCausalLM(Qwen3Config.from_pretrained(folder)).save_pretrained(folder)
    return folder


def flags(base: Path, url: str = "", **others: object) -> dict[str, str | None]:
    given = {
        "model.weights": "hf",
        "model.hf_assets_path": base,
        "lora.enable": None,
        "lora.rank": 4,
        "optimizer.lr": 3e-2,
        "lr_scheduler.warmup_steps": 0,
        "lr_scheduler.decay_ratio": 0,  # a schedule of its own would be that of another run
        "grpo.kl_coef": 0.01,
        "sft.steps": 0,
        "checkpoint.interval": 2,
        "validation.freq": 2,
        "training.steps": 4,
    }
    given |= {"rollout.urls": url} if url else {}
    return {f"--{name}": None if value is None else str(value) for name, value in (given | others).items()}


def test_servers_answer_as_the_trainer_does_and_a_resumed_run_is_the_same(base, tmp_path):
    with embedded_server(base, tmp_path / "server.log") as url:
        whole = train(tmp_path / "whole", flags(base, url))
        train(tmp_path / "cut", flags(base, url, **{"training.steps": 2}), ranks=1)
        cut = train(tmp_path / "cut", flags(base, url, **{"checkpoint.resume": "auto"}))
        version = VllmControl(url).weight_version()
    assert version is not None and version.startswith("4@")
    assert all(line["policy/mismatch_abs"] < 1e-4 for line in whole), "the servers have the trainer's adapters"
    assert whole[0]["policy/kl"] == 0, "the reference is the model without adapters"
    assert whole[-1]["policy/kl"] > 1e-4, "the adapters have learned something"
    for line, other in zip(cut, whole, strict=True):
        assert without_checkpoint(line) == without_checkpoint(other)
    files = [tmp_path / name / "checkpoint" / "step-4" / "adapter" / "adapter_model.safetensors" for name in RUNS]
    assert files[0].read_bytes() == files[1].read_bytes()
    assert all(name.startswith("base_model.model.") for name in load_file(files[0]))


RUNS = ("whole", "cut")


def without_checkpoint(line: dict) -> dict:
    (clean,) = without_times([line])
    return {name: value for name, value in clean.items() if not name.startswith("checkpoint/")}


def test_two_ranks_with_a_server_of_their_own(base, tmp_path):
    """It loads the base itself. Background updates, and the KL in the reward."""
    background = {"async_grpo.enabled": None, "weight_sync.async_weight_update": None, "grpo.kl_placement": "reward"}
    lines = train(
        tmp_path / "run",
        flags(base, **background, **{"training.steps": 3}),
        ranks=2,
        own_server=True,
        FORKED_SERVERS="1",
    )
    assert all(line["policy/mismatch_abs"] < 1e-4 for line in lines if line["rollout/age_max"] == 0)


def test_another_base_is_refused_and_both_are_named(base, tmp_path):
    other = tmp_path / "other"
    shutil.copytree(base, other)
    Qwen3ForCausalLM(Qwen3Config.from_pretrained(other)).save_pretrained(other)
    with embedded_server(other, tmp_path / "server.log") as url:
        status, said = attempt(tmp_path / "run", flags(base, url))
    assert status == 2 and "Traceback" not in said, said[-3000:]
    error = said[said.index("\nerror: ") :]
    assert f"{url}: [lora] the adapters belong to other base weights" in error
    assert "the trainer has those of 'model' with" in error and "this server those of 'other' with" in error
