"""Waits against load as an SVG: a column for each kind of arrivals, time to first token above the gaps of streams."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence

from simulation.figures import Figures
from simulation.variants import Row

WIDTH, HEIGHT = 380, 200
LEFT, TOP, GAP = 64, 52, 48
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000", "#999999")
#: Title and value of each row of panels.
PANELS: tuple[tuple[str, Callable[[Figures], float | None]], ...] = (
    ("p99 time to first token, ms", lambda figures: figures.ttft_ms.p99),
    ("p99 between two tokens of a stream, ms", lambda figures: figures.gap_ms.p99),
)
Point = tuple[float, float]


def svg(rows: Sequence[Row]) -> str:
    """The figure, self-contained. Each line is a variant; times have logarithmic axes. ValueError without a point."""
    columns = list(dict.fromkeys(row.arrivals for row in rows))
    names = list(dict.fromkeys(_name(row, rows) for row in rows))
    width = LEFT + len(columns) * (WIDTH + GAP)
    height = TOP + len(PANELS) * (HEIGHT + GAP)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif" '
        'font-size="12">',
        f'<rect width="{width}" height="{height}" fill="#fff"/>',
    ]
    for i, name in enumerate(names):
        x = LEFT + 130 * i
        parts.append(f'<path d="M{x} 14h24" stroke="{_colour(i)}" stroke-width="2"/>')
        parts.append(f'<text x="{x + 30}" y="18">{name}</text>')
    for line, (title, value) in enumerate(PANELS):
        points = [(row, found) for row in rows if (found := value(row.figures)) is not None and found > 0]
        if not points:
            raise ValueError(f"no run has a {title}")
        axes = _Axes([row.load for row, _ in points], [found for _, found in points])
        for column, kind in enumerate(columns):
            lines = [
                [(row.load, found) for row, found in points if row.arrivals == kind and _name(row, rows) == name]
                for name in names
            ]
            x, y = LEFT + column * (WIDTH + GAP), TOP + line * (HEIGHT + GAP)
            parts += [f'<g transform="translate({x} {y})">', f'<text y="-8">{kind}: {title}</text>']
            parts += [*axes.grid(), *_curves(axes, lines), "</g>"]
    return "\n".join([*parts, "</svg>", ""])


def _name(row: Row, rows: Sequence[Row]) -> str:
    """With the watermark, where one policy has several."""
    same = {other.variant.watermark for other in rows if other.variant.policy == row.variant.policy}
    return row.variant.policy if len(same) == 1 else f"{row.variant.policy} {100 * row.variant.watermark:g} %"


def _colour(i: int) -> str:
    return COLOURS[i % len(COLOURS)]


def _curves(axes: _Axes, lines: Sequence[Sequence[Point]]) -> Iterator[str]:
    for i, points in enumerate(lines):
        at = [axes.at(*point) for point in sorted(points)]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in at)
        yield f'<polyline points="{path}" fill="none" stroke="{_colour(i)}" stroke-width="2"/>'
        for x, y in at:
            yield f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{_colour(i)}"/>'


class _Axes:
    """Loads to the right, from 0; times up, by their logarithm, over whole decades."""

    def __init__(self, loads: Sequence[float], times: Sequence[float]) -> None:
        self._loads = sorted(set(loads))
        self._most = 1.05 * max(loads)
        self._low = math.floor(math.log10(min(times)))
        self._high = max(self._low + 1, math.ceil(math.log10(max(times))))

    def at(self, load: float, time: float) -> Point:
        up = (math.log10(time) - self._low) / (self._high - self._low)
        return WIDTH * load / self._most, HEIGHT * (1 - up)

    def grid(self) -> Iterator[str]:
        for decade in range(self._low, self._high + 1):
            y = self.at(0, 10.0**decade)[1]
            yield f'<path d="M0 {y:.1f}h{WIDTH}" stroke="#ccc"/>'
            yield f'<text x="-6" y="{y + 4:.1f}" text-anchor="end">{10.0**decade:,.12g}</text>'
        for load in self._loads:
            x = self.at(load, 1)[0]
            yield f'<path d="M{x:.1f} {HEIGHT}v4" stroke="#666"/>'
            yield f'<text x="{x:.1f}" y="{HEIGHT + 17}" text-anchor="middle">{load:g}</text>'
        yield f'<text x="{WIDTH}" y="{HEIGHT + 32}" text-anchor="end">load</text>'
