import logging
import os
import pty
import subprocess
import sys
from collections.abc import Callable

import pytest

from tests.helpers import ROOT
from torchtitan.grpo.process.log_lines import LineFormatter

PROGRAM = """
import logging, warnings
from torchtitan.grpo.process.log_lines import init_log_lines
init_log_lines()
logging.getLogger("a").info("one")
logging.getLogger("torchtitan.grpo.b").warning("two")
logging.getLogger("c").error("ten")
logging.getLogger().warning("upstream's")
for _ in range(2):
    warnings.warn("three\\n  and more")
"""


def record_at(seconds: float, level: int = logging.INFO, message: str = "hello") -> logging.LogRecord:
    record = logging.LogRecord("name", level, "file.py", 1, message, (), None)
    record.created = seconds
    return record


def test_the_date_comes_once_a_day(monkeypatch):
    lines = LineFormatter()
    day = 86400.0
    written = [lines.format(record_at(t)) for t in (10 * day, 10 * day + 1, 12 * day)]
    assert [len(text.splitlines()) for text in written] == [2, 1, 2]
    date, line = written[0].splitlines()
    assert date.startswith("1970-01-1") and line[2] == line[5] == ":" and line[8:] == " INFO  hello"


def test_levels_are_short_and_other_ranks_are_named():
    lines = LineFormatter(rank=3)
    assert lines.format(record_at(1.0, logging.WARNING))[8:] == " WARN  rank 3: hello"
    assert lines.format(record_at(1.0, logging.ERROR))[8:] == " ERROR rank 3: hello"


def said(rank: int) -> list[str]:
    environment = {"PATH": "", "PYTHONPATH": str(ROOT), "RANK": str(rank)}
    done = subprocess.run([sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True, check=True)
    assert done.stderr == ""
    return [line[9:] for line in done.stdout.splitlines() if line[2] == ":"]


def test_other_ranks_do_not_repeat_what_rank_0_says():
    own, others = ["WARN  two", "ERROR ten"], ["WARN  upstream's", "WARN  UserWarning: three and more (<string>:10)"]
    assert said(0) == ["INFO  one", *own, *others]
    assert said(1) == ["WARN  rank 1: two", "ERROR rank 1: ten"]


UNREAD = """
import logging, sys
from torchtitan.grpo.process.log_lines import init_log_lines
from torchtitan.grpo.process.stopping import run_and_exit
def main():
    init_log_lines()
    print("first", flush=True)
    sys.stdin.read()
    for _ in range(3):
        logging.getLogger().warning("x" * 10_000)
        print("y" * 10_000)
    return 0
run_and_exit(main)
"""


@pytest.mark.parametrize(
    ("opened", "error"),
    [(pty.openpty, "Input/output"), (os.pipe, "Broken pipe"), (lambda: (-1, os.open("/dev/full", 1)), "No space")],
    ids=["terminal", "pipe", "full disk"],
)
def test_a_process_outlives_who_reads_its_output(opened: Callable[[], tuple[int, int]], error: str):
    reader, stdout = opened()
    process = subprocess.Popen(
        [sys.executable, "-c", UNREAD],
        stdin=subprocess.PIPE,
        stdout=stdout,
        stderr=subprocess.PIPE,
        cwd=ROOT,
        text=True,
    )
    os.close(stdout)
    if reader >= 0:
        assert os.read(reader, 5) == b"first"
        os.close(reader)
    _, said = process.communicate(timeout=60)
    assert process.returncode == 0
    assert said.startswith("stdout cannot be written ([Errno ") and error in said and said.count("\n") == 1


def test_what_was_printed_before_ends_no_process_either():
    code = "print('before')\nfrom torchtitan.grpo.process import log_lines, stopping\nlog_lines.init_log_lines()"
    code += "\nstopping.run_and_exit(lambda: 0)"
    buffered = os.environ | {"PYTHONUNBUFFERED": ""}
    with open("/dev/full", "w") as full:
        done = subprocess.run([sys.executable, "-c", code], env=buffered, stdout=full, cwd=ROOT, timeout=60)
    assert done.returncode == 0


@pytest.mark.parametrize(("encoding", "printed"), [("ascii", "\\u65e5 \\ud83d\n"), ("utf-8", "日 \\ud83d\n")])
def test_text_of_any_script_and_half_a_character_can_be_printed(encoding: str, printed: str):
    code = "from torchtitan.grpo.process.log_lines import init_log_lines\ninit_log_lines()\nprint('\\u65e5', '\\ud83d')"
    told = os.environ | {"PYTHONIOENCODING": encoding}
    done = subprocess.run([sys.executable, "-c", code], env=told, capture_output=True, cwd=ROOT, timeout=60)
    assert (done.returncode, done.stdout.decode(), done.stderr) == (0, printed, b"")


def test_a_process_that_was_started_without_stdout_goes_on():
    code = "import os, sys; os.close(1); os.execv(sys.executable, [sys.executable, '-c', sys.argv[1]])"
    command = [sys.executable, "-c", code, UNREAD]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, stderr=subprocess.PIPE, cwd=ROOT, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
