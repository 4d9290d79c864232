"""The judge of one sink's arrivals against what was committed: lost, phantom, duplicate, reorder, stuck. Pure.

After Jepsen's checker for Kafka. The events of a key carry the numbers 1, 2, 3, … in the order of their commits; an
event that was rolled back leaves its number to the next one, which has another uid. Times are `time.monotonic()`.

A restore of a dump (see `timeline`) takes events back. Of each one the judge expects:

- Every event that survives arrives, or is dead for a reason: those of the dump, those that were emitted between the
  restore and the rebase, and those that were emitted later. An event that was taken back may have arrived or not.
- Until the rebase only what the old server had committed arrives, and afterwards nothing that was taken back. What was
  emitted into the restored database arrives only after its rebase. All else is *untimely*.
- The order of first arrivals of a key is that of the commits in every era: the events of the dump, those that were
  taken back, those of the restored database.
- An event that came before the rebase comes again after it only if the dump's ledger does not cover it: if it is an
  event from its shard's first unsettled one on, or a row. It must also have come after the positions of the dump could
  have been written, give or take a transaction that was late for them. No other fault explains such a repetition, and
  the restore explains none that does not cross it. An event that comes again only after several rebases must be
  unsettled in each of their dumps: it was due again from the first rebase on, until the last one made it due once more.
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
"""How long an event may have been delivered and not be settled when all goes well: far more than it takes."""
AFTER_SECONDS = 10.0
"""How long after a fault was undone what was in flight at it may arrive in any case: a lease, a poll, the way back of
the connections. Beyond that only before the first event of its key that was emitted after the fault."""
MOST_SECONDS = 300.0
"""And never later than this."""
LATE_SECONDS = 30.0
"""How long a transaction may stay open and hold up positions until it commits."""
RESTORE = "restore"
"""The fault of which repetitions across a rebase are counted."""
NEVER = -1.0
HARMLESS = frozenset(
    {
        "sigterm",
        "join and leave",
        "clock shifted",
        "reload",
        "retention",
        "day not settled",
        "health flood",
        "held snapshot",
        "long transaction",
        "huge transaction",
        "poison",
        RESTORE,
    }
)
"""Faults that must not repeat any event, but for what crosses a restore."""
OF_ONE_SINK = {"broker": "kafka", "receiver": "webhook", "kafka": "kafka", "webhook": "webhook"}
"""First word of a fault that only one sink can feel → that sink."""


Place = tuple[int, int]
"""Key, and number within the key."""


class Arrival(NamedTuple):
    """One event as a destination got it."""

    key: int
    number: int
    uid: bytes
    emitted: float
    arrived: float


@dataclass
class Dead:
    """Dead letters of one sink, and what may or must be one, by key and number."""

    letters: Collection[Place] = ()
    poison: Collection[Place] = ()
    """What no sink can take: it must be dead."""
    excused: Collection[Place] = ()
    """What may be dead: odd events, and those that relays died with again and again."""


class Duplicate(NamedTuple):
    """An event that arrived once more."""

    key: int
    number: int
    uid: bytes
    before: float
    """When it had arrived the last time."""
    again: float


@dataclass
class Account:
    """What arrived at one sink against what was committed for it, in events."""

    sink: str
    committed: int
    arrived: int = 0
    """Arrivals, repeated ones among them."""
    dead: int = 0
    """Dead letters that never arrived, and may be dead: odd ones, and what relays were killed with."""
    poisoned: int = 0
    """Dead letters that no sink could have taken: nothing else may become of those."""
    lost: int = 0
    """Neither arrived nor dead, though the system says that nothing is left to do."""
    stuck: int = 0
    """Neither arrived nor dead, and still in the backlog when the system had had its time."""
    phantom: int = 0
    taken_back: int = 0
    """Events that restores took back, arrived or not."""
    untimely: int = 0
    """Arrived before the rebase that had to come first, or after the one that took it back."""
    reordered: int = 0
    condemned: int = 0
    """Dead letters that should have arrived."""
    duplicates: Counter[str] = field(default_factory=Counter[str])
    """Fault → events that came again because of it."""
    unexplained: list[Duplicate] = field(default_factory=list[Duplicate])
    examples: dict[str, list[str]] = field(default_factory=dict[str, list[str]])
    """Up to ten of each that is wrong."""

    @property
    def sound(self) -> bool:
        """Nothing is lost, made up, out of order or time, stuck, or there twice for no reason."""
        wrong = self.lost, self.stuck, self.phantom, self.untimely, self.reordered, self.condemned, self.unexplained
        return not any(wrong)

    def note(self, what: str, key: int, number: int, detail: str = "") -> None:
        """Remember an example of something wrong."""
        found = self.examples.setdefault(what, [])
        if len(found) < 10:
            found.append(f"key-{key} {number} {detail}".rstrip())


class Times:
    """When each event of one key was emitted and when it arrived, first and last."""

    def __init__(self, count: int) -> None:
        self.emitted = array("d", [NEVER]) * count
        self.first = array("d", [NEVER]) * count
        self.last = array("d", [NEVER]) * count

    def fill(self) -> None:
        """Give what never came the time of the event before it, so that times of emission rise."""
        newest = NEVER
        for place, at in enumerate(self.emitted):
            newest = max(newest, at)
            self.emitted[place] = newest

    def flowed(self, since: float) -> float:
        """When the first event arrived that was emitted at `since` or later; infinity while none has."""
        for place in range(bisect_left(self.emitted, since), len(self.emitted)):
            if self.first[place] != NEVER:
                return self.first[place]
        return float("inf")


class Faults:
    """The strikes of a run, asked which of them explains that an event came again."""

    def __init__(self, strikes: Iterable[Strike], sink: str, restores: Sequence[Restored] = ()) -> None:
        self._sink = sink
        self._restores = restores
        self._strikes = sorted((s for s in strikes if can_repeat(s.fault, sink)), key=lambda strike: strike.began)
        self._began = [strike.began for strike in self._strikes]
        self._since = _since(self._strikes)
        self._longest = max((strike.healed - strike.began for strike in self._strikes), default=0.0)

    def explain(self, repeated: Duplicate, times: Times) -> str | None:
        """The fault at which the event was in flight, the nearest of several; `times` are those of its key."""
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
        """Return whether a relay must read this again after the last of these restores, and not before."""
        first, last = crossed[0], crossed[-1]
        return (
            all(repeated.uid in restored.unsettled.get(self._sink, ()) for restored in crossed)
            and repeated.before >= self._still_since(first.dumped) - LATE_SECONDS
            and _in_time(Strike(RESTORE, first.dumped, last.rebased), repeated.again, times)
        )

    def _still_since(self, at: float) -> float:
        """Return since when positions may have stood still at this time."""
        earlier = [strike for strike in self._strikes if strike.began <= at]
        return _since([*earlier, Strike(RESTORE, at, at)])[-1]


def _in_time(strike: Strike, arrived: float, times: Times) -> bool:
    """Whether what was in flight at the strike may still arrive: soon after it, or before its key has gone on."""
    if arrived <= strike.healed + AFTER_SECONDS:
        return True
    return arrived <= strike.healed + MOST_SECONDS and arrived <= times.flowed(strike.healed)


def can_repeat(fault: str, sink: str) -> bool:
    """Whether events of `sink` may come again because of `fault`."""
    only = OF_ONE_SINK.get(fault.split(" ", maxsplit=1)[0])
    return fault not in HARMLESS and (only is None or only == sink)


def _since(strikes: Sequence[Strike]) -> list[float]:
    """Of each strike: since when events may have been delivered and not settled.

    Where one fault follows another before all is well again, positions may have stood still since the first.
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
) -> Account:
    """Judge the arrivals at `sink`, those of each key in the order in which they came.

    `backlog` is what the system still called undelivered when it had had its time to come to rest. Poison is not in
    `committed`: none of it may arrive.
    """
    account = Account(sink, len(committed))
    dead = dead or Dead()
    account.taken_back = committed.taken_back
    keys = {key: Times(len(uids) // UID_BYTES) for key, uids in committed.keys.items()}
    repeated = _arrive(account, committed, arrivals, keys)
    for key in {duplicate.key for duplicate in repeated}:
        keys[key].fill()
    _explain(account, Faults(strikes, sink, committed.restores), repeated, keys)
    _missing(account, committed, keys, dead, backlog)
    return account


def _arrive(
    account: Account, committed: Committed, arrivals: Iterable[Arrival], keys: Mapping[int, Times]
) -> list[Duplicate]:
    """Note the times of all arrivals, and count what cannot be; return what came again."""
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
            if place < newest.get(arrival.key, 0):
                account.reordered += 1
                after = committed.number(arrival.key, newest[arrival.key])
                account.note("reordered", arrival.key, arrival.number, f"after {after}")
        times.last[place] = arrival.arrived
        newest[arrival.key] = max(place, newest.get(arrival.key, 0))
    return repeated


def _explain(account: Account, faults: Faults, repeated: Iterable[Duplicate], keys: Mapping[int, Times]) -> None:
    for duplicate in repeated:
        fault = faults.explain(duplicate, keys[duplicate.key])
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
