"""Where the seconds of a step went, and what bounds it.

Stages are timed on the host, and on CUDA also by events on the current stream. On CUDA a stage's seconds are the
device's: the host runs ahead, so its clock would book one stage's work on the next stage that waits. Stages of one
stream follow each other, so they partition the step either way.
"""

import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

KINDS = ("trainer", "rollout", "sync", "reward")
_KIND_OF_STAGE = {
    "rollout": "rollout",
    "sync": "sync",
    "reward": "reward",
    # Neither bounds a step: both happen once in many steps, and the user chooses how often.
    "validate": None,
    "checkpoint": None,
}
"""Kind of a stage in the verdict. A stage that is not listed is the trainer's own work."""

_CLEAR_LEAD = 0.15
"""A kind bounds the step if its share leads the next one's by at least this. Otherwise the step is balanced."""

_SHOWN = 0.05
"""The verdict does not list smaller shares."""


@dataclass
class _Span:
    """One timed stage."""

    name: str
    host_s: float
    events: tuple[torch.cuda.Event, torch.cuda.Event] | None


class Ledger:
    """Seconds by stage for one step at a time. Not thread-safe, except `now`. `move` and `hide` take what other threads
    measured.

    A step lasts from one `close_step` to the next. The first one begins with its first stage.

    Attributes:
        stages: Stages that have begun or ended so far.
    """

    def __init__(self, device: torch.device | str) -> None:
        self.stages = 0
        self._changed_at = time.monotonic()
        self._on_cuda = torch.device(device).type == "cuda"
        self._open: str | None = None
        self._spans: list[_Span] = []
        self._moved: list[tuple[str, float, str]] = []
        self._hidden_s: dict[str, float] = defaultdict(float)
        self._step_start: float | None = None

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Time a stage. Stages do not nest."""
        if self._open is not None:
            raise RuntimeError(f"stage {name!r} begins inside the stage {self._open!r}")
        start = time.perf_counter()
        if self._step_start is None:
            self._step_start = start
        self._set_open(name)
        events = None
        if self._on_cuda:
            events = (torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True))
            events[0].record()
        try:
            yield
        finally:
            if events is not None:
                events[1].record()
            self._set_open(None)
            self._spans.append(_Span(name, time.perf_counter() - start, events))

    def now(self) -> tuple[str | None, float]:
        """The stage that is open, None between stages, and its seconds so far. Any thread may ask."""
        return self._open, time.monotonic() - self._changed_at

    def _set_open(self, name: str | None) -> None:
        self._open, self._changed_at = name, time.monotonic()
        self.stages += 1

    def move(self, name: str, seconds: float, out_of: str) -> None:
        """Book seconds of another stage, such as the rollout that waited for rewards, as those of the stage `name`."""
        self._moved.append((name, seconds, out_of))

    def hide(self, name: str, seconds: float) -> None:
        """Book seconds that a stage ran beside the step and cost it nothing: `time/<name>_hidden_s`, and in no sum."""
        self._hidden_s[name] += seconds

    def close_step(self) -> dict[str, float]:
        """End the step and return its seconds by metric name. On CUDA this waits for the last stage's event.

        Returns:
            `time/<stage>_s` for each stage, and `time/<stage>_hidden_s` for what ran beside the step. On CUDA also
            `time/<stage>_host_s`, the host's time in the stage. `time/step_s` is the wall clock, and `time/other_s` the
            wall clock outside every stage.
        """
        if self._open is not None:
            raise RuntimeError(f"close_step inside the stage {self._open!r}")
        seconds: dict[str, float] = defaultdict(float)
        host: dict[str, float] = defaultdict(float)
        for span in self._spans:
            if span.events is None:
                seconds[span.name] += span.host_s
                continue
            span.events[1].synchronize()  # spans may end out of order: a stage may run on another stream
            seconds[span.name] += span.events[0].elapsed_time(span.events[1]) / 1e3
            host[span.name] += span.host_s
        for name, moved, out_of in self._moved:
            if out_of not in seconds:
                raise ValueError(f"move(out_of={out_of!r}): no such stage in this step, there are {sorted(seconds)}")
            seconds[out_of] = max(seconds[out_of] - moved, 0.0)
            seconds[name] += moved

        now = time.perf_counter()
        step_s = now - (now if self._step_start is None else self._step_start)
        in_stages_s = sum(seconds.values())
        result = {f"time/{name}_s": value for name, value in seconds.items()}
        result |= {f"time/{name}_host_s": value for name, value in host.items()}
        result |= {f"time/{name}_hidden_s": value for name, value in self._hidden_s.items()}
        result["time/step_s"] = step_s
        result["time/other_s"] = max(step_s - in_stages_s, 0.0)

        for booked in (self._spans, self._moved, self._hidden_s):
            booked.clear()
        self._step_start = now
        return result


def shares(seconds: dict[str, float]) -> dict[str, float]:
    """Each kind's share, 0 to 1, of the stages' seconds that `close_step` returned."""
    by_kind = dict.fromkeys(KINDS, 0.0)
    for name, value in seconds.items():
        stage = name.removeprefix("time/").removesuffix("_s")
        of_step = name.startswith("time/") and not stage.endswith(("_hidden", "_host"))
        if of_step and stage not in ("step", "other"):
            kind = _KIND_OF_STAGE.get(stage, "trainer")
            if kind is not None:
                by_kind[kind] += value
    total = sum(by_kind.values())
    return {kind: value / total if total > 0 else 0.0 for kind, value in by_kind.items()}


def verdict(seconds: dict[str, float]) -> str:
    """Text for the console, such as `rollout-bound (rollout 71%, trainer 22%, sync 7%)`; "" without stages."""
    ranked = sorted(shares(seconds).items(), key=lambda item: -item[1])
    (first, most), (_, next_most) = ranked[:2]
    if most == 0:
        return ""
    bound = f"{first}-bound" if most - next_most >= _CLEAR_LEAD else "balanced"
    return f"{bound} ({', '.join(f'{kind} {share:.0%}' for kind, share in ranked if share >= _SHOWN)})"
