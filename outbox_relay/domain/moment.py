"""Points in time, as people give them to commands and on the page. Pure."""

from __future__ import annotations

import re
from datetime import datetime

_AGE = re.compile(r"(\d{1,9})([smhd])", re.ASCII)
_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86_400}


def read_moment(value: str) -> str:
    """Return a time as ISO 8601 with its zone, or an age such as 90s, 2h, 3d as ISO 8601 duration.

    The database subtracts an age from its own clock. Raises ValueError with the fix.
    """
    if age := _AGE.fullmatch(value):
        return f"PT{int(age[1]) * _UNITS[age[2]]}S"
    try:
        found = datetime.fromisoformat(value)
    except ValueError:
        found = None
    if found is None or found.tzinfo is None or found.utcoffset() is None:
        raise ValueError(
            "should be a time with its zone, such as 2026-11-23T08:00:00Z, or an age such as 90s, 15m, 2h, 3d"
        )
    return found.isoformat()
