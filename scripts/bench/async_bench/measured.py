"""What a run's metrics.jsonl says about its speed, and how modes compare with each other and with the hardware."""

import statistics
from collections.abc import Iterable

from bench_common.output import Row

MODES = ("sync", "async", "in_flight", "in_flight_keep_kv")
MEASURED = """mode steps tokens_per_s tokens_per_s_gpu ratio of_bound step_s step_s_max rollout_s train_s sync_ms
    sync_ms_max busy age_mean age_max"""


def in_order(names: Iterable[str]) -> list[str]:
    """Names of runs, such as "in_flight_age4", in the order of the modes, then of the ages."""

    def place(name: str) -> tuple[int, int]:
        mode, _, age = name.partition("_age")
        return MODES.index(mode), int(age or 0)

    return sorted(names, key=place)


def summarise(lines: list[Row], measured: range, devices: int) -> Row | None:
    """One mode's row from its metrics.jsonl, over the steps `measured`; None if it has none of them.

    tokens/s is all answer tokens of these steps over all their wall clock, whatever happened in it.
    """
    steps = [line for line in lines if line.get("step", 0) in measured and "time/step_s" in line]
    if not steps:
        return None
    tokens = sum(line["rollout/answer_tokens"] for line in steps)
    seconds = sum(line["time/step_s"] for line in steps)

    def each(name: str, scale: float = 1.0) -> list[float]:
        return [scale * line[name] for line in steps if name in line]

    def median(name: str, scale: float = 1.0) -> float | None:
        return statistics.median(each(name, scale)) if each(name) else None

    def mean(name: str) -> float | None:
        return statistics.fmean(each(name)) if each(name) else None

    return {
        "steps": len(steps),
        "tokens": tokens,
        "seconds": seconds,
        "tokens_per_s": tokens / seconds,
        "tokens_per_s_gpu": tokens / seconds / devices,
        "train_tokens_per_s": tokens / sum(each("time/train_s")),
        "step_s": median("time/step_s"),
        "step_s_max": max(each("time/step_s")),
        "rollout_s": median("time/rollout_s"),
        "train_s": median("time/train_s"),
        "sync_ms": median("time/sync_s", 1e3),
        "sync_ms_max": max(each("time/sync_s", 1e3), default=0.0),
        "busy": mean("server/busy_share"),
        "age_mean": mean("rollout/age_mean"),
        "age_max": max(each("rollout/age_max"), default=None),
    }


def compare(rows: list[Row], bounds: list[Row]) -> list[str]:
    """Fill in each row's ratio to sync and its share of the bound; returns the bound as a sentence.

    The bound of any overlap is the slower of generation alone, at its best measured concurrency, and training alone, in
    the mode with most trained tokens a second. Without overlap it is their harmonic sum.
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
    in_turn = 1 / (1 / generation + 1 / training)
    return [
        f"Generation alone {generation:,.0f}, training alone {training:,.0f} answer tokens/s. Perfect overlap gives "
        f"{bound:,.0f}, {bound / in_turn:.2f} times the {in_turn:,.0f} of taking turns."
    ]
