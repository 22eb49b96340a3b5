"""One HTML file of a run, which needs no network."""

import html
import math
import re
import statistics
from collections.abc import Iterable
from datetime import datetime
from pathlib import Path
from typing import Any

from torchtitan.grpo.commands.run_report.charts import COLOURS, Series, line_chart, short, stacked_chart
from torchtitan.grpo.commands.run_report.findings import Bound, Finding, bound, findings
from torchtitan.grpo.commands.run_report.run_folder import Points, Run

LINE_CHARTS: tuple[tuple[str, dict[str, str | None]], ...] = (
    ("Held-out reward", {"validation/.*greedy_reward": "greedy", "validation/.*sampled_reward": "sampled"}),
    ("Held-out pass@k", {"validation/.*(pass_at|majority_at).*": ""}),
    ("Rewards by function", {"reward/(?!mean$|std$|failures$|.*fraction$).+": ""}),
    ("Groups without a signal", {"reward/zero_variance_fraction": "share of groups"}),
    ("Loss", {"train/loss": "loss"}),
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


def page(run: Run) -> str:
    """The whole file."""
    title = run.folder.resolve().name
    body = "\n".join(
        [
            _header(run, title),
            _tiles(run),
            '<div class="columns">',
            f"<div>{_reward(run)}{_time(run)}</div>",
            f"<div>{_verdict(bound(run), findings(run))}</div>",
            "</div>",
            _section("Curves", f'<div class="grid">{"".join(_cards(run))}</div>'),
            _section("Answers", _answers(run)),
            _section("Servers", _servers(run)),
            _section("Configuration", _configuration(run)),
        ]
    )
    style, script = (Path(__file__).with_name(name).read_text(encoding="utf-8") for name in ("page.css", "page.js"))
    head = f'<meta charset="utf-8"><title>{_text(title)}</title><style>{style}</style>'
    body = f"<body><main>{body}</main><script>{script}</script></body>"
    return f'<!doctype html>\n<html lang="en"><head>{head}</head>\n{body}</html>\n'


# ---------------------------------------------------------------------------------------------------- the top


def _header(run: Run, title: str) -> str:
    values = run.values
    facts = [
        Path(re.sub("@[0-9a-f]{40}$", "", values.get("model.hf_assets_path", ""))).name,
        values.get("rollout.engine"),
        f"{values['grpo.prompts_per_step']} x {values['grpo.group_size']} answers a step" if values else None,
        "async" if values.get("async_grpo.enabled") else "sync" if values else None,
    ]
    written = datetime.fromtimestamp((run.folder / "metrics.jsonl").stat().st_mtime).strftime("%Y-%m-%d %H:%M")
    chips = "".join(f"<span>{_text(fact)}</span>" for fact in facts if fact)
    description = _text(values.get("job.description", ""))
    return (
        f'<header><div><h1>{_text(title)}</h1><p>{description}</p></div><div class="chips">{chips}'
        f"<span>last step at {written}</span></div></header>"
    )


def _tiles(run: Run) -> str:
    steps = run.lines[-1]["step"] if run.lines else 0
    wanted = run.values.get("training.steps")
    seconds = sum(line.get("time/step_s", 0.0) for line in run.lines)
    tiles = [("steps", f"{steps:,}", f"of {wanted:,}" if wanted else ""), ("wall clock", _duration(seconds), "")]
    rewards = [value for _, value in run.points("reward/mean")]
    if rewards:
        tiles.append(("reward, last 10 steps", f"{statistics.fmean(rewards[-10:]):.3f}", f"first {rewards[0]:.3f}"))
    held_out = [value for _, value in run.points("validation/greedy_reward")]
    if held_out:
        tiles.append(("held-out, greedy", f"{held_out[-1]:.3f}", f"first {held_out[0]:.3f}"))
    speeds = [value for _, value in run.points("throughput/answer_tokens_per_s")]
    if speeds:
        tiles.append(("answer tokens/s", short(statistics.median(speeds)), "median"))
    for name, label, form in (
        ("throughput/mfu", "MFU of the updates", "{:.1%}"),
        ("cost/gpu_hours", "GPU hours", "{:.2f}"),
        ("data/epoch", "data epochs", "{:.2f}"),
    ):
        if points := run.points(name):
            tiles.append((label, form.format(points[-1][1]), ""))
    cells = (f"<div><b>{value}</b> <small>{note}</small><span>{label}</span></div>" for label, value, note in tiles)
    return f'<section class="tiles">{"".join(cells)}</section>'


def _reward(run: Run) -> str:
    series = _series(run, {"reward/mean": "training", "validation/.*greedy_reward": "held-out, greedy"})
    return _card("Reward", line_chart(series, _WIDE), _legend(series), "wide") if series else ""


def _time(run: Run) -> str:
    """Seconds of each step by stage, stacked."""
    lines = run.steps
    series = []
    for stage, colour in STAGES.items():
        points: Points = [(line["step"], line.get(f"time/{stage}_s", 0.0)) for line in lines]
        if any(seconds > 0.001 for _, seconds in points):
            series.append(Series(stage, points, colour))
    if not series:
        return ""
    means = [(one, statistics.fmean(y for _, y in one.points)) for one in series]
    legend = "".join(_key(one, f"{seconds:.2g} s") for one, seconds in means)
    return _card("Seconds of a step, by stage", stacked_chart(series, _WIDE), legend, "wide")


def _verdict(bounded: Bound | None, found: list[Finding]) -> str:
    bars = ""
    if bounded:
        kinds = sorted(bounded.shares.items(), key=lambda item: -item[1])
        parts = "".join(f'<i class="{kind}" style="width:{share:.2%}"></i>' for kind, share in kinds)
        labels = "".join(
            f'<span><i class="{kind}"></i>{kind} {share:.0%}</span>' for kind, share in kinds if share >= 0.005
        )
        name = bounded.sentence.partition(" (")[0]
        bars = (
            f'<h2>What bounds a step</h2><p class="bound">{name}</p><div class="bar">{parts}</div>'
            f'<p class="keys">{labels}</p><p>{_text(bounded.help)}</p>'
            "<p><small>More: docs/by_symptom.md#steps-are-slow-or-get-slower</small></p>"
        )
    items = ""
    for one in found:
        see = f"<p><small>What to do: docs/by_symptom.md#{one.symptom}</small></p>" if one.symptom else ""
        text = f"<p>{_text(one.text)}</p>" if one.text else ""
        items += f'<li class="{one.level}"><b>{_text(one.title)}</b>{text}{see}</li>'
    return f'<div class="card verdict">{bars}<h2>Findings</h2><ul>{items}</ul></div>'


# ------------------------------------------------------------------------------------------------- the curves


def _cards(run: Run) -> Iterable[str]:
    for title, labels in LINE_CHARTS:
        series = _series(run, labels)
        if series and series[0].points != run.points("reward/mean"):  # as those of a single function are
            yield _card(title, line_chart(series, _NARROW), _legend(series))


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


def _legend(series: list[Series]) -> str:
    return "".join(_key(one, short(one.points[-1][1])) for one in series)


def _key(series: Series, number: str) -> str:
    return f'<span><i style="background:{series.colour}"></i>{_text(series.label)} <b>{number}</b></span>'


def _card(title: str, chart: str, legend: str, kind: str = "") -> str:
    return f'<div class="card {kind}"><h3>{_text(title)}</h3><p class="keys">{legend}</p>{chart}</div>'


# ------------------------------------------------------------------------------------------------- the answers


def _answers(run: Run) -> str:
    samples = run.samples
    if not samples and not run.held_out:
        return "<p>None were written ([metrics] samples_per_step).</p>"
    newest_first = samples[::-1]
    scored = [sample for sample in newest_first if sample["reward"] is not None]
    failed = [sample for sample in newest_first if sample["reward_failures"]]
    last = run.held_out[-1]["step"] if run.held_out else None
    held_out = [sample for sample in run.held_out if sample["step"] == last and sample["kind"] == "greedy"]
    parts = (
        ("Newest", newest_first),
        ("Best: highest reward, then advantage", sorted(scored, key=_merit, reverse=True)),
        ("Worst: lowest reward, then advantage", sorted(scored, key=_merit)),
        ("A reward function failed", failed),
        (f"Held-out at step {last}, greedy: lowest reward first", sorted(held_out, key=_reward_of)),
    )
    folds: list[str] = []
    for title, chosen in parts:
        if chosen:
            cards = "".join(map(_answer, chosen[:_SAMPLES]))
            opened = " open" if not folds else ""
            folds.append(
                f'<details{opened}><summary>{_text(title)}</summary><div class="answers">{cards}</div></details>'
            )
    return "".join(folds)


def _reward_of(sample: dict[str, Any]) -> float:
    """An answer without a score comes first."""
    return -math.inf if sample["reward"] is None else sample["reward"]


def _merit(sample: dict[str, Any]) -> tuple[float, float]:
    return sample["reward"], sample["advantage"]


def _answer(sample: dict[str, Any]) -> str:
    by_function = ", ".join(f"{name} {value:g}" for name, value in sample["rewards"].items())
    facts = [f"step {sample['step']}", f"prompt {sample['prompt_index']}"]
    facts += [f"{sample['answer_tokens']} tokens", f"ended by {sample['finish_reason']}", by_function]
    advantage = sample.get("advantage")
    reward = "no reward" if sample["reward"] is None else f"reward {sample['reward']:.3g}"
    marks = f'<b class="reward">{reward}</b>'
    if advantage is not None:
        kind = "up" if advantage > 0 else "down" if advantage < 0 else "flat"
        marks += f'<b class="{kind}">advantage {advantage:+.3f}</b>'
    marks += "".join(f'<b class="down">{_text(f"{name} {why}")}</b>' for name, why in sample["reward_failures"].items())
    given = {"answer": sample.get("given", [])}
    texts = "".join(
        f"<dt>{label}</dt><dd><pre>{_marked(sample[label], given.get(label, []))}</pre></dd>"
        for label in ("prompt", "answer", "reference")
        if sample[label].strip()
    )
    return f"<article><p>{marks}<small>{_text(' · '.join(facts))}</small></p><dl>{texts}</dl></article>"


def _marked(text: str, given: list[list[int]]) -> str:
    """The beginning of a text, with what an environment wrote ([first, end) in characters) marked."""
    shown, parts, at = text[:_LONGEST_TEXT], [], 0
    for first, end in given:
        parts += [_text(shown[at:first]), f'<mark title="from the environment">{_text(shown[first:end])}</mark>']
        at = end
    rest = f" ... ({len(text):,} characters)" if len(text) > len(shown) else ""
    return "".join([*parts, _text(shown[at:])]).strip() + rest


# ----------------------------------------------------------------------------------------------- the rest


def _servers(run: Run) -> str:
    columns = (
        ("busy", "busy_share", statistics.fmean, "{:.0%}"),
        ("mismatch, mean", "mismatch", statistics.fmean, "{:.1e}"),
        ("mismatch, largest", "mismatch", max, "{:.1e}"),
        ("push, median", "total_s", statistics.median, "{:.3g} s"),
        ("stopped for it, median", "stopped_s", statistics.median, "{:.3g} s"),
    )
    rows = []
    for server, metrics in run.servers().items():
        cells = [f"<td>{_text(server)}</td>"]
        for _, name, reduce, form in columns:
            points = metrics.get(name)
            cells.append(f"<td>{form.format(reduce(value for _, value in points)) if points else '-'}</td>")
        last = max(points[-1][0] for points in metrics.values())
        rows.append(f"<tr>{''.join(cells)}<td>{last}</td></tr>")
    if not rows:
        return "<p>No step has numbers of a server.</p>"
    heads = ["server", *(head for head, *_ in columns), "last step with numbers"]
    head = "".join(f"<th>{text}</th>" for text in heads)
    counts = ", ".join(
        f"{name.partition('/')[2].replace('_', ' ')} {run.last(name):,.0f}"
        for name in ("sync/servers_in_traffic", "sync/servers_lost", "sync/version", "rollout/retried")
        if run.points(name)
    )
    return f'<table class="numbers"><tr>{head}</tr>{"".join(rows)}</table><p>At the last step: {counts}.</p>'


def _configuration(run: Run) -> str:
    if not run.settings:
        return "<p>The folder has no config.toml.</p>"
    changed = [one for one in run.settings if one.default is not None]
    rows = "".join(
        f"<tr><td>{_text(one.key)}</td><td>{_text(one.value)}</td><td>{_text(one.default or '')}</td></tr>"
        for one in changed
    )
    others = "".join(
        f"<tr><td>{_text(one.key)}</td><td>{_text(one.value)}</td></tr>" for one in run.settings if one.default is None
    )
    return (
        f"<table><tr><th>differs from its default</th><th>value</th><th>default</th></tr>{rows}</table>"
        f"<details><summary>{len(run.settings) - len(changed)} keys at their defaults</summary>"
        f'<table class="two">{others}</table></details>'
    )


def _section(title: str, content: str) -> str:
    return f"<section><h2>{title}</h2>{content}</section>"


def _text(value: Any) -> str:
    return html.escape(str(value))


def _duration(seconds: float) -> str:
    hours, rest = divmod(round(seconds), 3600)
    return f"{hours} h {rest // 60:02} min" if hours else f"{rest // 60} min {rest % 60:02} s"
