"""Whole runs whose episodes a harness in a process of its own plays."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.helpers import ROOT
from tests.helpers.ranks import free_port
from tests.helpers.trainer_runs import attempt, embedded_url, endless, steps

HARNESS = [sys.executable, "-m", "tests.helpers.harness"]


def flags(port: int) -> dict[str, str | None]:
    return {
        "--rollout.environment": "endpoint",
        "--rollout.serve_port": str(port),
        "--reward.functions": "",
        "--rollout.urls": embedded_url(),
        "--validation.prompts": "4",
        "--metrics.samples_per_step": "1000",
    }


def harness(port: int) -> subprocess.Popen:
    line = [*HARNESS, f"http://127.0.0.1:{port}"]
    return subprocess.Popen(line, cwd=ROOT, stdout=subprocess.PIPE, text=True, process_group=0)


def test_a_harness_plays_a_run(tmp_path: Path) -> None:
    port = free_port()
    playing = harness(port)
    try:
        status, said = attempt(tmp_path / "run", flags(port) | {"--training.steps": "2"})
        assert status == 0, said[-4000:]
        out, _ = playing.communicate(timeout=30)
    finally:
        playing.kill()
    assert playing.returncode == 0
    lines = steps(tmp_path / "run")
    assert len(lines) == 2 and all(line["policy/mismatch_abs"] <= 1e-4 for line in lines)
    samples = [json.loads(line) for line in (tmp_path / "run" / "samples.jsonl").read_text().splitlines()]
    assert len(samples) == 2 * 8 * 4
    for sample in samples:
        assert sample["reward"] == len(sample["answer"]) / 16
    assert len({sample["reward"] for sample in samples}) > 3
    assert all(line["train/grad_norm"] > 0 for line in lines)
    validations = 4 * (1 + 4) * 2  # prompts, greedily and sampled, at the first and the last step
    assert int(out.rsplit(":")[-1]) == len(samples) + validations
    assert (lines[-1]["endpoint/calls"], lines[-1]["endpoint/open_sessions"]) == (len(samples) + validations, 0)
    assert all(line["reward/characters"] == pytest.approx(16 * line["reward/mean"]) for line in lines)


def test_a_harness_that_is_killed_is_replaced_by_another(tmp_path: Path) -> None:
    port = free_port()
    lease = {"--rollout.group_timeout_seconds": "12", "--rollout.request_timeout_seconds": "12"}
    lease |= {"--validation.no-enable": None}
    first = harness(port)
    second = None
    try:
        with endless(tmp_path / "run", flags(port) | lease) as run:
            os.killpg(first.pid, signal.SIGKILL)
            before = len(steps(tmp_path / "run"))
            second = harness(port)
            run.wait_for("steps after the kill", lambda: len(steps(tmp_path / "run")) >= before + 3)
    finally:
        for process in (first, second):
            if process is not None:
                process.kill()
                process.communicate()


def test_without_a_harness_the_run_ends_and_says_so(tmp_path: Path) -> None:
    port = free_port()
    began = time.monotonic()
    status, said = attempt(tmp_path / "run", flags(port) | {"--rollout.start_timeout_seconds": "5"})
    assert status != 0 and time.monotonic() - began < 120
    assert "no harness has asked for an episode for 5 s ([rollout] start_timeout_seconds)" in said
    assert f"http://127.0.0.1:{port}/episodes/next" in said
