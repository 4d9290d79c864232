"""The judge of one sink's arrivals against what was committed: lost, phantom, duplicate, reorder, stuck. Pure.

After Jepsen's checker for Kafka. The events of a key carry the numbers 1, 2, 3, … in the order of their commits; an
event that was rolled back leaves its number to the next one, which has another uid. Times are `time.monotonic()`.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from tests.chaos.nemesis import Strike

UID_BYTES = 16
LAG_SECONDS = 5.0
"""How long an event may have been delivered and not be settled when all goes well: far more than it takes."""
AFTER_SECONDS = 10.0
"""How long after a fault was undone what was in flight at it may arrive in any case: a lease, a poll, the way back of
the connections. Beyond that only before the first event of its key that was emitted after the fault."""
MOST_SECONDS = 300.0
"""And never later than this."""
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
    }
)
"""Faults that must not repeat any event."""
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
class Committed:
    """The events that the surviving database has for one sink: of each key the uids of 1, 2, 3, …"""

    keys: dict[int, bytearray] = field(default_factory=dict[int, bytearray])

    def add(self, key: int, number: int, uid: bytes) -> None:
        """An event that was committed. Raises ValueError when the key has that number already."""
        _put(self.keys.setdefault(key, bytearray()), number, uid)

    def __len__(self) -> int:
        """How many events."""
        return sum(len(uids) for uids in self.keys.values()) // UID_BYTES - len(self.gaps())

    def has(self, key: int, number: int, uid: bytes) -> bool:
        """Is this event committed under this key, number and uid?"""
        return number > 0 and _uid(self.keys.get(key, b""), number) == uid

    def gaps(self) -> list[tuple[int, int]]:
        """Key and number of what is missing below a key's last number: never, unless commits were taken back."""
        nothing = bytes(UID_BYTES)
        return [
            (key, number)
            for key, uids in self.keys.items()
            if uids.find(nothing) >= 0
            for number in range(1, len(uids) // UID_BYTES + 1)
            if _uid(uids, number) == nothing
        ]


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
        """Nothing is lost, made up, out of order, stuck, or there twice for no reason."""
        return not (self.lost or self.stuck or self.phantom or self.reordered or self.condemned or self.unexplained)

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

    def __init__(self, strikes: Iterable[Strike], sink: str) -> None:
        self._strikes = sorted((s for s in strikes if can_repeat(s.fault, sink)), key=lambda strike: strike.began)
        self._began = [strike.began for strike in self._strikes]
        self._since = _since(self._strikes)
        self._longest = max((strike.healed - strike.began for strike in self._strikes), default=0.0)

    def explain(self, repeated: Duplicate, times: Times) -> str | None:
        """The fault at which the event was in flight, the nearest of several; `times` are those of its key."""
        found: tuple[float, str] | None = None
        before, again = repeated.before, repeated.again
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
    keys = {key: Times(len(uids) // UID_BYTES) for key, uids in committed.keys.items()}
    newest: dict[int, int] = {}
    repeated: list[Duplicate] = []
    for arrival in arrivals:
        account.arrived += 1
        if not committed.has(arrival.key, arrival.number, arrival.uid):
            account.phantom += 1
            account.note("phantom", arrival.key, arrival.number, f"uid {arrival.uid.hex()} at {arrival.arrived:.3f}")
            continue
        times, place = keys[arrival.key], arrival.number - 1
        if times.first[place] != NEVER:
            repeated.append(Duplicate(arrival.key, arrival.number, times.last[place], arrival.arrived))
        else:
            times.emitted[place], times.first[place] = arrival.emitted, arrival.arrived
            if arrival.number < newest.get(arrival.key, 0):
                account.reordered += 1
                account.note("reordered", arrival.key, arrival.number, f"after {newest[arrival.key]}")
        times.last[place] = arrival.arrived
        newest[arrival.key] = max(arrival.number, newest.get(arrival.key, 0))
    for key in {duplicate.key for duplicate in repeated}:
        keys[key].fill()
    _explain(account, Faults(strikes, sink), repeated, keys)
    _missing(account, committed, keys, dead, backlog)
    return account


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
    gaps = set(committed.gaps())
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
            if time != NEVER or (key, place + 1) in gaps:
                continue
            if (key, place + 1) in dead.letters:
                account.dead += 1
                if (key, place + 1) not in dead.excused:
                    account.condemned += 1
                    account.note("dead for no reason", key, place + 1)
                continue
            missing += 1
            account.note("missing", key, place + 1)
    account.stuck = backlog
    account.lost = max(0, missing - backlog)


def _uid(uids: bytes | bytearray, number: int) -> bytes:
    return bytes(uids[(number - 1) * UID_BYTES : number * UID_BYTES])


def _put(uids: bytearray, number: int, uid: bytes) -> None:
    end = number * UID_BYTES
    if len(uids) < end:
        uids.extend(bytes(end - len(uids)))
    elif any(uids[end - UID_BYTES : end]):
        raise ValueError(f"number {number} is there twice: as {_uid(uids, number).hex()} and as {uid.hex()}")
    uids[end - UID_BYTES : end] = uid
