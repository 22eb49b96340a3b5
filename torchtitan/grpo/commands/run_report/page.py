"""One HTML file of a run, which needs no network."""

import math
import re
import statistics
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import jinja2

from torchtitan.grpo.commands.run_report.charts import COLOURS, Series, line_chart, short, stacked_chart
from torchtitan.grpo.commands.run_report.findings import bound, findings
from torchtitan.grpo.commands.run_report.run_folder import Points, Run

LINE_CHARTS: tuple[tuple[str, dict[str, str | None]], ...] = (
    ("Held-out reward", {"validation/.*greedy_reward": "greedy", "validation/.*sampled_reward": "sampled"}),
    ("Held-out pass@k", {"validation/.*(pass_at|majority_at).*": ""}),
    ("Rewards by function", {"reward/(?!mean$|std$|failures$|.*fraction$).+": ""}),
    ("Groups without a signal", {"reward/zero_variance_fraction": "share of groups"}),
    ("Loss", {"train/loss": "training", "validation/(.*/)?loss": "held-out"}),
    ("Token accuracy", {"train/token_accuracy": "training", "validation/(.*/)?token_accuracy": "held-out"}),
    ("Entropy", {"policy/entropy": "nats per token"}),
    ("KL", {"policy/kl": "to the reference", "policy/update_kl": "of the update"}),
    ("Sampler against trainer", {"policy/mismatch_kl": "KL", "policy/mismatch_abs": "mean difference"}),
    ("Gradient norm", {"train/grad_norm": "before clipping"}),
    ("Clipped tokens", {"policy/clip_low_fraction": "low", "policy/clip_high_fraction": "high"}),
    ("Learning rate", {"train/lr": "rate"}),
    ("Answer length", {"rollout/answer_tokens_mean": "mean", "rollout/answer_tokens_max": "longest"}),
    ("Answers cut at the limit", {"rollout/truncated_fraction": "share"}),
    ("Age of tokens", {"rollout/age_mean": "mean", "rollout/age_max": "oldest"}),
    ("Answer tokens/s", {"throughput/answer_tokens_per_s": "all devices"}),
    ("MFU", {"throughput/mfu": "of the updates", "throughput/step_mfu": "of the whole step"}),
    ("GPU memory, GiB", {"memory/allocated_peak_gib": "allocated, peak", "memory/reserved_peak_gib": "reserved, peak"}),
    ("Servers busy", {"server/[^/]+/busy_share": None, "server/busy_share": "all"}),
    ("Weight update, s", {"sync/total_s": "whole push", "time/sync_s": "trainer waits"}),
    ("Supervised warm start", {"sft/loss": "nats per token"}),
)
"""Title, and label by pattern of metric names. An empty label is the last part of the name, None the one before."""

STAGES = {
    "rollout": "#2563c9",
    "reward": "#e0762f",
    "sync": "#0f93a8",
    "pack": "#c3a5e6",
    "logprobs": "#a57ed9",
    "train": "#8b57c7",
    "validate": "#9aa4b2",
    "checkpoint": "#7b8594",
    "record": "#b9a26a",
    "other": "#d3d8e0",
}
"""Colours of the stages, as of the kinds in the verdict: a trainer's stages are violet."""
_WIDE, _NARROW = 760, 372
_SAMPLES = 6
_LONGEST_TEXT = 4000


SERVER_COLUMNS = (
    ("busy", "busy_share", statistics.fmean, "{:.0%}"),
    ("mismatch, mean", "mismatch", statistics.fmean, "{:.1e}"),
    ("mismatch, largest", "mismatch", max, "{:.1e}"),
    ("push, median", "total_s", statistics.median, "{:.3g} s"),
    ("stopped for it, median", "stopped_s", statistics.median, "{:.3g} s"),
)
"""Title, metric, how its values become one, and how that is written."""


