"""What a run's metrics.jsonl says of its speed, and how modes compare with each other and with the hardware."""

import statistics
from collections.abc import Iterable

from bench_common.output import Row

MODES = ("sync", "async", "in_flight", "in_flight_keep_kv")
MEASURED = {
    "mode": "mode",
    "steps": "steps",
    "tokens_per_s": "tokens/s",
    "tokens_per_s_gpu": "a GPU",
    "tokens_per_s_median": "median",
    "generated_per_s": "generated",
    "ratio": "to sync",
    "of_bound": "of the bound",
    "step_s": "step, s",
    "rollout_s": "rollout, s",
    "train_s": "train, s",
    "sync_ms": "sync, ms",
    "sync_ms_max": "most, ms",
    "busy": "servers busy",
    "age_mean": "age",
    "age_max": "oldest",
    "answer_mean": "answer",
    "answer_max": "longest",
}
BOUND = {"sequences": "sequences a server", "seeded": "seeds", "tokens_per_s": "tokens/s"}


def in_order(names: Iterable[str]) -> list[str]:
    """Names of runs, "in_flight_age4:label", in the order of the modes, then of the ages, then of the labels."""

    def place(name: str) -> tuple[int, int, str]:
        mode, age = mode_and_age(name)
        return MODES.index(mode), age, name

    return sorted(names, key=place)


def mode_and_age(name: str) -> tuple[str, int]:
    """Of a run's name; the age of modes that have one of their own is 0."""
    mode, _, age = name.partition(":")[0].partition("_age")
    return mode, int(age or 0)


def summarise(lines: list[Row], measured: range, devices: int) -> Row | None:
    """One mode's row from its metrics.jsonl, the steps `measured`; None if there are none.

    tokens/s is all answer tokens of these steps over all their wall clock, from the log of the step before the first to
    that of the last, with whatever happened between.
    """
    steps = [line for line in lines if line.get("step", 0) in measured and "time/step_s" in line]
    if not steps:
        return None
    tokens = sum(line["rollout/answer_tokens"] for line in steps)
    seconds = sum(line["time/step_s"] for line in steps)

    def each(name: str) -> list[float]:
        return [line[name] for line in steps if name in line]

    def median(name: str, scale: float = 1.0) -> float | None:
        return scale * statistics.median(each(name)) if each(name) else None

    return {
        "steps": len(steps),
        "tokens": tokens,
        "seconds": seconds,
        "tokens_per_s": tokens / seconds,
        "tokens_per_s_gpu": tokens / seconds / devices,
        "tokens_per_s_median": statistics.median(s["rollout/answer_tokens"] / s["time/step_s"] for s in steps),
        "train_tokens_per_s": tokens / sum(each("time/train_s")),
        "step_s": median("time/step_s"),
        "rollout_s": median("time/rollout_s"),
        "train_s": median("time/train_s"),
        "sync_ms": median("time/sync_s", 1e3),
        "sync_ms_max": 1e3 * max(each("time/sync_s"), default=0.0),
        "busy": statistics.fmean(each("server/busy_share")) if each("server/busy_share") else None,
        "age_mean": statistics.fmean(each("rollout/age_mean")) if each("rollout/age_mean") else None,
        "age_max": max(each("rollout/age_max"), default=None),
        "answer_mean": tokens / sum(s["rollout/answer_tokens"] / s["rollout/answer_tokens_mean"] for s in steps),
        "answer_max": max(each("rollout/answer_tokens_max")),
    }


def compare(rows: list[Row], bounds: list[Row]) -> list[str]:
    """Fill in each row's ratio to sync and its share of the bound; returns what else there is to say.

    The bound of any overlap is the slower of the two alone: generation at its best measured concurrency, and training
    in the mode in which its seconds were fewest a token. Without overlap it is their harmonic sum.
    """
    sync = next((row for row in rows if row["mode"] == "sync"), None)
    for row in rows:
        row["ratio"] = row["tokens_per_s"] / sync["tokens_per_s"] if sync else None
    if not (rows and bounds):
        return []
    generation = max(row["tokens_per_s"] for row in bounds)
    training = max(row["train_tokens_per_s"] for row in rows)
    bound = min(generation, training)
    for row in rows:
        row["of_bound"] = row["tokens_per_s"] / bound
    one_after_the_other = 1 / (1 / generation + 1 / training)
    return [
        f"Generation alone {generation:,.0f}, training alone {training:,.0f} answer tokens/s: the best overlap gives "
        f"{bound:,.0f}; one after the other, without a tail or a sync, {one_after_the_other:,.0f}, "
        f"{bound / one_after_the_other:.2f} times less."
    ]
