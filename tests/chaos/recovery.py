"""Times from the end of a fault to the next arrivals, from the times of emit and arrival. Pure."""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from tests.chaos.nemesis import Strike

NEVER = float("inf")
PROMISED: Mapping[str, float] = {
    "postgres crash": 5.0,
    "blackholed connection": 20.0,
    "sigkill": 4.0,
    "sigkill after acknowledgement": 4.0,
    "sigkill inside settle": 4.0,
    "sigkill after claim": 4.0,
}
"""Fault → promised seconds if no other fault is active: for the first event of any shard after a fault of the database,
for an event of every shard after the death of a relay. Leases are 3 s, and other relays look every 0.5 s."""
BOUND_SECONDS = 60.0
"""Limit above which a run fails; it is generous because the machine may be busy."""
FOUND_OUT = frozenset({"blackholed connection"})
"""Faults that a relay must detect by itself. Their recovery is measured from the begin, as the end has no effect."""


class Flow:
    """The arrivals at one sink, to find the first event that was emitted after a time."""

    def __init__(self) -> None:
        self._shards: defaultdict[int, list[tuple[float, float]]] = defaultdict(list)
        self._emitted: dict[int, list[float]] = {}
        self._soonest: dict[int, list[float]] = {}

    def add(self, shard: int, emitted: float, arrived: float) -> None:
        """Add an arrival."""
        self._shards[shard].append((emitted, arrived))

    def close(self) -> None:
        """Prepare for queries; no arrivals may be added afterwards."""
        for shard, pairs in self._shards.items():
            pairs.sort()
            soonest = NEVER
            reverse: list[float] = []
            for _, arrived in reversed(pairs):
                soonest = min(soonest, arrived)
                reverse.append(soonest)
            self._emitted[shard] = [emitted for emitted, _ in pairs]
            self._soonest[shard] = reverse[::-1]
        self._shards.clear()

    def first(self, since: float) -> float:
        """Return the arrival time of the first event emitted at `since` or later; infinity without one."""
        return min((self._of(shard, since) for shard in self._emitted), default=NEVER)

    def everywhere(self, since: float) -> float:
        """Return the time at which every shard with such events had received one emitted at `since` or later."""
        found = [self._of(shard, since) for shard in self._emitted]
        return max((arrived for arrived in found if arrived < NEVER), default=NEVER)

    def _of(self, shard: int, since: float) -> float:
        place = bisect_left(self._emitted[shard], since)
        return self._soonest[shard][place] if place < len(self._emitted[shard]) else NEVER


@dataclass(frozen=True)
class Recovery:
    """Seconds from the end of one kind of fault to arrivals of events emitted after it."""

    fault: str
    strikes: int
    resumed_median: float
    """To the first event of any shard."""
    resumed_most: float
    everywhere_median: float
    """To an event of every shard."""
    everywhere_most: float

    @property
    def most(self) -> float:
        """Return the longest time of the kind for which a promise is made."""
        return self.everywhere_most if self.fault.startswith("sigkill") else self.resumed_most

    @property
    def promised(self) -> float | None:
        """Return the promised seconds; None without a promise."""
        return PROMISED.get(self.fault)


def recoveries(strikes: Iterable[Strike], flow: Flow, last_emit: float) -> list[Recovery]:
    """Return the recovery by kind of fault, for strikes that ended at least a second before the last emit."""
    by_fault: defaultdict[str, list[Strike]] = defaultdict(list)
    for strike in strikes:
        if strike.healed < last_emit - 1.0:
            by_fault[strike.fault].append(strike)
    return [_recovery(fault, found, flow) for fault, found in sorted(by_fault.items())]


def _recovery(fault: str, strikes: Sequence[Strike], flow: Flow) -> Recovery:
    ends = [strike.began if fault in FOUND_OUT else strike.healed for strike in strikes]
    resumed = [flow.first(end) - end for end in ends]
    everywhere = [flow.everywhere(end) - end for end in ends]
    return Recovery(fault, len(strikes), median(resumed), max(resumed), median(everywhere), max(everywhere))
