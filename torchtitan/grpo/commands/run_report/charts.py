"""Line charts and stacked areas as SVG, without a library: a page of them stays small and sharp."""

import html
import json
import math
import statistics
from dataclasses import dataclass

from torchtitan.grpo.commands.run_report.run_folder import Points

COLOURS = ("#2563c9", "#e0762f", "#26936a", "#8b57c7", "#c73e58", "#0f93a8", "#b58a00", "#5d6673", "#c76fae")
HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 190, 46, 10, 8, 22
_DRAWN_POINTS = 400
_SMOOTHED_FROM = 80
"""A series of this many points is drawn faintly, with its moving mean over it."""


@dataclass(frozen=True)
class Series:
    label: str
    points: Points
    colour: str


@dataclass(frozen=True)
class _Scale:
    """Data -> pixels. `x` and `y` are (least, greatest)."""

    width: int
    x: tuple[float, float]
    y: tuple[float, float]

    def at(self, x: float, y: float) -> tuple[float, float]:
        across = (x - self.x[0]) / ((self.x[1] - self.x[0]) or 1)
        up = (y - self.y[0]) / ((self.y[1] - self.y[0]) or 1)
        return LEFT + across * (self.width - LEFT - RIGHT), HEIGHT - BOTTOM - up * (HEIGHT - TOP - BOTTOM)

    def path(self, points: Points) -> str:
        return "M" + "L".join(f"{x:.1f},{y:.1f}" for x, y in (self.at(*point) for point in points))


def line_chart(series: list[Series], width: int) -> str:
    """Lines over one pair of axes. Few points get marks."""
    values = [y for one in series for _, y in one.points]
    scale = _Scale(width, _extent([x for one in series for x, _ in one.points]), _y_range(values))
    shapes = []
    for one in series:
        points = thinned(one.points, _DRAWN_POINTS)
        if len(points) >= _SMOOTHED_FROM:
            shapes.append(f'<path d="{scale.path(points)}" stroke="{one.colour}" class="faint"/>')
            points = smoothed(points)
        shapes.append(f'<path d="{scale.path(points)}" stroke="{one.colour}"/>')
        if len(points) <= 25:
            at = (scale.at(*point) for point in points)
            shapes += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="2.6" fill="{one.colour}"/>' for x, y in at]
    return _svg(scale, shapes, series)


def stacked_chart(series: list[Series], width: int) -> str:
    """Areas on top of each other, the first one lowest. All series have the same steps.

    The slowest twentieth of the steps may go beyond the top: a first step that compiles would flatten all others.
    """
    thin = [Series(one.label, thinned(one.points, 120), one.colour) for one in series]
    sums = [0.0] * len(thin[0].points)
    layers = []
    for one in thin:
        lower, sums = sums, [low + y for low, (_, y) in zip(sums, one.points, strict=True)]
        layers.append((one, lower, sums))
    steps = [x for x, _ in thin[0].points]
    top = _nice_end(1.2 * sorted(sums)[round(0.95 * (len(sums) - 1))])
    scale = _Scale(width, _extent(steps), (0.0, top))
    shapes = []
    for one, lower, upper in layers:
        edges = [[(x, min(y, top)) for x, y in zip(steps, edge, strict=True)] for edge in (upper, lower)]
        outline = edges[0] + edges[1][::-1]
        shapes.append(f'<path d="{scale.path(outline)}Z" style="fill:{one.colour}" class="area"/>')
    return _svg(scale, shapes, series)


def thinned(points: Points, count: int) -> Points:
    """At most `count` points: means of neighbours."""
    size = math.ceil(len(points) / count)
    parts = (points[i : i + size] for i in range(0, len(points), size))
    return [(part[-1][0], statistics.fmean(y for _, y in part)) for part in parts] if size > 1 else points


def smoothed(points: Points) -> Points:
    """Each point's mean with its neighbours, a twentieth of the curve in all; fewer at the ends."""
    reach = max(1, len(points) // 40)
    result = []
    for i, (x, _) in enumerate(points):
        own = min(reach, i, len(points) - 1 - i)
        result.append((x, statistics.fmean(y for _, y in points[i - own : i + own + 1])))
    return result


def ticks(least: float, greatest: float) -> list[float]:
    """Round numbers within a range, 3 to 7."""
    step = _nice((greatest - least) / 6)
    first = math.ceil(least / step - 1e-9)
    return [float(f"{i * step:.12g}") for i in range(first, math.floor(greatest / step + 1e-9) + 1)]


def short(value: float) -> str:
    """A number in at most six characters or so: 12k, 0.25, 3e-06."""
    size = abs(value)
    if size >= 1e6:
        return f"{value / 1e6:.3g}M"
    if size >= 1e4:
        return f"{value / 1e3:.3g}k"
    return f"{value:.0f}" if size >= 100 else f"{value:.3g}"


def _nice(step: float) -> float:
    """The next of 1, 2, 2.5, 5 times a power of ten."""
    if step <= 0 or not math.isfinite(step):
        return 1.0
    power = 10.0 ** math.floor(math.log10(step))
    return next(m * power for m in (1, 2, 2.5, 5, 10) if m * power >= step * (1 - 1e-9))


def _nice_end(value: float) -> float:
    step = _nice((value or 1.0) / 4)
    return math.ceil(value / step - 1e-9) * step or 1.0


def _extent(values: list[float]) -> tuple[float, float]:
    return (min(values), max(values)) if values else (0.0, 1.0)


def _y_range(values: list[float]) -> tuple[float, float]:
    """A little more than the values take; from 0 if that wastes less than half."""
    least, greatest = _extent(values)
    if 0 <= least <= greatest / 2:
        return 0.0, (greatest * 1.06 if greatest else 1.0)
    margin = (greatest - least) * 0.08 or abs(greatest) * 0.1 or 1.0
    return least - margin, greatest + margin


def _svg(scale: _Scale, shapes: list[str], series: list[Series]) -> str:
    grid = []
    for value in ticks(*scale.y):
        _, y = scale.at(scale.x[0], value)
        grid.append(f'<path d="M{LEFT},{y:.1f}H{scale.width - RIGHT}" class="grid"/>')
        grid.append(f'<text x="{LEFT - 6}" y="{y + 3.5:.1f}" text-anchor="end">{short(value)}</text>')
    for value in ticks(*scale.x):
        x, _ = scale.at(value, scale.y[0])
        grid.append(f'<text x="{x:.1f}" y="{HEIGHT - 6}" text-anchor="middle">{short(value)}</text>')
    baseline = f'<path d="M{LEFT},{HEIGHT - BOTTOM}H{scale.width - RIGHT}" class="axis"/>'
    shown = {
        "box": [LEFT, scale.width - RIGHT, TOP, HEIGHT - BOTTOM],
        "x": scale.x,
        "series": [
            [one.label, one.colour, [[x, float(f"{y:.4g}")] for x, y in thinned(one.points, _DRAWN_POINTS)]]
            for one in series
        ],
    }
    data = html.escape(json.dumps(shown, separators=(",", ":")))
    return (
        f'<svg viewBox="0 0 {scale.width} {HEIGHT}" class="chart" data-chart="{data}">'
        f'{"".join(grid)}{baseline}{"".join(shapes)}<path class="cursor"/></svg>'
    )
