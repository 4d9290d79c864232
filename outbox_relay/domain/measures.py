"""Counts and durations of one process, as they are exported. Pure: the caller passes the time.

Recording is cheap and never raises. A call of many events costs no more than ``MOST_OBSERVED`` observations.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Iterable, Sequence
from datetime import datetime
from typing import Final, Literal, NamedTuple, TypeAlias, get_args

from outbox_relay.domain.event import StoredEvent
from outbox_relay.domain.outcomes import Delivered, Failed, Refused, Unavailable, Verdict

BOUNDS: Final = (
    *(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5),
    *(1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0),
)
"""The upper bounds of the buckets, in seconds. One more bucket has no bound."""
MOST_OBSERVED: Final = 64
"""Maximum number of observations for the events of one call. Each of them counts for several events."""
KEEP_EXEMPLAR_SECONDS: Final = 1.0
"""Minimum age of an exemplar before it is replaced."""
MOST_HEADER_CHARACTERS: Final = 4096
"""Maximum size of the headers of an event that are searched for the id of a trace."""
FIRST_YEAR: Final = 2000
"""The first year that a clock of a database can have. Before the first tick it is unknown."""

Outcome: TypeAlias = Literal["delivered", "failed", "refused", "unavailable"]
DeadReason: TypeAlias = Literal["refused", "exhausted", "undeliverable", "crashes"]
"""Why an event is dead: refused by the destination, out of attempts, faulty, or suspected of crashing relays."""

FiringOutcome: TypeAlias = Literal["emitted", "passed_over", "refused", "failed"]
"""The end of a time of a schedule: emitted, missed and not wanted, refused by the schema, or failed here."""
FIRING_OUTCOMES: Final[tuple[FiringOutcome, ...]] = get_args(FiringOutcome)


class Exemplar(NamedTuple):
    """An event that was observed. ``headers`` is None unless they may name a trace, and ``at`` is a POSIX time."""

    seconds: float
    uid: str
    headers: str | None
    at: float


class DeliveredCall(NamedTuple):
    """A call that delivered one event in ``seconds``, and was answered at ``ended``, a ``time.monotonic()`` value."""

    event: StoredEvent
    seconds: float
    ended: float


class Distribution(NamedTuple):
    """A copy of a histogram: the count of each bucket, the sum of the observations, and an exemplar per bucket.

    ``longest`` is the longest observation of the present interval.
    """

    counts: tuple[int, ...]
    sum: float
    exemplars: tuple[Exemplar | None, ...] = ()
    longest: float = math.inf


class Histogram:
    """Observed seconds by bucket."""

    __slots__ = ("_counts", "_exemplars", "_longest", "_sum")

    def __init__(self) -> None:
        self._counts = [0] * (len(BOUNDS) + 1)
        self._sum = self._longest = 0.0
        self._exemplars: list[Exemplar | None] = [None] * (len(BOUNDS) + 1)

    @property
    def count(self) -> int:
        """The number of observations."""
        return sum(self._counts)

    def observe(self, seconds: float, weight: int = 1) -> int:
        """Add ``weight`` observations of ``seconds``, and return the index of their bucket."""
        bucket = bisect_left(BOUNDS, seconds)
        self._counts[bucket] += weight
        self._sum += seconds * weight
        self._longest = max(self._longest, seconds)
        return bucket

    def observe_all(self, found: Sequence[float]) -> None:
        """Add an observation of each duration. The cost is mainly that of sorting them."""
        if not found:
            return
        ordered, counts, seen = sorted(found), self._counts, 0
        self._longest = max(self._longest, ordered[-1])
        for bucket, bound in enumerate(BOUNDS):
            upto = bisect_right(ordered, bound, seen)
            counts[bucket] += upto - seen
            seen = upto
        counts[-1] += len(ordered) - seen
        self._sum += sum(ordered)

    def observe_calls(self, calls: Sequence[DeliveredCall], now: datetime, at: float) -> None:
        """Add the time from the beginning of each event to the end of its call, and keep exemplars.

        ``now`` is the time at ``at``, a ``time.monotonic()`` value.
        """
        waited = [(now - _begun(event)).total_seconds() - (at - ended) for event, _, ended in calls]
        if min(waited) < 0.0:
            waited = [max(0.0, seconds) for seconds in waited]
        self.observe_all(waited)
        seen_at, exemplars = now.timestamp(), self._exemplars
        fresh = [kept is not None and 0.0 <= seen_at - kept.at < KEEP_EXEMPLAR_SECONDS for kept in exemplars]
        least, most = (bisect_left(BOUNDS, found) for found in (min(waited), max(waited)))
        if all(fresh[least : most + 1]):
            return
        for seconds, (event, _, _) in zip(waited, calls, strict=True):
            bucket = bisect_left(BOUNDS, seconds)
            if not fresh[bucket]:
                fresh[bucket] = True
                exemplars[bucket] = Exemplar(seconds, event.uid, _traced(event.headers), seen_at)

    def observe_events(self, events: Sequence[StoredEvent], weight: int, count: int, now: datetime) -> None:
        """Add the time from the beginning of each event to ``now``, and keep exemplars.

        Each event counts ``weight`` times, and the last one as often as is left of ``count``. This is one loop without
        calls of our own: it runs for every call of a sink.
        """
        counts, exemplars, at, total = self._counts, self._exemplars, now.timestamp(), 0.0
        waited, longest, bucket = 0.0, self._longest, 0
        for event in events:
            begun, due = event.created_at, event.deliver_at
            if due is not None and due > begun:
                begun = due
            waited = (now - begun).total_seconds()
            if waited < 0.0:
                waited = 0.0
            elif waited > longest:
                longest = waited
            bucket = bisect_left(BOUNDS, waited)
            counts[bucket] += weight
            total += waited
            kept = exemplars[bucket]
            if kept is None or not 0.0 <= at - kept.at < KEEP_EXEMPLAR_SECONDS:
                exemplars[bucket] = Exemplar(waited, event.uid, _traced(event.headers), at)
        surplus = weight * len(events) - count
        counts[bucket] -= surplus
        self._sum += weight * total - surplus * waited
        self._longest = longest

    def copy(self) -> Distribution:
        """Return the present state."""
        return Distribution(tuple(self._counts), self._sum, tuple(self._exemplars), self._longest)

    def begin_interval(self) -> None:
        """Forget the longest observation."""
        self._longest = 0.0


class SinkMeasures:
    """The counts and durations of one sink since the start of the process."""

    def __init__(self) -> None:
        self.attempts: dict[Outcome, Histogram] = {}
        """The duration of the call of each attempt, by outcome. Only outcomes that occurred are present."""
        self.end_to_end = Histogram()
        """The time from the emit of an event, or from its scheduled time, to its acknowledgement."""
        self.dead: Counter[DeadReason] = Counter()
        """The number of events that became dead, once that is in the database."""
        self.row_leases_lost = 0
        """The number of rows whose lease ended before they were settled."""
        self.in_flight = 0
        """The number of calls that the sink has not answered."""
        self.read, self.claim, self.settle = Histogram(), Histogram(), Histogram()
        """The durations of statements that read the log, claim rows, and settle events and rows."""

    @property
    def delivered_count(self) -> int:
        """The number of acknowledged events."""
        histogram = self.attempts.get("delivered")
        return histogram.count if histogram else 0

    def delivered(self, events: Sequence[StoredEvent], seconds: float, now: datetime) -> None:
        """Record events that one call of ``seconds`` delivered by ``now``, the database's time.

        Of many events, only some are observed, each with the weight of those up to the next.
        """
        count = len(events)
        if not count:
            return
        self._attempts("delivered").observe(seconds, count)
        if now.year < FIRST_YEAR:
            return
        step = -(-count // MOST_OBSERVED)
        self.end_to_end.observe_events(events[::step], step, count, now)

    def delivered_each(self, calls: Sequence[DeliveredCall], now: datetime, at: float) -> None:
        """Record calls that delivered one event each. ``now`` is the database's time at ``at``."""
        if not calls:
            return
        self._attempts("delivered").observe_all([seconds for _, seconds, _ in calls])
        if now.year >= FIRST_YEAR:
            self.end_to_end.observe_calls(calls, now, at)

    def attempted(self, verdict: Verdict, seconds: float) -> None:
        """Record an attempt that failed, by the verdict that counts. An event behind another one had no attempt."""
        outcome = outcome_of(verdict)
        if outcome is not None and outcome != "delivered":
            self._attempts(outcome).observe(seconds)

    def begin_call(self) -> None:
        """Count a call to the sink."""
        self.in_flight += 1

    def end_call(self) -> None:
        """Stop counting a call, which was answered or cancelled."""
        self.in_flight -= 1

    def died(self, reasons: Iterable[DeadReason]) -> None:
        """Count events that are dead in the database."""
        self.dead.update(reasons)

    def lost_rows(self, rows: int) -> None:
        """Count rows whose lease ended before they were settled."""
        self.row_leases_lost += rows

    def begin_interval(self) -> None:
        """Forget the longest observations of which percentiles are recorded."""
        for histogram in (self.end_to_end, self.read, self.claim, self.settle):
            histogram.begin_interval()

    def _attempts(self, outcome: Outcome) -> Histogram:
        histogram = self.attempts.get(outcome)
        if histogram is None:
            histogram = self.attempts[outcome] = Histogram()
        return histogram


