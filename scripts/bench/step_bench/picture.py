"""A picture of where a step's device time goes, from what `--profile` and `--json` have recorded."""

import json
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

HEIGHT_INCHES = 0.7
"""Of one step."""


def draw_shares(records: Path, picture: Path) -> int:
    """A bar for each profiled step of a JSON Lines file, cut by class of kernel. Returns how many there are."""
    steps: dict[str, dict[str, float]] = {}
    for line in records.read_text().splitlines():
        row = json.loads(line)
        if row.get("table") == "shares":
            steps.setdefault(row["label"], {})[row["name"]] = row["ms"]
    if not steps:
        return 0
    figure, axes = plt.subplots(figsize=(9, 1.6 + HEIGHT_INCHES * len(steps)), layout="constrained")
    classes = sorted({name for shares in steps.values() for name in shares}, key=lambda name: -_most(steps, name))
    left = dict.fromkeys(steps, 0.0)
    for name in classes:
        values = [shares.get(name, 0.0) for shares in steps.values()]
        bars = axes.barh(list(steps), values, left=list(left.values()), label=name)
        axes.bar_label(bars, [f"{value:.0f}" if value > 8 else "" for value in values], label_type="center")
        left = {label: start + value for (label, start), value in zip(left.items(), values, strict=True)}
    axes.invert_yaxis()
    axes.set_xlabel("milliseconds of the device in one step")
    figure.legend(loc="outside upper center", ncols=len(classes), frameon=False)
    figure.savefig(picture, dpi=110)
    plt.close(figure)
    return len(steps)


def _most(steps: dict[str, dict[str, float]], name: str) -> float:
    return max(shares.get(name, 0.0) for shares in steps.values())
