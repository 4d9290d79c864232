"""The parts that deliver for one sink, and the outcomes of its events."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import NamedTuple
from uuid import UUID

from outbox_relay.domain.attempts import AttemptRecord, failure_record
from outbox_relay.domain.errors import LeaseLost
from outbox_relay.domain.event import StoredEvent
from outbox_relay.domain.in_flight import BlockedKeys, Chunk
from outbox_relay.domain.lease_clock import lease_clock
from outbox_relay.domain.measures import DeadReason, SinkMeasures
from outbox_relay.domain.outcomes import (
    Attempt,
    DeadLetter,
    Done,
    Failed,
    Refused,
    RetryLater,
    StandStill,
    Unavailable,
    Verdict,
    clip,
    decide,
)
from outbox_relay.domain.retry import requested_delay
from outbox_relay.domain.sink_limits import spread_of
from outbox_relay.domain.sink_spec import SinkSpec
from outbox_relay.postgres.rows import NewRow
from outbox_relay.relay.breaker import CircuitBreaker, Permit
from outbox_relay.relay.due_timer import DueTimer
from outbox_relay.relay.limiter import ConcurrencyLimiter
from outbox_relay.relay.parked_limit import ParkedLimit
from outbox_relay.relay.settler import Settler
from outbox_relay.relay.shared_limits import Admission, SharedLimits
from outbox_relay.relay.sink_leases import SinkLeases
from outbox_relay.relay.sink_report import SinkReport
from outbox_relay.relay.turns import Source
from outbox_relay.sinks import Sink

LEASE_MARGIN_SECONDS = 5.0
"""Minimum time by which the lease of a row outlasts the time limit of its request."""
SUSPECT_CRASHES = 2
"""Lapsed leases of a shard from which on its next events become rows, where claims are counted."""
SUSPECT_CLAIMS = 2
"""Claims with which such rows begin.

They are claimed together once, since most owners crash for another reason. Rows that were claimed three times without
an outcome are claimed alone.
"""


class _Tried(NamedTuple):
    """The record of an event's first attempt that its row begins with."""

    attempts: int = 0
    error: str | None = None
    status: int | None = None
    attempt: Attempt | None = None
    record: AttemptRecord | None = None
    dead: DeadReason | None = None


class CallResult(NamedTuple):
    """The verdicts of one call, and its duration in ``seconds``."""

    verdicts: Sequence[Verdict]
    seconds: float


NOT_TRIED = _Tried()