class ScheduleMeasures:
    """The times of schedules that one process has fired, by outcome."""

    def __init__(self) -> None:
        self.fired: Counter[FiringOutcome] = Counter(dict.fromkeys(FIRING_OUTCOMES, 0))

    def count(self, outcome: FiringOutcome, times: int = 1) -> None:
        """Count times that had this outcome."""
        self.fired[outcome] += times


class RelayMeasures:
    """The counts and durations of one process that belong to no sink."""

    def __init__(self) -> None:
        self.tick = Histogram()
        """The durations of ticks."""
        self.schedules = ScheduleMeasures()


def since(before: Distribution | None, after: Distribution) -> Distribution:
    """Return the observations of a histogram in the interval that begins with ``before``, without exemplars."""
    if before is None:
        return Distribution(after.counts, after.sum, longest=after.longest)
    counts = tuple(max(0, new - old) for old, new in zip(before.counts, after.counts, strict=True))
    return Distribution(counts, max(0.0, after.sum - before.sum), longest=after.longest)


def quantile(found: Distribution, share: float) -> float | None:
    """Return an estimate of a quantile in seconds, at most the longest observation; None without an observation.

    A quantile above the last bound is returned as the last bound.
    """
    total, seen = sum(found.counts), 0
    if not total:
        return None
    for bucket, count in enumerate(found.counts[: len(BOUNDS)]):
        if count and seen + count >= share * total:
            low = BOUNDS[bucket - 1] if bucket else 0.0
            return min(found.longest, low + (BOUNDS[bucket] - low) * max(0.0, share * total - seen) / count)
        seen += count
    return BOUNDS[-1]


def outcome_of(verdict: Verdict) -> Outcome | None:
    """Return the outcome of an attempt, or None if the event was not attempted."""
    match verdict:
        case Delivered():
            return "delivered"
        case Failed():
            return "failed"
        case Refused():
            return "refused"
        case Unavailable(behind=True):
            return None
        case Unavailable():
            return "unavailable"


def _begun(event: StoredEvent) -> datetime:
    """Return the time from which on the event could be delivered."""
    due = event.deliver_at
    return event.created_at if due is None or due < event.created_at else due


def _traced(headers: str | None) -> str | None:
    """Return ``headers`` if they may name a trace and are small."""
    if headers is None or len(headers) >= MOST_HEADER_CHARACTERS or "traceparent" not in headers.lower():
        return None
    return headers
