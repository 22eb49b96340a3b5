"""scripts/bench/weight_sync.py: what it refuses and prints, and a small run of the real thing."""

import json
import sys

import pytest
import torch

from tests.helpers import ROOT
from tests.helpers.ranks import Ranks
from tests.helpers.trainer_runs import embedded_server

BENCH = ROOT / "scripts" / "bench"
sys.path.insert(0, str(BENCH))

import weight_sync as bench  # noqa: E402
from bench_common import output  # noqa: E402
from bench_common.shapes import write_model  # noqa: E402
from weight_sync_bench import trainer  # noqa: E402


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("", "--urls"),
        ("--urls 127.0.0.1:8000", "write http://host:port"),
        ("--urls http://a --shape 3b", "invalid choice: '3b'"),
        ("--urls http://a --timeout-s 0", "0 is not a positive number"),
        ("--urls http://a --repeats 0", "0 is under 1"),
    ],
)
def test_bad_arguments_are_refused_with_what_to_change(arguments, message, capsys):
    with pytest.raises(SystemExit) as ended:
        bench.parse_arguments(arguments.split())
    assert ended.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("value", "text"),
    [(None, "-"), (7, "7"), ("x", "x"), (0.0, "0"), (12345.6, "12346"), (12.34, "12.3"), (0.001234, "0.00123")],
)
def test_cells_show_three_digits(value, text):
    assert output.cell(value) == text


def test_tables_are_markdown_and_json_lines(tmp_path, capsys):
    out = output.Output(True, tmp_path / "rows.jsonl")
    out.table("Title", "a none b", [{"a": 1, "hidden": [2]}, {"a": 2.5, "b": "x"}])
    out.table("Shown only", "a", [{"a": 1}], record=False)
    said = capsys.readouterr().out
    assert said.startswith("\n**Title**\n\n| a | b |\n| --- | --- |\n| 1 | - |\n| 2.50 | x |\n\n")
    assert "Shown only" in said
    rows = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    assert rows == [{"table": "Title", "a": 1, "hidden": [2]}, {"table": "Title", "a": 2.5, "b": "x"}]
    output.Output(False, tmp_path / "none.jsonl").table("Title", "a", [{"a": 1}])
    assert capsys.readouterr().out == "" and not (tmp_path / "none.jsonl").exists()


def test_medians_are_of_each_key():
    assert output.medians([{"a": 1.0, "b": 2.0}, {"a": 5.0, "b": 2.0}, {"a": 3.0, "b": 8.0}]) == {"a": 3.0, "b": 2.0}


@pytest.mark.parametrize(
    ("shape", "parameters", "tied"),
    [("0.6b", 0.596e9, True), ("1.7b", 1.72e9, True), ("4b", 4.02e9, True), ("8b", 8.19e9, False)],
)
def test_shapes_are_those_of_qwen3(shape, parameters, tied):
    source = trainer.shape_source(shape)
    with torch.device("meta"):
        found = sum(p.numel() for p in source.build().parameters())
    assert found == pytest.approx(parameters, rel=0.01)
    assert source.tied == tied


def test_every_phase_of_a_refit_on_a_cpu(tmp_path):
    """Against the embedded server, which takes the weights into service and answers with them."""
    model = tmp_path / "model"
    write_model(model, "tiny", 4096)
    words = f"--shape tiny --device cpu --repeats 2 --warmup 1 --background --timeout-s 30 --json {tmp_path}/rows.jsonl"
    with embedded_server(model, tmp_path / "server.log") as url:
        run = Ranks(1, BENCH / "weight_sync.py", *words.split(), "--urls", url, log=tmp_path / "log", found=False)
        run.check()
    first, row = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    assert first["table"] == "run" and row["table"].startswith("Refit of Qwen3's tiny shape") and row["servers"] == 1
    assert row["bytes"] == 3_413_504  # 0.85 million float32 parameters
    assert 0 < row["exposed_ms"] < row["total_ms"] < row["answered_ms"]  # --background
    assert (row["device_grown_mib"], abs(row["host_grown_mib"]) < 500) == (0.0, True)
    assert all(row[f"{phase}_ms"] > 0 for phase in ("pause", "snapshot", "pack", "wire", "apply"))
    assert row["total_ms"] > row["pause_ms"] + row["acknowledge_ms"]
