"""Two FSDP2 ranks, two TP ranks, FSDP2 x TP with activation checkpointing and HSDP train as one process does."""

import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from tests.helpers import ROOT
from tests.helpers.ranks import Ranks
from tests.helpers.tiny_models import with_biases

PAD = 85  # among the most frequent tokens, and in the second rank's shard of the vocabulary
SHAPE = dict(
    vocab_size=131,  # odd, so that FSDP2 and TP shards are uneven
    pad_token_id=PAD,
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=64,
)


EXPERTS = dict(head_dim=32, moe_intermediate_size=40, num_experts=8, num_experts_per_tok=3, initializer_range=0.1)


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[str, str]:
    made = {}
    for name, tied in (("qwen3", True), ("llama", True), ("qwen2", False), ("qwen3_moe", False)):
        torch.manual_seed(0)
        if name == "qwen3_moe":
            model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**SHAPE, **EXPERTS, tie_word_embeddings=tied))
        elif name == "qwen3":
            model = Qwen3ForCausalLM(Qwen3Config(**SHAPE, head_dim=32, tie_word_embeddings=tied))
        elif name == "qwen2":
            model = with_biases(Qwen2ForCausalLM(Qwen2Config(**SHAPE, tie_word_embeddings=tied)))
        else:
            model = LlamaForCausalLM(LlamaConfig(**SHAPE, tie_word_embeddings=tied))
        key = f"{name}-{'tied' if tied else 'untied'}"
        folder = tmp_path_factory.mktemp(key)
        model.save_pretrained(folder)
        made[key] = str(folder)
    return made


WAY = {
    "tp": 1,
    "cp": 1,
    "ep": 1,
    "replicas": 1,
    "checkpointing": "none",
    "row_tokens": 64,
    "reduce_once": False,
    "computed": "float32",
    "together": 3,
}


def run(folder: str, ranks: int, out: Path, *ways: dict[str, Any]) -> torch.Tensor:
    """[ways, 3 steps, (loss, gradient norm)] of `ranks` gloo ranks that train in each of these ways, one by one."""
    worker = ROOT / "tests" / "helpers" / "parallel_worker.py"
    words = json.dumps([WAY | way for way in ways])
    Ranks(ranks, worker, folder, out, words, log=out.with_suffix(".log"), cwd=out.parent).check()
    return torch.tensor(json.loads(out.read_text()))


@pytest.fixture(scope="module")
def alone(folders, tmp_path_factory) -> Callable[..., torch.Tensor]:
    """What one process gives, run once for each model and way."""

    @functools.cache
    def result(model: str, **way: Any) -> torch.Tensor:
        return run(folders[model], 1, tmp_path_factory.mktemp("alone") / "1", way)[0]

    return result


@pytest.mark.parametrize("model", ["qwen3-tied", "llama-tied", "qwen2-untied"])
def test_sharded_training_equals_one_process(folders, alone, model, tmp_path):
    alone = alone(model)
    assert (alone[0] - alone[2]).abs().max() > 1e-3  # the weights do move
    ways = [{"tp": 1, "together": together} for together in (1, 2, 3)] + [{"tp": 2}, {"cp": 2}]
    for way, sharded in zip(ways, run(folders[model], 2, tmp_path / "2", *ways), strict=True):
        torch.testing.assert_close(sharded, alone, atol=1e-5, rtol=0, msg=lambda m, w=way: f"{w}: {m}")


def test_experts_on_four_ranks_equal_one_process(folders, alone, tmp_path):
    """Sharded by FSDP2 alone, two ranks with the same half of the experts, and each rank with a quarter of them."""
    way = {"row_tokens": 32}
    ways = [way, way | {"ep": 2, "checkpointing": "selective"}, way | {"ep": 4, "reduce_once": True}]
    ways += [way | {"ep": 2, "checkpointing": "full", "offload": True}]
    alone = alone("qwen3_moe-untied")
    assert (alone[0] - alone[2]).abs().max() > 1e-3
    for way, found in zip(ways, run(folders["qwen3_moe-untied"], 4, tmp_path / "4", *ways), strict=True):
        torch.testing.assert_close(found, alone, atol=1e-5, rtol=0, msg=lambda m, w=way: f"{w}: {m}")


def test_four_ranks_equal_one_process(folders, alone, tmp_path):
    """FSDP2 with TP and with CP, checkpointing, replicas of shards, of tensor-parallel and of context-parallel ranks.

    Four context-parallel ranks have two key/value heads, documents longer than a part, and parts without an answer.
    Block inputs on the host change no bit.
    """
    ways = [{"tp": 2, "checkpointing": kind, "together": 2 if kind == "full" else 1} for kind in ("full", "selective")]
    ways += [{"tp": tp, "replicas": 2} for tp in (1, 2)]
    ways += [{"cp": 4}, {"cp": 2, "checkpointing": "selective"}, {"cp": 2, "replicas": 2, "checkpointing": "full"}]
    ways += [way | {"offload": True} for way in (ways[0], ways[-1])]
    every = run(folders["qwen3-tied"], 4, tmp_path / "4", *ways)
    for way, found in zip(ways, every, strict=True):
        torch.testing.assert_close(found, alone("qwen3-tied"), atol=1e-5, rtol=0, msg=lambda m, w=way: f"{w}: {m}")
    assert torch.equal(every[-2:], every[[0, -3]])


def test_tensor_parallel_ranks_that_shard_nothing_compute_in_bfloat16(folders, alone, tmp_path):
    [parallel] = run(folders["qwen3-tied"], 2, tmp_path / "2", {"tp": 2, "computed": "bfloat16"})
    torch.testing.assert_close(parallel, alone("qwen3-tied", computed="bfloat16"), atol=2e-3, rtol=2e-2)


@pytest.mark.parametrize(
    ("ranks", "tp", "replicas"),
    [(2, 1, 1), (2, 1, 2), (4, 1, 2), (4, 2, 1)],
    ids=["sharded", "replicated", "replicas of shards", "tensor parallel"],
)
def test_gradients_that_are_reduced_once_a_step_are_the_same(folders, alone, ranks, tp, replicas, tmp_path):
    """In rows of 32 tokens: several for each rank. Replicated: pure data parallelism, with nothing sharded."""
    split = alone("qwen3-tied", row_tokens=32)
    alone = alone("qwen3-tied")
    torch.testing.assert_close(split, alone, atol=1e-5, rtol=0)
    way = {"tp": tp, "replicas": replicas, "row_tokens": 32}
    ways = [way | {"reduce_once": once, "together": together} for once, together in ((False, 1), (True, 2), (True, 3))]
    for way, found in zip(ways, run(folders["qwen3-tied"], ranks, tmp_path / "2", *ways), strict=True):
        torch.testing.assert_close(found, alone, atol=1e-5, rtol=0, msg=lambda m, w=way: f"{w}: {m}")


def test_bfloat16_gradients_that_are_reduced_once_are_summed_in_float32(alone):
    """As those of single rows are. A tied weight would have two gradients in each row: torch 2.15 adds even these in
    float32 if they are reduced once, and in bfloat16 by row."""
    by_row, once = (alone("qwen2-untied", row_tokens=32, computed="bfloat16", reduce_once=o) for o in (False, True))
    torch.testing.assert_close(once, by_row, atol=1e-6, rtol=0)
