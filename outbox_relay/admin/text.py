"""Durations, times, aligned tables and printable lines. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime

MOST_SECONDS = 3.2e11
"""Longest time that is shown, about 10,000 years. A time of the log may be -infinity, which gives an infinite age."""


def duration(seconds: float) -> str:
    """Format ``seconds`` in at most two units: 0.4 s, 5 min 20 s, 3 h 12 min, 4 d 6 h."""
    seconds = min(seconds, MOST_SECONDS)
    if seconds < 60:
        return f"{seconds:.1f} s"
    whole = int(seconds)
    for size, unit, smaller, name in ((86_400, "d", 3600, "h"), (3600, "h", 60, "min"), (60, "min", 1, "s")):
        if whole >= size:
            return f"{whole // size} {unit} {whole % size // smaller} {name}"
    raise ValueError(seconds)


def iso_time(value: datetime | None) -> str | None:
    """Return a time as ISO 8601 with its zone, or None for None."""
    return None if value is None else value.isoformat()


def table(rows: Sequence[Sequence[str]]) -> list[str]:
    """Return ``rows`` as lines with aligned columns; the last column is not padded."""
    if not rows:
        return []
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]) - 1)] + [0]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def replace_unprintable(line: str) -> str:
    """Replace unprintable characters, which a terminal would interpret, with ``?``."""
    return "".join(c if c.isprintable() else "?" for c in line)
