"""The decision on an event by its verdict, read from the log or claimed as a row: the only place that makes it."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import NamedTuple, Protocol
from uuid import UUID

from structlog.stdlib import BoundLogger

from outbox_relay.domain.attempts import AttemptRecord, delivery_record, failure_record
from outbox_relay.domain.circuit import Circuit
from outbox_relay.domain.errors import LeaseLost
from outbox_relay.domain.event import StoredEvent
from outbox_relay.domain.in_flight import BlockedKeys, Chunk
from outbox_relay.domain.outcomes import (
    DELIVERED,
    Attempt,
    DeadLetter,
    Delivered,
    Done,
    Failed,
    Refused,
    RetryLater,
    Settlement,
    StandStill,
    Unavailable,
    Verdict,
    clip,
    decide,
)
from outbox_relay.domain.sink_limits import spread_of
from outbox_relay.domain.times import lease_clock
from outbox_relay.postgres.rows import ClaimedRow, NewRow, RowUpdate
from outbox_relay.postgres.store import Store
from outbox_relay.relay.calls import Permit, SentCall
from outbox_relay.relay.limits import RateShare, RowBound, Slots
from outbox_relay.relay.measures import DeadReason, DeliveredCall, SinkMeasures
from outbox_relay.relay.settle import Settler
from outbox_relay.relay.sink_leases import SinkLeases
from outbox_relay.relay.sink_spec import SinkSpec
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
MOST_CLAIMS = 5
"""Claims without an outcome after which a row is dead, since it may stop every relay that delivers it."""
GONE_SECONDS = 10.0
"""Minimum pause after a destination reports that it is gone. By then every relay knows that the sink is paused."""


class Clock(Protocol):
    """The clocks of this process, in seconds, and its source of jitter."""

    def monotonic(self) -> float:
        """Return the time by which durations are measured."""
        ...

    def lease(self) -> float:
        """Return the time by which leases are measured: it counts while the machine is suspended."""
        ...

    def noise(self) -> float:
        """Return a random number from [-1, 1]."""
        ...


class SystemClock:
    """The clocks of the system."""

    monotonic = staticmethod(time.monotonic)
    lease = staticmethod(lease_clock)

    @staticmethod
    def noise() -> float:
        """Return a random number from [-1, 1]."""
        return random.uniform(-1.0, 1.0)  # noqa: S311 - jitter is no secret


@dataclass(slots=True)
class Parts:
    """The parts that the loop of a sink works with."""

    spec: SinkSpec
    sink: Sink
    store: Store
    leases: SinkLeases
    relay: UUID
    """The id of this relay process."""
    log: BoundLogger
    clock: Clock = field(default_factory=SystemClock)
    measures: SinkMeasures = field(default_factory=SinkMeasures)
    now: datetime = field(default_factory=lambda: datetime.min.replace(tzinfo=UTC))
    """The database's time at the newest tick."""
    now_at: float = 0.0
    """The time of the clock then."""

    def db_time(self, ago: float = 0.0) -> datetime:
        """Return the database's time, as far as it is known, ``ago`` seconds ago."""
        return self.now + timedelta(seconds=self.clock.monotonic() - self.now_at - ago)


class _Tried(NamedTuple):
    """The record of an event's first attempt that its row begins with."""

    attempts: int = 0
    error: str | None = None
    status: int | None = None
    attempt: Attempt | None = None
    record: AttemptRecord | None = None
    dead: DeadReason | None = None


NOT_TRIED = _Tried()


