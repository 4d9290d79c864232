"""Limits the shop's emit rate so that the slowest destination keeps up. Pure."""

from __future__ import annotations

from dataclasses import dataclass, replace

INITIAL = 200.0
MAXIMUM = 1_000.0
MINIMUM = 100.0
FAST_INCREASE = 1.25
"""Factor per second until the limit is found; a fast machine reaches ``MAXIMUM`` after eight seconds."""
SLOW_INCREASE = 1.05
"""Factor per second after the limit was found."""
DECREASE = 0.7
BACKLOG_SECONDS = 0.5
"""The rate drops when the backlog exceeds this many seconds of events, and rises when it is below half of that."""


@dataclass(frozen=True, slots=True)
class EmitRate:
    """The rate at which the shop may emit; `limit_found` is True once a rate was too high."""

    events_per_second: float = INITIAL
    limit_found: bool = False

    def adjusted(self, backlog: int) -> EmitRate:
        """Return the rate for the next second, given the backlog of the slowest destination in events."""
        allowed = self.events_per_second * BACKLOG_SECONDS
        if backlog > allowed:
            return EmitRate(max(MINIMUM, self.events_per_second * DECREASE), limit_found=True)
        if backlog < allowed / 2:
            factor = SLOW_INCREASE if self.limit_found else FAST_INCREASE
            return replace(self, events_per_second=min(MAXIMUM, self.events_per_second * factor))
        return self
