"""What metrics.jsonl of runs says about learning: when a reward was reached, and with how many tokens."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from bench_common.output import Row

REWARD = "validation/greedy_reward"
SHARES = (0.5, 0.75, 0.9)
"""Of what sync gains: the default thresholds."""


@dataclass(frozen=True)
class Point:
    """A validation. `seconds` are those of the steps before it, without validations; `tokens` the answers' in them."""

    step: float
    seconds: float
    tokens: float
    reward: float


def curve(lines: Sequence[Row]) -> list[Point]:
    """The validations of a run, from step 0 on."""
    seconds = tokens = 0.0
    points = []
    for line in lines:
        if line.get("step", 0) > 0 and "time/step_s" in line:
            seconds += line["time/step_s"] - line.get("time/validate_s", 0.0)
            tokens += line.get("rollout/answer_tokens", 0)
        if REWARD in line:
            points.append(Point(line["step"], seconds, tokens, line[REWARD]))
    return points


def reach(points: Sequence[Point], threshold: float) -> Point | None:
    """Where a curve first reaches a reward, between two validations by a straight line; None if it does not."""
    for before, after in zip([None, *points[:-1]], points, strict=True):
        if after.reward < threshold:
            continue
        if before is None:
            return after
        share = (threshold - before.reward) / (after.reward - before.reward)
        between = [a + share * (b - a) for a, b in zip(_numbers(before), _numbers(after), strict=True)]
        return Point(*between, threshold)
    return None


def _numbers(point: Point) -> tuple[float, float, float]:
    return point.step, point.seconds, point.tokens


def thresholds_of(curves: Sequence[Sequence[Point]]) -> list[float]:
    """`SHARES` of the way from the mean first to the mean last reward of these runs."""
    start = statistics.fmean(points[0].reward for points in curves)
    end = statistics.fmean(points[-1].reward for points in curves)
    return [start + share * (end - start) for share in SHARES]


def summarise(seeds: Sequence[Sequence[Row]], thresholds: Sequence[float], answers: int = 0) -> Row:
    """The row of one contender at one learning rate, from the metrics of its seeds.

    Seconds, tokens and answers to a threshold are means over the seeds, and missing unless every seed reached it.

    Args:
        answers: Of a step.
    """
    curves = [curve(lines) for lines in seeds]
    last = [points[-1].reward for points in curves]
    row: Row = {"seeds": len(seeds), "steps": max(points[-1].step for points in curves)}
    row |= {"start": statistics.fmean(points[0].reward for points in curves), "final": statistics.fmean(last)}
    row["final_std"] = statistics.stdev(last) if len(last) > 1 else None
    row["seconds"] = statistics.fmean(points[-1].seconds for points in curves)
    tokens, seconds = (sum(getattr(points[-1], name) for points in curves) for name in ("tokens", "seconds"))
    row["tokens_per_s"] = tokens / seconds if tokens else None  # TRL's asynchronous trainer does not tell them
    row["peak_gib"] = max(_each(seeds, "memory/allocated_peak_gib"), default=None)
    pauses = _each(seeds, "time/sync_s")
    row["pause_ms"] = 1e3 * statistics.median(pauses) if pauses else None
    for number, threshold in enumerate(thresholds, start=1):
        reached = [point for points in curves if (point := reach(points, threshold)) is not None]
        row[f"reached_{number}"] = f"{len(reached)}/{len(curves)}"
        everyone = len(reached) == len(curves)
        row[f"seconds_to_{number}"] = statistics.fmean(point.seconds for point in reached) if everyone else None
        row[f"tokens_to_{number}"] = statistics.fmean(point.tokens for point in reached) if everyone else None
        row[f"answers_to_{number}"] = answers * statistics.fmean(p.step for p in reached) if everyone else None
    return row


def _each(seeds: Sequence[Sequence[Row]], name: str) -> list[float]:
    return [line[name] for lines in seeds for line in lines if name in line]


def best(rows: Sequence[Row]) -> Row:
    """The learning rate that is best: fastest to the highest threshold that any reached, else with the highest end."""
    for number in (3, 2, 1):
        reached = [row for row in rows if row[f"seconds_to_{number}"] is not None]
        if reached:
            return min(reached, key=lambda row: row[f"seconds_to_{number}"])
    return max(rows, key=lambda row: row["final"])
