"""How many events a second the shop may emit, so that this machine's slowest destination keeps up. Pure."""

from __future__ import annotations

from dataclasses import dataclass, replace

INITIAL = 200.0
MAXIMUM = 1_000.0
MINIMUM = 100.0
FAST_INCREASE = 1.25
"""Each second, until the limit was found; on a quick machine it is ``MAXIMUM`` after eight seconds."""
SLOW_INCREASE = 1.05
"""Each second, after that."""
DECREASE = 0.7
BACKLOG_SECONDS = 0.5
"""Slower when a destination is behind by more than what the shop emits in this time, faster when by less than half."""


@dataclass(frozen=True, slots=True)
class EmitRate:
    """What the shop may emit now, and whether it has ever been too much."""

    events_per_second: float = INITIAL
    limit_found: bool = False

    def adjusted(self, behind: int) -> EmitRate:
        """The pace for the next second when the slowest destination is `behind` by so many events."""
        allowed = self.events_per_second * BACKLOG_SECONDS
        if behind > allowed:
            return EmitRate(max(MINIMUM, self.events_per_second * DECREASE), limit_found=True)
        if behind < allowed / 2:
            faster = SLOW_INCREASE if self.limit_found else FAST_INCREASE
            return replace(self, events_per_second=min(MAXIMUM, self.events_per_second * faster))
        return self
