"""The clock that leases are counted by: monotonic, and it goes on while the machine is suspended."""

from __future__ import annotations

import time


def lease_clock() -> float:
    """Return seconds since some point in the past, those of a suspended machine or virtual machine included.

    ``time.monotonic()`` leaves those out on Linux: a relay that wakes up would take a lease for valid that ended while
    it was suspended. Where the system has no such clock, ``time.monotonic()`` answers.
    """
    return time.clock_gettime(CLOCK)


CLOCK = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)
"""See clock_gettime(2)."""