@dataclass(frozen=True)
class Card:
    """A chart with its legend: each series, and a number of it."""

    title: str
    chart: str
    keys: list[tuple[Series, str]]


def page(run: Run) -> str:
    """The whole file: page.html with the run's numbers and words."""
    folder = Path(__file__).parent
    templates = jinja2.Environment(
        loader=jinja2.FileSystemLoader(folder), autoescape=True, trim_blocks=True, lstrip_blocks=True
    )
    return templates.get_template("page.html").render(
        title=run.folder.resolve().name,
        style=(folder / "page.css").read_text(encoding="utf-8"),
        script=(folder / "page.js").read_text(encoding="utf-8"),
        description=run.values.get("job.description", ""),
        facts=list(filter(None, _facts(run))),
        tiles=list(_tiles(run)),
        large=[*_reward(run), *_time(run)],
        bounded=bound(run),
        findings=findings(run),
        small=list(_curves(run)),
        answers=[(title, samples[:_SAMPLES]) for title, samples in _answers(run) if samples],
        parts=_parts,
        server_heads=["server", *(head for head, *_ in SERVER_COLUMNS), "last step with numbers"],
        servers=[_server(name, metrics) for name, metrics in run.servers().items()],
        counts=[
            f"{name.partition('/')[2].replace('_', ' ')} {run.last(name):,.0f}"
            for name in ("sync/servers_in_traffic", "sync/servers_lost", "sync/version", "rollout/retried")
            if run.points(name)
        ],
        changed=[one for one in run.settings if one.default is not None],
        defaults=[one for one in run.settings if one.default is None],
    )


# ---------------------------------------------------------------------------------------------------- the top


def _facts(run: Run) -> Iterator[str | None]:
    values = run.values
    yield Path(re.sub("@[0-9a-f]{40}$", "", values.get("model.hf_assets_path", ""))).name
    if run.points("train/token_accuracy"):
        yield "supervised fine-tuning"
    elif values:
        yield values.get("rollout.engine")
        yield f"{values['grpo.prompts_per_step']} x {values['grpo.group_size']} answers a step"
        yield "async" if values.get("async_grpo.enabled") else "sync"
    written = datetime.fromtimestamp((run.folder / "metrics.jsonl").stat().st_mtime).strftime("%Y-%m-%d %H:%M")
    yield f"last step at {written}"


def _tiles(run: Run) -> Iterator[tuple[str, str, str]]:
    """Label, number and note."""
    steps = run.lines[-1]["step"] if run.lines else 0
    wanted = run.values.get("training.steps")
    yield "steps", f"{steps:,}", f"of {wanted:,}" if wanted else ""
    yield "wall clock", _duration(sum(line.get("time/step_s", 0.0) for line in run.lines)), ""
    if rewards := [value for _, value in run.points("reward/mean")]:
        yield "reward, last 10 steps", f"{statistics.fmean(rewards[-10:]):.3f}", f"first {rewards[0]:.3f}"
    if held_out := [value for _, value in run.points("validation/greedy_reward")]:
        yield "held-out, greedy", f"{held_out[-1]:.3f}", f"first {held_out[0]:.3f}"
    if speeds := [value for _, value in run.points("throughput/answer_tokens_per_s")]:
        yield "answer tokens/s", short(statistics.median(speeds)), "median"
    for name, label, form in (
        ("throughput/mfu", "MFU of the updates", "{:.1%}"),
        ("cost/gpu_hours", "GPU hours", "{:.2f}"),
        ("data/epoch", "data epochs", "{:.2f}"),
    ):
        if points := run.points(name):
            yield label, form.format(points[-1][1]), ""


def _duration(seconds: float) -> str:
    hours, rest = divmod(round(seconds), 3600)
    return f"{hours} h {rest // 60:02} min" if hours else f"{rest // 60} min {rest % 60:02} s"


# ------------------------------------------------------------------------------------------------- the curves


