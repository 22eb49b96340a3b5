"""Whether a process gets on, and what to write when it does not."""

import sys
import threading
import time
from collections.abc import Callable
from typing import Self

from torchtitan.grpo.config.torchtitan_keys import Debug
from torchtitan.grpo.process.stacks import stacks
from torchtitan.grpo.process.stopping import GRACE_S, stop
from torchtitan.grpo.reporting.ledger import Ledger

_LOOK_S = 1.0


class Progress:
    """Since when this process has not got on. Any thread may ask, and must: something done is noticed by asking.

    Progress is a stage that begins or ends, or a value of `watch` that changes: a scored answer, a gathered bucket, a
    message between ranks. So a long rollout is progress as long as its groups end one by one.

    Attributes:
        changes: How often progress was seen.
    """

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._values: list[Callable[[], object]] = [lambda: ledger.stages]
        self._lock = threading.Lock()
        self._last: list[object] = []
        self.changes = 0
        self._since = time.monotonic()

    def watch(self, value: Callable[[], object]) -> None:
        """Count a change of this value as progress. It is read from any thread and must not block."""
        self._values.append(value)

    def still_s(self) -> float:
        """Seconds since the last call that saw progress."""
        with self._lock:
            values = [value() for value in self._values]
            if values != self._last:
                self._last, self._since = values, time.monotonic()
                self.changes += 1
            return time.monotonic() - self._since

    def describe(self) -> str:
        """`in stage 'validate' for 812 s`."""
        stage, seconds = self._ledger.now()
        return f"in stage {stage!r} for {seconds:.0f} s" if stage else f"between stages for {seconds:.0f} s"


class Watchdog:
    """`[debug] hang_seconds`: without progress for so long, write what every part waits for, and perhaps exit. The last
    step is saved if the run can still do that.

    A report has the stage, one line for each of `parts`, and every thread's stack. There is one for each standstill.

    Args:
        parts: Say in a few lines what a part of the process waits for. They are called from the watchdog's thread while
            the process may hang, so they must not wait for a lock that is held for long.
        stop_s: `[checkpoint] stop_seconds`.
    """

    def __init__(
        self, debug: Debug, progress: Progress, parts: list[Callable[[], str]], stop_s: float = GRACE_S
    ) -> None:
        self._stop_s = stop_s
        self._after_s, self._exit_code = debug.hang_seconds, debug.hang_exit_code
        self._progress, self._parts = progress, parts
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)

    def __enter__(self) -> Self:
        if self._after_s:
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._closed.set()
        if self._after_s:
            self._thread.join(_LOOK_S)  # a report that has begun is written to its end

    def _watch(self) -> None:
        reported = False
        while not self._closed.wait(min(_LOOK_S, self._after_s / 4)):
            still_s = self._progress.still_s()
            if still_s >= self._after_s and not reported:
                self._report(still_s)
                if self._exit_code:
                    stop(self._exit_code, self._stop_s, saves=True)
            reported = still_s >= self._after_s

    def _report(self, still_s: float) -> None:
        about = f"{self._progress.describe()}; docs/by_symptom.md#the-run-hangs reads this"
        lines = [f"no progress for {still_s:.0f} s ([debug] hang_seconds): {about}"]
        for part in self._parts:
            try:
                lines.append(part())
            except Exception as error:  # a report with a gap is better than none
                lines.append(f"{type(error).__name__}: {error}")
        print("\n  ".join(lines), stacks(), sep="\n", file=sys.stderr, flush=True)
