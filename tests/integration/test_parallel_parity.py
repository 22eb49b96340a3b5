"""Two FSDP2 ranks, two TP ranks, FSDP2 x TP with activation checkpointing and HSDP train as one process does."""

import functools
import json
from collections.abc import Callable
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

ROUNDING = 3e-5
"""Of three steps, whose sums have another order on several ranks. Torch 2.11 comes to 1.7e-5."""
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


def reduced_once(tp: int, replicas: int) -> list[dict[str, Any]]:
    """In rows of 32 tokens: several for each rank."""
    way = {"tp": tp, "replicas": replicas, "row_tokens": 32}
    return [way | {"reduce_once": once, "together": together} for once, together in ((False, 1), (True, 2), (True, 3))]


SHARDED = [{"tp": 1, "together": together} for together in (1, 2, 3)] + [{"tp": 2}, {"cp": 2}]
MIXED = [{"tp": 2, "checkpointing": kind, "together": 2 if kind == "full" else 1} for kind in ("full", "selective")]
MIXED += [{"tp": tp, "replicas": 2} for tp in (1, 2)]
MIXED += [{"cp": 4, "checkpointing": "full", "mlp_chunk": 5}, {"cp": 2, "checkpointing": "selective"}]
MIXED += [{"cp": 2, "replicas": 2, "checkpointing": "full"}]
OFFLOADED = [(way, way | {"offload": True}) for way in (MIXED[0], MIXED[-1])]
MIXED += [offloaded for _, offloaded in OFFLOADED]
OF_EXPERTS = [{}, {"ep": 2, "checkpointing": "selective"}, {"ep": 4, "reduce_once": True}]
OF_EXPERTS += [{"ep": 2, "checkpointing": "full", "offload": True}]
OF_EXPERTS = [way | {"row_tokens": 32} for way in OF_EXPERTS]
TP_BFLOAT16 = {"tp": 2, "computed": "bfloat16"}
ROUNDED = [way | {"rounded": True} for way in ({}, {"tp": 2}, {"checkpointing": "full"})]
BFLOAT16 = [{"row_tokens": 32, "computed": "bfloat16", "reduce_once": once} for once in (False, True)]
ONCE = {
    "sharded": (2, reduced_once(tp=1, replicas=1)),
    "replicated": (2, reduced_once(tp=1, replicas=2)),
    "replicas of shards": (4, reduced_once(tp=1, replicas=2)),
    # Slow; others have each pair of what is left out. Rows of MIXED's shape: DTensor works out its rules for each anew.
    "tensor parallel": (4, [reduced_once(tp=2, replicas=1)[-1] | {"row_tokens": 64}]),
}
WAYS: dict[tuple[str, int], list[dict[str, Any]]] = {
    ("qwen3-tied", 1): [{}, {"row_tokens": 32}, {"computed": "bfloat16"}],
    ("qwen3-tied", 2): [*SHARDED, TP_BFLOAT16, *(way for ranks, ways in ONCE.values() if ranks == 2 for way in ways)],
    ("qwen3-tied", 4): [*MIXED, *(way for ranks, ways in ONCE.values() if ranks == 4 for way in ways)],
    ("llama-tied", 1): [{}],
    ("llama-tied", 2): SHARDED,
    ("qwen2-untied", 1): [{}, ROUNDED[0], *BFLOAT16],
    ("qwen2-untied", 2): [*SHARDED, *ROUNDED],
    ("qwen3_moe-untied", 1): [{}],
    ("qwen3_moe-untied", 4): OF_EXPERTS,
}
"""Of a model on so many ranks. These train in each way, one after the other: DTensor's first step on a mesh takes
longer than all others."""


