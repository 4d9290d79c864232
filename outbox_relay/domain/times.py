"""The clock of leases, and points in time as people give them to commands and on the page."""

from __future__ import annotations

import re
import time
from contextlib import suppress
from datetime import datetime, timedelta

CLOCK = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)
"""See clock_gettime(2)."""

_AGE = re.compile(r"(\d{1,9})([smhd])", re.ASCII)
_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86_400}


def lease_clock() -> float:
    """Return monotonic seconds, including time in which the machine was suspended.

    ``time.monotonic()`` excludes such time on Linux, so a relay on a resumed machine would trust a lease that expired
    meanwhile. It is the fallback where the system has no clock that includes it.
    """
    return time.clock_gettime(CLOCK)


def read_moment(value: str) -> str:
    """Return a time as ISO 8601 with its zone, or an age such as 90s, 2h, 3d as ISO 8601 duration.

    The database subtracts an age from its own clock. Raises ValueError with the fix.
    """
    read = _read(value, "an age")
    return read.isoformat() if isinstance(read, datetime) else f"PT{read.total_seconds():.0f}S"


def read_due(value: str) -> datetime | timedelta:
    """Return a time with its zone, or a delay such as 90s, 2h, 3d, which the caller adds to the database's clock.

    Raises ValueError with the fix.
    """
    return _read(value, "a delay")


def _read(value: str, kind: str) -> datetime | timedelta:
    if match := _AGE.fullmatch(value):
        return timedelta(seconds=int(match[1]) * _UNITS[match[2]])
    with suppress(ValueError):
        if (moment := datetime.fromisoformat(value)).utcoffset() is not None:
            return moment
    raise ValueError(
        f"should be a time with its zone, such as 2026-11-23T08:00:00Z, or {kind} such as 90s, 15m, 2h, 3d"
    )
