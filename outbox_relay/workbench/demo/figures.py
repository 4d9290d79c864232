"""Rates and latencies: of the last seconds for the live view, of the whole run for the report. Pure."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

RECENT_SECONDS = 5.0
"""How far back the latencies of the live view reach."""
RATE_SECONDS = 2.0
"""Over how long a rate is taken."""


@dataclass(frozen=True)
class Latency:
    """Percentiles in seconds; None where there is nothing to count."""

    p50_seconds: float | None
    p99_seconds: float | None
    longest_seconds: float | None


def summarise_latency(seconds: Sequence[float]) -> Latency:
    """The percentiles by nearest rank: the smallest value that is not exceeded by that share of all."""
    if not seconds:
        return Latency(None, None, None)
    ordered = sorted(seconds)
    return Latency(*(ordered[math.ceil(share * len(ordered)) - 1] for share in (0.5, 0.99, 1.0)))


class RecentLatency:
    """The latencies of what arrived in the last ``RECENT_SECONDS``."""

    def __init__(self) -> None:
        self._found: deque[tuple[float, float]] = deque()

    def add(self, arrived_at: float, seconds: float) -> None:
        """One arrival."""
        self._found.append((arrived_at, seconds))

    def latency(self, now: float) -> Latency:
        """The percentiles at `now`, by the clock of the arrivals."""
        while self._found and self._found[0][0] < now - RECENT_SECONDS:
            self._found.popleft()
        return summarise_latency([seconds for _, seconds in self._found])


class RateMeter:
    """How fast a count grows."""

    def __init__(self) -> None:
        self._looks: deque[tuple[float, int]] = deque()

    def per_second(self, now: float, count: int) -> float:
        """The growth per second since about ``RATE_SECONDS`` before `now`; 0 at the first look."""
        self._looks.append((now, count))
        while len(self._looks) > 2 and self._looks[1][0] <= now - RATE_SECONDS:
            self._looks.popleft()
        began, before = self._looks[0]
        return (count - before) / (now - began) if now > began else 0.0
