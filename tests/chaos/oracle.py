"""Judges the arrivals at one sink: lost, phantom, duplicate, reordered and stuck events. Pure.

It is modelled on Jepsen's checker for Kafka. The events of a key are numbered 1, 2, 3, … in the order of their commits.
The number of a rolled-back event is used again by the next one, which has another uid. Times are `time.monotonic()`.

A restore of a dump (see `timeline`) takes events back. For each restore the judge expects:

- Every surviving event arrives or is dead for a reason: events of the dump, events emitted between the restore and the
  rebase, and later ones. An event that was taken back may have arrived or not.
- Before the rebase, only events of the old server arrive; after it, no event that was taken back. Events emitted into
  the restored database arrive only after its rebase. All other arrivals are *untimely*.
- In every era the first arrivals of a key are in the order of the commits: events of the dump, events that were taken
  back, events of the restored database.
- An event that arrived before the rebase arrives again after it only if the dump's positions do not cover it: it is
  the first unsettled event of its shard or a later one, or it is a row. Its earlier arrival must also be later than
  the positions of the dump could have been written, with an allowance for a transaction that delayed them. No other
  fault explains such a duplicate, and the restore explains only duplicates on both sides of its rebase. An event that
  arrives again only after several rebases must be unsettled in each of their dumps: it was due from the first rebase
  on, and the last one made it due once more.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from tests.chaos.nemesis import Strike
from tests.chaos.timeline import UID_BYTES, Committed, Restored

LAG_SECONDS = 5.0
"""Longest time from delivery to settlement without faults; an ample bound."""
AFTER_SECONDS = 10.0
"""Time after the end of a fault in which an event in flight may arrive: a lease, a poll, and reconnecting. Later it may
arrive only before the first event of its key that was emitted after the fault."""
MOST_SECONDS = 300.0
"""Limit for every such arrival, except after a restore: whatever the dump had not settled is then due, in its order."""
LATE_SECONDS = 30.0
"""Longest time for which an open transaction may delay positions."""
RESTORE = "restore"
"""Fault for which duplicates on both sides of a rebase are counted."""
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
"""Faults that explain no duplicate; a restore explains those on both sides of its rebase."""
OF_SOME_SINKS: Mapping[str, Collection[str]] = {
    "broker": ("kafka",),
    "receiver": ("webhook", "jobs"),
    **{sink: (sink,) for sink in ("kafka", "webhook", "jobs", "calls", "effects")},
}
"""First word of a fault that affects only some sinks → these."""

Place = tuple[int, int]
"""Key, and number within the key."""


class Promise(NamedTuple):
    """The promises of a sink that differ from those of others."""

    ordered: bool = True
    """First arrivals of a key are in the order of the commits."""
    exactly_once: bool = False
    """No fault explains a duplicate, and a restore explains none either."""


USUAL = Promise()


class Arrival(NamedTuple):
    """An event received by a destination."""

    key: int
    number: int
    uid: bytes
    emitted: float
    arrived: float


@dataclass
class Dead:
    """Dead letters of one sink, and the events that may or must be dead."""

    letters: Collection[Place] = ()
    poison: Collection[Place] = ()
    """Events that no sink accepts: they must be dead."""
    excused: Collection[Place] = ()
    """Events that may be dead: odd ones, and those with which relays died repeatedly."""


class Duplicate(NamedTuple):
    """A repeated arrival of an event."""

    key: int
    number: int
    uid: bytes
    before: float
    """Time of the previous arrival."""
    again: float


@dataclass
class Account:
    """Result for one sink; numbers are events."""

    sink: str
    committed: int
    arrived: int = 0
    """All arrivals, duplicates included."""
    dead: int = 0
    """Dead letters that never arrived, other than poison."""
    poisoned: int = 0
    """Poison events that are dead letters, as all of them must be."""
    lost: int = 0
    """Neither arrived nor dead, and not in the backlog either."""
    stuck: int = 0
    """Still in the backlog when the time to come to rest was over."""
    phantom: int = 0
    taken_back: int = 0
    """Events that restores took back, arrived or not."""
    untimely: int = 0
    """Arrived before the rebase that makes the event due, or after the one that took it back."""
    reordered: int = 0
    condemned: int = 0
    """Dead letters without a reason."""
    duplicates: Counter[str] = field(default_factory=Counter[str])
    """Fault → duplicates that it explains."""
    unexplained: list[Duplicate] = field(default_factory=list[Duplicate])
    examples: dict[str, list[str]] = field(default_factory=dict[str, list[str]])
    """Kind of error → at most ten examples."""

    @property
    def sound(self) -> bool:
        """Return True if no event is lost, stuck, phantom, untimely, reordered or dead, or repeated without a fault."""
        wrong = self.lost, self.stuck, self.phantom, self.untimely, self.reordered, self.condemned, self.unexplained
        return not any(wrong)

    def note(self, what: str, key: int, number: int, detail: str = "") -> None:
        """Add an example of an error."""
        found = self.examples.setdefault(what, [])
        if len(found) < 10:
            found.append(f"key-{key} {number} {detail}".rstrip())


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


class Faults:
    """The strikes of a run, which may explain duplicates."""

    def __init__(
        self, strikes: Iterable[Strike], sink: str, restores: Sequence[Restored] = (), *, ordered: bool = True
    ) -> None:
        self._sink = sink
        self._restores = restores
        self._ordered = ordered
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
            if before < self._since[place] or not _in_time(strike, before, times):
                continue
            distance = max(strike.began - before, before - strike.healed, 0.0)
            if (found is None or distance < found[0]) and _in_time(strike, again, times):
                found = distance, strike.fault
        return found[1] if found else None

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
        if not self._ordered:
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


def judge(
    sink: str,
    committed: Committed,
    arrivals: Iterable[Arrival],
    strikes: Iterable[Strike],
    dead: Dead | None = None,
    backlog: int = 0,
    promise: Promise = USUAL,
) -> Account:
    """Judge the arrivals at `sink`; those of each key are in the order of arrival.

    `backlog` is the number of undelivered events that `status` reports after the time to come to rest. Poison is not
    in `committed`, because none of it may arrive.
    """
    account = Account(sink, len(committed))
    dead = dead or Dead()
    account.taken_back = committed.taken_back
    keys = {key: Times(len(uids) // UID_BYTES) for key, uids in committed.keys.items()}
    repeated = _arrive(account, committed, arrivals, keys, ordered=promise.ordered)
    for key in {duplicate.key for duplicate in repeated}:
        keys[key].fill()
    faults = None if promise.exactly_once else Faults(strikes, sink, committed.restores, ordered=promise.ordered)
    _explain(account, faults, repeated, keys)
    _missing(account, committed, keys, dead, backlog)
    return account


def _arrive(
    account: Account, committed: Committed, arrivals: Iterable[Arrival], keys: Mapping[int, Times], *, ordered: bool
) -> list[Duplicate]:
    """Record the times of all arrivals and count errors. Return the duplicates."""
    newest: dict[int, int] = {}
    repeated: list[Duplicate] = []
    for arrival in arrivals:
        account.arrived += 1
        place = committed.find(arrival.key, arrival.number, arrival.uid)
        if place is None:
            account.phantom += 1
            account.note("phantom", arrival.key, arrival.number, f"uid {arrival.uid.hex()} at {arrival.arrived:.3f}")
            continue
        if committed.restores and not committed.timely(arrival.key, place, arrival.arrived):
            account.untimely += 1
            account.note("untimely", arrival.key, arrival.number, f"at {arrival.arrived:.3f}")
        times = keys[arrival.key]
        if times.first[place] != NEVER:
            repeated.append(Duplicate(arrival.key, arrival.number, arrival.uid, times.last[place], arrival.arrived))
        else:
            times.emitted[place], times.first[place] = arrival.emitted, arrival.arrived
            if ordered and place < newest.get(arrival.key, 0):
                account.reordered += 1
                after = committed.number(arrival.key, newest[arrival.key])
                account.note("reordered", arrival.key, arrival.number, f"after {after}")
        times.last[place] = arrival.arrived
        newest[arrival.key] = max(place, newest.get(arrival.key, 0))
    return repeated


def _explain(account: Account, faults: Faults | None, repeated: Iterable[Duplicate], keys: Mapping[int, Times]) -> None:
    for duplicate in repeated:
        fault = faults.explain(duplicate, keys[duplicate.key]) if faults else None
        if fault is not None:
            account.duplicates[fault] += 1
            continue
        account.unexplained.append(duplicate)
        detail = f"at {duplicate.before:.3f} and {duplicate.again:.3f}"
        account.note("unexplained duplicate", duplicate.key, duplicate.number, detail)


def _missing(
    account: Account,
    committed: Committed,
    keys: Mapping[int, Times],
    dead: Dead,
    backlog: int,
) -> None:
    missing = 0
    for place in sorted(dead.poison):
        if place in dead.letters:
            account.poisoned += 1
        else:
            missing += 1
            account.note("missing poison", *place)
    for key, times in keys.items():
        if NEVER not in times.first:
            continue
        for place, time in enumerate(times.first):
            if time != NEVER or not committed.due(key, place):
                continue
            number = committed.number(key, place)
            if (key, number) in dead.letters:
                account.dead += 1
                if (key, number) not in dead.excused:
                    account.condemned += 1
                    account.note("dead for no reason", key, number)
                continue
            missing += 1
            account.note("missing", key, number)
    account.stuck = backlog
    account.lost = max(0, missing - backlog)