@pytest.fixture(scope="module")
def trained(folders, tmp_path_factory) -> Callable[..., torch.Tensor]:
    """[3 steps, (loss, gradient norm)] of `ranks` gloo ranks that train a model in this way."""
    worker = ROOT / "tests" / "helpers" / "parallel_worker.py"

    @functools.cache
    def run(model: str, ranks: int) -> torch.Tensor:
        folder = tmp_path_factory.mktemp(f"{model}-{ranks}")
        words = json.dumps([WAY | way for way in WAYS[model, ranks]])
        Ranks(ranks, worker, folders[model], folder / "out", words, log=folder / "log", cwd=folder).check()
        return torch.tensor(json.loads((folder / "out").read_text()))

    return lambda model, ranks, way: run(model, ranks)[WAYS[model, ranks].index(way)]


def assert_equal(trained: Callable[..., torch.Tensor], model: str, ranks: int, ways: list[dict[str, Any]]) -> None:
    """Each way gives what one process gives."""
    alone = trained(model, 1, {})
    for way in ways:
        found = trained(model, ranks, way)
        torch.testing.assert_close(found, alone, atol=ROUNDING, rtol=0, msg=lambda m, w=way: f"{w}: {m}")


@pytest.mark.parametrize("model", ["qwen3-tied", "llama-tied", "qwen2-untied"])
def test_sharded_training_equals_one_process(trained, model):
    alone = trained(model, 1, {})
    assert (alone[0] - alone[2]).abs().max() > 1e-3  # the weights do move
    assert_equal(trained, model, 2, SHARDED)


def test_experts_on_four_ranks_equal_one_process(trained):
    """Sharded by FSDP2 alone, two ranks with the same half of the experts, and each rank with a quarter of them."""
    alone = trained("qwen3_moe-untied", 1, {})
    assert (alone[0] - alone[2]).abs().max() > 1e-3
    assert_equal(trained, "qwen3_moe-untied", 4, OF_EXPERTS)


def test_four_ranks_equal_one_process(trained):
    """FSDP2 with TP and with CP, checkpointing, replicas of shards, of tensor-parallel and of context-parallel ranks.

    Four context-parallel ranks have two key/value heads, documents longer than a part, and parts without an answer.
    Feed-forward layers take five tokens at a time there. Block inputs on the host change no bit.
    """
    assert_equal(trained, "qwen3-tied", 4, MIXED)
    for way, offloaded in OFFLOADED:
        assert torch.equal(trained("qwen3-tied", 4, offloaded), trained("qwen3-tied", 4, way))


def test_ranks_round_weights_as_one_process_does(trained):
    """A weight midway between two values of FP8 becomes the other one by the order of a sum."""
    alone = trained("qwen2-untied", 1, ROUNDED[0])
    assert (alone[0] - trained("qwen2-untied", 1, {})[0]).abs().max() > 5e-4
    for way in ROUNDED:
        found = trained("qwen2-untied", 2, way)
        torch.testing.assert_close(found, alone, atol=1e-4, rtol=0, msg=lambda m, w=way: f"{w}: {m}")


def test_tensor_parallel_ranks_that_shard_nothing_compute_in_bfloat16(trained):
    parallel, alone = trained("qwen3-tied", 2, TP_BFLOAT16), trained("qwen3-tied", 1, {"computed": "bfloat16"})
    torch.testing.assert_close(parallel, alone, atol=2e-3, rtol=2e-2)


@pytest.mark.parametrize("name", ONCE)
def test_gradients_that_are_reduced_once_a_step_are_the_same(trained, name):
    """Replicated: pure data parallelism, with nothing sharded."""
    split, alone = trained("qwen3-tied", 1, {"row_tokens": 32}), trained("qwen3-tied", 1, {})
    torch.testing.assert_close(split, alone, atol=1e-5, rtol=0)
    assert_equal(trained, "qwen3-tied", *ONCE[name])


def test_bfloat16_gradients_that_are_reduced_once_are_summed_in_float32(trained):
    """As those of single rows are. A tied weight would have two gradients in each row: torch 2.15 adds even these in
    float32 if they are reduced once, and in bfloat16 by row."""
    by_row, once = (trained("qwen2-untied", 1, way) for way in BFLOAT16)
    torch.testing.assert_close(once, by_row, atol=1e-6, rtol=0)
