"""SVG line charts of the series of a panel. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple
from xml.sax.saxutils import escape

WIDTH, HEIGHT = 420, 210
LEFT, RIGHT, TOP, BOTTOM = 56, 24, 34, 44
COLORS = ("#3b6ea8", "#c2571a", "#3d8b4f", "#8a4fa3", "#8c6d1f", "#4b4b4b")
TEXT, FAINT, GRID, FAULT = "#222222", "#777777", "#e3e3e3", "#fbe9e7"
STEPS = 4
MINUTE = 60.0
GAP_SECONDS = 10.0
"""Time between two points from which on they are not connected."""


class Line(NamedTuple):
    """A series: its legend, and points of seconds since the beginning and values."""

    legend: str
    points: Sequence[tuple[float, float]]


class Chart(NamedTuple):
    """The series of a panel. ``fault`` is the time from which to which the fault lasted."""

    title: str
    unit: str
    lines: Sequence[Line]
    seconds: float
    fault: tuple[float, float]


def drawn(chart: Chart) -> str:
    """Return a chart as SVG."""
    top = _ceiling(max((value for line in chart.lines for _, value in line.points), default=0.0))
    across = (WIDTH - LEFT - RIGHT) / chart.seconds
    begin, end = (LEFT + across * at for at in chart.fault)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{HEIGHT}" viewBox="0 0 {WIDTH} {HEIGHT}" '
        'font-family="sans-serif" font-size="11">',
        '<rect width="100%" height="100%" fill="#ffffff"/>',
        f'<rect x="{begin:.1f}" y="{TOP}" width="{end - begin:.1f}" height="{HEIGHT - TOP - BOTTOM}" fill="{FAULT}"/>',
        f'<text x="10" y="20" font-size="13" font-weight="bold" fill="{TEXT}">{escape(chart.title)}</text>',
        *_grid(chart, top, across),
        *(_line(line, top, across, COLORS[number]) for number, line in enumerate(chart.lines[: len(COLORS)])),
        *_legend(chart.lines[: len(COLORS)]),
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


def _y(value: float, top: float) -> float:
    return HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * value / top


def _ceiling(value: float) -> float:
    """Return the least of 1, 2, 4 or 8 times a power of ten that is not below the value, and 1 for 0."""
    if value <= 0.0:
        return 1.0
    power = 10.0 ** math.floor(math.log10(value))
    return next(power * factor for factor in (1, 2, 4, 8, 10) if power * factor >= value * 0.999)


def _grid(chart: Chart, top: float, across: float) -> list[str]:
    rows: list[str] = []
    for step in range(STEPS + 1):
        value = top * step / STEPS
        y = _y(value, top)
        rows.append(f'<line x1="{LEFT}" y1="{y:.1f}" x2="{WIDTH - RIGHT}" y2="{y:.1f}" stroke="{GRID}"/>')
        label = _label(value, chart.unit)
        rows.append(f'<text x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end" fill="{FAINT}">{label}</text>')
    for minute in range(int(chart.seconds // MINUTE) + 1):
        x = LEFT + across * minute * MINUTE
        y = HEIGHT - BOTTOM + 14
        rows.append(f'<text x="{x:.1f}" y="{y}" text-anchor="middle" fill="{FAINT}">{minute} min</text>')
    return rows


def _label(value: float, unit: str) -> str:
    match unit:
        case "s":
            return f"{value * 1000:g} ms" if 0 < value < 1 else f"{value:g} s"
        case "ops":
            return f"{value:g}/s"
        case _:
            return f"{value:g}"


def _line(line: Line, top: float, across: float, color: str) -> str:
    """Return a line for each part of a series without a gap."""
    parts: list[list[str]] = []
    last = -math.inf
    for at, value in line.points:
        if at - last > GAP_SECONDS:
            parts.append([])
        parts[-1].append(f"{LEFT + across * at:.1f},{_y(value, top):.1f}")
        last = at
    style = f'fill="none" stroke="{color}" stroke-width="1.5"'
    return "\n".join(f'<polyline points="{" ".join(points)}" {style}/>' for points in parts)


def _legend(lines: Sequence[Line]) -> list[str]:
    rows: list[str] = []
    x, y = LEFT, HEIGHT - 12
    for number, line in enumerate(lines):
        rows.append(f'<rect x="{x}" y="{y - 7}" width="12" height="3" fill="{COLORS[number]}"/>')
        rows.append(f'<text x="{x + 16}" y="{y}" fill="{TEXT}">{escape(line.legend)}</text>')
        x += 30 + 6 * len(line.legend)
    return rows
