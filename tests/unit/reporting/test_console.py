import logging
import os
import pty
import re
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from tests.helpers import ROOT
from torchtitan.config import JobConfig
from torchtitan.grpo.config.load import load_config
from torchtitan.grpo.process.log_lines import LineFormatter, init_log_lines
from torchtitan.grpo.reporting.console import LINE_CHARS, Console, duration, fitted, step_warnings

STEP = {
    "reward/mean": 0.5,
    "throughput/answer_tokens_per_s": 3211.4,
    "rollout/age_mean": 1.25,
    "time/rollout_s": 80.0,
    "time/train_s": 19.0,
    "time/other_s": 1.0,
    "time/step_s": 100.0,
}


def config_of(*arguments: str) -> JobConfig:
    return load_config(["--model.hf_assets_path", str(ROOT / "train_configs" / "tiny_qwen3"), *arguments])


def test_a_step_is_one_line(caplog):
    console = Console(config_of(), 5)
    with caplog.at_level(logging.INFO):
        console.log(20, {"sft/loss": 1.5}, prefix="sft")
        console.log(1, STEP | {"validation/greedy_reward": 0.25})
        console.log(2, {"reward/mean": 1.0})
    sft, step, next_step = (record.getMessage() for record in caplog.records)
    assert step == (
        "step 1/5  eta 0:06:40  reward 0.500  held-out 0.250  tokens/s 3,211  s/step 100.00"
        "  rollout-bound (rollout 81%, trainer 19%)"
    )
    assert sft == "sft step 20/0  loss 1.5"
    assert re.fullmatch(r"step 2/5  eta \d:\d\d:\d\d  reward 1.000  held-out 0.250", next_step)


def test_the_longest_line_keeps_progress_reward_and_warnings(caplog):
    console = Console(config_of("--async_grpo.enabled"), 100000)
    huge = STEP | {"validation/greedy_reward": -12.5, "reward/mean": -12.5, "time/step_s": 1234.5}
    huge |= {"throughput/answer_tokens_per_s": 12345.0, "reward/failures": 4096}
    with caplog.at_level(logging.INFO):
        console.log(10000, huge)
        console.log(10001, huge | {"reward/zero_variance_fraction": 1.0})
    usual, worst = (record.getMessage() for record in caplog.records)
    assert max(len(usual), len(worst)) <= LINE_CHARS
    assert "  s/step 1234.50  age 1.2  " in usual and usual.endswith("  4096 scores failed  rollout-bound")
    assert worst.startswith("step 10001/100000  eta ") and "  reward -12.500  held-out -12.500  " in worst
    assert worst.endswith("  4096 scores failed  no signal (100% of groups have equal rewards)")
    assert len(LineFormatter().format(caplog.records[-1]).splitlines()[-1]) < 160


@pytest.mark.parametrize(
    ("values", "other_signal", "expected"),
    [
        ({"reward/failures": 0, "reward/zero_variance_fraction": 0.9, "train/answer_tokens": 7.0}, False, ""),
        ({"reward/failures": 3}, False, "  3 scores failed"),
        ({"reward/zero_variance_fraction": 1.0}, False, "  no signal (100% of groups have equal rewards)"),
        ({"reward/zero_variance_fraction": 1.0, "train/answer_tokens": 7.0}, True, ""),
        (
            {"reward/zero_variance_fraction": 0.75, "train/answer_tokens": 0.0},
            True,
            "  no signal (75% of groups have equal rewards)",
        ),
        ({"train/answer_tokens": 0.0}, False, "  no signal"),
        ({}, False, ""),
    ],
)
def test_warnings_of_a_step(values, other_signal, expected):
    assert step_warnings(values, other_signal) == expected


@pytest.mark.parametrize(("placement", "says_so"), [("loss", True), ("reward", False)])
def test_equal_rewards_are_no_missing_signal_if_a_kl_is_subtracted_from_them(placement, says_so, caplog):
    console = Console(config_of("--grpo.kl_coef", "0.1", "--grpo.kl_placement", placement), 5)
    with caplog.at_level(logging.INFO):
        console.log(1, STEP | {"reward/zero_variance_fraction": 1.0, "train/answer_tokens": 7.0})
    assert ("no signal" in caplog.text) is says_so


def test_duration():
    assert [duration(seconds) for seconds in (0.4, 400, 86399, 86400 * 3 + 4 * 3600 + 59)] == [
        "0:00:00",
        "0:06:40",
        "23:59:59",
        "3d 04h",
    ]


def test_what_leaves_a_long_line():
    parts = [("step", 0), (" least", 2), (" less", 1)]
    assert [fitted(parts, width) for width in (15, 14, 8, 3, -1)] == ["step least less", "step less", "step", "ste", ""]


