"""scripts/bench/step.py: what it refuses, what it counts, a small run of the real thing."""

import dataclasses
import json
import sys
from pathlib import Path

import pytest
import torch

from tests.helpers import ROOT

sys.path.insert(0, str(ROOT / "scripts" / "bench"))

import step as bench
from bench_common.output import Output
from bench_common.shapes import SHAPES, write_model
from step_bench import runs
from step_bench.setup import peak_parts
from step_bench.work import FIRST_TOKEN, Work

from torchtitan.grpo.model.flops import TrainingFlops
from torchtitan.grpo.model.hf_config import from_folder
from torchtitan.models.qwen3 import Qwen3Model, qwen3_args

SMALL = ["--device", "cpu", "--shapes", "tiny", "--tokens", "64", "--documents", "32"]
SMALL += ["--microbatches", "2", "--steps", "2", "--warmup", "1"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--what our", "invalid choice: 'our'"),
        ("--tokens 100 --documents 64", "--tokens 100 is not a multiple of --documents 64"),
        ("--documents 1", "so 2 or more"),
        ("--prompt-share 1", "1 is not in [0, 1)"),
        ("--prompt-share -0.1", "-0.1 is not in [0, 1)"),
        ("--steps 0", "0 is under 1"),
        ("--peak-tflops 0", "0 is not a positive number"),
        ("--what torchtitan --lora 4", "--lora is for the contender ours"),
        ("--lora 0", "0 is under 1"),
        ("--micro 2", "unrecognized arguments: --micro 2"),
        ("-- training.steps 3", "'training.steps' is not --section.key"),
    ],
)
def test_bad_arguments_are_refused_with_what_to_change(arguments, message, capsys):
    with pytest.raises(SystemExit) as ended:
        bench.parse_arguments(arguments.split())
    assert ended.value.code == 2
    assert message in capsys.readouterr().err


def test_torchtitan_comes_first_so_that_ratios_are_known_at_once():
    args = bench.parse_arguments(["--what", "ours", "torchtitan", "--", "--training.max_norm", "0.5"])
    assert args.what == ["torchtitan", "ours"]
    assert args.flags == {"training.max_norm": "0.5"}
    assert [runs.ac_of("auto", shape) for shape in ("0.6b", "4b")] == ["none", "selective"]
    assert runs.ac_of("full", "0.6b") == "full"


@pytest.mark.parametrize("shape", [s for s, flags in SHAPES.items() if flags.get("vocab-size") == 151936])
def test_shapes_are_qwen3_s(shape, tmp_path):
    write_model(tmp_path, shape, 4096)
    family, args, config = from_folder(tmp_path)
    flavor = qwen3_args[shape.upper()]
    assert family == ("qwen3_moe" if flavor.moe_enabled else "qwen3")
    assert dataclasses.replace(flavor.moe_args, load_balance_coeff=None) == args.moe_args or not flavor.moe_enabled
    assert config["tie_word_embeddings"] == flavor.enable_weight_tying
    names = ["dim", "n_layers", "n_heads", "n_kv_heads", "head_dim", "hidden_dim", "vocab_size", "moe_inter_dim"]
    for name in names[: 8 if flavor.moe_enabled else 7]:
        assert getattr(args, name) == getattr(flavor, name), name


@pytest.mark.parametrize(
    ("prompt_share", "prompt", "trained"), [(0.0, 1, 2 * 3 * 32), (0.3, 10, 2 * 3 * 23), (0.999, 32, 2 * 3 * 1)]
)
def test_work_counts_positions_and_trained_tokens(prompt_share, prompt, trained):
    job = {"documents": 32, "tokens": 96, "microbatches": 2, "prompt_share": prompt_share}
    work = Work.of(job)
    assert (work.prompt, work.tokens, work.trained_tokens) == (prompt, 2 * 96, trained)
    sequences = work.sequences(100, seed=0)
    assert sequences.shape == (2, 3, 33)
    assert sequences.min() >= FIRST_TOKEN and sequences.max() < 100
    assert not torch.equal(sequences, work.sequences(100, seed=1))
    assert torch.equal(work.advantages(0), work.advantages(0))


def test_documents_of_a_group_have_one_prompt():
    job = {"documents": 32, "tokens": 96, "microbatches": 2, "prompt_share": 0.3, "group": 2}
    sequences = Work.of(job).sequences(100, seed=0).flatten(0, 1)
    for first, second in zip(sequences[::2], sequences[1::2], strict=True):
        assert torch.equal(first[:10], second[:10]) and not torch.equal(first[10:], second[10:])
    assert not torch.equal(sequences[0, :10], sequences[2, :10])


