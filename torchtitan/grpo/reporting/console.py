"""What a user reads while a run goes. Rank 0 only.

In a file or a pipe: one plain line per step. On a terminal: a live line, and above it a row of a table now and then.
"""

import statistics
import time
from collections import deque
from collections.abc import Callable
from datetime import timedelta

from torchtitan.config import JobConfig
from torchtitan.grpo.process.log_lines import on_terminal
from torchtitan.grpo.reporting.ledger import verdict
from torchtitan.tools.logging import logger

SFT_PREFIX = "sft"
"""Metrics with this prefix count supervised steps, on their own axis (`sft/step`)."""

FIELDS = (
    # label, metric, format, width in the table, when it leaves a line that is too long (the highest first, 0 never)
    ("reward", "reward/mean", "{:.3f}", 7, 0),
    ("held-out", "validation/greedy_reward", "{:.3f}", 9, 1),
    ("tokens/s", "throughput/answer_tokens_per_s", "{:,.0f}", 9, 5),
    ("s/step", "time/step_s", "{:.2f}", 7, 2),
    ("age", "rollout/age_mean", "{:.1f}", 4, 6),
)
"""What a line says of a step, as far as it is known. The age is that of the tokens, with `[async_grpo]`."""
SFT_FIELDS = (
    ("loss", "train/loss", "{:.4f}", 8, 0),
    ("held-out", "validation/loss", "{:.4f}", 9, 1),
    ("accuracy", "validation/token_accuracy", "{:.3f}", 9, 6),
    ("tokens/s", "throughput/tokens_per_s_per_gpu", "{:,.0f}", 9, 5),
    ("s/step", "time/step_s", "{:.2f}", 7, 2),
)
"""The same for supervised fine-tuning. Tokens are those of one GPU."""
_STAGE_LEAVES, _VERDICT_LEAVES, _SHARES_LEAVE = 3, 4, 7

LINE_CHARS = 144
"""Longest step line in a file. The time and the level before it make it 159."""
ROW_EVERY_S = 10.0
"""Seconds between rows on a terminal. The first and last step, a validation and a new warning have a row at once."""
ROWS_PER_HEADER = 20
_RECENT_STEPS = 10
"""The ETA is the median length of this many steps, times the steps left."""

Field = tuple[str, str, str, int, int]
"""An entry of `FIELDS`."""
Stage = Callable[[], tuple[str | None, float]]
"""What the trainer does now, None between stages, and for how many seconds."""

Part = tuple[str, int]
"""A text, and when it leaves a line that is too long: the highest number first, 0 never."""


def fitted(parts: list[Part], width: int) -> str:
    """The parts as one text of at most `width` characters."""
    kept = list(parts)
    while len(text := "".join(part for part, _ in kept)) > width and any(leaves for _, leaves in kept):
        kept.remove(max(kept, key=lambda part: part[1]))
    return text[: max(width, 0)]


def duration(seconds: float) -> str:
    """`0:06:40`, or `3d 04h`."""
    days, rest = divmod(round(seconds), 86400)
    return f"{days}d {rest // 3600:02}h" if days else str(timedelta(seconds=rest))


def step_warnings(values: dict[str, float], other_signal: bool = False) -> str:
    """What a step's other numbers would hide: scores that failed, and that no group gave a gradient. Usually "".

    Args:
        other_signal: Equal rewards give a gradient too, by a teacher or by a KL that is subtracted from them.
    """
    found = ""
    if failures := values.get("reward/failures"):
        found += f"  {failures:.0f} scores failed"
    equal = values.get("reward/zero_variance_fraction")
    if values.get("train/answer_tokens") == 0 or (equal == 1 and not other_signal):
        found += "  no signal" if equal is None else f"  no signal ({equal:.0%} of groups have equal rewards)"
    return found


