"""Processes that are told to stop while their main thread waits in C, where no handler of Python's is called."""

import os
import signal
import subprocess
import sys
import time

import pytest
import torch.distributed as dist

from tests.helpers import ROOT
from tests.helpers.ranks import free_port
from torchtitan.grpo.stopping import leave_process_groups

GRACE_S = 1.0
UNTIL_IN_C_S = 1.0
"""From a process's last word in Python until its main thread surely waits in C."""

WAITS_IN_C = """
import ctypes
mutex = ctypes.create_string_buffer(64)  # PTHREAD_MUTEX_INITIALIZER
libc = ctypes.CDLL(None)
print("waits", flush=True)
libc.pthread_mutex_lock(mutex)
libc.pthread_mutex_lock(mutex)
"""
CLOSES_IN_TIME = """
import time
try:
    print("waits", flush=True)
    time.sleep(60)
finally:
    print("closed", flush=True)
"""


def start(body: str, launcher: str = "", grace_s: float = GRACE_S, **environment: str) -> subprocess.Popen:
    program = f"from torchtitan.grpo.stopping import stop_in_time\nstop_in_time({grace_s}){body}"
    command = [sys.executable, "-c", program]
    if launcher:
        command = [sys.executable, "-c", launcher, *command]
    return subprocess.Popen(
        command, cwd=ROOT, env=os.environ | environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_process_that_waits_in_c_ends_and_says_where_it_was(number):
    process = start(WAITS_IN_C)
    assert process.stdout.readline() == "waits\n"
    time.sleep(UNTIL_IN_C_S)
    told = time.monotonic()
    process.send_signal(number)
    _, said = process.communicate(timeout=30)
    assert process.returncode == 1
    assert GRACE_S <= time.monotonic() - told < 20
    assert "Timeout" in said and 'File "<string>", line 8 in <module>' in said


@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, 143), (signal.SIGINT, -signal.SIGINT)])
def test_a_process_that_can_closes_in_order(number, status):
    process = start(CLOSES_IN_TIME)
    assert process.stdout.readline() == "waits\n"
    process.send_signal(number)
    printed, said = process.communicate(timeout=30)
    assert (process.returncode, printed) == (status, "closed\n")
    assert "Timeout" not in said


def test_a_process_that_loses_the_exit_is_told_again():
    """As inside `torch.save`: an exception in a callback of C++ becomes another one."""
    body = (
        "import time\ntry:\n    print('waits', flush=True)\n    time.sleep(60)\nexcept SystemExit:\n    print('lost')\n"
    )
    process = start(f"\n{body}time.sleep(60)", grace_s=20)
    assert process.stdout.readline() == "waits\n"
    process.send_signal(signal.SIGTERM)
    assert process.communicate(timeout=15)[0] == "lost\n"
    assert process.returncode == 143


def test_a_process_whose_launcher_died_while_it_was_imported_ends():
    agent = {"TORCHELASTIC_RUN_ID": "test", "TORCHELASTIC_USE_AGENT_STORE": "True", "MASTER_ADDR": "127.0.0.1"}
    process = start(CLOSES_IN_TIME, **agent, MASTER_PORT=str(free_port()))
    printed, said = process.communicate(timeout=30)
    assert (process.returncode, printed) == (143, "") and "torchrun ended" in said


def test_a_process_that_closes_after_an_error_still_says_which():
    closes = "from torchtitan.grpo.stopping import end_within\nend_within(60)\nprint('waits', flush=True)\n"
    process = start(f"\nimport time\n{closes}time.sleep({GRACE_S / 2})\nprint('error', flush=True)")
    assert process.stdout.readline() == "waits\n"
    process.send_signal(signal.SIGTERM)
    assert process.communicate(timeout=30)[0] == "error\n"
    assert process.returncode == 0


@pytest.mark.parametrize(("body", "closed"), [(CLOSES_IN_TIME, "closed\n"), (WAITS_IN_C, "")])
def test_a_thread_ends_the_process_with_a_status_of_its_own(body, closed):
    ends = "import threading\nfrom torchtitan.grpo.stopping import stop\n"
    process = start(f"\n{ends}threading.Timer(0.5, stop, (75, {GRACE_S / 2})).start()\n{body}")
    printed, _ = process.communicate(timeout=30)
    assert (process.returncode, printed) == (75, f"waits\n{closed}")


@pytest.mark.parametrize(
    ("ends", "status", "says"),
    [("return 2", 2, ""), ("sys.exit(143)", 143, ""), ("raise KeyError('no')", 1, "KeyError: 'no'")],
)
def test_a_process_ends_without_waiting_for_its_threads(ends, status, says):
    body = "import sys, threading, time\nfrom torchtitan.grpo.stopping import run_and_exit\n"
    body += f"threading.Thread(target=time.sleep, args=(60,)).start()\ndef main():\n    print('closed')\n    {ends}\n"
    process = start(f"\n{body}run_and_exit(main)")
    printed, said = process.communicate(timeout=30)
    assert (process.returncode, printed) == (status, "closed\n") and says in said


def test_what_a_forked_child_is_told_is_not_for_its_parent():
    child = "import os, signal, time\npid = os.fork()\nif pid == 0:\n    time.sleep(60)\ntime.sleep(0.5)\n"
    process = start(f"\n{child}os.kill(pid, signal.SIGINT)\nos.waitpid(pid, 0)\ntime.sleep({3 * GRACE_S})\n")
    _, said = process.communicate(timeout=30)
    assert process.returncode == 0, said


def test_without_its_launcher_a_process_ends():
    process = start(WAITS_IN_C, "import subprocess, sys\nsubprocess.run(sys.argv[1:])", TORCHELASTIC_RUN_ID="test")
    assert process.stdout.readline() == "waits\n"
    time.sleep(UNTIL_IN_C_S)
    process.kill()
    _, said = process.communicate(timeout=30)  # the pipes close when both are gone
    assert "Timeout" in said


def test_a_later_call_does_not_give_more_time():
    body = "\nfrom torchtitan.grpo.stopping import end_within\nend_within(0.5)\nend_within(60)"
    process = start(body + WAITS_IN_C)
    began = time.monotonic()
    process.communicate(timeout=30)
    assert process.returncode == 1 and time.monotonic() - began < 20


@pytest.mark.parametrize("error", [None, SystemExit])
def test_no_process_group_is_left(error):
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    dist.new_group(backend="gloo")
    leave_process_groups(error)
    assert not dist.is_initialized()
