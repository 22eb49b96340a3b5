"""`python -m torchtitan.grpo.process.launch`: torchrun whose end is the run's."""

import os
import re
import signal
import time
from pathlib import Path

import pytest

from tests.helpers import ROOT
from tests.helpers.ranks import Ranks

SCRIPT = """
import os, signal, subprocess, sys, time
from torchtitan.grpo.errors import UserError, refuse
from torchtitan.grpo.process.stopping import run_and_exit, stop_in_time, STOPPED, Stopped
def main():
    ends, rank = sys.argv[1], os.environ["RANK"]
    if ends == "refused":
        return refuse(UserError("[grpo] lr: unknown"))
    if ends == "killed" and rank == "1":
        os.kill(os.getpid(), 9)
    if ends == "is done":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        own = "from torchtitan.grpo.process.stopping import run_and_exit; run_and_exit(lambda: 75)"
        subprocess.run([sys.executable, "-c", own])  # whose status is not the rank's
        print("waits", flush=True)
        time.sleep(2)
        return 0
    if ends == "fails first" and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        return 75
    stop_in_time()
    print("waits", flush=True)
    try:
        time.sleep(0 if ends == "fails first" else 60)
    except SystemExit:
        raise Stopped(STOPPED, "stopped and saved" * (rank == "0")) from None
    return 0
run_and_exit(main)
"""


NOHUP = """
import runpy, signal
signal.signal(signal.SIGHUP, signal.SIG_IGN)
runpy.run_module("torchtitan.grpo.process.launch", run_name="__main__", alter_sys=True)
"""


def launched(folder: Path, ends: str, *flags: str, module: str | Path = "torchtitan.grpo.process.launch") -> Ranks:
    (folder / "script.py").write_text(SCRIPT)
    words = ["--standalone", "--nproc-per-node", "2", "--monitor-interval", "0.1", *flags, folder / "script.py", ends]
    environment = {name: value for name, value in os.environ.items() if name != "LOGLEVEL"}
    environment["PYTHONPATH"] = str(ROOT)
    return Ranks(1, module, *words, log=folder / "log.txt", environment=environment)


@pytest.mark.parametrize(
    ("ends", "flags", "status", "said"),
    [
        ("refused", [], 2, r"error: \[grpo\] lr: unknown\n"),
        (
            "killed",
            [],
            137,
            r"(?:waits\n)?(?:stopped and saved\n)?error: rank 1 on \S+ \(process \d+\) was killed by SIGKILL\n",
        ),
        ("fails first", ["--max-restarts", "1"], 0, "waits\nwaits\n"),
    ],
)
def test_the_exit_status_is_the_runs_and_nothing_is_said_twice(ends, flags, status, said, tmp_path):
    run = launched(tmp_path, ends, *flags)
    assert run.wait(60) == status, run.log
    assert re.fullmatch(said, run.log), run.log


def test_a_signal_after_the_last_step_changes_nothing(tmp_path):
    run = launched(tmp_path, "is done")
    deadline = time.monotonic() + 60
    while run.log.count("waits") < 2:
        assert run.poll() is None and time.monotonic() < deadline, run.log
        time.sleep(0.05)
    run.send_signal(signal.SIGTERM)
    assert run.wait(30) == 0, run.log


def test_a_run_that_is_stopped_ends_with_its_own_status_and_a_hangup_after_nohup_does_not_stop_it(tmp_path):
    nohup = tmp_path / "nohup.py"
    nohup.write_text(NOHUP)
    run = launched(tmp_path, "when stopped", module=nohup)
    deadline = time.monotonic() + 60
    while run.log.count("waits") < 2:
        assert run.poll() is None and time.monotonic() < deadline, run.log
        time.sleep(0.05)
    run.send_signal(signal.SIGHUP)
    time.sleep(1.0)
    assert run.poll() is None, run.log
    run.send_signal(signal.SIGTERM)
    assert run.wait(30) == 75, run.log
    assert run.log.splitlines() == ["waits", "waits", "stopped and saved"]
