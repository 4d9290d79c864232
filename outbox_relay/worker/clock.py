"""The clock that the relay and its workers share. It is that of leases, so that both compare the same numbers."""

from __future__ import annotations

import time

CLOCK = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)
"""The clock of ``outbox_relay.domain.lease_clock``."""


def clock() -> float:
    """Return monotonic seconds, which are the same in all processes of the machine."""
    return time.clock_gettime(CLOCK)
