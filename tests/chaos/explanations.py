"""Decides which faults explain that an event arrived again at a sink. Pure; see `oracle` for the rules of a restore."""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import accumulate
from typing import NamedTuple

from tests.chaos.nemesis import Strike
from tests.chaos.timeline import Restored

LAG_SECONDS = 5.0
"""Longest time from delivery to settlement without faults; an ample bound."""
AFTER_SECONDS = 10.0
"""Time after the end of a fault in which an event in flight may arrive: a lease, a poll, and reconnecting. Later it may
arrive only before the first event of its key that was emitted after the fault. A row may do so after the lease of its
claim, and after what was emitted before the end of that lease."""
MOST_SECONDS = 300.0
"""Limit for every such arrival, except after a restore: whatever the dump had not settled is then due, in its order."""
LATE_SECONDS = 30.0
"""Longest time for which an open transaction may delay positions."""
RESTORE = "restore"
"""Fault for which duplicates are counted that a rebase causes."""
NEVER = -1.0
HARMLESS = frozenset(
    {
        "sigterm",
        "join and leave",
        "not joined",
        "clock shifted",
        "reload",
        "retention",
        "day not settled",
        "replay",
        "no replay",
        "health flood",
        "held snapshot",
        "long transaction",
        "huge transaction",
        "poison",
        "statistics reset",
        RESTORE,
    }
)
"""Faults that explain no duplicate. What a restore explains is not decided by its time alone."""
OF_SOME_SINKS: Mapping[str, Collection[str]] = {
    "broker": ("kafka",),
    "receiver": ("webhook", "jobs"),
    **{sink: (sink,) for sink in ("kafka", "webhook", "jobs", "calls", "effects")},
}
"""First word of a fault that affects only some sinks → these."""


class Promise(NamedTuple):
    """The promises of a sink that differ from those of others."""

    ordered: bool = True
    """First arrivals of a key are in the order of the commits."""
    row_lease_seconds: float = 0.0
    """Longest lease of a row, if rows are claimed in any order: what a dead relay held is claimed again after it."""
    exactly_once: bool = False
    """No fault explains a duplicate, and a restore explains none either."""


USUAL = Promise()


class Duplicate(NamedTuple):
    """A repeated arrival of an event."""

    key: int
    number: int
    uid: bytes
    before: float
    """Time of the previous arrival."""
    again: float


class Times:
    """Times of emit, first and last arrival of each event of one key."""

    def __init__(self, count: int) -> None:
        self.emitted = array("d", [NEVER]) * count
        self.first = array("d", [NEVER]) * count
        self.last = array("d", [NEVER]) * count

    def fill(self) -> None:
        """Give events that never arrived the time of the previous event, so that the times of emit are sorted."""
        newest = NEVER
        for place, at in enumerate(self.emitted):
            newest = max(newest, at)
            self.emitted[place] = newest

    def flowed(self, since: float) -> float:
        """Return the arrival time of the first event that was emitted at `since` or later; infinity without one."""
        for place in range(bisect_left(self.emitted, since), len(self.emitted)):
            if self.first[place] != NEVER:
                return self.first[place]
        return float("inf")


class Backlog:
    """The time at which a sink without an order had received all that was emitted before."""

    def __init__(self, keys: Iterable[Times]) -> None:
        came = sorted((at, first) for times in keys for at, first in zip(times.emitted, times.first, strict=True))
        self._emitted = [at for at, _ in came]
        self._cleared = list(accumulate((first for _, first in came), max))

    def cleared(self, since: float) -> float:
        """Return the time at which every event emitted until `since` had arrived that ever did."""
        place = bisect_right(self._emitted, since)
        return self._cleared[place - 1] if place else NEVER


