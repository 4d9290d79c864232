"""Rates and latencies, recent ones for the screen and those of a whole run for the report. Pure."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

RECENT_SECONDS = 5.0
"""Period of the latencies on the screen."""
RATE_SECONDS = 2.0
"""Period over which a rate is averaged."""


@dataclass(frozen=True)
class Latency:
    """Percentiles in seconds; None without any values."""

    p50_seconds: float | None
    p99_seconds: float | None
    longest_seconds: float | None


def summarise_latency(seconds: Sequence[float]) -> Latency:
    """Return the percentiles by nearest rank."""
    if not seconds:
        return Latency(None, None, None)
    ordered = sorted(seconds)
    return Latency(*(ordered[math.ceil(share * len(ordered)) - 1] for share in (0.5, 0.99, 1.0)))


class RecentLatency:
    """Latencies of the arrivals in the last ``RECENT_SECONDS``."""

    def __init__(self) -> None:
        self._arrivals: deque[tuple[float, float]] = deque()

    def add(self, arrived_at: float, seconds: float) -> None:
        """Add one arrival."""
        self._arrivals.append((arrived_at, seconds))

    def latency(self, now: float) -> Latency:
        """Return the percentiles at `now`, a time by the clock of the arrivals."""
        while self._arrivals and self._arrivals[0][0] < now - RECENT_SECONDS:
            self._arrivals.popleft()
        return summarise_latency([seconds for _, seconds in self._arrivals])


class RateMeter:
    """The growth rate of a counter."""

    def __init__(self) -> None:
        self._samples: deque[tuple[float, int]] = deque()

    def per_second(self, now: float, count: int) -> float:
        """Add a sample and return the growth per second over the last ``RATE_SECONDS``; 0 for the first sample."""
        self._samples.append((now, count))
        while len(self._samples) > 2 and self._samples[1][0] <= now - RATE_SECONDS:
            self._samples.popleft()
        began, before = self._samples[0]
        return (count - before) / (now - began) if now > began else 0.0
