"""A report for each standstill: once, with what every part waits for, and none while something is done."""

import threading
import time

import pytest

from torchtitan.grpo.config.torchtitan_keys import Debug
from torchtitan.grpo.reporting.ledger import Ledger
from torchtitan.grpo.run.watchdog import Progress, Watchdog

AFTER_S = 0.3


def wait_for(count: int, reports: list[str]) -> None:
    deadline = time.monotonic() + 10
    while len(reports) < count and time.monotonic() < deadline:
        time.sleep(0.01)


def test_each_standstill_is_reported_once_and_progress_never(capfd):
    ledger, done, asked = Ledger("cpu"), [0], []
    progress = Progress(ledger)
    progress.watch(lambda: done[0])

    def broken() -> str:
        asked.append("a report")
        raise KeyError("gone")

    release = threading.Event()
    threading.Thread(target=release.wait, name="a waiter", daemon=True).start()
    with Watchdog(Debug(hang_seconds=AFTER_S), progress, [broken, lambda: "7 requests wait"]), ledger.stage("rollout"):
        for _ in range(8):  # groups end one by one, for longer than the bound
            time.sleep(AFTER_S / 4)
            done[0] += 1
        early = len(asked)
        wait_for(early + 1, asked)
        time.sleep(2 * AFTER_S)
        assert len(asked) == early + 1
        done[0] += 1
        wait_for(early + 2, asked)
    release.set()
    assert len(asked) == early + 2
    report = capfd.readouterr().err
    assert report.count("in stage 'rollout' for") == early + 2
    assert "KeyError: 'gone'\n  7 requests wait\n" in report
    assert "Thread a waiter:" in report and "Thread MainThread:" in report
    if early:
        pytest.skip("the machine stood still for longer than the bound")


def test_nothing_is_watched_without_a_bound():
    before = set(threading.enumerate())
    with Watchdog(Debug(hang_seconds=0.0), Progress(Ledger("cpu")), []):
        assert set(threading.enumerate()) <= before
