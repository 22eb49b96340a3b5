"""scripts/bench/weight_sync.py: what it refuses, what it computes, and one small run of the real thing."""

import json
import math
import subprocess
import sys
import time

import pytest
import requests
import torch

from tests.helpers import ROOT

SCRIPT = ROOT / "scripts" / "bench" / "weight_sync.py"
sys.path.insert(0, str(SCRIPT.parent))

import weight_sync as bench  # noqa: E402
from bench_common import output  # noqa: E402
from weight_sync_bench import exposed, receivers, refit, scale, trainer  # noqa: E402

from torchtitan.grpo.errors import UserError  # noqa: E402

H200_BYTES = 150_000_000_000


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("", "SUBCOMMAND"),
        ("refits", "invalid choice: 'refits'"),
        ("refit", "refit needs servers: --urls"),
        ("refit --urls 127.0.0.1:8000", "write http://host:port"),
        ("refit --receivers cuda:1", "neither cpu nor the index of a GPU"),
        ("refit --receivers cpu --num-buffers 0", "0 is under 1"),
        ("refit --receivers cpu --servers 1 3", "--servers 3: --urls and --receivers give 1"),
        ("refit --receivers cpu --shape 3b", "invalid choice: '3b'"),
        ("refit --receivers cpu --timeout-s 0", "0 is not a positive number"),
        ("vllm-nccl", "--url"),
        ("exposed", "exposed needs servers"),
        ("exposed --receivers cpu --tokens 64 --document-tokens 128", "--tokens 64 is under --document-tokens 128"),
        ("exposed --receivers cpu --document-tokens 8192", "2 to 4096"),
        ("exposed --receivers cpu --kill", "have a second server that stays"),
        ("exposed --urls http://a http://b --kill", "--kill ends the first of --receivers"),
        ("exposed --receivers cpu --sleep-s -1", "--sleep-s -1 is negative"),
        ("scale --counts 0", "0 is under 1"),
        ("scale --plot /nowhere/at/all.png", "no such folder: /nowhere/at"),
        ("receiver --servers 2 --sleep-server 2", "there are servers 0 to 1"),
    ],
)
def test_bad_arguments_are_refused_with_what_to_change(arguments, message, capsys):
    with pytest.raises(SystemExit) as ended:
        bench.parse_arguments(arguments.split())
    assert ended.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("command", ["refit", "vllm-nccl", "exposed", "scale", "receiver", "raw-receiver"])
def test_every_subcommand_has_help(command, capsys):
    with pytest.raises(SystemExit) as ended:
        bench.parse_arguments([command, "--help"])
    assert ended.value.code == 0
    assert len(capsys.readouterr().out) > 200


@pytest.mark.parametrize(
    ("value", "text"),
    [(None, "-"), (7, "7"), ("x", "x"), (0.0, "0"), (12345.6, "12346"), (12.34, "12.3"), (0.001234, "0.00123")],
)
def test_cells_show_three_digits(value, text):
    assert output.cell(value) == text


def test_tables_are_markdown_and_json_lines(tmp_path, capsys):
    out = output.Output(True, tmp_path / "rows.jsonl")
    out.table("Title", {"a": "A", "b": "B"}, [{"a": 1, "hidden": [2]}, {"a": 2.5, "b": "x"}])
    assert capsys.readouterr().out == "\n**Title**\n\n| A | B |\n| --- | --- |\n| 1 | - |\n| 2.50 | x |\n\n"
    rows = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    assert rows == [{"table": "Title", "a": 1, "hidden": [2]}, {"table": "Title", "a": 2.5, "b": "x"}]
    silent = output.Output(False, tmp_path / "none.jsonl")
    silent.table("Title", {"a": "A"}, [{"a": 1}])
    assert capsys.readouterr().out == "" and not (tmp_path / "none.jsonl").exists()


def test_medians_are_over_the_samples_that_have_the_key():
    assert output.medians([{"a": 1.0}, {"a": 5.0, "b": 2.0}, {"a": 3.0}]) == {"a": 3.0, "b": 2.0}


def test_growth_is_that_of_the_law_it_was_made_from():
    servers = [1, 2, 4, 8, 256]
    assert output.line_through(servers, [3 + 0.5 * n for n in servers]) == pytest.approx((3.0, 0.5))
    assert output.growth_exponent(servers, [2 * n**1.5 for n in servers]) == pytest.approx(1.5)
    with pytest.raises(ValueError, match="two different x"):
        output.line_through([2, 2], [1, 1])
    rows = [{"servers": n, "publish_us": 100.0, "push_s": 0.1 * n, "cpu_s": 0.0, "threads": 4 + n} for n in servers]
    lines = scale.growth(rows)
    assert lines[0].endswith("servers^0.00") and lines[1].endswith("servers^1.00")
    assert lines[3].startswith("Python threads: about 4 + 1")
    assert scale.growth(rows[:1]) == []


def test_plot_is_written(tmp_path):
    rows = [
        {
            "servers": n,
            "push_s": n,
            "cpu_s": n,
            "publish_us": 9.0,
            "publish_max_us": 10.0,
            "threads": n,
            "os_threads": n,
        }
        for n in (1, 2)
    ]
    scale.plot(rows, tmp_path / "scale.png")
    assert (tmp_path / "scale.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("shape", "gigabytes", "tied"),
    [("0.6b", 1.19, True), ("1.7b", 3.44, True), ("4b", 8.04, True), ("8b", 16.38, False)],
)
def test_shapes_are_those_of_qwen3(shape, gigabytes, tied):
    source = trainer.shape_source(shape)
    tensors = trainer.hf_tensors(source)
    assert sum(2 * size.numel() for size in tensors.values()) / 1e9 == pytest.approx(gigabytes, abs=0.01)
    assert source.tied == tied
    assert ("lm_head.weight" in tensors) != tied
    assert "model.layers.0.self_attn.q_proj.weight" in tensors