def _reward(run: Run) -> Iterator[Card]:
    if series := _series(run, {"reward/mean": "training", "validation/.*greedy_reward": "held-out, greedy"}):
        yield _lines("Reward", series, _WIDE)


def _time(run: Run) -> Iterator[Card]:
    """Seconds of each step by stage, stacked."""
    series = []
    for stage, colour in STAGES.items():
        points: Points = [(line["step"], line.get(f"time/{stage}_s", 0.0)) for line in run.steps]
        if any(seconds > 0.001 for _, seconds in points):
            series.append(Series(stage, points, colour))
    if series:
        means = [(one, f"{statistics.fmean(y for _, y in one.points):.2g} s") for one in series]
        yield Card("Seconds of a step, by stage", stacked_chart(series, _WIDE), means)


def _curves(run: Run) -> Iterator[Card]:
    for title, labels in LINE_CHARTS:
        series = _series(run, labels)
        if series and series[0].points != run.points("reward/mean"):  # as those of a single function are
            yield _lines(title, series, _NARROW)


def _lines(title: str, series: list[Series], width: int) -> Card:
    return Card(title, line_chart(series, width), [(one, short(one.points[-1][1])) for one in series])


def _series(run: Run, labels: dict[str, str | None]) -> list[Series]:
    """A series for each metric that is not always 0, the first ones of many."""
    found: dict[str, str] = {}
    for pattern, label in labels.items():
        for name in run.names(pattern):
            _, *which, last = name.split("/")  # of a server, or of a held-out set
            words = [*which, label or last.replace("_", " ")] if label is not None else which
            found.setdefault(name, " ".join(words))
    shown = [(label, run.points(name)) for name, label in found.items()]
    shown = [(label, points) for label, points in shown if any(value for _, value in points)]
    return [Series(label, points, colour) for (label, points), colour in zip(shown, COLOURS, strict=False)]


# ------------------------------------------------------------------------------------- answers and servers


def _answers(run: Run) -> list[tuple[str, list[dict[str, Any]]]]:
    """Samples by title."""
    newest_first = run.samples[::-1]
    scored = [sample for sample in newest_first if sample["reward"] is not None]
    last = run.held_out[-1]["step"] if run.held_out else None
    held_out = [sample for sample in run.held_out if sample["step"] == last and sample["kind"] == "greedy"]
    return [
        ("Newest", newest_first),
        ("Best: highest reward, then advantage", sorted(scored, key=_merit, reverse=True)),
        ("Worst: lowest reward, then advantage", sorted(scored, key=_merit)),
        ("A reward function failed", [sample for sample in newest_first if sample["reward_failures"]]),
        (f"Held-out at step {last}, greedy: lowest reward first", sorted(held_out, key=_reward_of)),
    ]


def _reward_of(sample: dict[str, Any]) -> float:
    """An answer without a score comes first."""
    return -math.inf if sample["reward"] is None else sample["reward"]


def _merit(sample: dict[str, Any]) -> tuple[float, float]:
    return sample["reward"], sample["advantage"]


def _parts(text: str, given: list[list[int]]) -> Iterator[tuple[str, bool]]:
    """The beginning of a text, in parts: each with whether an environment wrote it ([first, end) in characters)."""
    shown = text[:_LONGEST_TEXT].rstrip()
    at = len(shown) - len(shown.lstrip())
    for first, end in given:
        yield shown[at:first], False
        yield shown[first:end], True
        at = end
    yield shown[at:] + (f" ... ({len(text):,} characters)" if len(text) > _LONGEST_TEXT else ""), False


def _server(name: str, metrics: dict[str, Points]) -> list[str]:
    """A row of the table of servers."""
    cells = [name]
    for _, metric, reduce, form in SERVER_COLUMNS:
        points = metrics.get(metric)
        cells.append(form.format(reduce(value for _, value in points)) if points else "-")
    return [*cells, str(max(points[-1][0] for points in metrics.values()))]
