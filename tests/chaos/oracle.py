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
  fault explains such a duplicate. An event that arrives again only after several rebases must be unsettled in each of
  their dumps: it was due from the first rebase on, and the last one made it due once more.
- An event may arrive twice after the rebase if the dump has its row and the positions do not cover it: relays may
  settle the row before they read the event again. All other duplicates after a rebase need a fault.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from tests.chaos.explanations import NEVER, USUAL, Backlog, Duplicate, Faults, Promise, Times
from tests.chaos.nemesis import Strike
from tests.chaos.timeline import UID_BYTES, Committed

Place = tuple[int, int]
"""Key, and number within the key."""


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
    backlog_of_rows = None if promise.ordered else Backlog(keys.values())
    faults = None if promise.exactly_once else Faults(strikes, sink, committed.restores, promise, backlog_of_rows)
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