class Faults:
    """The strikes of a run, which may explain duplicates at one sink.

    `backlog` is that of a sink without an order.
    """

    def __init__(
        self,
        strikes: Iterable[Strike],
        sink: str,
        restores: Sequence[Restored] = (),
        promise: Promise = USUAL,
        backlog: Backlog | None = None,
    ) -> None:
        self._sink = sink
        self._restores = restores
        self._promise = promise
        self._backlog = backlog
        self._read = set[tuple[float, bytes]]()
        """The rebases after which it is explained that an event of a uid was read again."""
        self._strikes = sorted((s for s in strikes if can_repeat(s.fault, sink)), key=lambda strike: strike.began)
        self._began = [strike.began for strike in self._strikes]
        self._since = _since(self._strikes)
        self._longest = max((strike.healed - strike.began for strike in self._strikes), default=0.0)

    def explain(self, repeated: Duplicate, times: Times) -> str | None:
        """Return the nearest fault during which the event was in flight, or None. `times` are those of its key."""
        before, again = repeated.before, repeated.again
        if crossed := [restored for restored in self._restores if before < restored.rebased <= again]:
            return RESTORE if self._bring_back(crossed, repeated, times) else None
        found: tuple[float, str] | None = None
        for place in range(bisect_right(self._began, again) - 1, -1, -1):
            strike = self._strikes[place]
            if strike.began + self._longest + MOST_SECONDS < before:
                break
            if before < self._since[place] or not self._in_flight(strike, before, times):
                continue
            distance = max(strike.began - before, before - strike.healed, 0.0)
            if (found is None or distance < found[0]) and self._due(strike, again, times):
                found = distance, strike.fault
        if found:
            return found[1]
        return RESTORE if self._read_again(repeated, times) else None

    def _read_again(self, repeated: Duplicate, times: Times) -> bool:
        """Return True if this was a row of a dump, and relays settled it before they read its event again.

        That explains one arrival after each rebase.
        """
        rebased = [restored for restored in self._restores if restored.rebased <= repeated.before]
        if not rebased or repeated.uid not in rebased[-1].read_again.get(self._sink, ()):
            return False
        since = rebased[-1].rebased
        backlog = self._backlog
        limit = self._latest(since, times) if backlog is None else backlog.cleared(since) + AFTER_SECONDS
        if (since, repeated.uid) in self._read or repeated.again > min(limit, since + MOST_SECONDS):
            return False
        self._read.add((since, repeated.uid))
        return True

    def _in_flight(self, strike: Strike, before: float, times: Times) -> bool:
        """Return True if an event that arrived at this time may have been in flight at the strike.

        A row may arrive long after the strike because it came back then. That delivery was not in flight.
        """
        if self._backlog is None:
            return _in_time(strike, before, times)
        return before <= strike.healed + AFTER_SECONDS

    def _due(self, strike: Strike, again: float, times: Times) -> bool:
        """Return True if an event in flight at the strike may arrive again at this time.

        A row comes back when its lease ends, and then has its turn among the rows of all keys. Later events of its key
        say nothing about it.
        """
        if self._backlog is None:
            return _in_time(strike, again, times)
        lapsed = strike.healed + self._promise.row_lease_seconds
        turn = max(lapsed, self._backlog.cleared(lapsed)) + AFTER_SECONDS
        return again <= min(turn, strike.healed + MOST_SECONDS)

    def _bring_back(self, crossed: Sequence[Restored], repeated: Duplicate, times: Times) -> bool:
        """Return True if a relay must deliver this event again after the last of these restores, and not before."""
        first, last = crossed[0], crossed[-1]
        return (
            all(repeated.uid in restored.unsettled.get(self._sink, ()) for restored in crossed)
            and repeated.before >= self._still_since(first.dumped) - LATE_SECONDS
            and repeated.again <= self._latest(last.rebased, times)
        )

    def _latest(self, rebased: float, times: Times) -> float:
        """Return the last time at which an event of the dump may arrive again.

        A row may arrive after rows of its key that were emitted later, so these say nothing about it.
        """
        if not self._promise.ordered:
            return rebased + MOST_SECONDS
        return max(rebased + AFTER_SECONDS, times.flowed(rebased))

    def _still_since(self, at: float) -> float:
        """Return the time since which positions may have been unchanged at `at`."""
        earlier = [strike for strike in self._strikes if strike.began <= at]
        return _since([*earlier, Strike(RESTORE, at, at)])[-1]


def _in_time(strike: Strike, arrived: float, times: Times) -> bool:
    """Return True if an event in flight at the strike may arrive at this time.

    That is shortly after the strike, or before the first later event of its key.
    """
    if arrived <= strike.healed + AFTER_SECONDS:
        return True
    return arrived <= strike.healed + MOST_SECONDS and arrived <= times.flowed(strike.healed)


def can_repeat(fault: str, sink: str) -> bool:
    """Return True if `fault` may cause duplicates at `sink`."""
    only = OF_SOME_SINKS.get(fault.split(" ", maxsplit=1)[0])
    return fault not in HARMLESS and (only is None or sink in only)


def _since(strikes: Sequence[Strike]) -> list[float]:
    """Return for each strike the time since which delivered events may be unsettled.

    If a fault follows before the system has recovered, positions may have been unchanged since the first one.
    """
    found: list[float] = []
    ended = float("-inf")
    for strike in strikes:
        since = strike.began - LAG_SECONDS
        found.append(min(found[-1], since) if since <= ended else since)
        ended = max(ended, strike.healed + LAG_SECONDS)
    return found
