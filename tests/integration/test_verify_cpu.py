"""scripts/verify_grpo_cpu.sh: the part that no other test stands for, and what it leaves behind when it is stopped."""

import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest

from tests.helpers import ROOT
from tests.helpers.forked_torchrun import python_for_scripts
from tests.helpers.trainer_runs import command_of, environment, processes_of, steps


def forking(folder: Path) -> dict[str, str]:
    """Variables with which the script's runs are forked, and their servers, from a process that imports once."""
    paths = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    return {"PYTHON": str(python_for_scripts(folder)), "FORKED_SERVERS": "1", "PYTHONPATH": paths}


def test_background_sync_holds_what_blocking_sync_holds_and_waits_less(tmp_path):
    done = subprocess.run(
        ["bash", "scripts/verify_grpo_cpu.sh", "async"],
        cwd=ROOT,
        env=environment() | forking(tmp_path) | {"STEPS": "8", "KEEP": str(tmp_path / "kept")},
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "times; a step takes" in done.stdout and "verified: async" in done.stdout
    background, blocking = (steps(tmp_path / "kept" / name) for name in ("background", "blocking"))
    assert len(background) == len(blocking) == 8
    assert any(line.get("time/sync_hidden_s") for line in background)
    assert not any(line.get("time/sync_hidden_s") for line in blocking)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=["SIGTERM-at-the-start", "SIGINT-later"])
def test_a_script_that_is_stopped_stops_its_trainer(number, tmp_path):
    # What starts in the background ignores SIGINT, and hands that on.
    command = ["env", "--default-signal=INT", "bash", "scripts/verify_grpo_cpu.sh", "embedded"]
    kept = tmp_path / "kept"
    # The first is started by torchrun itself.
    python = {"PYTHON": sys.executable} if number == signal.SIGTERM else forking(tmp_path)
    variables = environment() | python | {"STEPS": "100000", "KEEP": str(kept)}
    with subprocess.Popen(command, cwd=ROOT, env=variables, process_group=0) as script:
        try:
            deadline = time.monotonic() + 120
            log = kept / "embedded.log"

            def begun() -> bool:
                if number == signal.SIGTERM:  # besides `timeout` and torchrun there is the rank, which imports
                    commands = [command_of(pid) for pid in processes_of(kept)]
                    return any(command and "torch.distributed.run" not in command for command in commands)
                return log.exists() and "sft step" in log.read_text()

            while not begun():
                assert script.poll() is None and time.monotonic() < deadline, log.exists() and log.read_text()
                time.sleep(0.2)
            time.sleep(0.5)  # torchrun loses a rank that it is just starting; imports go on for seconds
            os.killpg(script.pid, number)
            assert script.wait(90) != 0  # a busy machine: the trainer may take 25 s, and torchrun 30
            assert processes_of(kept) == []
        finally:
            script.kill()
            for pid in processes_of(kept):  # none, unless the test has failed
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
