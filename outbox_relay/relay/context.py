"""The parts that deliver events of one sink, and the outcomes of an event of the log."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import NamedTuple
from uuid import UUID

from outbox_relay.domain.errors import LeaseLost
from outbox_relay.domain.event import StoredEvent
from outbox_relay.domain.in_flight import Chunk
from outbox_relay.domain.lease_clock import lease_clock
from outbox_relay.domain.outcomes import (
    Attempt,
    Dead,
    Done,
    Failed,
    Retry,
    StandStill,
    Unavailable,
    Verdict,
    clip,
    decide,
)
from outbox_relay.domain.retry import requested_delay
from outbox_relay.domain.sink_spec import SinkSpec
from outbox_relay.postgres.store import ClaimedRow, NewRow
from outbox_relay.relay.breaker import CircuitBreaker, Permit
from outbox_relay.relay.limiter import ConcurrencyLimiter
from outbox_relay.relay.settler import Settler
from outbox_relay.relay.sink_leases import SinkLeases
from outbox_relay.sinks import Sink

LEASE_MARGIN_SECONDS = 5.0
"""A row's lease outlasts the request's time limit by at least this."""
SUSPECT_CRASHES = 2
"""From this many lapsed leases on, the next events of a shard go through rows, where claims are counted."""
SUSPECT_CLAIMS = 2
"""Claims with which such rows begin. They are claimed together once, since most owners die of something else; what was
claimed three times and never settled is claimed alone."""


def _nobody(*_: object) -> None:
    raise RuntimeError("the rows of this sink are not being served")


class _Kept(NamedTuple):
    """What a row remembers of how its event was tried: attempts counted, the last error, its status and details."""

    attempts: int = 0
    error: str | None = None
    status: int | None = None
    attempt: Attempt | None = None


NOTHING_KEPT = _Kept()


@dataclass(slots=True)
class DeliveryContext:
    """What every part that delivers for one sink works with.

    ``now`` is the database's time as far as is known; ``noise`` draws from [-1, 1]; ``limiter`` bounds the
    requests under way of a sink that takes one event each; ``adopt_slow_request`` is given rows whose request outlasted
    ``park_after_seconds``, with what they were sent by and the verdict to come; ``schedule_wakeup`` the seconds after
    which a row will be due. ``want_more`` is called when what was read is no longer enough for the sink.
    """

    spec: SinkSpec
    sink: Sink
    leases: SinkLeases
    settler: Settler
    breaker: CircuitBreaker
    now: Callable[[], datetime]
    noise: Callable[[], float]
    limiter: ConcurrencyLimiter
    adopt_slow_request: Callable[[ClaimedRow, Permit, Awaitable[Verdict]], None] = _nobody
    schedule_wakeup: Callable[[float], None] = _nobody
    want_more: Callable[[], None] = _nobody

    def until(self, events: Iterable[StoredEvent]) -> float:
        """The ``lease_clock()`` value by which ``events`` must be handed over. Raises ``LeaseLost`` behind it."""
        until = self.leases.until({event.shard for event in events})
        if lease_clock() >= until:
            raise LeaseLost(f"sink {self.spec.name}: a lease could not be renewed in time")
        return until

    async def deliver(self, events: Sequence[StoredEvent]) -> Sequence[Verdict]:
        """One verdict per event of ours. Raises ``LeaseLost`` when a lease ran out before all were handed over."""
        until = self.until(events)
        verdicts = await self.sink.deliver(events, until)
        if lease_clock() >= until and any(isinstance(verdict, Unavailable) for verdict in verdicts):
            self.until(events)
        return verdicts

    def keyed(self, event: StoredEvent) -> bool:
        """Whether the event takes part in the order of a key."""
        return self.spec.ordered and event.key is not None

    def park_unless_deliverable(self, chunk: Chunk, index: int) -> bool:
        """Park the event at ``index`` as a row if it must not be delivered now; returns whether it was.

        Events with a fault are dead at once. Scheduled events leave the order of their key. Events of a blocked key
        are held behind its rows. Events of a shard whose owners crashed again and again go through rows, where claims
        are counted.
        """
        event = chunk.events[index]
        if event.fault is not None:
            self.park(chunk, index, "dead", kept=_Kept(error=clip(event.fault)))
        elif event.deliver_at is not None and event.deliver_at > self.now():
            self.park(chunk, index, "waiting", ordered=False)
            self.schedule_wakeup((event.deliver_at - self.now()).total_seconds())
        elif event.key in self.settler.blocked and self.keyed(event):
            self.park(chunk, index, "held")
        elif self._crashes(event) >= SUSPECT_CRASHES:
            self.park(chunk, index, "waiting", claims=SUSPECT_CLAIMS, due_in=0.0)
        else:
            return False
        return True

    def defer(self, chunk: Chunk, index: int) -> None:
        """Make the event at ``index`` a row, to be tried when the destination is next."""
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
        kept: _Kept = NOTHING_KEPT,
    ) -> int:
        """Make the event at ``index`` a row; returns the number of the settlement that writes it."""
        event = chunk.events[index]
        takes_part = self.keyed(event) if ordered is None else ordered
        row = NewRow(
            *(event.id, event.shard, state, takes_part, due_in, kept.attempts, claims, lease, lease_for),
            *(kept.error, kept.status, kept.attempt),
        )
        scheduled = state == "waiting" and due_in is None
        if state != "dead" and not scheduled:
            self.breaker.parked()
        blocks = takes_part and (state != "dead" or self.spec.hold)
        if due_in is not None and state != "dead":
            self.schedule_wakeup(due_in)
        return self.settler.park(chunk, index, row, blocks=blocks)

    def apply(self, chunk: Chunk, index: int, verdict: Verdict, permit: Permit) -> bool:
        """Settle the event at ``index`` by its first verdict; returns False if it stays where it is."""
        event = chunk.events[index]
        match decide(0, self.judged(event, verdict, permit), self.spec.retry, self.noise()):
            case Done():
                self.settler.done(chunk, index)
            case Retry(delay, attempts, error, status, attempt):
                self.park(chunk, index, "waiting", due_in=delay, kept=_Kept(attempts, error, status, attempt))
            case Dead(attempts, error, status, attempt):
                self.park(chunk, index, "dead", kept=_Kept(attempts, error, status, attempt))
            case StandStill():
                return False
        return True

    def judged(self, event: StoredEvent, verdict: Verdict, permit: Permit, *, failed_before: bool = False) -> Verdict:
        """Tell the circuit of ``verdict``; a failure while it is not closed is the destination's, not the event's.

        But a probe that the destination answered counts as an attempt of its event: that becomes a row, and the next
        probe is another event. Else one that always fails would be every probe, and the circuit would never close.
        An event that ``failed_before`` and does so again says nothing about the destination: such events come together
        when their delays end, would open the circuit and, as probes, keep it open while all others would be taken.
        """
        match verdict:
            case Failed() if failed_before:
                self.breaker.unused(permit)
            case Failed(reason, status, retry_after, attempt):
                counts = permit.probe or self.breaker.holds(permit)
                self.breaker.failed(event.id, reason, permit)
                return verdict if counts else Unavailable(reason, status, retry_after, attempt)
            case Unavailable(behind=True):
                self.breaker.unused(permit)
            case Unavailable(part=None):
                self._unavailable(event, verdict, permit)
            case Unavailable():
                self.breaker.unused(permit)
                self.breaker.trouble(verdict.reason)
            case _:
                self.breaker.delivered(permit)
                self.limiter.increase()
        return verdict

    def _unavailable(self, event: StoredEvent, verdict: Unavailable, permit: Permit) -> None:
        retry_after = requested_delay(verdict.retry_after_seconds, self.spec.retry, self.noise())
        at_once = self.sink.keeps_order
        opened = self.breaker.unavailable(event.id, verdict, permit, at_once=at_once, retry_after=retry_after)
        if opened and verdict.throttled:
            self.limiter.decrease()
