"""Points in time, as people give them to commands and on the page. Pure."""

from __future__ import annotations

import re
from datetime import datetime, timedelta

_AGE = re.compile(r"(\d{1,9})([smhd])", re.ASCII)
_IS_TIME = "should be a time with its zone, such as 2026-11-23T08:00:00Z"
_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86_400}


def read_moment(value: str) -> str:
    """Return a time as ISO 8601 with its zone, or an age such as 90s, 2h, 3d as ISO 8601 duration.

    The database subtracts an age from its own clock. Raises ValueError with the fix.
    """
    if (seconds := _seconds(value)) is not None:
        return f"PT{seconds}S"
    if (found := _time(value)) is None:
        raise ValueError(f"{_IS_TIME}, or an age such as 90s, 15m, 2h, 3d")
    return found.isoformat()


def read_due(value: str) -> datetime | timedelta:
    """Return a time with its zone, or a delay such as 90s, 2h, 3d, which the caller adds to the database's clock.

    Raises ValueError with the fix.
    """
    if (seconds := _seconds(value)) is not None:
        return timedelta(seconds=seconds)
    if (found := _time(value)) is None:
        raise ValueError(f"{_IS_TIME}, or a delay such as 90s, 15m, 2h, 3d")
    return found


def _seconds(value: str) -> int | None:
    """Return the seconds of a number with a unit, or None for another text."""
    found = _AGE.fullmatch(value)
    return int(found[1]) * _UNITS[found[2]] if found else None


def _time(value: str) -> datetime | None:
    """Return a time with its zone, or None for another text."""
    try:
        found = datetime.fromisoformat(value)
    except ValueError:
        return None
    return None if found.tzinfo is None or found.utcoffset() is None else found
