"""Counts and durations of one process, as they are exported. Pure: the caller passes the time.

Recording is cheap and never raises. A call of many events costs no more than ``MOST_OBSERVED`` observations.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Sequence
from datetime import datetime
from typing import Final, Literal, NamedTuple, TypeAlias, get_args

from outbox_relay.domain.event import StoredEvent
from outbox_relay.domain.outcomes import Failed, Refused, Unavailable, Verdict

BOUNDS: Final = (
    *(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5),
    *(1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0),
)
"""The upper bounds of the buckets, in seconds. One more bucket has no bound."""
MOST_OBSERVED: Final = 64
"""Maximum number of observations for the events of one call. Each of them counts for several events."""
FIRST_YEAR: Final = 2000
"""The first year that a clock of a database can have. Before the first tick it is unknown."""

Outcome: TypeAlias = Literal["delivered", "failed", "refused", "unavailable"]
DeadReason: TypeAlias = Literal["refused", "exhausted", "undeliverable", "crashes"]
"""Why an event is dead: refused by the destination, out of attempts, faulty, or suspected of crashing relays."""
FiringOutcome: TypeAlias = Literal["emitted", "passed_over", "refused", "failed"]
"""The end of a time of a schedule: emitted, missed and not wanted, refused by the schema, or failed here."""


class DeliveredCall(NamedTuple):
    """A call that delivered one event in ``seconds``, and was answered at ``ended``, a ``time.monotonic()`` value."""

    event: StoredEvent
    seconds: float
    ended: float


class Distribution(NamedTuple):
    """A copy of a histogram: the count of each bucket, and the sum of the observations.

    ``longest`` is the longest observation of the present interval.
    """

    counts: tuple[int, ...]
    sum: float
    longest: float = math.inf


class Histogram:
    """Observed seconds by bucket."""

    __slots__ = ("_counts", "_longest", "_sum")

    def __init__(self) -> None:
        self._counts = [0] * (len(BOUNDS) + 1)
        self._sum = self._longest = 0.0

    @property
    def count(self) -> int:
        """The number of observations."""
        return sum(self._counts)

    def observe(self, seconds: float, weight: int = 1) -> None:
        """Add ``weight`` observations of ``seconds``, which count as 0 if a clock was set back."""
        if seconds < 0.0:
            seconds = 0.0
        self._counts[bisect_left(BOUNDS, seconds)] += weight
        self._sum += seconds * weight
        if seconds > self._longest:
            self._longest = seconds

    def copy(self) -> Distribution:
        """Return the present state."""
        return Distribution(tuple(self._counts), self._sum, self._longest)

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
        if left := len(events):
            self._attempts("delivered").observe(seconds, left)
            step = -(-left // MOST_OBSERVED)
            for event in events[::step]:
                self._waited(event, now, 0.0, min(step, left))
                left -= step

    def delivered_each(self, calls: Sequence[DeliveredCall], now: datetime, at: float) -> None:
        """Record calls that delivered one event each. ``now`` is the database's time at ``at``."""
        for event, seconds, ended in calls:
            self._attempts("delivered").observe(seconds)
            self._waited(event, now, at - ended, 1)

    def _waited(self, event: StoredEvent, now: datetime, ago: float, weight: int) -> None:
        """Observe the time since an event could be delivered, which was acknowledged ``ago`` seconds before ``now``."""
        begun, due = event.created_at, event.deliver_at
        if due is not None and due > begun:
            begun = due
        if now.year >= FIRST_YEAR:
            self.end_to_end.observe((now - begun).total_seconds() - ago, weight)

    def attempted(self, verdict: Verdict, seconds: float) -> None:
        """Record an attempt that failed, by the verdict that counts. An event behind another one had no attempt."""
        match verdict:
            case Failed():
                self._attempts("failed").observe(seconds)
            case Refused():
                self._attempts("refused").observe(seconds)
            case Unavailable(behind=False):
                self._attempts("unavailable").observe(seconds)
            case _:
                pass

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
        self.fired: Counter[FiringOutcome] = Counter(dict.fromkeys(get_args(FiringOutcome), 0))

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
    """Return the observations of a histogram in the interval that begins with ``before``."""
    if before is None:
        return after
    counts = tuple(max(0, new - old) for old, new in zip(before.counts, after.counts, strict=True))
    return Distribution(counts, max(0.0, after.sum - before.sum), after.longest)


def quantile(distribution: Distribution, share: float) -> float | None:
    """Return an estimate of a quantile in seconds, at most the longest observation; None without an observation.

    A quantile above the last bound is returned as the last bound.
    """
    total, seen = sum(distribution.counts), 0
    if not total:
        return None
    for bucket, count in enumerate(distribution.counts[: len(BOUNDS)]):
        if count and seen + count >= share * total:
            low = BOUNDS[bucket - 1] if bucket else 0.0
            estimate = low + (BOUNDS[bucket] - low) * max(0.0, share * total - seen) / count
            return min(distribution.longest, estimate)
        seen += count
    return BOUNDS[-1]
