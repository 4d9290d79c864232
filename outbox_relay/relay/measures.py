"""The counters and histograms of one relay process, objects of prometheus-client that are set where things happen.

Names and labels are a contract with users: ``docs/observability.md`` lists them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import datetime
from typing import Final, Literal, NamedTuple, TypeAlias

import prometheus_client
from prometheus_client import CollectorRegistry, Counter, Histogram

from outbox_relay.domain.event import StoredEvent
from outbox_relay.domain.outcomes import Delivered, Failed, Refused, Unavailable, Verdict
from outbox_relay.formats.trace_context import trace_id

BOUNDS: Final = (
    *(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5),
    *(1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0),
)
"""The upper bounds of the buckets, in seconds. One more bucket has no bound."""
MOST_OBSERVED: Final = 64
"""Maximum number of observations of events that are counted together, which keeps the cost of a large batch small."""
EXEMPLAR_SECONDS: Final = 1.0
"""Least time between two exemplars of a sink."""
FIRST_YEAR: Final = 2000
"""The first year that a clock of a database can have. Before the first tick it is unknown."""

Outcome: TypeAlias = Literal["delivered", "failed", "refused", "unavailable"]
DeadReason: TypeAlias = Literal["refused", "exhausted", "undeliverable", "crashes"]
"""Why an event is dead: refused by the destination, out of attempts, faulty, or suspected of crashing relays."""

prometheus_client.disable_created_metrics()  # a time for each series, which no alert or panel needs


class DeliveredCall(NamedTuple):
    """A call that delivered one event in ``seconds``, and was answered at ``ended``, a ``time.monotonic()`` value."""

    event: StoredEvent
    seconds: float
    ended: float


class RelayMeasures:
    """The metrics of a process. A child with the label ``sink`` is made by ``SinkMeasures``."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry(auto_describe=False)
        self.delivered = self._counter("delivered", "Events that the destination acknowledged, repeated ones too.")
        self.attempts = self._counter("attempts", "Deliveries of an event that were tried, by outcome.", "outcome")
        self.attempt_seconds = self._histogram("attempt", "Duration of a call, by outcome.", "sink", "outcome")
        self.end_to_end = self._histogram(
            "end_to_end", "Time from the emit of an event, or from its scheduled time, to its acknowledgement.", "sink"
        )
        self.dead = self._counter("dead", "Events that became dead in the database, by reason.", "reason")
        self.tick = self._histogram("tick", "Duration of a tick.")
        self.read = self._histogram("read", "Duration of a statement that reads the log.", "sink")
        self.claim = self._histogram("claim", "Duration of a statement that claims rows.", "sink")
        self.settle = self._histogram("settle", "Duration of a settlement of events or of rows.", "sink")
        self.fired = Counter(
            "outbox_schedules_fired",
            "Times of schedules that this process fired, by outcome: emitted, passed_over, refused or failed.",
            ("outcome",),
            registry=self.registry,
        )
        for outcome in ("emitted", "passed_over", "refused", "failed"):
            self.fired.labels(outcome)

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(f"outbox_{name}", text, ("sink", *labels), registry=self.registry)

    def _histogram(self, name: str, text: str, *labels: str) -> Histogram:
        return Histogram(f"outbox_{name}_seconds", text, labels, unit="seconds", registry=self.registry, buckets=BOUNDS)


class SinkMeasures:
    """The metrics of one sink. Without a process they are not exported, as those of a replay."""

    def __init__(self, process: RelayMeasures | None = None, sink: str = "") -> None:
        process = process or RelayMeasures()
        self.process = process
        self._sink = sink
        self._delivered = process.delivered.labels(sink)
        self._end_to_end = process.end_to_end.labels(sink)
        self._exemplar_at = 0.0
        self.read, self.claim, self.settle = (
            each.labels(sink) for each in (process.read, process.claim, process.settle)
        )
        self.in_flight = 0
        """The number of calls that the sink has not answered."""
        self.row_leases_lost = 0
        """The number of rows whose lease ended before they were settled."""

    def begin_call(self) -> None:
        """Count a call to the sink."""
        self.in_flight += 1

    def end_call(self) -> None:
        """Stop counting a call, which was answered or cancelled."""
        self.in_flight -= 1

    def lost_rows(self, rows: int) -> None:
        """Count rows whose lease ended before they were settled."""
        self.row_leases_lost += rows

    def died(self, reasons: Iterable[DeadReason]) -> None:
        """Count events that are dead in the database."""
        for reason in reasons:
            self.process.dead.labels(self._sink, reason).inc()

    def attempted(self, verdict: Verdict, seconds: float) -> None:
        """Count an attempt that failed, by the verdict that counts. An event behind another one had no attempt."""
        if (outcome := outcome_of(verdict)) not in (None, "delivered"):
            self._attempts(outcome, 1, [seconds])

    def delivered(self, events: Sequence[StoredEvent], seconds: float, now: datetime) -> None:
        """Count events that one call of ``seconds`` delivered by ``now``, the database's time."""
        if events:
            self._attempts("delivered", len(events), [seconds])
            some = events[:: _step(len(events))]
            self._count_delivered(len(events), [(_waited(event, now), event) for event in some], now)

    def delivered_each(self, calls: Sequence[DeliveredCall], now: datetime, at: float) -> None:
        """Count calls that delivered one event each. ``now`` is the database's time at ``at``."""
        if calls:
            some = calls[:: _step(len(calls))]
            self._attempts("delivered", len(calls), [call.seconds for call in some])
            waited = [(_waited(call.event, now) - (at - call.ended), call.event) for call in some]
            self._count_delivered(len(calls), waited, now)

    def _attempts(self, outcome: str, count: int, seconds: Iterable[float]) -> None:
        self.process.attempts.labels(self._sink, outcome).inc(count)
        durations = self.process.attempt_seconds.labels(self._sink, outcome)
        for each in seconds:
            durations.observe(each)

    def _count_delivered(self, count: int, waited: list[tuple[float, StoredEvent]], now: datetime) -> None:
        """Count delivered events, of which some have ``waited``. The slowest of them may become an exemplar."""
        self._delivered.inc(count)
        if now.year < FIRST_YEAR:
            return
        slowest = None
        if abs(now.timestamp() - self._exemplar_at) >= EXEMPLAR_SECONDS:
            self._exemplar_at = now.timestamp()
            slowest = max(waited, key=lambda each: each[0])[1]
        for seconds, event in waited:
            self._end_to_end.observe(max(0.0, seconds), _exemplar(event) if event is slowest else None)


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


def _step(count: int) -> int:
    return -(-count // MOST_OBSERVED)


def _waited(event: StoredEvent, now: datetime) -> float:
    """Return the seconds since the event could be delivered."""
    due = event.deliver_at
    return (now - (event.created_at if due is None or due < event.created_at else due)).total_seconds()


def _exemplar(event: StoredEvent) -> dict[str, str]:
    trace = trace_id(event.headers)
    return {"uid": event.uid, **({"trace_id": trace} if trace else {})}
