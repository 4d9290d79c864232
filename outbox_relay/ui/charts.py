"""Charts as SVG, drawn by the server. They contain numbers only, and no style, which the page's policy forbids."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from markupsafe import Markup

BARS_HEIGHT, BAR_WIDTH = 24, 2
CHART_WIDTH, CHART_HEIGHT = 480, 96


def bars(values: Sequence[float], label: str) -> Markup:
    """Return a small bar chart of ``values``; ``label`` says what it shows to those who do not see it."""
    top = max(values, default=0) or 1
    shapes = "".join(_bar(place, value / top) for place, value in enumerate(values) if value > 0)
    size = f"0 0 {len(values) * BAR_WIDTH} {BARS_HEIGHT}"
    return _svg("bars", size, label, shapes)


def _bar(place: int, share: float) -> str:
    height = max(1.0, share * BARS_HEIGHT)
    return f'<rect x="{place * BAR_WIDTH}" y="{BARS_HEIGHT - height:.1f}" width="1.6" height="{height:.1f}"/>'


def line(values: Sequence[float | None], label: str) -> Markup:
    """Return a line chart of ``values``, oldest first. Where one is None, the line is interrupted."""
    known = [value for value in values if value is not None]
    top = max(known, default=0) or 1
    step = CHART_WIDTH / max(1, len(values) - 1)
    pieces: list[list[str]] = [[]]
    for place, value in enumerate(values):
        if value is None:
            pieces.append([])
            continue
        pieces[-1].append(f"{place * step:.1f},{CHART_HEIGHT - 2 - value / top * (CHART_HEIGHT - 6):.1f}")
    shapes = "".join(_piece(points) for points in pieces if points)
    return _svg("line", f"0 0 {CHART_WIDTH} {CHART_HEIGHT}", label, shapes)


def _piece(points: Sequence[str]) -> str:
    if len(points) == 1:
        x, y = points[0].split(",")
        return f'<circle cx="{x}" cy="{y}" r="1.5"/>'
    return f'<polyline points="{" ".join(points)}" fill="none"/>'


def _svg(kind: str, box: str, label: str, shapes: str) -> Markup:
    start = Markup('<svg class="chart {}" viewBox="{}" preserveAspectRatio="none" role="img" aria-label="{}">')
    return start.format(kind, box, label) + Markup(shapes) + Markup("</svg>")  # noqa: S704 - of numbers alone


def steps_of(history: Mapping[str, Any], field: str) -> list[float | None]:
    """Return the values of ``field`` for every step of a history, oldest first; None where nothing was recorded."""
    known = {row["age"]: row[field] for row in history["minutes"]}
    return [known.get(age) for age in range(history["steps"] - 1, -1, -1)]
