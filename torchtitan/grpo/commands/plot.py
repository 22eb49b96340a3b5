"""Draw metrics of runs from their metrics.jsonl to a PNG, and print their last values."""

import glob
import statistics
from argparse import Namespace
from pathlib import Path

from torchtitan.grpo.errors import UserError, did_you_mean
from torchtitan.grpo.reporting.step_lines import WARM_START, read_lines

try:
    import matplotlib
except ModuleNotFoundError as missing:
    raise UserError("torchtitan-grpo plot draws with matplotlib: pip install matplotlib") from missing
matplotlib.use("Agg")
import matplotlib.pyplot as plt

Curve = dict[int, float]
"""Value by step."""


def find_runs(arguments: list[str]) -> dict[str, list[Path]]:
    """Label -> metrics.jsonl files. Folders with the same label are one experiment."""
    runs: dict[str, list[Path]] = {}
    for label, files in map(_found, arguments):
        runs.setdefault(label, []).extend(files)
    return runs


def _found(argument: str) -> tuple[str, list[Path]]:
    """The label and files of one argument. A folder may have `=` in its name: the longest name that is there counts."""
    words = argument.split("=")
    for first in range(len(words)):
        pattern = "=".join(words[first:])
        folders = map(Path, sorted(glob.glob(pattern)) or [pattern])
        files = [folder / "metrics.jsonl" if folder.is_dir() else folder for folder in folders]
        if files := [file for file in files if file.exists()]:
            return "=".join(words[:first]) or Path(pattern).name, files
    raise UserError(f"no metrics.jsonl under {pattern}")


def read_curves(file: Path) -> dict[str, Curve]:
    """Every metric of one run by its own steps."""
    curves: dict[str, Curve] = {}
    for record in read_lines(file):
        step = record.get("step", record.get(WARM_START))
        if step is None:
            raise UserError(f"{file} holds no metrics of a run: name its folder, or a metrics.jsonl in it")
        for name, value in record.items():
            curves.setdefault(name, {})[step] = value
    return curves


def smoothed(curve: Curve, points: int) -> Curve:
    """Each step's mean over `points` past points. A curve with values at fewer than half of its steps stays as it is.

    Validations are far apart: their mean would show results of long ago.
    """
    steps = sorted(curve)
    if 2 * len(steps) <= steps[-1] - steps[0]:
        return curve
    return {
        step: statistics.fmean(curve[s] for s in steps[max(0, i + 1 - points) : i + 1]) for i, step in enumerate(steps)
    }


def mean_and_range(curves: list[Curve]) -> tuple[list[int], list[float], list[float], list[float]]:
    """Steps of any curve, with the mean, least and greatest value of the curves that have the step."""
    steps = sorted(set().union(*curves))
    values = [[curve[step] for curve in curves if step in curve] for step in steps]
    return steps, [statistics.fmean(v) for v in values], [min(v) for v in values], [max(v) for v in values]


def in_words(curves: list[Curve]) -> str:
    """Mean over the seeds of the last value, with its standard deviation, and of the mean over steps."""
    last = [curve[max(curve)] for curve in curves]
    spread = f" +- {statistics.stdev(last):.3g} over {len(last)} seeds" if len(last) > 1 else ""
    mean = statistics.fmean(statistics.fmean(curve.values()) for curve in curves)
    return f"last {statistics.fmean(last):.4g}{spread}, mean over steps {mean:.4g}"


def main(arguments: Namespace) -> int:
    if arguments.smooth < 1:
        raise UserError(f"--smooth {arguments.smooth}: 1 leaves the points as they are, more are averaged")
    runs = {label: [read_curves(file) for file in files] for label, files in find_runs(arguments.runs).items()}
    known = sorted({name for seeds in runs.values() for curves in seeds for name in curves} - {"step", WARM_START})
    missing = [name for name in arguments.metrics if name not in known]
    if missing:
        said = ", ".join(f"{name}{did_you_mean(name, known)}" for name in missing)
        raise UserError(f"no run has {said}; metrics.jsonl and docs/metrics.md have all names")

    figure, rows = plt.subplots(
        len(arguments.metrics), 1, figsize=(8, 3.2 * len(arguments.metrics)), squeeze=False, layout="constrained"
    )
    for axes, metric in zip(rows[:, 0], arguments.metrics, strict=True):
        for label, seeds in runs.items():
            measured = [curves[metric] for curves in seeds if metric in curves]
            if not measured:
                continue
            print(f"{metric}  {label}: {in_words(measured)}")
            curves = [smoothed(curve, arguments.smooth) for curve in measured]
            steps, mean, low, high = mean_and_range(curves)
            legend = label if len(curves) == 1 else f"{label} ({len(curves)} seeds: mean, range)"
            # Points show that a metric is logged only at some steps, as validation is.
            (line,) = axes.plot(steps, mean, label=legend, marker="o" if len(steps) <= 20 else None, markersize=3)
            if len(curves) > 1:
                axes.fill_between(steps, low, high, color=line.get_color(), alpha=0.2, linewidth=0)
        axes.set_ylabel(metric)
        axes.grid(alpha=0.3)
        axes.legend()
    axes.set_xlabel("step")
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    kind, kinds = arguments.out.suffix[1:], figure.canvas.get_supported_filetypes()
    figure.savefig(arguments.out, dpi=120, format=kind if kind in kinds else "png")
    print(f"wrote {arguments.out}")
    return 0