def test_flops_of_the_tiny_shape_by_hand(tmp_path):
    write_model(tmp_path, "tiny", 32)
    with torch.device("meta"):
        model = Qwen3Model(from_folder(tmp_path)[1])
    work = Work(microbatches=2, documents=3, length=32, prompt=10)
    layer = 128 * 128 + 2 * 128 * 64 + 128 * 128 + 3 * 128 * 384  # q; k and v; output; three of the feed-forward
    products = 6 * 4 * layer * (2 * 3 * 32)
    output = 6 * 512 * 128 * (2 * 3 * 23)
    attention = 12 * 4 * 4 * 32 * (2 * 3) * 32 * 32 / 2
    assert TrainingFlops.of(model)(work.lengths, work.trained_tokens) == products + output + attention


def test_the_estimate_leaves_weight_sync_out_before_it_takes_the_peak():
    moments = {"a": {"weights": 5, "snapshots": 100}, "b": {"weights": 5, "activations": 3, "buckets, at most": 9}}
    assert peak_parts(moments) == {"weights": 5, "activations": 3}


def test_ratios_are_to_contenders_on_the_same_shape():
    rows = [
        {"shape": "4b", "contender": "torchtitan", "tokens_per_s_gpu": 10.0},
        {"shape": "4b", "contender": "ours", "tokens_per_s_gpu": 12.0},
        {"shape": "4b", "contender": "transformers", "error": "out of memory"},
        {"shape": "8b", "contender": "torchtitan", "error": "out of memory"},
        {"shape": "8b", "contender": "ours", "tokens_per_s_gpu": 12.0},
    ]
    runs.set_ratio(rows)
    assert [row.get("to_torchtitan") for row in rows] == [1.0, 1.2, None, None, None]


def test_a_small_run_on_a_cpu(tmp_path, capsys):
    """Our trainer's process starts as a user's does."""
    out = tmp_path / "found.jsonl"
    words = [*SMALL, "--prompt-share", "0.3", "--json", str(out)]
    words += ["--what", "ours"]
    assert bench.main([*words, "--", "--training.max_norm", "0.5"]) == 0
    said = capsys.readouterr().out
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    steps = {line["contender"]: line for line in lines if line["table"] == "steps"}
    assert set(steps) == {"ours"}
    for row in steps.values():
        assert (row["tokens"], row["trained_tokens"]) == (2 * 64, 2 * 2 * 23)
        assert row["tokens_per_s_gpu"] == pytest.approx(2 * 64 / row["step_ms"] * 1e3)
        assert row["forward_backward_ms"] > 0 and row["optimizer_ms"] > 0 and row["mfu_percent"] > 0
        assert 5 < row["first_loss"] < 15  # nats a token, over 512 tokens, tied weights as they start
    assert steps["ours"]["estimate_gib"] > 0
    assert not any("error" in line for line in lines)
    assert "| shape | contender | lora | gpus | work | ac | compile | tokens_per_s_gpu |" in said


@pytest.mark.parametrize(
    ("code", "left", "row"),
    [
        ("raise SystemExit(3)", {}, {"error": "ended with exit status 3"}),
        ("raise SystemExit(1)", {"error": "out of memory: CUDA"}, {"error": "out of memory: CUDA"}),
        ("import time; time.sleep(60)", {}, {"error": "not within 1 s (--run-limit-s)"}),
        ("", {"step_ms": 1.0}, {"step_ms": 1.0}),
    ],
)
def test_a_contender_that_fails_is_a_row_and_the_next_one_runs(code, left, row, tmp_path, monkeypatch, capsys):
    """What children leave behind: nothing at all, an error, a row."""
    real = runs.ProcessGroup

    def start(command, log, environment):
        folder = Path(command[-1])
        is_first = json.loads((folder / "job.json").read_text())["contender"] == "torchtitan"
        own = left if is_first else {"step_ms": 2.0}
        (folder / "rows.jsonl").write_text(json.dumps(own) + "\n" if own else "")
        return real([sys.executable, "-S", "-c", code if is_first else ""], log, environment)

    monkeypatch.setattr(runs, "ProcessGroup", start)
    monkeypatch.setattr(runs, "LEAST_S", 0.1)
    args = bench.parse_arguments(["--gpus", "2", "--run-limit-s", "1"])
    assert runs.steps(args, Output(True, tmp_path / "found.jsonl")) == 0
    first, second = [json.loads(line) for line in (tmp_path / "found.jsonl").read_text().splitlines()]
    found = {"table": "steps", "shape": "0.6b", "lora": 0}
    assert first == found | {"contender": "torchtitan"} | row
    assert second == found | {"contender": "ours", "step_ms": 2.0}
    assert row.get("error", "") in capsys.readouterr().out