class Outcomes:
    """Applies verdicts to the circuit, the limits and the next settlement of one session.

    ``blocked`` are the keys whose events become rows. ``on_dead`` is called with each dead letter, for the log. Nothing
    is sent while ``may_run`` returns False.
    """

    def __init__(
        self,
        parts: Parts,
        circuit: Circuit,
        settler: Settler,
        blocked: BlockedKeys,
        slots: Slots,
        limits: RateShare,
        bound: RowBound,
        on_dead: Callable[[StoredEvent, int | None, Attempt | None], None],
        may_run: Callable[[], bool] = lambda: True,
    ) -> None:
        self.parts = parts
        self.circuit = circuit
        self.settler = settler
        self.blocked = blocked
        self.slots = slots
        self.limits = limits
        self.bound = bound
        self._on_dead = on_dead
        self._unmeasured: list[DeliveredCall] = []
        self.next_due = float("inf")
        """The time at which the next row that this session made or gave back is due, in seconds of the clock."""
        self.handing_over = False
        """True if nothing is sent any more, since shards are given up with events in flight."""
        self._may_run = may_run
        self.is_replay = parts.spec.replay is not None
        self.gone: str | None = None
        """The reason given by a destination that reported that it is gone, until the sink is paused."""
        self.awaited = 0
        """The number of claimed rows that have no outcome yet."""

    @property
    def may_send(self) -> bool:
        """True unless nothing may be sent, whatever the circuit says."""
        return not self.handing_over and self._may_run()

    @property
    def flows(self) -> bool:
        """True if events can be delivered or become rows now."""
        return self.circuit.state == "closed" and self.may_send and not self.bound.full

    def until(self, events: Sequence[StoredEvent]) -> float:
        """Return the ``lease_clock()`` value by which ``events`` must be handed over.

        Raises ``LeaseLost`` if it has passed.
        """
        until = self.parts.leases.until({event.shard for event in events})
        if self.parts.clock.lease() >= until:
            raise LeaseLost(f"sink {self.parts.spec.name}: a lease could not be renewed in time")
        return until

    def keyed(self, event: StoredEvent) -> bool:
        """Return True if the event takes part in the order of a key."""
        return self.parts.spec.ordered and event.key is not None

    def must_wait(self, event: StoredEvent, now: float) -> bool:
        """Return True if the event could only become a row behind others, while the destination may be down.

        Such rows would grow with the backlog. The position of the sink waits instead.
        """
        return event.key in self.blocked and self.keyed(event) and self._may_be_down(now)

    def _may_be_down(self, now: float) -> bool:
        """Return True if nothing was delivered since the circuit opened, or since an attempt was unavailable.

        For ``park_after_seconds`` this holds after any other failure too. By then another attempt shows what it means.
        """
        circuit = self.circuit
        if circuit.state != "closed" or circuit.unavailable_since is not None:
            return True
        since = circuit.failing_since
        return since is not None and now - since < self.parts.spec.park_after_seconds

    def may_release(self, now: float) -> bool:
        """Return True if the limits of all relays let drained shards be released. Those of a replay have no share."""
        return self.is_replay or self.limits.may_release(self.parts.sink.timeout_seconds, now)

    # -- the circuit --------------------------------------------------------------------------------------------

    def delivered(self, permit: Permit) -> None:
        """Record that the destination accepted an event."""
        self.circuit.delivered(permit.term)
        self.slots.increase()

    def judged(
        self, event: StoredEvent, answered: Verdict, permit: Permit, seconds: float, *, failed_before: bool = False
    ) -> Verdict:
        """Report the verdict of a call of ``seconds`` to the circuit, and return the verdict that counts."""
        verdict = self._judged(event, answered, permit, failed_before=failed_before)
        self.parts.measures.attempted(verdict, seconds)
        return verdict

    def _judged(self, event: StoredEvent, verdict: Verdict, permit: Permit, *, failed_before: bool) -> Verdict:
        """Report ``verdict`` to the circuit, and return the verdict that counts.

        While the circuit is not closed, a failure is the destination's and not the event's. A probe that is refused for
        good, or fails as a probe again, nevertheless counts. Otherwise a key whose first event always fails would never
        let the circuit close.

        The failure of an event that ``failed_before`` says little about the destination. Such events come together when
        their delays end, and would open the circuit for all others.

        What is not reported here says nothing about the destination: a probe of that kind was in vain.
        """
        match verdict:
            case Delivered():
                self.delivered(permit)
            case Failed() | Refused(status=int()):
                return self._failed(event, verdict, permit, failed_before=failed_before)
            case Unavailable(part=None, behind=False):
                self._unavailable(event, verdict, permit)
            case Unavailable(part=str(part), behind=False):
                self.bound.report_trouble(part, verdict.reason, self.parts.clock.monotonic())
            case _:
                pass
        return verdict

    def _failed(self, event: StoredEvent, verdict: Failed | Refused, permit: Permit, *, failed_before: bool) -> Verdict:
        circuit, is_current = self.circuit, permit.term == self.circuit.term
        holds = is_current and circuit.state == "closed"
        if failed_before and holds:
            circuit.answered(permit.term)
            return verdict
        counts = holds or (is_current and event.id in circuit.refused_probes)
        circuit.failed(event.id, verdict.reason, self.parts.clock.monotonic(), permit.term)
        if counts or (permit.probe and isinstance(verdict, Refused)):
            return verdict
        retry_after = verdict.retry_after_seconds if isinstance(verdict, Failed) else None
        return Unavailable(verdict.reason, verdict.status, retry_after, verdict.attempt)

    def _unavailable(self, event: StoredEvent, verdict: Unavailable, permit: Permit) -> None:
        policy = self.parts.spec.settings.retry
        retry_after = policy.requested_delay(verdict.retry_after_seconds, self.parts.clock.noise())
        if verdict.gone:
            self.gone = verdict.reason
            retry_after = max(retry_after, GONE_SECONDS)
        opened = self.circuit.unavailable(
            *(event.id, verdict.reason, self.parts.clock.monotonic(), permit.term),
            at_once=self.parts.sink.keeps_order or verdict.throttled or verdict.gone,
            retry_after=retry_after,
        )
        if opened and verdict.throttled:
            self.slots.decrease()

    # -- events of the log --------------------------------------------------------------------------------------

    def apply(self, chunk: Chunk, index: int, verdict: Verdict, permit: Permit, seconds: float) -> bool:
        """Settle the event at ``index`` by its first verdict. Return False if it stays in flight."""
        event = chunk.events[index]
        settlement, record = self._decide(event, 0, self.judged(event, verdict, permit, seconds))
        match settlement:
            case Done():
                self.record_delivered((event,), (verdict,), seconds)
                self.settler.done(chunk, index)
            case RetryLater(delay, attempts, error, status, attempt):
                self.park(chunk, index, "waiting", due_in=delay, tried=_Tried(attempts, error, status, attempt, record))
            case DeadLetter(attempts, error, status, attempt, refused):
                dead: DeadReason = "refused" if refused else "exhausted"
                self.park(chunk, index, "dead", tried=_Tried(attempts, error, status, attempt, record, dead))
            case StandStill():
                return False
        return True

    def _decide(self, event: StoredEvent, attempts: int, verdict: Verdict) -> tuple[Settlement, AttemptRecord | None]:
        spec, clock = self.parts.spec, self.parts.clock
        settlement, mode = decide(attempts, verdict, spec.settings.retry, clock.noise()), spec.settings.record_attempts
        return settlement, failure_record(mode, event, settlement, attempts, clock.monotonic())

    def record_delivered(
        self, events: Sequence[StoredEvent], verdicts: Sequence[Verdict] | None, seconds: float
    ) -> None:
        """Count the delivery of events at their first attempt, and record it if the sink records all attempts."""
        self.parts.measures.delivered(events, seconds, self.parts.db_time())
        if self.parts.spec.settings.record_attempts == "all":
            now = self.parts.clock.monotonic()
            for event, verdict in zip(events, verdicts or [DELIVERED] * len(events), strict=True):
                if isinstance(verdict, Delivered) and (record := delivery_record("all", event, verdict, 0, now)):
                    self.settler.record(record)

    def park_unless_deliverable(self, chunk: Chunk, index: int) -> bool:
        """Make the event at ``index`` a row if it must not be delivered now. Return True if it became one.

        Events with a fault are dead at once. Scheduled events whose part of ``spread_seconds`` has not passed leave the
        order of their key. Events of a blocked key wait for the rows of that key. Events of a shard with several
        crashed owners become rows, where claims are counted.
        """
        event = chunk.events[index]
        if event.fault is not None:
            self.park(chunk, index, "dead", tried=_Tried(error=clip(event.fault), dead="undeliverable"))
        elif (due_in := self._spread_left(event)) > 0:
            self.park(chunk, index, "waiting", ordered=False)
            self.due_in(due_in)
        elif event.key in self.blocked and self.keyed(event):
            self.park(chunk, index, "held")
        elif self._crashes(event) >= SUSPECT_CRASHES:
            self.park(chunk, index, "waiting", claims=SUSPECT_CLAIMS, due_in=0.0)
        else:
            return False
        return True

    def _spread_left(self, event: StoredEvent) -> float:
        """Return the seconds until a scheduled event is due here, 0 or less if it is."""
        spread = self.parts.leases.limits.spread_seconds
        if event.deliver_at is None or spread is None or self.is_replay:
            return 0.0
        return (event.deliver_at - self.parts.db_time()).total_seconds() + spread_of(event.uid, spread)

    def _crashes(self, event: StoredEvent) -> int:
        lease = self.parts.leases.held.get(event.shard)
        if lease is None:
            raise LeaseLost(f"sink {self.parts.spec.name}: a shard was lost while its events were in hand")
        return lease.crashes

    def defer(self, chunk: Chunk, index: int) -> None:
        """Make the event at ``index`` a row that is due at the next probe of the destination."""
        if not self.park_unless_deliverable(chunk, index):
            self.park(chunk, index, "waiting", due_in=self.parts.spec.settings.circuit.probe_seconds)

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
    ) -> None:
        """Make the event at ``index`` a row of the next settlement."""
        event = chunk.events[index]
        takes_part = self.keyed(event) if ordered is None else ordered
        row = NewRow(
            *(event.id, event.shard, state, takes_part, due_in, tried.attempts, claims, lease, lease_for),
            *(tried.error, tried.status, tried.attempt, tried.record),
        )
        if state == "dead":
            self._on_dead(event, tried.status, tried.attempt)
        elif state == "held" or due_in is not None:
            self.bound.add()
        if due_in is not None and state != "dead":
            self.due_in(due_in)
        blocks = takes_part and (state != "dead" or self.parts.spec.hold)
        self.settler.park(chunk, index, row, blocks=blocks, dead=tried.dead)

    def due_in(self, seconds: float) -> None:
        """Record that a row is due in ``seconds``."""
        self.next_due = min(self.next_due, self.parts.clock.monotonic() + seconds)

    # -- claimed rows -------------------------------------------------------------------------------------------

    def expect(self, count: int) -> None:
        """Record that ``count`` claimed rows will have an outcome."""
        self.awaited += count

    def deliverable(self, claimed: Sequence[ClaimedRow]) -> list[ClaimedRow]:
        """Return the rows that may be sent.

        Rows that can never be delivered are dead. With when_dead = "hold" the later rows of their keys go back.
        """
        rows, stopped = list[ClaimedRow](), set[str]()
        for row in claimed:
            key = row.event.key if row.ordered else None
            if key in stopped:
                self.settler.send_back(row, RowUpdate(row.event.id, row.lease, row.attempts))
            elif (dead := self._never(row)) is None:
                rows.append(row)
            else:
                reason, error = dead
                self._send_back(row, RowUpdate(row.event.id, row.lease, row.attempts, "dead", None, error), reason)
                if key is not None and self.parts.spec.hold:
                    stopped.add(key)
        self.expect(len(rows))
        return rows

    def _never(self, row: ClaimedRow) -> tuple[DeadReason, str] | None:
        """Return why a row can never be delivered, or None."""
        if row.claims > MOST_CLAIMS:
            crashes = f"claimed {row.claims - 1} times without an outcome"
            return "crashes", f"{crashes}: it may have crashed the relays that delivered it"
        return None if row.event.fault is None else ("undeliverable", row.event.fault)

    def give_back(self, rows: Collection[ClaimedRow]) -> None:
        """Give back rows that were claimed and not tried."""
        self.awaited -= len(rows)
        for row in rows:
            self.settler.send_back(row, RowUpdate(row.event.id, row.lease, row.attempts))

    def rows_answered(self, rows: Sequence[ClaimedRow], call: SentCall) -> set[str]:
        """Settle the rows of a call. Those that were not tried, such as behind a failed row of their key, go back.

        Return the keys of which a row was not delivered.
        """
        self.awaited -= len(rows)
        if call.verdicts is None:
            self.delivered(call.permit)
            for row in rows:
                self._row_delivered(row, DELIVERED, call.seconds)
            return set()
        stopped: set[str] = set()
        for row, verdict in zip(rows, call.verdicts, strict=True):
            key = row.event.key if self.keyed(row.event) else None
            if isinstance(verdict, Unavailable) and (verdict.untouched or key in stopped):
                self.settler.send_back(row, RowUpdate(row.event.id, row.lease, row.attempts))
            else:
                self._row_answered(row, verdict, call)
            if key is not None and not isinstance(verdict, Delivered):
                stopped.add(key)
        return stopped

    def _row_answered(self, row: ClaimedRow, verdict: Verdict, call: SentCall) -> None:
        event = row.event
        judged = self.judged(event, verdict, call.permit, call.seconds, failed_before=row.attempts > 0)
        settlement, record = self._decide(event, row.attempts, judged)
        dead: DeadReason | None = None
        match settlement:
            case Done():
                self._row_delivered(row, judged, call.seconds)
                return
            case RetryLater(delay, attempts, error, status, attempt):
                state = "waiting"
            case DeadLetter(attempts, error, status, attempt, refused):
                state, delay, dead = "dead", None, "refused" if refused else "exhausted"
            case StandStill(error, status, retry_after, attempt):
                state, attempts = None, row.attempts
                delay = max(self.circuit.retry_delay(self.parts.clock.monotonic()), retry_after or 0.0)
        back = RowUpdate(event.id, row.lease, attempts, state, delay, error, status, attempt, record)
        self._send_back(row, back, dead)

    def _row_delivered(self, row: ClaimedRow, verdict: Verdict, seconds: float) -> None:
        now, mode = self.parts.clock.monotonic(), self.parts.spec.settings.record_attempts
        self._unmeasured.append(DeliveredCall(row.event, seconds, now))
        record = None
        if isinstance(verdict, Delivered):
            record = delivery_record(mode, row.event, verdict, row.attempts, now, tried=row.tried)
        self.settler.finish(row, record)

    def _send_back(self, row: ClaimedRow, back: RowUpdate, dead: DeadReason | None = None) -> None:
        if back.state == "dead":
            self._on_dead(row.event, back.status, back.attempt)
        if back.due_in is not None:
            self.due_in(back.due_in)
        self.settler.send_back(row, back, dead)

    def measure(self) -> None:
        """Count the rows that were delivered since this was called last, together, which costs less."""
        if self._unmeasured:
            calls, self._unmeasured = self._unmeasured, []
            self.parts.measures.delivered_each(calls, self.parts.db_time(), self.parts.clock.monotonic())
