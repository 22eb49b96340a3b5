"""The tables of the runs in a folder."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path

from async_bench.measured import MODES
from bench_common.output import Output, Row
from learning_bench.reached import best, curve, summarise, thresholds_of
from learning_bench.runs import RUN_FILE, complete

from torchtitan.grpo.errors import UserError
from torchtitan.grpo.reporting.step_lines import read_lines

COLUMNS = """contender lr seeds steps seconds start final final_std seconds_to_1 seconds_to_2 seconds_to_3
    tokens_to_1 tokens_to_2 tokens_to_3 answers_to_1 answers_to_2 answers_to_3 reached_3
    tokens_per_s peak_gib pause_ms"""
Seeds = list[list[Row]]
"""Lines of metrics.jsonl of each seed."""


def report(folder: Path, thresholds: Sequence[float] | None, out: Output) -> None:
    """Print every contender at its best learning rate, then all of them.

    Raises:
        UserError: No run is complete, or there is no sync run and no thresholds are given.
    """
    found: dict[str, dict[float, Seeds]] = defaultdict(lambda: defaultdict(list))
    answers: dict[str, int] = {}
    for path in sorted(folder.glob(f"*/{RUN_FILE}")):
        run = complete(path.parent)
        if run is not None:
            found[run["contender"]][run["lr"]].append(read_lines(path.parent / "metrics.jsonl"))
            answers[run["contender"]] = run["answers"]
    if not found:
        raise UserError(f"{folder} holds no complete run: the logs beside the runs' folders say why")
    thresholds = thresholds or _default_thresholds(found)
    every = {
        name: [
            {"contender": name, "lr": lr} | summarise(seeds, thresholds, answers[name])
            for lr, seeds in sorted(rates.items())
        ]
        for name, rates in sorted(found.items(), key=lambda item: place(item[0]))
    }
    chosen = {name: best(rows) for name, rows in every.items()}
    said = ", ".join(f"{number}: {threshold:.3f}" for number, threshold in enumerate(thresholds, start=1))
    out.table(f"Each at its best learning rate. Rewards to reach: {said}", COLUMNS, list(chosen.values()))
    out.table("Every learning rate", COLUMNS, [row for rows in every.values() for row in rows])


def place(name: str) -> tuple[int, int, str]:
    """Sort key: the order of the modes, then the ages, then the others by name."""
    mode, _, age = name.partition("_age")
    return (MODES.index(mode), int(age or 0), "") if mode in MODES else (len(MODES), 0, name)


def _default_thresholds(found: Mapping[str, Mapping[float, Seeds]]) -> list[float]:
    """Shares of what the best learning rate of sync gains."""
    if "sync" not in found:
        raise UserError("no run of sync is complete, and the default thresholds are shares of its gain: --thresholds")
    curves = [[curve(lines) for lines in seeds] for seeds in found["sync"].values()]
    thresholds = max((thresholds_of(seeds) for seeds in curves), key=lambda thresholds: thresholds[-1])
    if not thresholds[0] < thresholds[-1]:
        raise UserError(
            "sync has gained nothing, so there are no thresholds: train for more steps, or set --thresholds"
        )
    return thresholds
