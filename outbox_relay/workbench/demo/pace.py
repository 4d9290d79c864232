"""How many events a second the shop may emit, so that this machine's slowest destination keeps up. Pure."""

from __future__ import annotations

from dataclasses import dataclass, replace

FIRST = 200.0
MOST = 1_000.0
LEAST = 100.0
FASTER = 1.25
"""Each second, until the limit was found; on a quick machine it is ``MOST`` after eight seconds."""
BIT_FASTER = 1.05
"""Each second, after that."""
SLOWER = 0.7
BEHIND_SECONDS = 0.5
"""Slower when a destination is behind by more than what the shop emits in this time, faster when by less than half."""


@dataclass(frozen=True, slots=True)
class Pace:
    """What the shop may emit now, and whether it has ever been too much."""

    events_per_second: float = FIRST
    limit_found: bool = False

    def adapted(self, behind: int) -> Pace:
        """The pace for the next second when the slowest destination is `behind` by so many events."""
        allowed = self.events_per_second * BEHIND_SECONDS
        if behind > allowed:
            return Pace(max(LEAST, self.events_per_second * SLOWER), limit_found=True)
        if behind < allowed / 2:
            faster = BIT_FASTER if self.limit_found else FASTER
            return replace(self, events_per_second=min(MOST, self.events_per_second * faster))
        return self
