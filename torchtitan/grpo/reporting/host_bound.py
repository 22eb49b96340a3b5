"""A hint for updates in which the device waits for the host."""

import math
from dataclasses import dataclass, field

LOW_MFU = 0.15
"""Below it the device mostly waits. 135M parameters in rows of 16k tokens ran at 0.04."""
SKIPPED_STEPS = 2
"""A run's first steps load kernels."""
STEPS = 3
"""In a row that must be so slow."""
USED_SHARE = 0.8
"""Of the memory that is left for activations, at most, after what is suggested."""


@dataclass
class HostBound:
    """Says once what would make a small model's update faster: the host launches as many kernels for a short row as for
    a long one.

    Args:
        row_tokens: `[training] tokens_per_microbatch` or its default.
        compiles: `[compile] enable`.
        memory_gib: What the trainer may have of its device.
    """

    row_tokens: int
    compiles: bool
    memory_gib: float
    _steps: int = 0
    _low: list[float] = field(default_factory=list)
    _said: bool = False

    def look(self, mfu: float, rows: int, peak_gib: float) -> str:
        """What to try, after a step; mostly "".

        Args:
            rows: Packed rows of one rank in one optimizer step.
            peak_gib: The most memory that torch's allocator held.
        """
        self._steps += 1
        if self._said or self._steps <= SKIPPED_STEPS:
            return ""
        self._low = [*self._low, mfu] if mfu < LOW_MFU else []
        if len(self._low) < STEPS:
            return ""
        room = min(rows, USED_SHARE * self.memory_gib / peak_gib) if peak_gib else 1.0
        longer = self.row_tokens << int(math.log2(max(room, 1.0)))
        tries = []
        if longer > self.row_tokens:
            now = f"a step has {rows} rows of {self.row_tokens}"
            tries.append(f"[training] tokens_per_microbatch = {longer}, since {now}")
        if not self.compiles:
            tries.append("[compile] enable = true, for runs of many minutes")
        self._said = True
        if not tries:
            return ""
        mfu = sum(self._low) / len(self._low)
        what = f"The update reaches {mfu:.1%} MFU: the device may be waiting for the host"
        return f"{what}. Try {', or '.join(tries)} (docs/performance.md)"
