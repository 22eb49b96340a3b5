"""What a user reads while a run goes: one plain line per step. Rank 0 only."""

import statistics
import time
from collections import deque
from datetime import timedelta

from torchtitan.config import JobConfig
from torchtitan.grpo.reporting.ledger import verdict
from torchtitan.grpo.reporting.step_lines import WARM_START
from torchtitan.tools.logging import logger

FIELDS = (
    # label, metric, format
    ("reward", "reward/mean", "{:.3f}"),
    ("held-out", "validation/greedy_reward", "{:.3f}"),
    ("tokens/s", "throughput/answer_tokens_per_s", "{:,.0f}"),
    ("s/step", "time/step_s", "{:.2f}"),
    ("age", "rollout/age_mean", "{:.1f}"),
)
"""What a line says of a step, as far as it is known. The age is that of the tokens, with `[async_grpo]`."""
SFT_FIELDS = (
    ("loss", "train/loss", "{:.4f}"),
    ("held-out", "validation/loss", "{:.4f}"),
    ("accuracy", "validation/token_accuracy", "{:.3f}"),
    ("tokens/s", "throughput/tokens_per_s_per_gpu", "{:,.0f}"),
    ("s/step", "time/step_s", "{:.2f}"),
)
"""The same for supervised fine-tuning. Tokens are those of one GPU."""
_RECENT_STEPS = 10
"""The ETA is the median length of this many steps, times the steps left."""

Field = tuple[str, str, str]
"""An entry of `FIELDS`."""


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
    equal, cut = values.get("reward/zero_variance_fraction"), values.get("rollout/truncated_fraction")
    if values.get("train/answer_tokens") == 0 or (equal == 1 and not other_signal):
        why = [] if equal is None else [f"{equal:.0%} of groups have equal rewards"]
        if cut and equal != 1:  # by [grpo] overlong_filter the others may be left out
            why.append(f"{cut:.0%} of answers hit the limit")
        found += "  no signal" + (f" ({', '.join(why)})" if why else "")
    return found


class Console:
    """Shows the steps of a run.

    Args:
        config: The run's configuration ([sft] steps, [grpo], [async_grpo], [distill]).
        total_steps: GRPO steps of the whole run, for progress and ETA.

    Attributes:
        fields: What a line says: `FIELDS` or `SFT_FIELDS`. Only with the first it says what bounds the step.
    """

    def __init__(self, config: JobConfig, total_steps: int) -> None:
        self._total_steps = total_steps
        self._sft_steps = config.sft.steps
        kl_in_reward = config.grpo.kl_coef > 0 and config.grpo.kl_placement == "reward"
        self._other_signal = kl_in_reward or bool(config.distill.teacher_urls)
        self.fields = tuple(field for field in FIELDS if field[0] != "age" or config.async_grpo.enabled)
        self._held_out: dict[str, float] = {}
        self._step_seconds: deque[float] = deque(maxlen=_RECENT_STEPS)
        self._last_step_at: float | None = None
        self._warned = False

    def log(self, step: int, values: dict[str, float], axis: str = "step") -> None:
        """Show a step's metrics."""
        if axis == WARM_START:
            shown = "  ".join(f"{name.removeprefix('sft/')} {value:.4g}" for name, value in values.items())
            logger.info(f"sft step {step}/{self._sft_steps}  {shown}")
            return
        # A step without validation says the last one's result.
        self._held_out |= {name: value for name, value in values.items() if name.startswith("validation/")}
        known, eta = self._held_out | values, self._eta(step, values)
        line = f"step {step}/{self._total_steps}" + (f"  eta {eta}" if eta else "")
        line += "".join(f"  {label} {form.format(known[name])}" for label, name, form in self.fields if name in known)
        line += (warned := step_warnings(values, self._other_signal))
        if step and self.fields is not SFT_FIELDS and (bound := verdict(values)):  # step 0 is only validated
            line += f"  {bound}"
        logger.info(line)
        if "no signal" in warned and not self._warned:
            self._warned = True
            logger.info("docs/by_symptom.md#all-groups-are-equal says what to look at when a step has no signal")

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
