"""Charts as SVG, drawn by the server, without a style, which the page's policy forbids. Templates have their axes."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from markupsafe import Markup

BARS_HEIGHT, BAR_WIDTH = 24, 2
CHART_WIDTH, CHART_HEIGHT = 480, 96


def time_text(at: datetime) -> str:
    """Return a time in UTC, in the form that every time on the page has."""
    return at.strftime("%Y-%m-%d %H:%M:%S UTC")


def step_times(steps: int, step_seconds: float) -> list[datetime]:
    """Return when each step of a history began, oldest first. The last one is the present step."""
    newest = time.time() // step_seconds * step_seconds
    return [datetime.fromtimestamp(newest - age * step_seconds, UTC) for age in range(steps - 1, -1, -1)]


def bars(values: Sequence[float], times: Sequence[datetime], label: str) -> Markup:
    """Return a small bar chart of ``values``; ``label`` says what it shows to those who do not see it."""
    top = max(values, default=0) or 1
    shapes = Markup().join(
        _bar(place, value / top, f"{time_text(at)}: {value:,}")
        for place, (value, at) in enumerate(zip(values, times, strict=True))
        if value > 0
    )
    size = f"0 0 {len(values) * BAR_WIDTH} {BARS_HEIGHT}"
    return _svg("bars", size, label, shapes)


def _bar(place: int, share: float, title: str) -> Markup:
    height = max(1.0, share * BARS_HEIGHT)
    shape = Markup('<rect x="{}" y="{:.1f}" width="1.6" height="{:.1f}"><title>{}</title></rect>')
    return shape.format(place * BAR_WIDTH, BARS_HEIGHT - height, height, title)


def line(
    values: Sequence[float | None], times: Sequence[datetime], shown: Callable[[float], str], label: str
) -> Markup:
    """Return a line chart of ``values``, oldest first, from 0 at the bottom to the largest at the top.

    Where a value is None, the line is interrupted. ``shown`` formats a value for the pointer that is on it.
    """
    known = [value for value in values if value is not None]
    top = max(known, default=0) or 1
    step = CHART_WIDTH / max(1, len(values) - 1)
    pieces: list[list[str]] = [[]]
    titles = Markup()
    for place, (value, at) in enumerate(zip(values, times, strict=True)):
        if value is None:
            pieces.append([])
            continue
        pieces[-1].append(f"{place * step:.1f},{CHART_HEIGHT - 2 - value / top * (CHART_HEIGHT - 6):.1f}")
        titles += _title(place * step, step, f"{time_text(at)}: {shown(value)}")
    shapes = Markup().join(_piece(points) for points in pieces if points)
    return _svg("line", f"0 0 {CHART_WIDTH} {CHART_HEIGHT}", label, shapes + titles)


def _piece(points: Sequence[str]) -> Markup:
    if len(points) == 1:
        return Markup('<circle cx="{}" cy="{}" r="1.5"/>').format(*points[0].split(","))
    return Markup('<polyline points="{}" fill="none"/>').format(" ".join(points))


def _title(x: float, width: float, title: str) -> Markup:
    """Return a shape that is not seen, around a point of a line, with the text of that point."""
    shape = Markup('<rect class="point" x="{:.1f}" y="0" width="{:.1f}" height="{}"><title>{}</title></rect>')
    return shape.format(x - width / 2, width, CHART_HEIGHT, title)


def _svg(kind: str, box: str, label: str, shapes: Markup) -> Markup:
    start = Markup('<svg class="chart {}" viewBox="{}" preserveAspectRatio="none" role="img" aria-label="{}">')
    return start.format(kind, box, label) + shapes + Markup("</svg>")


def steps_of(history: Mapping[str, Any], field: str) -> list[float | None]:
    """Return the values of ``field`` for every step of a history, oldest first; None where nothing was recorded."""
    known = {row["age"]: row[field] for row in history["minutes"]}
    return [known.get(age) for age in range(history["steps"] - 1, -1, -1)]