class Screen:
    """What a terminal shows: the lines that these bytes leave on it, and the escape sequences that set colours."""

    def __init__(self, written: str) -> None:
        self.colours = re.findall(r"\x1b\[[0-9;]+m", written)
        lines, row, column = [""], 0, 0
        for token in re.findall(r"\x1b\[[0-9;?]*[a-zA-Z]|[^\x1b]", written):
            if token == "\n":
                row, column = row + 1, 0
                lines += [""] * (row == len(lines))
            elif token == "\r":
                column = 0
            elif token == "\x1b[2K":
                lines[row] = ""
            elif token == "\x1b[1A":
                row -= 1
            elif token[0] != "\x1b":
                lines[row] = lines[row].ljust(column)[:column] + token + lines[row][column + 1 :]
                column += 1
        self.lines = [line.rstrip() for line in lines]


@contextmanager
def terminal(monkeypatch: pytest.MonkeyPatch, **variables: str) -> Iterator[Callable[[], Screen]]:
    """stdout is a terminal of 100 columns. What it shows is returned by a function."""
    host, device = pty.openpty()
    os.set_blocking(host, False)
    root = logging.getLogger()
    before = root.handlers[:], root.level, warnings.formatwarning
    written = b""

    def screen() -> Screen:
        nonlocal written
        sys.stdout.flush()
        while True:
            try:
                written += os.read(host, 65536)
            except BlockingIOError:
                return Screen(written.decode())

    with monkeypatch.context() as patch, os.fdopen(device, "w", buffering=1) as stdout:
        patch.delenv("NO_COLOR", raising=False)
        for name, value in ({"TERM": "xterm-256color", "COLUMNS": "100", "LINES": "30"} | variables).items():
            patch.setenv(name, value)
        patch.setattr(sys, "stdout", stdout)
        logging.captureWarnings(False)  # by an earlier test, for a `showwarning` that is gone
        init_log_lines()
        yield screen
    logging.captureWarnings(False)
    root.handlers[:], warnings.formatwarning = before[0], before[2]
    root.setLevel(before[1])
    os.close(host)


def wait_for(screen, text: str) -> list[str]:
    until = time.monotonic() + 10
    while text not in "\n".join(lines := screen().lines) and time.monotonic() < until:
        time.sleep(0.02)
    return lines


def test_a_terminal_has_one_live_line_and_nothing_tears_it(monkeypatch):
    with terminal(monkeypatch) as screen:
        console = Console(config_of(), 300)
        assert wait_for(screen, "starting")[-1].endswith("━ starting 1 s")
        console.stage = lambda: ("rollout", 12.0)
        console.log(0, {"validation/greedy_reward": 0.25})
        console.log(1, STEP)
        console.log(2, STEP | {"reward/mean": 0.75})  # no news, and within ROW_EVERY_S of a row: no row
        logging.getLogger("somebody").warning("two\nlines")
        warnings.warn("also two\nlines", stacklevel=1)
        print("printed")
        os.write(sys.stdout.fileno(), b"\r\x1b[2Krank 1: another process\r\n")
        console.log(3, STEP | {"reward/failures": 2})
        live = wait_for(screen, "step 3/300")[-1]
        console.close()
        shown = screen()
    assert re.search(r"━ step 3/300  eta \d:\d\d:\d\d  reward 0.500  held-out 0.250 .* 2 scores failed$", live), live
    assert len(live) <= 100
    lines = [re.sub(r"^\d\d:\d\d:\d\d ", "", line) for line in shown.lines if line]
    assert "━" not in "".join(lines), "the live line is gone"
    table = [line for line in lines if re.match(r" *(step|\d/300)", line)]
    assert [line.split()[0] for line in table] == ["step", "0/300", "1/300", "3/300"]
    assert table[2].endswith("rollout-bound (rollout 81%, trainer 19%)")
    assert "2 scores failed  rollout-bound" in table[3] and max(map(len, table)) <= 100
    rest = [line for line in lines if line not in table and not re.match(r"\d{4}-\d\d-\d\d", line)]
    assert rest[:2] == ["WARN  two", "lines"] and rest[2].startswith("WARN  UserWarning: also two lines (")
    assert rest[3:] == ["printed", "rank 1: another process"]
    assert shown.colours


@pytest.mark.parametrize("variables", [{"NO_COLOR": "1"}, {"TERM": "dumb"}])
def test_a_terminal_without_colours(monkeypatch, variables):
    with terminal(monkeypatch, **variables) as screen:
        console = Console(config_of(), 300)
        console.log(1, STEP)
        console.close()
        shown = screen()
    assert any("1/300" in line for line in shown.lines)
    assert not [colour for colour in shown.colours if re.search(r"[34]\dm", colour)]
