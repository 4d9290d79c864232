"""Compares arrivals with the shop's ledger and with the promises. Pure.

Times are in seconds since 1970 by this machine's clock.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass

from outbox_relay.workbench.shop.checker import DeliveryChecker, Identity
from outbox_relay.workbench.shop.journal import Arrival

NEVER = math.inf


@dataclass(frozen=True, slots=True)
class Check:
    """One line of the judgement: what was looked at, what was found, and what is promised."""

    what: str
    found: str
    promised: str
    kept: bool


@dataclass(frozen=True, slots=True)
class Repeats:
    """The duplicates that a fault explains: `most` of events that first arrived from `since` to `until`."""

    since: float
    until: float
    most: int


@dataclass(frozen=True, slots=True)
class Evidence:
    """The arrivals of a sink in their order, and the events that were due.

    `exempt` are uids of events that left the order of their key: dead letters that a person retried.
    """

    sink: str
    arrivals: Sequence[Arrival]
    committed: AbstractSet[Identity]
    exempt: AbstractSet[str] = frozenset()


def check_deliveries(evidence: Evidence, repeats: Repeats | None) -> list[Check]:
    """Return the checks of loss, invention, order and duplicates; None for `repeats` allows no duplicate."""
    checker, lost = DeliveryChecker(), {event for event in evidence.committed if event[2] in evidence.exempt}
    for arrival in evidence.arrivals:
        if arrival.uid in evidence.exempt:
            lost.discard((arrival.key, arrival.number, arrival.uid))
        else:
            checker.add(arrival.key, arrival.number, arrival.uid)
    result = checker.result({event for event in evidence.committed if event[2] not in evidence.exempt})
    zeros = {
        "lost": result.lost + len(lost),
        "arrived without a commit": result.phantom,
        "out of order in their key": result.reordered,
    }
    return [
        Check(f"{evidence.sink}: committed events", f"{len(evidence.committed):,}", "some", bool(evidence.committed)),
        *(Check(f"{evidence.sink}: {what}", f"{count:,}", "0", count == 0) for what, count in zeros.items()),
        _check_duplicates(evidence, repeats),
    ]


def _check_duplicates(evidence: Evidence, repeats: Repeats | None) -> Check:
    what, (explained, others) = f"{evidence.sink}: duplicates", count_duplicates(evidence.arrivals, repeats)
    if repeats is None:
        return Check(what, f"{others:,}", "0", others == 0)
    return Check(
        what,
        f"{explained + others:,}, {others:,} of them of events that were settled before",
        f"at most {repeats.most:,}, of events not yet settled",
        others == 0 and explained <= repeats.most,
    )


def count_duplicates(arrivals: Iterable[Arrival], repeats: Repeats | None) -> tuple[int, int]:
    """Return the numbers of duplicates that the fault explains, and of others."""
    first: dict[tuple[str, int, str], float] = {}
    explained = others = 0
    for arrival in arrivals:
        event = (arrival.key, arrival.number, arrival.uid)
        if event not in first:
            first[event] = arrival.arrived_at
        elif repeats is not None and repeats.since <= first[event] <= repeats.until:
            explained += 1
        else:
            others += 1
    return explained, others


def check_time(what: str, found: float, promised: float, grace: float) -> Check:
    """Return the check of a time in seconds; infinity means that it did not end. `grace` is added to the promise."""
    shown = "not" if found == NEVER else f"{max(found, 0.0):.1f} s"
    allowed = f" + {grace:g} s of grace" if grace else ""
    return Check(what, shown, f"at most {promised:.1f} s{allowed}", found <= promised + grace)


def check_none(what: str, count: int) -> Check:
    """Return the check of a number that must be 0."""
    return Check(what, f"{count:,}", "0", count == 0)


def first_of_any(arrivals: Iterable[Arrival], since: float) -> float:
    """Return the time of the first arrival of an event that was emitted at `since` or later."""
    return min((each.arrived_at for each in arrivals if each.emitted_at >= since), default=NEVER)


def first_of_every(arrivals: Iterable[Arrival], since: float, shards: Mapping[str, int]) -> float:
    """Return when the last of all shards received its first event that was emitted at `since` or later.

    `shards` has the shard of each key; keys without one are ignored.
    """
    first: defaultdict[int, float] = defaultdict(lambda: NEVER)
    for each in arrivals:
        if each.emitted_at >= since and each.key in shards:
            first[shards[each.key]] = min(first[shards[each.key]], each.arrived_at)
    return max((first[shard] for shard in set(shards.values())), default=NEVER)


def longest_delay(
    arrivals: Iterable[Arrival], since: float, until: float, without: AbstractSet[str] = frozenset()
) -> float:
    """Return the longest time from emit to first arrival of events emitted between two times, but for some keys."""
    first: dict[str, float] = {}
    for each in arrivals:
        if since <= each.emitted_at <= until and each.key not in without:
            first.setdefault(each.uid, each.latency_seconds)
    return max(first.values(), default=NEVER)
