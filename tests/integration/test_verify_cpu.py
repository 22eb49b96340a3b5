"""scripts/verify_grpo_cpu.sh as CI runs it: the part that no other test stands for."""

import os
import subprocess
import sys

from tests.integration.trainer_runs import ROOT, environment


def test_background_sync_holds_what_blocking_sync_holds_and_waits_less(tmp_path):
    done = subprocess.run(
        ["bash", "scripts/verify_grpo_cpu.sh", "async"],
        cwd=ROOT,
        env=environment() | {"PYTHON": sys.executable, "STEPS": "8", "TMPDIR": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "times; a step takes" in done.stdout and "verified: async" in done.stdout
    assert not os.listdir(tmp_path)