def test_parameters_are_bfloat16_only_where_float32_does_not_fit():
    assert exposed.parameter_dtype(596_000_000, H200_BYTES, 1, "adamw") == "float32"
    assert exposed.parameter_dtype(8_190_000_000, H200_BYTES, 1, "adamw") == "bfloat16"
    assert exposed.parameter_dtype(8_190_000_000, H200_BYTES, 2, "adamw") == "float32"
    assert exposed.parameter_dtype(8_190_000_000, H200_BYTES, 1, "sgd") == "float32"


def test_a_faulty_run_lasts_until_the_server_is_back():
    assert exposed.fault_steps(0.5, 10.0, 20) == 2 + 30
    assert exposed.fault_steps(5.0, 10.0, 20) == 20
    assert exposed.fault_steps(0.0, 1.0, 20) < 10_000


def test_rows_are_whole_documents_half_of_them_answers():
    row = exposed.random_row(100, 30, 512, rank=0)
    assert row.cu_seqlens.tolist() == [0, 30, 60, 90]
    assert row.max_seqlen == 30
    assert int(row.loss_mask.sum()) == 3 * 16
    assert not torch.equal(row.tokens, exposed.random_row(100, 30, 512, rank=1).tokens)


def test_comparisons_name_the_ratios():
    def row(servers: int, num_buffers: int, total_ms: float) -> dict:
        values = {"servers": servers, "num_buffers": num_buffers, "total_ms": total_ms}
        return values | {"bucket_mib": 1024, "wire_ms": 80.0}

    rows = [row(1, 2, 100.0), row(1, 1, 250.0), row(3, 2, 140.0), row(3, 1, 400.0)]
    lines = refit.comparisons(rows, [{"pieces": 1, "total_ms": 60.0}, {"pieces": 16, "total_ms": 64.0}])
    assert lines[0] == (
        "1 server(s), 1024 MiB: 100.0 ms with num_buffers 2, 2.50x as fast as with one, 60 % of the raw broadcast's "
        "speed (its wire 75 %)"
    )
    assert lines[-1] == "each further server adds 20.0 ms (1 to 3 servers, first settings)"
    assert refit.comparisons(rows[:1], []) == ["1 server(s), 1024 MiB: 100.0 ms with num_buffers 2"]


def test_waits_end():
    assert trainer.bounded(lambda: 7, 5, "seven") == 7
    with pytest.raises(ZeroDivisionError):
        trainer.bounded(lambda: 1 // 0, 5, "nothing")
    with pytest.raises(UserError, match=r"timed out after 0\.2 s waiting for the end of days"):
        trainer.bounded(lambda: time.sleep(30), 0.2, "the end of days")

    def gone() -> None:
        raise UserError("it is gone")

    with pytest.raises(UserError, match="it is gone"):
        trainer.bounded(lambda: time.sleep(30), 20, "someone", gone)


@pytest.fixture
def child():
    process = receivers.Receivers(2, "cpu")
    yield process
    process.close()


def test_fake_servers_answer_take_faults_and_end(child):
    first, second = child.urls
    assert requests.get(f"{first}/health", timeout=10).ok
    assert requests.get(f"{second}/get_world_size", timeout=10).json() == {"world_size": 1}
    assert requests.get(f"{first}/nonsense", timeout=10).status_code == 404
    assert requests.post(f"{first}/pause", timeout=10).ok
    assert requests.get(f"{first}/is_paused", timeout=10).json() == {"is_paused": True}
    assert requests.get(f"{second}/is_paused", timeout=10).json() == {"is_paused": False}
    early = requests.post(f"{second}/update_weights", json={"update_info": {"version": 1}}, timeout=10)
    assert early.status_code == 500 and "before pause" in early.json()["error"]
    assert requests.post(f"{first}/fault", json={"sleep_s": 3, "version": 4}, timeout=10).ok
    wrong = requests.post(f"{first}/fault", json={"sleeps": 3}, timeout=10)
    assert wrong.status_code == 500 and "unknown ['sleeps']" in wrong.json()["error"]
    child.close()
    assert child.process.returncode == -9


def test_a_child_that_ends_says_why():
    child = receivers.Child(["receiver", "--servers", "0"], "cpu")
    child.process.wait(60)
    with pytest.raises(UserError, match=r"exit status 2; it said:\n(.|\n)*0 is under 1"):
        child.check()
    child.close()


def test_scale_of_two_servers_end_to_end(tmp_path):
    command = [
        sys.executable,
        SCRIPT,
        "scale",
        "--counts",
        "1",
        "2",
        "--repeats",
        "2",
        "--json",
        tmp_path / "rows.jsonl",
    ]
    command += ["--timeout-s", "30", "--time-limit-s", "150"]
    result = subprocess.run([str(part) for part in command], cwd=ROOT, capture_output=True, text=True, timeout=200)
    assert result.returncode == 0, result.stderr
    assert "| servers | connect, s |" in result.stdout and "a push: about" in result.stdout
    run, one, two = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    assert run["arguments"][0] == "scale"
    assert [one["servers"], two["servers"]] == [1, 2]
    for row in (one, two):
        assert row["bytes"] == 3_413_504  # 0.85 million float32 parameters
        for key in ("connect_s", "publish_us", "publish_max_us", "push_s", "cpu_s"):
            assert math.isfinite(row[key]) and row[key] > 0
        assert row["publish_us"] <= row["publish_max_us"]
    assert two["threads"] > one["threads"]
