"""How many copies of the model a run on several nodes has."""

import copy
import dataclasses

import pytest

from tests.helpers import TINY_QWEN3
from torchtitan.grpo.config.load import load_config
from torchtitan.grpo.config.target import GPUS
from torchtitan.grpo.dry_run.copies import TIGHT, choose_copies, node_count, ranks_of_node
from torchtitan.grpo.dry_run.describe import describe
from torchtitan.grpo.dry_run.memory import memory_bytes

BASE = ["--model.hf_assets_path", str(TINY_QWEN3), "--model.weights", "random", "--training.seq_len", "256"]
BASE += ["--data.max_prompt_tokens", "64", "--rollout.max_answer_tokens", "64"]


def config(monkeypatch, world_size: int, *flags: str):
    monkeypatch.setenv("WORLD_SIZE", str(world_size))
    return load_config([*BASE, *flags], dry_run="h100")


def need(config, world_size: int, copies: int) -> int:
    """Bytes of a rank at its peak."""
    tried = copy.copy(config)
    tried.parallelism = dataclasses.replace(config.parallelism, data_parallel_replicate_degree=copies)
    memory = memory_bytes(tried, world_size, GPUS["h100"])
    return memory.total(memory.peak)


def test_one_copy_for_each_node_if_it_fits_there_else_one_over_all(monkeypatch):
    cfg = config(monkeypatch, 16)
    whole, half = need(cfg, 16, 1), need(cfg, 16, 2)
    assert half > whole, "a copy on fewer ranks needs more memory of each"
    just = dataclasses.replace(GPUS["h100"], memory_bytes=int(half / TIGHT) + 1)
    assert choose_copies(cfg, 16, 2, just).degree == 2
    less = dataclasses.replace(just, memory_bytes=int(half / TIGHT) - 1)
    refused = choose_copies(cfg, 16, 2, less)
    assert refused.degree == 1 and "of the memory of a GPU, over 90%" in refused.why
    assert refused.describe(16).startswith("One copy of the model, on 16 ranks: a copy for each node would take")
    assert cfg.parallelism.data_parallel_replicate_degree == 0, "nothing was changed"


def test_all_ranks_of_a_node_share_a_cpus_memory(monkeypatch):
    cfg = config(monkeypatch, 4)
    cpu = dataclasses.replace(GPUS["h100"], cuda=False)
    tried = copy.copy(cfg)
    tried.parallelism = dataclasses.replace(cfg.parallelism, data_parallel_replicate_degree=2)
    memory = memory_bytes(tried, 4, cpu)
    two_ranks = 2 * memory.total(memory.peak)
    for room, degree in ((1.2 * two_ranks, 2), (0.6 * two_ranks, 1)):  # one rank would fit the second
        assert choose_copies(cfg, 4, 2, dataclasses.replace(cpu, memory_bytes=int(room))).degree == degree


@pytest.mark.parametrize(
    ("flags", "world_size", "nodes", "even", "degree", "why"),
    [
        ([], 8, 1, True, 1, "there is one node"),
        ([], 1, 1, True, 1, "there is one node"),
        (["--parallelism.data_parallel_replicate_degree", "4"], 16, 2, True, 4, "is set"),
        (["--parallelism.data_parallel_replicate_degree", "1"], 16, 2, True, 1, "is set"),
        (["--parallelism.data_parallel_shard_degree", "16"], 16, 2, True, 1, "data_parallel_shard_degree is set"),
        (["--parallelism.tensor_parallel_degree", "2"], 16, 2, True, 2, "a copy for each node takes"),
        (["--parallelism.tensor_parallel_degree", "2"], 6, 2, True, 1, "tensor_parallel_degree = 2 does not divide"),
        (["--parallelism.expert_parallel_degree", "4"], 12, 2, True, 1, "expert_parallel_degree = 4 does not divide"),
        ([], 16, 2, False, 1, "different numbers of ranks"),
        ([], 16, 3, True, 1, "different numbers of ranks"),
    ],
)
def test_where_the_choice_is_not_open(flags, world_size, nodes, even, degree, why, monkeypatch):
    copies = choose_copies(config(monkeypatch, world_size, *flags), world_size, nodes, GPUS["h100"], even)
    assert copies.degree == degree and why in copies.why


def test_a_dry_run_is_told_its_nodes_and_says_what_it_chose(monkeypatch):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    text = describe(config(monkeypatch, 32), dry_run="h100", full=True)
    assert "# 32 ranks on 4 nodes\n#   4 copies of the model, each on 8 ranks: a copy for each node takes" in text
    assert "data_parallel_replicate_degree = 4  # default 0" in text
    monkeypatch.delenv("LOCAL_WORLD_SIZE")
    text = describe(config(monkeypatch, 32), dry_run="h100", full=True)
    assert " nodes\n" not in text and "data_parallel_replicate_degree = 1  # default 0" in text


@pytest.mark.parametrize(
    ("here", "ranks", "nodes"), [("8", 8, 2), ("16", 16, 1), ("32", 16, 1), ("5", 5, 1), ("0", 16, 1), (None, 16, 1)]
)
def test_nodes_are_counted_by_torchruns_variables(here, ranks, nodes, monkeypatch):
    if here:
        monkeypatch.setenv("LOCAL_WORLD_SIZE", here)
    else:
        monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    assert ranks_of_node(16) == ranks and node_count(16) == nodes
