"""scripts/verify_grpo_cpu.sh as CI runs it: the part that no other test stands for."""

import subprocess
import sys

from tests.integration.trainer_runs import ROOT, environment, steps


def test_background_sync_holds_what_blocking_sync_holds_and_waits_less(tmp_path):
    done = subprocess.run(
        ["bash", "scripts/verify_grpo_cpu.sh", "async"],
        cwd=ROOT,
        env=environment() | {"PYTHON": sys.executable, "STEPS": "8", "KEEP": str(tmp_path / "kept")},
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "times; a step takes" in done.stdout and "verified: async" in done.stdout
    background, blocking = (steps(tmp_path / "kept" / name) for name in ("background", "blocking"))
    assert len(background) == len(blocking) == 8
    assert any(line.get("time/sync_hidden_s") for line in background)
    assert not any(line.get("time/sync_hidden_s") for line in blocking)
