"""Log lines: `12:34:56 INFO  message`, after one line with the date."""

import contextlib
import logging
import os
import sys
import time
import warnings
from collections.abc import Iterator
from typing import Any, TextIO, cast

_SHORT = {"WARNING": "WARN", "CRITICAL": "FATAL"}


class LineFormatter(logging.Formatter):
    """`12:34:56 INFO  message`. Before the first line of a day comes one with the date and the time zone.

    Args:
        rank: Of the trainer process. Lines of others than rank 0 name it. The date is in rank 0's.
        is_continued: Another process has said the date.
    """

    def __init__(self, rank: int = 0, is_continued: bool = False) -> None:
        super().__init__()
        self._rank = f"rank {rank}: " if rank else ""
        self._date = _date(time.localtime()) if is_continued else ""

    def format(self, record: logging.LogRecord) -> str:
        when = time.localtime(record.created)
        level = _SHORT.get(record.levelname, record.levelname)
        line = f"{time.strftime('%H:%M:%S', when)} {level:<5} {self._rank}{super().format(record)}"
        before, self._date = self._date, _date(when)
        return line if before == self._date or self._rank else f"{self._date}\n{line}"


def _date(when: time.struct_time) -> str:
    return time.strftime("%Y-%m-%d %Z", when)


class _Lasting:
    """A text stream whose writes never fail: a closed terminal, a pipe without a reader and a full disk end no run.

    What cannot be written is lost. The first time, `told` hears of it. Nobody does if the process was started without
    the stream, which is None then.
    """

    def __init__(self, stream: TextIO | None, told: "_Lasting | None" = None) -> None:
        self._stream = stream or open(os.devnull, "w")  # noqa: SIM115  as long as the process
        self._told = told

    def write(self, text: str) -> int:
        try:
            self._stream.write(text)
        except UnicodeEncodeError as error:  # a model may write in any script, and half a character
            self.write(text.encode(error.encoding, "backslashreplace").decode(error.encoding))
        except OSError as error:
            self._lost(error)
        return len(text)

    def flush(self) -> None:
        try:
            self._stream.flush()
        except OSError as error:
            self._lost(error)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def _lost(self, error: OSError) -> None:
        told, self._told = self._told, None
        if told is not None:
            told.write(f"stdout cannot be written ({error}): what it cannot take is lost, and the run goes on\n")


class _Stdout(logging.StreamHandler):
    """Writes to what `sys.stdout` is at that moment."""

    def __init__(self, rank: int, is_continued: bool) -> None:
        logging.Handler.__init__(self)
        self.setFormatter(LineFormatter(rank, is_continued))

    @property
    def stream(self) -> TextIO:
        return sys.stdout


def init_log_lines(is_continued: bool = False) -> None:
    """Send all loggers and Python's warnings to stdout. From now on, writing to stdout or stderr raises neither OSError
    nor UnicodeError.

    Ranks other than 0 write errors, and the warnings of this project. What a library warns of, rank 0 writes too.
    """
    if not isinstance(sys.stdout, _Lasting):
        stderr = _Lasting(sys.stderr)
        sys.stdout, sys.stderr = cast(TextIO, _Lasting(sys.stdout, told=stderr)), cast(TextIO, stderr)
    rank = int(os.environ.get("RANK", "0"))
    root = logging.getLogger()
    root.handlers[:] = [_Stdout(rank, is_continued)]
    root.setLevel(logging.ERROR if rank else logging.INFO)
    logging.getLogger("torchtitan.grpo").setLevel(logging.WARNING if rank else logging.INFO)
    for client in ("httpx", "httpx2"):  # each request of the hub's client, to addresses that may be signed
        logging.getLogger(client).setLevel(logging.WARNING)
    warnings.formatwarning = _one_line
    logging.captureWarnings(True)
    os.environ["KINETO_LOG_LEVEL"] = "5"  # as torchtitan's init_logger: the profiler says nothing


def _one_line(
    message: Warning | str, category: type[Warning], filename: str, lineno: int, line: str | None = None
) -> str:
    file = filename.rpartition("site-packages/")[2]
    return f"{category.__name__}: {' '.join(str(message).split())} ({file}:{lineno})"


@contextlib.contextmanager
def stdout_to_stderr() -> Iterator[None]:
    """What this process and those that it starts print meanwhile goes to stderr: stdout is for the result alone."""
    stdout = os.dup(1)
    os.dup2(2, 1)
    try:
        with contextlib.redirect_stdout(sys.stderr):
            yield
    finally:
        os.dup2(stdout, 1)
        os.close(stdout)
