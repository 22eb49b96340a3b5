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
from torchtitan.grpo.process.stopping import leave_process_groups

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
    program = f"from torchtitan.grpo.process.stopping import stop_in_time\nstop_in_time({grace_s}){body}"
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


@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, 143), (signal.SIGINT, 130), (signal.SIGHUP, 129)])
def test_a_process_that_can_closes_in_order(number, status):
    process = start(CLOSES_IN_TIME, grace_s=20)
    assert process.stdout.readline() == "waits\n"
    process.send_signal(number)
    printed, said = process.communicate(timeout=30)
    assert (process.returncode, printed, said) == (status, "closed\n", "")


def test_a_hangup_that_nohup_has_ignored_stays_ignored():
    ends = "\nimport os, signal, time\nos.kill(os.getpid(), signal.SIGHUP)\ntime.sleep(0.5)\nprint('goes on')"
    process = start(ends, "import os, sys\nos.execvp('nohup', ['nohup', *sys.argv[1:]])")
    assert (process.communicate(timeout=30)[0], process.returncode) == ("goes on\n", 0)


ASKED = """
import time
from torchtitan.grpo.process import stopping
stopping.ECHO_S = 1.0
def ask(number):
    print("asked", number, flush=True)
    return {saves}
with stopping.asks_first(ask):
    try:
        print("waits", flush=True)
        time.sleep(60)
    finally:
        stopping.end_within(60)
        print("closed", flush=True)
"""


def asked_to_stop(saves: bool, grace_s: float = 20.0, waits_after_s: tuple[float, ...] = ()) -> tuple[int, float]:
    """Exit status, and seconds from the first signal, of a process that is sent more signals after these waits."""
    process = start(ASKED.format(saves=saves), grace_s=grace_s)
    assert process.stdout.readline() == "waits\n"
    told = time.monotonic()
    for wait_s in (0.0, *waits_after_s):
        time.sleep(wait_s)
        process.send_signal(signal.SIGINT)
    printed, said = process.communicate(timeout=40)
    assert (printed, said) == ("asked 2\nclosed\n", "")
    return process.returncode, time.monotonic() - told


def test_who_has_nothing_to_save_is_interrupted_at_once():
    status, seconds = asked_to_stop(saves=False)
    assert status == 130 and seconds < 10


def test_who_saves_is_interrupted_when_that_takes_too_long():
    status, seconds = asked_to_stop(saves=True, grace_s=5.0)
    assert status == 130 and seconds >= 4.0


def test_an_echo_of_the_first_signal_does_not_interrupt_but_a_second_one_does():
    status, seconds = asked_to_stop(saves=True, waits_after_s=(0.05, 0.05, 1.2))
    assert status == 130 and 1.3 <= seconds < 10


@pytest.mark.parametrize("closes_in_s", [0, 60])
def test_the_last_line_of_a_stopped_run_is_what_it_has_to_say(closes_in_s):
    body = "import time\nfrom torchtitan.grpo.process.stopping import end_within, run_and_exit, stopped\ndef main():\n"
    body += "    end_within(1.5)\n    try:\n        raise stopped(75, 'stopped at step 24')\n"
    body += f"    finally:\n        time.sleep({closes_in_s})\n"
    process = start(f"\n{body}run_and_exit(main)")
    assert process.communicate(timeout=30) == ("", "stopped at step 24\n")
    assert process.returncode == 75


@pytest.mark.parametrize("closes_in_s", [0.5, 60])
def test_closing_after_the_last_step_is_bounded_and_no_signal_makes_it_a_failure(closes_in_s):
    body = "import time\nfrom torchtitan.grpo.process.stopping import closes_within, run_and_exit\ndef main():\n"
    limit_s = 1.5 if closes_in_s == 60 else 30
    body += f"    with closes_within({limit_s}, 'closing took too long'):\n        print('closes', flush=True)\n"
    body += f"        time.sleep({closes_in_s})\n    return 0\n"
    process = start(f"\n{body}run_and_exit(main)", grace_s=20)
    assert process.stdout.readline() == "closes\n"
    process.send_signal(signal.SIGTERM)
    said = process.communicate(timeout=30)[1]
    assert process.returncode == 0
    assert ("closing took too long" in said) == ("in main" in said) == (closes_in_s == 60), said


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
    closes = "from torchtitan.grpo.process.stopping import end_within\nend_within(60)\nprint('waits', flush=True)\n"
    process = start(f"\nimport time\n{closes}time.sleep({GRACE_S / 2})\nprint('error', flush=True)", grace_s=20)
    assert process.stdout.readline() == "waits\n"
    process.send_signal(signal.SIGTERM)
    assert process.communicate(timeout=30)[0] == "error\n"
    assert process.returncode == 0


@pytest.mark.parametrize(
    ("body", "closed", "grace_s"), [(CLOSES_IN_TIME, "closed\n", 2 * GRACE_S), (WAITS_IN_C, "", GRACE_S / 2)]
)
def test_a_thread_ends_the_process_with_a_status_of_its_own(body, closed, grace_s):
    ends = "import threading\nfrom torchtitan.grpo.process.stopping import stop\n"
    process = start(f"\n{ends}threading.Timer(0.5, stop, (75, {grace_s})).start()\n{body}")
    printed, _ = process.communicate(timeout=30)
    assert (process.returncode, printed) == (75, f"waits\n{closed}")


@pytest.mark.parametrize(
    ("ends", "status", "says"),
    [
        ("return 2", 2, ""),
        ("sys.exit(143)", 143, ""),
        ("sys.exit('please set MY_DATA')", 1, "please set MY_DATA"),
        ("raise KeyError('no')", 1, "KeyError: 'no'"),
    ],
)
def test_a_process_ends_without_waiting_for_its_threads(ends, status, says):
    body = "import sys, threading, time\nfrom torchtitan.grpo.process.stopping import run_and_exit\n"
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
    body = "\nfrom torchtitan.grpo.process.stopping import end_within\nend_within(0.5)\nend_within(60)"
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
