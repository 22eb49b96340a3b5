"""scripts/bench/weight_sync.py: what it refuses and computes, and small runs of the real thing."""

import json
import math
import subprocess
import sys
import threading
import time

import pytest
import requests
import torch

from tests.helpers import ROOT

BENCH = ROOT / "scripts" / "bench"
sys.path.insert(0, str(BENCH))

import weight_sync as bench  # noqa: E402
from bench_common import output  # noqa: E402
from weight_sync_bench import exposed, receivers, trainer  # noqa: E402

from torchtitan.grpo.errors import UserError  # noqa: E402
from torchtitan.grpo.weight_wire.transport import in_thread  # noqa: E402

H200_BYTES = 150_000_000_000


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("", "SUBCOMMAND"),
        ("refit", "refit needs servers: --urls"),
        ("refit --urls 127.0.0.1:8000", "write http://host:port"),
        ("refit --receivers cuda:1", "neither cpu nor the index of a GPU"),
        ("refit --receivers cpu --servers 1 3", "--servers 3: --urls and --receivers give 1"),
        ("refit --receivers cpu --shape 3b", "invalid choice: '3b'"),
        ("refit --receivers cpu --timeout-s 0", "0 is not a positive number"),
        ("vllm-nccl", "--url"),
        ("exposed", "exposed needs servers"),
        ("exposed --receivers cpu --tokens 64 --document-tokens 128", "--tokens 64 is under --document-tokens 128"),
        ("exposed --receivers cpu --document-tokens 8192", "2 to 4096"),
        ("exposed --receivers cpu --kill", "have a second server"),
        ("exposed --urls http://a http://b --kill", "--kill ends the first of --receivers"),
        ("exposed --receivers cpu --sleep-s -1", "--sleep-s -1 is negative"),
        ("scale --counts 0", "0 is under 1"),
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
    assert exposed.parameter_dtype(596_000_000, H200_BYTES, 1) == "float32"
    assert exposed.parameter_dtype(8_190_000_000, H200_BYTES, 1) == "bfloat16"
    assert exposed.parameter_dtype(8_190_000_000, H200_BYTES, 2) == "float32"


def test_a_faulty_run_lasts_until_the_server_is_back():
    assert exposed.fault_steps(0.5, 10.0, 20) == 2 + 30
    assert exposed.fault_steps(5.0, 10.0, 20) == 20


def test_rows_are_whole_documents_half_of_them_answers():
    row = exposed.random_row(100, 30, 512, rank=0)
    assert row.cu_seqlens.tolist() == [0, 30, 60, 90]
    assert row.to(torch.device("cpu")).max_seqlen == 30
    assert int(row.loss_mask.sum()) == 3 * 16
    assert not torch.equal(row.tokens, exposed.random_row(100, 30, 512, rank=1).tokens)


def test_waits_end():
    def bounded(call, timeout_s: float, check=lambda: None):
        return trainer.bounded(in_thread(call, "bench-wait"), timeout_s, "the end of days", check)

    assert bounded(lambda: 7, 5) == 7
    with pytest.raises(ZeroDivisionError):
        bounded(lambda: 1 // 0, 5)
    with pytest.raises(UserError, match=r"timed out after 0\.2 s waiting for the end of days"):
        bounded(lambda: time.sleep(30), 0.2)

    def gone() -> None:
        raise UserError("it is gone")

    with pytest.raises(UserError, match="it is gone"):
        bounded(lambda: time.sleep(30), 20, gone)


def test_fake_servers_answer_and_take_faults():
    listener = receivers.Listener("127.0.0.1", 0, receivers.FakeServer(torch.device("cpu")))
    threading.Thread(target=listener.serve_forever, daemon=True).start()
    url = f"http://127.0.0.1:{listener.server_port}"
    try:
        assert requests.get(f"{url}/health", timeout=10).ok
        assert requests.get(f"{url}/nonsense", timeout=10).status_code == 404
        early = requests.post(f"{url}/update_weights", json={"update_info": {"version": 1}}, timeout=10)
        assert early.status_code == 500 and "before pause" in early.json()["error"]
        assert requests.post(f"{url}/pause", timeout=10).ok
        assert requests.get(f"{url}/is_paused", timeout=10).json() == {"is_paused": True}
        wrong = requests.post(f"{url}/fault", json={"sleeps": 3}, timeout=10)
        assert wrong.status_code == 500 and "unknown ['sleeps']" in wrong.json()["error"]
    finally:
        listener.shutdown()


COMMANDS = [
    "refit --shape tiny --receivers cpu cpu --raw-gpu 0 --num-buffers 2 --repeats 2 --warmup 1 --background",
    "exposed --shape tiny --tokens 64 --document-tokens 32 --receivers cpu cpu --sleep-s 0 --kill --steps 3 --warmup 1",
    "scale --counts 1 2 --repeats 2 --warmup 1",
]


def test_every_command_end_to_end_on_a_cpu(tmp_path):
    """One after another in one process, which saves imports."""
    script = tmp_path / "all.py"
    script.write_text(
        f"import sys\nsys.path.insert(0, {str(BENCH)!r})\nimport weight_sync\nif __name__ == '__main__':\n"
        "    from weight_sync_bench import exposed\n"
        "    exposed._AFTER_FAULT_S = 0.5\n"
        f"    for words in {COMMANDS!r}:\n"
        f"        own = [*words.split(), '--json', {str(tmp_path / 'rows.jsonl')!r}, '--timeout-s', '30']\n"
        "        args = weight_sync.parse_arguments(own)\n"
        "        args.device = 'cpu'\n"
        "        assert weight_sync.run(args) == 0\n"
    )
    result = subprocess.run([sys.executable, script], cwd=ROOT, capture_output=True, text=True, timeout=250)
    assert result.returncode == 0, result.stderr
    lines = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    one, two = [row for row in lines if row["table"].startswith("Refit")]
    assert [one["servers"], two["servers"]] == [1, 2]
    for row in (one, two):
        assert row["bytes"] == 3_413_504  # 0.85 million float32 parameters
        assert 0 < row["exposed_ms"] < row["total_ms"]  # --background
        assert (row["device_grown_mib"], abs(row["host_grown_mib"]) < 500) == (0.0, True)
        assert all(row[f"{phase}_ms"] > 0 for phase in ("total", "pause", "snapshot", "pack", "wire", "apply"))
        assert row["total_ms"] > row["pause_ms"] + row["acknowledge_ms"]
    (raw,) = [row for row in lines if row["table"].startswith("Raw")]
    assert raw["pieces"] == 1 and raw["bytes"] == 3_413_504 and raw["gb_per_s"] > 0

    alone, blocking, background, again, killed = [row for row in lines if row["table"].startswith("Exposed")]
    assert "exposed_ms" not in alone and "exposed_ms" not in again
    assert blocking["pushed"] == 3 and blocking["servers"] == background["servers"] == "2 of 2 newest, 2 in traffic"
    assert killed["servers"] == "1 of 2 newest, 1 in traffic"

    one, two = [row for row in lines if row["table"].startswith("One publish")]
    for row in (one, two):
        assert all(math.isfinite(row[key]) and row[key] > 0 for key in ("connect_s", "push_s", "cpu_s"))
        assert 0 < row["publish_us"] <= row["publish_max_us"]
    assert two["threads"] > one["threads"]
