"""scripts/bench/arrivals.py: what it refuses, and a small run of each subcommand."""

import json
import os
import sys

import pytest

from tests.helpers import ROOT
from tests.helpers.ranks import Ranks

sys.path.insert(0, str(ROOT / "scripts" / "bench"))

import arrivals as bench


class Forked(Ranks):
    """A `ProcessGroup` of one Python process, which has imported everything."""

    def __init__(self, command, log, environment):
        super().__init__(1, *map(str, command[2:]), log=log, environment=os.environ | environment, found=False)

    def said(self):
        return self.log

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.kill()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("", "SUBCOMMAND"),
        ("notice --tokens 0", "0 is under 1"),
        ("notice --tokens-per-s 0", "0 is not a positive number"),
        ("growth --rounds 3", "unrecognized arguments: --rounds 3"),
        ("growth --modes async", "invalid choice: 'async'"),
    ],
)
def test_bad_arguments_are_refused_with_what_to_change(arguments, message, capsys):
    with pytest.raises(SystemExit) as ended:
        bench.parse_arguments(arguments.split())
    assert ended.value.code == 2
    assert message in capsys.readouterr().err


def small_run(words, tmp_path, monkeypatch):
    """Exit status and rows of a run with one server."""
    monkeypatch.setattr(bench, "ProcessGroup", Forked)
    words += f" --servers 1 --group 4 --json {tmp_path}/rows.jsonl"
    status = bench.run(bench.parse_arguments(words.split()))
    return status, [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]


def test_a_small_loop_beside_arriving_tokens(tmp_path, monkeypatch, capsys):
    words = "notice --tokens 16 --step-tokens 128 --tokens-per-s 2000 --seconds 0.2 --rounds 1"
    status, (row,) = small_run(words, tmp_path, monkeypatch)
    assert status == 0
    assert (row["table"], row["mode"], row["answers"], row["tokens"]) == ("notice", "ahead", 8, 16)
    assert len(row["lost_s_by_round"]) == 1
    assert row["tokens_per_s"] > 0 and row["tokens_arrived"] % 64 == 0  # replies come whole
    assert row["gap_ms"] >= row["held_ms"] > 0 and row["gap_ms_alone"] >= row["held_ms_alone"] > 0
    assert row["take_s"] > 0 and row["own_mib"] > 100
    assert "| tokens | tokens_per_s | lost_s | lost_cpu_s | ready_s | take_s |" in capsys.readouterr().out


def test_small_steps_in_both_modes(tmp_path, monkeypatch, capsys):
    words = "growth --answers 8 16 --tokens 16 --max-tokens 128 --modes sync ahead --seconds 0.2"
    status, rows = small_run(words, tmp_path, monkeypatch)
    assert status == 0
    assert [(row["mode"], row["answers"], row["tokens"]) for row in rows] == [("sync", 8, 16), ("ahead", 8, 16)]
    for row in rows:
        assert row["steps"] >= 1 and row["step_s"] > 0 and row["tokens_per_s"] > 0 and row["own_us"] > 0
    # In sync mode what a step trains on arrives in it.
    assert rows[0]["tokens_per_s"] == pytest.approx(128 / rows[0]["step_s"])
    assert "| sync | 1 | 8 | 16 |" in capsys.readouterr().out


def test_a_measurement_that_takes_too_long_is_a_row(tmp_path, monkeypatch, capsys):
    status, (row,) = small_run("growth --answers 8 --tokens 16 --run-limit-s 0.01", tmp_path, monkeypatch)
    assert status == 1 and row["error"] == "not within 0.01 s (--run-limit-s)"
    assert "sync 8 x 16: not within 0.01 s" in capsys.readouterr().err
