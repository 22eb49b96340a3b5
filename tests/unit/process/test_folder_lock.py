"""One run at a time in a dump folder."""

import errno
import fcntl
import multiprocessing
import os
import resource
import socket
import subprocess
import sys
import threading
import time
from contextlib import ExitStack

import pytest

import grpo_train
from tests.helpers import ROOT
from tests.helpers.files import limited
from torchtitan.grpo.config.load import load_config
from torchtitan.grpo.errors import UserError
from torchtitan.grpo.process.folder_lock import LOCK, only_run_in
from torchtitan.grpo.run import run

HOLDER = rf"\(host {socket.gethostname()}, process {os.getpid()}, since \d{{4}}-\d\d-\d\d .*\)"


def test_a_second_run_is_refused_and_the_first_one_named(tmp_path):
    said = rf"uses {tmp_path} {HOLDER} .*another \[job\] dump_folder"
    with only_run_in(tmp_path), pytest.raises(UserError, match=said), only_run_in(tmp_path, wait_s=0.15):
        pass
    with only_run_in(tmp_path, wait_s=0):
        pass


def test_a_file_is_held_beside_others_of_its_folder(tmp_path):
    with only_run_in(tmp_path), only_run_in(tmp_path, file_name="a"), only_run_in(tmp_path, file_name="b"):
        said = rf"uses {tmp_path}/a {HOLDER}: .*another --list"
        with pytest.raises(UserError, match=said), only_run_in(tmp_path, key="--list", file_name="a"):
            pass
    with only_run_in(tmp_path, file_name="a"):
        pass


def test_a_run_waits_for_the_one_before_it(tmp_path, caplog):
    ended = []

    def end() -> None:
        deadline = time.monotonic() + 10
        while "waiting" not in caplog.text and time.monotonic() < deadline:
            time.sleep(0.01)
        ended.append(True)
        held.close()

    with ExitStack() as held:
        held.enter_context(only_run_in(tmp_path))
        threading.Thread(target=end).start()
        with only_run_in(tmp_path, wait_s=30):
            assert ended
    assert caplog.text.count("waiting up to 30 s for its end") == 1


def test_a_process_that_the_run_leaves_behind_does_not_hold_the_folder(tmp_path):
    fork = multiprocessing.get_context("fork")
    with only_run_in(tmp_path):
        forked = fork.Process(target=time.sleep, args=(60,))
        forked.start()
        spawned = subprocess.Popen(["sleep", "60"], close_fds=False)
    try:
        with only_run_in(tmp_path, wait_s=5):
            assert forked.is_alive() and spawned.poll() is None
    finally:
        for process in (forked, spawned):
            process.kill()


def test_a_killed_run_holds_nothing(tmp_path):
    program = "import os, sys; from torchtitan.grpo.process.folder_lock import only_run_in\n"
    program += "with only_run_in(sys.argv[1]): print('held', flush=True); os.kill(os.getpid(), 9)"
    killed = subprocess.run([sys.executable, "-c", program, tmp_path], cwd=ROOT, capture_output=True, text=True)
    assert killed.stdout == "held\n" and killed.returncode == -9, killed.stderr
    with only_run_in(tmp_path, wait_s=0):
        pass


def test_a_file_system_without_locks_is_warned_of(tmp_path, monkeypatch, caplog):
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", refuse)
    with only_run_in(tmp_path):
        assert f"{tmp_path} cannot be locked ([Errno {errno.ENOLCK}]" in caplog.text


def test_a_full_disk_costs_the_holders_name_alone(tmp_path):
    with limited(resource.RLIMIT_FSIZE, 0), only_run_in(tmp_path):
        pass
    assert (tmp_path / LOCK).read_text() == ""


def test_a_lock_that_names_nobody(tmp_path):
    (tmp_path / LOCK).write_text("[]")
    with (tmp_path / LOCK).open() as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        with pytest.raises(UserError, match="has not written its name"), only_run_in(tmp_path, wait_s=0):
            pass


def test_a_folder_that_cannot_be_made_is_refused():
    with (
        pytest.raises(UserError, match=r"/proc/sys/run cannot be written .*\[job\] dump_folder"),
        only_run_in("/proc/sys/run"),
    ):
        pass


def test_a_trainer_holds_its_folder_before_it_writes_anything(tmp_path, monkeypatch):
    monkeypatch.setattr(run, "end_within", lambda seconds: None)
    monkeypatch.chdir(ROOT)
    config = load_config(["--job.config_file", "train_configs/quickstart.toml", "--job.dump_folder", str(tmp_path)])
    with only_run_in(tmp_path), pytest.raises(UserError, match="another run uses"):
        grpo_train.Trainer(config)
    assert [path.name for path in tmp_path.iterdir()] == [LOCK]
