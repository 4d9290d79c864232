"""SVG plots of a report: a bar for each median, a line for its spread. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from xml.sax.saxutils import escape

from outbox_relay.workbench.bench.figures import COUNT, Summary
from outbox_relay.workbench.bench.report import BenchReport, ScenarioResult, format_value

WIDTH = 860
LABEL_WIDTH = 400
VALUE_WIDTH = 130
ROW_HEIGHT = 26
HEAD_HEIGHT = 44
BAR_HEIGHT = 14
BAR, SPREAD, TEXT, FAINT = "#3b6ea8", "#1f2d3d", "#222222", "#777777"


def plots(report: BenchReport) -> Mapping[str, str]:
    """Return the SVG of each plot by its file name without suffix."""
    found: dict[str, str] = {}
    for scenario in report.scenarios:
        for unit, figures in _by_unit(scenario).items():
            name = f"{scenario.name}-{''.join(c if c.isalnum() else '-' for c in unit).strip('-').replace('--', '-')}"
            found[name] = _plot(f"{scenario.name}, {unit}", figures)
    return found


def _by_unit(found: ScenarioResult) -> Mapping[str, Sequence[Summary]]:
    units: dict[str, list[Summary]] = {}
    for each in found.figures:
        if each.unit != COUNT and math.isfinite(each.most):
            units.setdefault(each.unit, []).append(each)
    return units


def _plot(title: str, figures: Sequence[Summary]) -> str:
    """Return a bar chart of figures with the same unit."""
    height = HEAD_HEIGHT + ROW_HEIGHT * len(figures)
    per_pixel = (max(each.most for each in figures) or 1.0) / (WIDTH - LABEL_WIDTH - VALUE_WIDTH)
    rows = "".join(_row(each, HEAD_HEIGHT + ROW_HEIGHT * number, per_pixel) for number, each in enumerate(figures))
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height}" viewBox="0 0 {WIDTH} {height}" '
        f'font-family="sans-serif" font-size="12">\n<rect width="100%" height="100%" fill="#ffffff"/>\n'
        f'<text x="10" y="20" font-size="14" font-weight="bold" fill="{TEXT}">{escape(title)}</text>\n{rows}</svg>\n'
    )


def _row(each: Summary, top: int, per_pixel: float) -> str:
    y, start, high = top + ROW_HEIGHT / 2, LABEL_WIDTH, BAR_HEIGHT
    end, least, most = (start + value / per_pixel for value in (each.median, each.least, each.most))
    label, value = escape(each.label), format_value(each.median, each.unit)
    return "\n".join(
        (
            f'<text x="{start - 8}" y="{y + 4:.1f}" text-anchor="end" fill="{TEXT}">{label}</text>',
            f'<rect x="{start}" y="{y - high / 2:.1f}" width="{end - start:.1f}" height="{high}" fill="{BAR}"/>',
            f'<line x1="{least:.1f}" y1="{y:.1f}" x2="{most:.1f}" y2="{y:.1f}" stroke="{SPREAD}" stroke-width="2"/>',
            f'<text x="{max(end, most) + 6:.1f}" y="{y + 4:.1f}" fill="{FAINT}">{value}</text>\n',
        )
    )
