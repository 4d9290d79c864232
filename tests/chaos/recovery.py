"""How long after a fault events flowed again: pure arithmetic over when events were emitted and arrived."""

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
"""Fault → seconds that are promised where nothing else is wrong: for the first event of any shard after a fault of the
database, for one of every shard after the death of a relay, whose lease is 3 s and whose others look every 0.5 s."""
BOUND_SECONDS = 60.0
"""What makes a run fail: a machine may be busy with other things."""
FOUND_OUT = frozenset({"blackholed connection"})
"""Faults that a relay must find out by itself, from whose begin its recovery counts: nothing tells it of the end."""


class Flow:
    """What flowed to one sink: told of every arrival, asked for the first that was emitted after a time."""

    def __init__(self) -> None:
        self._shards: defaultdict[int, list[tuple[float, float]]] = defaultdict(list)
        self._emitted: dict[int, list[float]] = {}
        self._soonest: dict[int, list[float]] = {}

    def add(self, shard: int, emitted: float, arrived: float) -> None:
        """One arrival."""
        self._shards[shard].append((emitted, arrived))

    def close(self) -> None:
        """No more arrivals: make it ready to be asked."""
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
        """When the first event arrived that was emitted at `since` or later; infinity if none was."""
        return min((self._of(shard, since) for shard in self._emitted), default=NEVER)

    def everywhere(self, since: float) -> float:
        """When an event emitted at `since` or later had arrived of every shard that was still written to."""
        found = [self._of(shard, since) for shard in self._emitted]
        return max((arrived for arrived in found if arrived < NEVER), default=NEVER)

    def _of(self, shard: int, since: float) -> float:
        place = bisect_left(self._emitted[shard], since)
        return self._soonest[shard][place] if place < len(self._emitted[shard]) else NEVER


@dataclass(frozen=True)
class Recovery:
    """Seconds from the end of one kind of fault until events emitted after it arrived."""

    fault: str
    strikes: int
    resumed_median: float
    """Until the first of any shard."""
    resumed_most: float
    everywhere_median: float
    """Until one of every shard."""
    everywhere_most: float

    @property
    def most(self) -> float:
        """The longest time that a promise is about, if there is one."""
        return self.everywhere_most if self.fault.startswith("sigkill") else self.resumed_most

    @property
    def promised(self) -> float | None:
        """Seconds, or nothing."""
        return PROMISED.get(self.fault)


def recoveries(strikes: Iterable[Strike], flow: Flow, last_emit: float) -> list[Recovery]:
    """The seconds to recovery by kind of fault, of strikes undone at least a second before the last emit."""
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
