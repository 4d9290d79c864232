"""The parts that deliver for one sink from one start at the stored positions to its end.

A session ends when its state in memory may be wrong.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import NamedTuple

from structlog.stdlib import BoundLogger

from outbox_relay.domain.errors import LeaseLost, SessionReset, first
from outbox_relay.domain.in_flight import InFlight
from outbox_relay.domain.measures import SinkMeasures
from outbox_relay.domain.sink_spec import SinkSpec
from outbox_relay.postgres.store import Store
from outbox_relay.relay.attempt_recorder import AttemptRecorder
from outbox_relay.relay.breaker import CircuitBreaker
from outbox_relay.relay.context import DeliveryContext
from outbox_relay.relay.dispatcher import dispatcher_for
from outbox_relay.relay.due_timer import DueTimer
from outbox_relay.relay.earlier_outcomes import EarlierOutcomes
from outbox_relay.relay.leases import LeaseManager
from outbox_relay.relay.limiter import ConcurrencyLimiter
from outbox_relay.relay.log_reader import LogReader
from outbox_relay.relay.parked import ParkedDeliveries
from outbox_relay.relay.parked_limit import ParkedLimit
from outbox_relay.relay.queue_claims import RowsInHand
from outbox_relay.relay.queue_limit import QueueLimit
from outbox_relay.relay.queue_reader import QueueReader
from outbox_relay.relay.replay_log import ReplayLog
from outbox_relay.relay.replay_reader import ReplayReader
from outbox_relay.relay.settler import FLUSH_SECONDS, FORWARD_SECONDS, Settler
from outbox_relay.relay.shared_limits import SharedLimits
from outbox_relay.relay.sink_leases import SinkLeases
from outbox_relay.relay.sink_report import ClientTrouble, SinkReport
from outbox_relay.relay.slow_requests import SlowRequests
from outbox_relay.relay.ticker import Ticker
from outbox_relay.sinks import Sink

REPLAY_FLUSH_SECONDS = 0.5
"""Interval between two settlements of a replay. Each locks the shards whose positions it writes."""


class Start(NamedTuple):
    """The state of the database from which a session starts."""

    server: str
    """The incarnation of the server."""
    session_epoch: int
    """The epoch of the ticks."""
    floor: int
    """The last id of an older numbering."""


def is_loss(error: SessionReset) -> bool:
    """Return True if ``error`` says that a shard was lost, or that a write met the loss: the server is the same."""
    return type(error) in (LeaseLost, SessionReset)


class Session:
    """The parts that live from one start at the stored positions to its end.

    They are built in the order of dependency. A session that follows ``before`` shares its slots while that finishes.
    """

    loss: SessionReset | None = None
    """The error of the settler of a queue that lost a shard, which the loop of the session handles."""
    _others: Sequence[asyncio.Task[None]] = ()
    """The tasks of the parts that a session without shards needs no more."""

    def __init__(
        self,
        spec: SinkSpec,
        sink: Sink,
        store: Store,
        ticker: Ticker,
        lease_manager: LeaseManager,
        leases: SinkLeases,
        log: BoundLogger,
        noise: Callable[[], float],
        recorder: AttemptRecorder,
        start: Start,
        may_send: Callable[[], bool],
        measures: SinkMeasures,
        limits: SharedLimits,
        in_hand: RowsInHand,
        before: Session | None = None,
    ) -> None:
        report_due = asyncio.Event()
        self.server = start.server
        self.in_flight = InFlight()
        replay_log = None if spec.replay is None else ReplayLog(store, spec.replay)
        self.settler = Settler(
            *(replay_log or store, leases, lease_manager.relay, self.in_flight, recorder, start.server),
            forward_seconds=FORWARD_SECONDS if replay_log is None else 0.0,
            flush_seconds=FLUSH_SECONDS if replay_log is None else REPLAY_FLUSH_SECONDS,
            measures=measures,
        )
        self.breaker = CircuitBreaker(spec.circuit, report_due, may_send)
        self.limiter = ConcurrencyLimiter(sink.max_in_flight, report_due, before.limiter if before else None)
        limit_parts = (store, spec, self.settler, report_due)
        self._parked_limit = QueueLimit(*limit_parts, leases) if spec.queued else ParkedLimit(*limit_parts)
        self._report = SinkReport(store, spec, leases, self.breaker, self.limiter, self._parked_limit, report_due, log)
        self._client_trouble = ClientTrouble(store, spec.name, sink)
        self._slow_requests = SlowRequests(spec.name, sink.max_in_flight)
        self.context = DeliveryContext(
            *(spec, sink, leases, self.in_flight.blocked, self.settler, self.breaker, self.limiter, limits),
            *(self._parked_limit, self._report, DueTimer(), ticker.now, noise, measures),
        )
        self._dispatcher = dispatcher_for(self.context, leases.wake, self._slow_requests)
        self.parked = ParkedDeliveries(
            *(self.context, store, lease_manager.relay, log, self._slow_requests, recorder, in_hand)
        )
        parts = (
            *(self.context, store, ticker, lease_manager, self.in_flight, self._dispatcher, self.parked),
            *(EarlierOutcomes(store, spec, self.in_flight, start.server), start.floor, start.session_epoch),
        )
        if replay_log is not None:
            self.log_reader: LogReader = ReplayReader(replay_log, *parts)
        elif isinstance(self._parked_limit, QueueLimit):
            self.log_reader = QueueReader(self._parked_limit, *parts)
        else:
            self.log_reader = LogReader(*parts)

    async def run(self, loop: Callable[[Session], Awaitable[None]]) -> None:
        """Run every part until ``loop`` ends, or until a part fails.

        Raises the most informative of several failures.
        """
        others = (self._dispatcher, self._parked_limit, self._report, self._client_trouble)
        try:
            async with asyncio.TaskGroup() as tasks:
                parked = tasks.create_task(self.parked.run())
                self._others = [tasks.create_task(run()) for run in (self._settle, *(part.run for part in others))]
                await loop(self)
                for task in (parked, *self._others):
                    task.cancel()
        except BaseExceptionGroup as group:
            raise first(group) from None
        finally:
            self._slow_requests.close()

    async def _settle(self) -> None:
        try:
            await self.settler.run()
        except SessionReset as error:
            if not (self.context.spec.queued and is_loss(error)):
                raise
            self.loss = error
            self.context.leases.wake.set()

    async def finish(self) -> None:
        """Deliver and settle the rows that are under way. Another session claims rows by now."""
        for task in self._others:
            task.cancel()
        await self.parked.finish()
