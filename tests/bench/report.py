"""The report of the benchmarks, as text and as JSON. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from textwrap import fill
from typing import Any

from tests.bench.figures import COUNT, RATIO, Summary

WIDTH = 100
HEAD = ("", "median", "least", "most", "unit", "runs")


@dataclass(frozen=True, slots=True)
class ScenarioResult:
    """The results of all runs of one scenario; `notes` explain what could not be measured."""

    name: str
    text: str
    figures: Sequence[Summary]
    notes: Sequence[str] = ()
    failed: int = 0
    """Number of failed runs."""


@dataclass(frozen=True, slots=True)
class BenchReport:
    """Figures, and the machine, versions and settings needed to compare them."""

    mode: str
    """`quick` or `full`."""
    machine: Mapping[str, str]
    versions: Mapping[str, str]
    settings: Mapping[str, str]
    scenarios: Sequence[ScenarioResult]
    seconds: float
    """Total duration."""

    @property
    def complete(self) -> bool:
        """Return True if every scenario has figures and no run failed."""
        return all(found.figures and not found.failed for found in self.scenarios)

    def json(self) -> dict[str, Any]:
        """Return the report for `json.dumps`; an infinite value becomes None."""
        return {
            "mode": self.mode,
            "machine": dict(self.machine),
            "versions": dict(self.versions),
            "settings": dict(self.settings),
            "seconds": round(self.seconds, 1),
            "scenarios": [_json(found) for found in self.scenarios],
        }

    def text(self) -> str:
        """Return the report as text."""
        lines = [
            *_fact_lines("machine", self.machine),
            *_fact_lines("versions", self.versions),
            *_fact_lines("settings", self.settings),
        ]
        for found in self.scenarios:
            lines += ["", found.name, fill(found.text, WIDTH), "", *_table(found.figures)]
            lines += [fill(f"note: {note}", WIDTH) for note in found.notes]
        return "\n".join([*lines, "", f"mode {self.mode}, {self.seconds:.0f} s in total"])


def format_value(value: float, unit: str) -> str:
    """Return a value for display, with about three significant digits."""
    if not math.isfinite(value):
        return "-"
    if unit == RATIO:
        return f"{value:.2f}"
    if unit == COUNT or abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{value:.1f}" if abs(value) >= 10 else f"{value:.2f}"


def _json(found: ScenarioResult) -> dict[str, Any]:
    return {
        "name": found.name,
        "text": found.text,
        "notes": list(found.notes),
        "failed": found.failed,
        "figures": [
            {
                "label": each.label,
                "unit": each.unit,
                "median": _finite(each.median),
                "least": _finite(each.least),
                "most": _finite(each.most),
                "values": [_finite(value) for value in each.values],
            }
            for each in found.figures
        ],
    }


def _finite(value: float) -> float | None:
    return float(f"{value:.6g}") if math.isfinite(value) else None


def _fact_lines(title: str, facts: Mapping[str, str]) -> list[str]:
    return [fill(f"{title}: {', '.join(f'{name} {value}' for name, value in facts.items())}", WIDTH)]


def _table(figures: Sequence[Summary]) -> Iterable[str]:
    rows = [HEAD]
    rows += [
        (
            each.label,
            format_value(each.median, each.unit),
            format_value(each.least, each.unit),
            format_value(each.most, each.unit),
            each.unit,
            str(len(each.values)),
        )
        for each in figures
    ]
    widths = [max(len(row[column]) for row in rows) for column in range(len(HEAD))]
    left = (0, 4)
    for row in rows:
        cells = [
            cell.ljust(w) if n in left else cell.rjust(w) for n, (cell, w) in enumerate(zip(row, widths, strict=True))
        ]
        yield "  ".join(cells).rstrip()
