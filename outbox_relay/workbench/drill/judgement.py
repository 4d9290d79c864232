"""Compares arrivals with the shop's ledger and with the promises. Pure.

Times are in seconds since 1970 by this machine's clock.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, fields

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
    of_time: bool = False
    """True if a busy machine may be the cause."""


@dataclass(frozen=True, slots=True)
class Repeats:
    """The duplicates that a fault explains: `most` of events that first arrived from `since` to `until`."""

    since: float
    until: float
    most: int


@dataclass(frozen=True, slots=True)
class Evidence:
    """The arrivals of a sink in their order, and the events that were due.

    `exempt` are uids of events that left the order of their key: dead letters that a person retried. `unanswered` are
    those of events of which a request had no answer, for example because it timed out. An event that first arrived in
    one of the `interruptions` may be repeated, since the session of a relay was restarted or its lease was lost.
    """

    sink: str
    arrivals: Sequence[Arrival]
    committed: AbstractSet[Identity]
    exempt: AbstractSet[str] = frozenset()
    unanswered: AbstractSet[str] = frozenset()
    interruptions: Sequence[tuple[float, float]] = ()


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


@dataclass(frozen=True, slots=True)
class DuplicateCounts:
    """Numbers of repeated arrivals, by what explains them."""

    fault: int
    interrupted: int
    unanswered: int
    unexplained: int


def count_duplicates(evidence: Evidence, repeats: Repeats | None) -> DuplicateCounts:
    """Count the duplicates by the first of these reasons that explains them."""
    first: dict[Identity, float] = {}
    counts: Counter[str] = Counter()
    for arrival in evidence.arrivals:
        event = (arrival.key, arrival.number, arrival.uid)
        if event in first:
            counts[_reason(first[event], arrival.uid, evidence, repeats)] += 1
        first.setdefault(event, arrival.arrived_at)
    return DuplicateCounts(*(counts[field.name] for field in fields(DuplicateCounts)))


def _reason(first: float, uid: str, evidence: Evidence, repeats: Repeats | None) -> str:
    """Return what explains the duplicate of an event that arrived first at a time, as a field of the counts."""
    if repeats is not None and repeats.since <= first <= repeats.until:
        return "fault"
    if any(since <= first <= until for since, until in evidence.interruptions):
        return "interrupted"
    return "unanswered" if uid in evidence.unanswered else "unexplained"


def _check_duplicates(evidence: Evidence, repeats: Repeats | None) -> Check:
    counts, most = count_duplicates(evidence, repeats), 0 if repeats is None else repeats.most
    found = [f"{counts.fault:,}"] if counts.fault or not counts.unexplained else []
    found += [f"{counts.interrupted:,} after lost leases or restarts"] if counts.interrupted else []
    found += [f"{counts.unanswered:,} after unanswered requests"] if counts.unanswered else []
    found += [f"{counts.unexplained:,} for no reason"] if counts.unexplained else []
    promised = f"at most {most:,}, of unsettled events" if repeats else "0"
    kept = not counts.unexplained and counts.fault <= most
    return Check(f"{evidence.sink}: duplicates", ", ".join(found), promised, kept)


def check_time(what: str, found: float, promised: float, grace: float) -> Check:
    """Return the check of a time in seconds; infinity means that it did not end. `grace` is added to the promise."""
    shown = "not" if found == NEVER else f"{max(found, 0.0):.1f} s"
    allowed = f" + {grace:g} s of grace" if grace else ""
    return Check(what, shown, f"at most {promised:.1f} s{allowed}", found <= promised + grace, of_time=True)


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
