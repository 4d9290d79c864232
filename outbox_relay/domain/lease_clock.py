"""The clock of leases: monotonic, and counting while the machine is suspended."""

from __future__ import annotations

import time


def lease_clock() -> float:
    """Return monotonic seconds, including time in which the machine was suspended.

    ``time.monotonic()`` excludes such time on Linux, so a relay on a resumed machine would trust a lease that expired
    meanwhile. It is the fallback where the system has no clock that includes it.
    """
    return time.clock_gettime(CLOCK)


CLOCK = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)
"""See clock_gettime(2)."""