@dataclass(frozen=True, slots=True)
class DeliveryContext:
    """The parts of a session that the dispatcher and the parked deliveries share.

    ``now`` returns the database's time as far as it is known, and ``noise`` a number from [-1, 1]. ``limiter`` bounds
    the requests in flight of a sink of one request per event, ``limits`` those of all relays, and their rate.
    ``blocked`` are the keys whose events become rows.
    """

    spec: SinkSpec
    sink: Sink
    leases: SinkLeases
    blocked: BlockedKeys
    settler: Settler
    breaker: CircuitBreaker
    limiter: ConcurrencyLimiter
    limits: SharedLimits
    parked_limit: ParkedLimit
    report: SinkReport
    due_timer: DueTimer
    now: Callable[[], datetime]
    noise: Callable[[], float]
    measures: SinkMeasures = field(default_factory=SinkMeasures)

    @property
    def flows(self) -> bool:
        """True if events can be delivered or parked now."""
        return self.breaker.closed and not self.parked_limit.full

    # -- delivery ---------------------------------------------------------------------------------------------

    def until(self, events: Iterable[StoredEvent]) -> float:
        """Return the ``lease_clock()`` value by which ``events`` must be handed over.

        Raises ``LeaseLost`` if it has passed.
        """
        until = self.leases.until({event.shard for event in events})
        if lease_clock() >= until:
            raise LeaseLost(f"sink {self.spec.name}: a lease could not be renewed in time")
        return until

    async def admit(self, source: Source, most: int = 1) -> Admission:
        """Wait until the limits of all relays allow a request with up to ``most`` events."""
        source = source if self.spec.replay is None else "replay"
        return await self.limits.admit(source, most)

    def must_wait(self, event: StoredEvent) -> bool:
        """Return True if the event could only become a row behind others, while the destination may be down.

        Such rows would grow with the backlog. The position of the sink waits instead.
        """
        is_blocked = event.key in self.blocked and self.keyed(event)
        return is_blocked and self.breaker.may_be_down(self.spec.park_after_seconds)

    @property
    def may_release(self) -> bool:
        """True if the limits of all relays let drained shards be released. Those of a replay have no share."""
        return self.spec.replay is not None or self.limits.may_release(self.sink.timeout_seconds)

    async def deliver(self, events: Sequence[StoredEvent]) -> CallResult:
        """Deliver events of owned shards, and return a verdict for each.

        Raises ``LeaseLost`` if a lease ended before all of them were handed over.
        """
        until = self.until(events)
        answer = await self.call(events, until)
        if lease_clock() >= until and any(isinstance(verdict, Unavailable) for verdict in answer.verdicts):
            self.until(events)
        return answer

    async def call(self, events: Sequence[StoredEvent], until: float, attempt: int = 0) -> CallResult:
        """Call the sink, as ``Sink.deliver`` says, and time the call."""
        began = time.monotonic()
        self.measures.begin_call()
        try:
            return CallResult(await self.sink.deliver(events, until, attempt), time.monotonic() - began)
        finally:
            self.measures.end_call()

    def delivered(self, permit: Permit) -> None:
        """Record that the destination accepted an event."""
        self.breaker.delivered(permit)
        self.report.delivered()

    def judged(
        self, event: StoredEvent, answered: Verdict, permit: Permit, seconds: float, *, failed_before: bool = False
    ) -> Verdict:
        """Report the verdict of a call of ``seconds`` to the circuit, and return the verdict that counts."""
        verdict = self._judged(event, answered, permit, failed_before=failed_before)
        self.measures.attempted(verdict, seconds)
        return verdict

    def _judged(self, event: StoredEvent, verdict: Verdict, permit: Permit, *, failed_before: bool) -> Verdict:
        """Report ``verdict`` to the circuit, and return the verdict that counts.

        While the circuit is not closed, a failure is the destination's and not the event's. A probe that is refused for
        good, or fails as a probe again, nevertheless counts. Otherwise a key whose first event always fails would never
        let the circuit close.

        The failure of an event that ``failed_before`` says little about the destination. Such events come together when
        their delays end, and would open the circuit for all others.
        """
        match verdict:
            case Failed() | Refused(status=int()):
                return self._failed(event, verdict, permit, failed_before=failed_before)
            case Unavailable(behind=True):
                self.breaker.unused(permit)
            case Unavailable(part=None):
                self._unavailable(event, verdict, permit)
            case Unavailable(part=str(part)):
                self.breaker.unused(permit)
                self.parked_limit.report_trouble(part, verdict.reason)
            case Refused():  # without a status: it was not sent
                self.breaker.unused(permit)
            case _:
                self.delivered(permit)
                self.limiter.increase()
        return verdict

    def _failed(self, event: StoredEvent, verdict: Failed | Refused, permit: Permit, *, failed_before: bool) -> Verdict:
        if failed_before and self.breaker.holds(permit):
            self.breaker.answered(permit)
            return verdict
        counts = self.breaker.failed(event.id, verdict.reason, permit)
        if counts or (permit.probe and isinstance(verdict, Refused)):
            return verdict
        retry_after = verdict.retry_after_seconds if isinstance(verdict, Failed) else None
        return Unavailable(verdict.reason, verdict.status, retry_after, verdict.attempt)

    def _unavailable(self, event: StoredEvent, verdict: Unavailable, permit: Permit) -> None:
        retry_after = requested_delay(verdict.retry_after_seconds, self.spec.retry, self.noise())
        at_once = self.sink.keeps_order
        opened = self.breaker.unavailable(event.id, verdict, permit, at_once=at_once, retry_after=retry_after)
        if opened and verdict.throttled:
            self.limiter.decrease()

    def keyed(self, event: StoredEvent) -> bool:
        """Return True if the event takes part in the order of a key."""
        return self.spec.ordered and event.key is not None

    # -- outcomes of events of the log ------------------------------------------------------------------------

    def apply(self, chunk: Chunk, index: int, verdict: Verdict, permit: Permit, seconds: float) -> bool:
        """Settle the event at ``index`` by its first verdict, which a call of ``seconds`` returned.

        Return False if it stays in flight.
        """
        event = chunk.events[index]
        settlement = decide(0, self.judged(event, verdict, permit, seconds), self.spec.retry, self.noise())
        record = failure_record(self.spec.record_attempts, event, settlement, 0, time.monotonic())
        match settlement:
            case Done():
                self.done(chunk, index, verdict, seconds)
            case RetryLater(delay, attempts, error, status, attempt):
                self.park(chunk, index, "waiting", due_in=delay, tried=_Tried(attempts, error, status, attempt, record))
            case DeadLetter(attempts, error, status, attempt, refused):
                dead: DeadReason = "refused" if refused else "exhausted"
                self.park(chunk, index, "dead", tried=_Tried(attempts, error, status, attempt, record, dead))
            case StandStill():
                return False
        return True

    def done(self, chunk: Chunk, index: int, verdict: Verdict, seconds: float) -> None:
        """Settle the event at ``index``, which a call of ``seconds`` delivered."""
        self.record_delivered((chunk.events[index],), (verdict,), seconds)
        self.settler.done(chunk, index)

    def record_delivered(self, events: Sequence[StoredEvent], verdicts: Sequence[Verdict], seconds: float) -> None:
        """Count the delivery of events at their first attempt, and record it if the sink records all attempts.

        To be called before they are settled, so that no position covers a delivery without its record.
        """
        self.measures.delivered(events, seconds, self.now())
        if self.spec.record_attempts == "all":
            self.settler.record(events, verdicts)

    def park_unless_deliverable(self, chunk: Chunk, index: int) -> bool:
        """Park the event at ``index`` if it must not be delivered now.

        Return True if it was parked.

        Events with a fault are dead at once. Scheduled events whose part of ``spread_seconds`` has not passed leave the
        order of their key. Events of a blocked key wait for the rows of that key. Events of a shard with several
        crashed owners become rows, where claims are counted.
        """
        event = chunk.events[index]
        if event.fault is not None:
            self.park(chunk, index, "dead", tried=_Tried(error=clip(event.fault), dead="undeliverable"))
        elif (due_in := self._spread_left(event)) > 0:
            self.park(chunk, index, "waiting", ordered=False)
            self.due_timer.schedule_wakeup(due_in)
        elif event.key in self.blocked and self.keyed(event):
            self.park(chunk, index, "held")
        elif self._crashes(event) >= SUSPECT_CRASHES:
            self.park(chunk, index, "waiting", claims=SUSPECT_CLAIMS, due_in=0.0)
        else:
            return False
        return True

    def _spread_left(self, event: StoredEvent) -> float:
        """Return the seconds until a scheduled event is due here, 0 or less if it is."""
        spread = self.leases.limits.spread_seconds
        if event.deliver_at is None or spread is None or self.spec.replay is not None:
            return 0.0
        return (event.deliver_at - self.now()).total_seconds() + spread_of(event.uid, spread)

    def defer(self, chunk: Chunk, index: int) -> None:
        """Park the event at ``index`` until the next probe of the destination."""
        if not self.park_unless_deliverable(chunk, index):
            self.park(chunk, index, "waiting", due_in=self.spec.circuit.probe_seconds)

    def _crashes(self, event: StoredEvent) -> int:
        lease = self.leases.held.get(event.shard)
        if lease is None:
            raise LeaseLost(f"sink {self.spec.name}: a shard was lost while its events were in hand")
        return lease.crashes

    def park(
        self,
        chunk: Chunk,
        index: int,
        state: str,
        *,
        ordered: bool | None = None,
        due_in: float | None = None,
        claims: int = 0,
        lease: UUID | None = None,
        lease_for: float | None = None,
        tried: _Tried = NOT_TRIED,
    ) -> int:
        """Make the event at ``index`` a row.

        Return the number of the settlement that writes it.
        """
        event = chunk.events[index]
        takes_part = self.keyed(event) if ordered is None else ordered
        row = NewRow(
            *(event.id, event.shard, state, takes_part, due_in, tried.attempts, claims, lease, lease_for),
            *(tried.error, tried.status, tried.attempt, tried.record),
        )
        if state == "dead":
            self.report.dead(event, tried.status, tried.attempt)
        spread = state == "waiting" and due_in is None
        if state != "dead" and not spread:
            self.parked_limit.add()
        blocks = takes_part and (state != "dead" or self.spec.hold)
        if due_in is not None and state != "dead":
            self.due_timer.schedule_wakeup(due_in)
        return self.settler.park(chunk, index, row, blocks=blocks, dead=tried.dead)
