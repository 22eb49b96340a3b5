"""GRPO with a mixture of experts: two ranks with half of the experts each, and an embedded server that gets all."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

from tests.helpers import ROOT, TINY_QWEN3
from tests.helpers.ranks import Ranks
from tests.helpers.trainer_runs import embedded_server, train, without_times

HELPERS = ROOT / "tests" / "helpers"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    shutil.copytree(TINY_QWEN3, folder)
    shape = dict(vocab_size=64, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4)
    shape |= dict(num_key_value_heads=2, head_dim=16, max_position_embeddings=512, initializer_range=0.1)
    experts = dict(moe_intermediate_size=32, num_experts=6, num_experts_per_tok=2, norm_topk_prob=True)
    ends = dict(pad_token_id=0, bos_token_id=1, eos_token_id=2)
    torch.manual_seed(0)
    Qwen3MoeForCausalLM(Qwen3MoeConfig(**shape, **experts, **ends)).save_pretrained(folder)
    return folder


FLAGS = {
    "model.weights": "hf",
    "lr_scheduler.warmup_steps": "0",
    "lr_scheduler.decay_ratio": "0",
    "grpo.kl_coef": "0.01",
    "sft.steps": "0",
    "validation.enable": "false",
}


def run(folder: Path, dump: Path, url: str, ranks: int, **others: str | None) -> list[dict]:
    flags = FLAGS | {"model.hf_assets_path": str(folder), "rollout.urls": url} | others
    return train(dump, {f"--{key}": value for key, value in flags.items()}, ranks)


def test_servers_answer_as_the_trainer_does_and_a_resumed_run_is_the_same(folder, tmp_path):
    keys = {"parallelism.expert_parallel_degree": "2", "optimizer.lr": "3e-3", "checkpoint.interval": "2"}
    with embedded_server(folder, tmp_path / "server.log") as url:
        whole = run(folder, tmp_path / "whole", url, 2, **keys, **{"training.steps": "3"})
        shutil.copytree(tmp_path / "whole", tmp_path / "cut")
        shutil.rmtree(tmp_path / "cut" / "checkpoint" / "step-3")
        cut = run(folder, tmp_path / "cut", url, 2, **keys, **{"training.steps": "3", "checkpoint.resume": "auto"})
    assert all(line["policy/mismatch_abs"] < 1e-4 for line in whole), "the server has the trainer's experts"
    assert whole[-1]["policy/kl"] > 1e-5, "the policy has moved"
    assert all(1 < line["experts/load_max"] < 3 and line["experts/idle_fraction"] < 1 for line in whole)
    assert without_checkpoint(cut[-1]) == without_checkpoint(whole[-1])
    exported = [
        AutoModelForCausalLM.from_pretrained(tmp_path / name / "checkpoint" / "step-3" / "hf").state_dict()
        for name in ("whole", "cut")
    ]
    assert exported[0].keys() == exported[1].keys()
    assert all(torch.equal(value, exported[1][name]) for name, value in exported[0].items())
    start = AutoModelForCausalLM.from_pretrained(folder).state_dict()
    assert all((value != start[name]).any() for name, value in exported[0].items() if ".experts." in name)


def test_adapters_of_the_attention(folder, tmp_path):
    keys = {"lora.enable": None, "optimizer.lr": "3e-2", "training.steps": "2", "checkpoint.enable": "false"}
    with embedded_server(folder, tmp_path / "server.log") as url:
        lines = run(folder, tmp_path / "run", url, 1, **keys)
    assert all(line["policy/mismatch_abs"] < 1e-4 for line in lines)
    assert lines[0]["policy/kl"] == 0 and lines[1]["policy/kl"] > 1e-5, "the reference is the base"


def test_compiled_experts_of_two_ranks_have_the_gradients_of_eager_ones(folder, tmp_path):
    """With every activation checkpointing. Each exchanges rows with the other rank, forwards and backwards."""
    out = tmp_path / "out"
    Ranks(2, HELPERS / "compiled_experts.py", folder, out, log=tmp_path / "log").check()
    found = json.loads(out.read_text())
    assert sum("router" in name for name in found) == 3 * 2
    assert {name: value for name, value in found.items() if not value < 0.01} == {}


def without_checkpoint(line: dict) -> dict:
    (clean,) = without_times([line])
    return {name: value for name, value in clean.items() if not name.startswith("checkpoint/")}