class Console:
    """Shows the steps of a run.

    Args:
        config: The run's configuration ([metrics], [sft] steps, [grpo], [async_grpo], [distill]).
        total_steps: GRPO steps of the whole run, for progress and ETA.

    Attributes:
        stage: For the live line.
        fields: What a line says: `FIELDS` or `SFT_FIELDS`. Only with the first it says what bounds the step.
    """

    def __init__(self, config: JobConfig, total_steps: int) -> None:
        self._total_steps = total_steps
        self._sft_steps = config.sft.steps
        started = time.monotonic()
        self.stage: Stage = lambda: (None, time.monotonic() - started)
        kl_in_reward = config.grpo.kl_coef > 0 and config.grpo.kl_placement == "reward"
        self._other_signal = kl_in_reward or bool(config.distill.teacher_urls)
        self.fields = tuple(field for field in FIELDS if field[0] != "age" or config.async_grpo.enabled)
        self._held_out: dict[str, float] = {}
        self._step_seconds: deque[float] = deque(maxlen=_RECENT_STEPS)
        self._last_step_at: float | None = None
        self._live: tuple[list[Part], str] = [], ""
        self._rows, self._row_at = 0, float("-inf")
        self._terminal = None
        if on_terminal():
            from torchtitan.grpo.reporting.terminal import Terminal  # late: a file needs no rich

            self._terminal = Terminal(total_steps, self._live_text)

    def log(self, step: int, values: dict[str, float], prefix: str = "") -> None:
        """Show a step's metrics; with a prefix, those that `MetricsLogger.log` put it before."""
        if prefix:
            total = f"/{self._sft_steps}" if prefix == SFT_PREFIX else ""
            shown = "  ".join(f"{name.removeprefix(prefix + '/')} {value:.4g}" for name, value in values.items())
            text = f"{prefix} step {step}{total}  {shown}"
            self._live = [(text, 0)], ""
            if self._terminal is None or prefix != SFT_PREFIX or step == self._sft_steps:
                logger.info(text)
            return
        held_out = {name: value for name, value in values.items() if name.startswith("validation/")}
        self._held_out |= held_out  # a step without validation says the last one's result
        known = self._held_out | values
        warnings, eta = step_warnings(values, self._other_signal), self._eta(step, values)
        parts = [(f"step {step}/{self._total_steps}", 0), *[(f"  eta {eta}", 0)] * bool(eta)]
        for label, name, form, _, leaves in self.fields:
            if name in known:
                parts.append((f"  {label} {form.format(known[name])}", leaves))
        if self._terminal is None:
            logger.info(fitted([*parts, (warnings, 0), *self._verdict(step, values)], LINE_CHARS))
            return
        news = held_out or step in (1, self._total_steps) or warnings != self._live[1]
        self._live, self._terminal.done = (parts, warnings), step
        if news or time.monotonic() - self._row_at >= ROW_EVERY_S:
            self._print_row(step, values, eta, warnings)

    def close(self) -> None:
        """Take the live line off the terminal."""
        if self._terminal is not None:
            self._terminal.close()

    def _live_text(self, width: int) -> list[tuple[str, str]]:
        (parts, warnings), (stage, seconds) = self._live, self.stage()
        stage = stage if parts else stage or "starting"
        now = [(f"  {stage} {seconds:.0f} s", _STAGE_LEAVES)] if stage and seconds >= 1 else []
        return [(fitted([*parts, *now], width - len(warnings)).lstrip(), ""), (warnings, "red")]

    def _print_row(self, step: int, values: dict[str, float], eta: str, warnings: str) -> None:
        step_chars = len(f"{self._total_steps}/{self._total_steps}")
        if self._rows % ROWS_PER_HEADER == 0:
            labels = "".join(f"{label:>{width + 2}}" for label, _, _, width, _ in self.fields)
            self._terminal.print((f"{'step':>{step_chars}}{'eta':>10}{labels}  verdict", "bold"))
        self._rows, self._row_at = self._rows + 1, time.monotonic()
        row = f"{f'{step}/{self._total_steps}':>{step_chars}}{eta:>10}"
        for _, name, form, width, _ in self.fields:
            row += f"{form.format(values[name]) if name in values else '':>{width + 2}}"
        bound = fitted(self._verdict(step, values), self._terminal.width - len(row) - len(warnings))
        self._terminal.print((row, ""), (warnings, "red"), (bound, "green"))

    def _eta(self, step: int, values: dict[str, float]) -> str:
        """Time left, "" before a step was timed."""
        now = time.perf_counter()
        # Between two steps are validation and checkpoints. Before the first is also the warm start: left out.
        seconds = values.get("time/step_s") if self._last_step_at is None else now - self._last_step_at
        self._last_step_at = now
        if seconds is not None and step > 0:
            self._step_seconds.append(seconds)
        if not self._step_seconds:
            return ""
        return duration((self._total_steps - step) * statistics.median(self._step_seconds))

    def _verdict(self, step: int, values: dict[str, float]) -> list[Part]:
        """Nothing bounds step 0: it is only validated."""
        bound, _, shares = verdict(values if step and self.fields is not SFT_FIELDS else {}).partition(" ")
        return [(f"  {bound}", _VERDICT_LEAVES), (f" {shares}", _SHARES_LEAVE)] if bound else []
