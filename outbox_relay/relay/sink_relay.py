"""The relay of one sink: claim → deliver → settle.

A session ends when its state in memory may be wrong, and the next one starts from the stored positions. When the
sink gets new settings, another session follows while rows of a queue are still under way.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace

from structlog.stdlib import BoundLogger

from outbox_relay.domain.errors import (
    DatabaseUnusable,
    IncarnationChanged,
    RelayError,
    Reloaded,
    SessionReset,
    StatementFailed,
    first,
)
from outbox_relay.domain.measures import SinkMeasures
from outbox_relay.domain.rate_limited_log import RateLimitedLog
from outbox_relay.domain.sink_spec import SinkSpec
from outbox_relay.postgres.connection_slots import REPLAYS, caller, sink_caller
from outbox_relay.postgres.store import Store
from outbox_relay.relay.attempt_recorder import AttemptRecorder
from outbox_relay.relay.leases import LeaseManager
from outbox_relay.relay.parked import ParkedDeliveries
from outbox_relay.relay.running_sessions import NextConfiguration, RunningSessions
from outbox_relay.relay.session import Session, Start, is_loss
from outbox_relay.relay.shared_limits import SharedLimits
from outbox_relay.relay.sink_fault import SinkFault
from outbox_relay.relay.sink_leases import SinkLeases
from outbox_relay.relay.sink_registration import SinkRegistration
from outbox_relay.relay.ticker import Ticker
from outbox_relay.sinks import ExtendsCalls, Sink

LOOK_SECONDS = 1.0
"""Maximum wait of the loop if no event wakes it."""
TELL_SECONDS = 5.0
"""Time after which the log says that new settings wait for requests in flight."""
DRAIN_SECONDS = 0.01
"""Maximum wait of the loop while shards are drained."""


@dataclass(slots=True)
class SinkRelay:
    """One sink, served in one session after another until the relay stops."""

    spec: SinkSpec
    sink: Sink
    store: Store
    ticker: Ticker
    lease_manager: LeaseManager
    leases: SinkLeases
    log: BoundLogger
    stopping: asyncio.Event
    noise: Callable[[], float] = lambda: random.uniform(-1.0, 1.0)  # noqa: S311 - jitter is no secret
    may_send: Callable[[], bool] = lambda: True
    """False while nothing may be sent, whatever the circuit says."""
    session: Session | None = None
    """The newest session, or the last one until the next begins."""
    restarts: Counter[str] = field(default_factory=Counter[str])
    """The number of sessions that ended other than by the relay's stop, by ``RelayError.reason``."""
    measures: SinkMeasures = field(default_factory=SinkMeasures)
    """The counts and durations of all sessions."""
    target_limits: SharedLimits | None = None
    """The limits of the target of a replay; None for a sink, which has its own."""
    limits: SharedLimits = field(init=False)
    """The limits across all relays, which outlast every session."""
    recorder: AttemptRecorder = field(init=False)
    registration: SinkRegistration = field(init=False)
    _next: NextConfiguration | None = None
    _drained: bool = True
    _fault: SinkFault = field(init=False)
    _caller: str = ""
    _waits_since: float = float("inf")
    """``time.monotonic()`` of the last reload until the requests that delay it are logged, otherwise infinity."""
    _sessions: RunningSessions = field(default_factory=RunningSessions)

    def __post_init__(self) -> None:
        """Take connections as one caller."""
        self._caller = sink_caller(self.spec.name) if self.spec.replay is None else REPLAYS
        manager = self.lease_manager
        self.recorder = AttemptRecorder(manager.name, self.log)
        self._fault = SinkFault(self.leases)
        self.registration = SinkRegistration(self.store, self.ticker, manager, self.leases)
        self.limits = self.target_limits or SharedLimits(self.leases)

    @property
    def circuit(self) -> str:
        """The state of the sink's circuit in this process."""
        return self.session.breaker.state if self.session else "closed"

    @property
    def in_flight_limit(self) -> int:
        """The current limit of concurrent requests, which is reduced for a while after the destination throttled."""
        return self.session.limiter.limit if self.session else self.sink.max_in_flight

    @property
    def in_hand(self) -> int:
        """The number of events that were read and are neither delivered nor parked."""
        return self.session.in_flight.undone if self.session else 0

    @property
    def fault(self) -> str | None:
        """The reason why this process cannot serve the sink; None if it can."""
        return self._fault.of(self.spec, self.sink)

    @property
    def sinks(self) -> list[Sink]:
        """The sinks that are open: the present one, earlier ones to be closed, and the one of the next session."""
        following = self._next.sink if self._next else None
        return [self.sink, *self._sessions.retired, *([] if following is None else [following])]

    def reload(self, spec: SinkSpec, generation: int, sink: Sink | None = None) -> None:
        """Use ``spec``, and ``sink`` if it was made again, once every shard is drained and released.

        ``generation`` is already in the database. Until then this relay counts as one with an older configuration, or
        as one that does not serve the sink.
        """
        newer = replace(spec, start=self.spec.start)
        if self._next is None and sink is None and generation == self.leases.generation and newer == self.spec:
            return
        pending = self._next.sink if self._next else None
        if sink is not None and pending is not None:
            self._sessions.discard(pending)
        self._next = NextConfiguration(newer, generation, sink or pending)
        self._waits_since = time.monotonic()
        self.leases.reconfigure()

    async def run(self) -> None:
        """Run one session, and those that follow it, until the relay has stopped and drained its shards.

        Raises, and counts, ``SessionReset``, ``DatabaseUnavailable``, ``StatementFailed`` or ``DatabaseUnusable``,
        which end all of these sessions. The next one then starts from the stored positions.
        """
        caller.set(self._caller)
        self._drained = False
        try:
            async with asyncio.TaskGroup() as tasks:
                await self._run_session(tasks)
        except BaseExceptionGroup as group:
            self._ended(error := first(group))
            raise error from None
        self._drained = True

    def _ended(self, error: BaseException) -> None:
        """Count the end of the sessions by an error."""
        if isinstance(error, RelayError):
            self._fault.refuse(error)
            if not self.stopping.is_set():
                self.restarts[error.reason] += 1

    async def _run_session(self, tasks: asyncio.TaskGroup, before: Session | None = None) -> None:
        """Run one session, which may follow ``before``, and start those that follow it in ``tasks``."""
        start = await self._prepare() if before is None else await self._prepare_beside(before)
        if start is None:
            return
        self._fault.session_begins()
        sessions = self._sessions
        with sessions.running(self.sink) as rows:
            session = self.session = Session(
                *(self.spec, self.sink, self.store, self.ticker, self.lease_manager, self.leases, self.log, self.noise),
                *(self.recorder, start, self.may_send, self.measures, self.limits, rows, before),
            )

            async def loop(session: Session) -> None:
                if await self._claim_deliver_settle(session):
                    tasks.create_task(self._run_session(tasks, session))
                    await session.finish()

            await session.run(loop)
        with suppress(StatementFailed, DatabaseUnusable):  # they are given back later, or come back by themselves
            await sessions.give_back(self.store, self.spec.name, self.lease_manager.relay)
        await sessions.close_retired()

    async def _prepare_beside(self, before: Session) -> Start | None:
        """Prepare a session that follows ``before``, whose calls a failed statement must not end.

        Return None if the relay stops meanwhile.
        """
        limited = RateLimitedLog(self.log)
        while not self.stopping.is_set():
            try:
                start = await self._prepare()
            except (StatementFailed, DatabaseUnusable) as error:
                self._fault.refuse(error)
                limited.warning("sink.prepare_failed", reason=str(error))
                await asyncio.sleep(LOOK_SECONDS)
            else:
                if start.server == before.server:
                    return start
                raise IncarnationChanged(f"sink {self.spec.name}: the database is another one")
        with suppress(StatementFailed):  # otherwise they would be renewed until the rows under way are settled
            await self.lease_manager.release(self.leases, set(self.leases.held))
        return None

    async def _prepare(self) -> Start:
        """Clear what ended sessions left behind, and return the starting point.

        These are requests in the client, epochs of shards, and leases of rows.
        """
        await self._sessions.close_retired()
        if not self._sessions.uses(self.sink):
            await self.sink.reset()
        await self.store.check_session()
        began, session_epoch = await self.ticker.refresh(), self.ticker.session_epoch
        self.registration.begin_session(began)
        await self.lease_manager.reclaim(self.leases)
        await self._give_rows_back()
        return Start(began.incarnation, session_epoch, await self.store.floor())

    async def _give_rows_back(self) -> None:
        """Give back the rows that ended sessions have claimed and not settled."""
        name, relay = self.spec.name, self.lease_manager.relay
        await self._sessions.give_back(self.store, name, relay)
        if not self.spec.queued:
            await self.store.give_rows_back(name, relay)

    async def _claim_deliver_settle(self, session: Session) -> bool:
        """Read the log for the dispatcher, until the relay has stopped, or another session is to follow: return True.

        What becomes of events is settled as it comes.

        Only this loop waits for the wake event and clears it.
        """
        log_reader, parked, leases = session.log_reader, session.parked, self.leases
        extends = self.sink.extend if isinstance(self.sink, ExtendsCalls) else None
        while not self.stopping.is_set() or leases.held or parked.under_way:
            await self._sessions.close_discarded()
            if self._adopt_reload(parked) or await self._register_again(parked) or await self._serve_again(parked):
                return True
            self._tell_wait(session)
            leases.wake.clear()
            if leases.take_probe_request():
                session.breaker.probe_now()
            try:
                if session.loss is not None:
                    raise session.loss
                await log_reader.adopt()
                if leases.held:
                    self._fault.shards_are_owned()
                    if extends is not None:
                        extends(leases.until(leases.held))
                reads = await log_reader.step()
            except SessionReset as error:
                return await self._follow_loss(session, error)
            if not reads:
                await leases.wait_for_wake(
                    DRAIN_SECONDS if log_reader.draining or self.stopping.is_set() else LOOK_SECONDS
                )
        return False

    async def _follow_loss(self, session: Session, error: SessionReset) -> bool:
        """Return True once another session follows one of a queue that lost a shard. Raise ``error`` if none does.

        The rows under way are not concerned.
        """
        parked, may_follow = session.parked, self._sessions.may_follow
        if not (self.spec.queued and is_loss(error)):
            raise error
        if not may_follow(parked.under_way, queued=True):
            self.log.warning("config.waits", requests=session.limiter.taken)
        while not (may_follow(parked.under_way, queued=True) or self.stopping.is_set()):
            self.leases.wake.clear()
            await self.leases.wait_for_wake(LOOK_SECONDS)
        return self._follow(parked, error)

    def _may_follow(self, parked: ParkedDeliveries, following: SinkSpec) -> bool:
        """Return True if a session with ``following`` may take the place of the present one, which has no shards."""
        if self.leases.held or (parked.under_way and self.stopping.is_set()):
            return False
        return self._sessions.may_follow(parked.under_way, queued=self.spec.queued and following.queued)

    def _follow(self, parked: ParkedDeliveries, reason: SessionReset) -> bool:
        """Return True if the next session runs while rows are still under way. Raise ``reason`` if none are."""
        if not self.spec.queued or (not parked.under_way and len(self._sessions) <= 1):
            raise reason
        self.restarts[reason.reason] += 1
        requests = self.session.limiter.taken if self.session else parked.under_way
        self.log.info("sink.followed", reason=str(reason), requests=requests)
        self._waits_since = time.monotonic() if isinstance(reason, Reloaded) else float("inf")
        return True

    def _adopt_reload(self, parked: ParkedDeliveries) -> bool:
        """Adopt new settings with another session; return True if it follows this one."""
        following = self._next
        if following is None or not self._may_follow(parked, following.spec):
            return False
        self._next = None
        self.spec = following.spec
        if following.sink is not None:
            self._sessions.retire(self.sink)
            self.sink = following.sink
        self.leases.serve(following.generation, self.spec.routes)
        return self._follow(parked, Reloaded("the configuration was reloaded"))

    def _tell_wait(self, session: Session) -> None:
        """Log once that new settings, or events, wait for requests in flight.

        Until then a sink with new settings starts no other event. Those of a queue start none while the requests of
        earlier sessions have every slot.
        """
        waits = self._next is not None
        if not waits and (session.parked.under_way or not session.limiter.full()):
            self._waits_since = float("inf")
        elif time.monotonic() - self._waits_since > TELL_SECONDS:
            self._waits_since = float("inf")
            requests = session.parked.under_way + self.in_hand if waits else session.limiter.taken
            self.log.warning("config.waits", requests=requests)

    async def _register_again(self, parked: ParkedDeliveries) -> bool:
        """Register the sink again if a restore has taken its registration back; return True if a session follows."""
        registration, leases = self.registration, self.leases
        if self.spec.replay is not None or not await registration.was_taken_back():
            return False
        if (
            self._next is not None
            or self.stopping.is_set()
            or (self.spec.queued and not self._may_follow(parked, self.spec))
        ):
            return False
        if not await registration.register(self.spec, self.log):
            return False
        if self._next is not None:  # meanwhile
            leases.reconfigure()
        return self._follow(parked, Reloaded("the sink was registered again"))

    async def _serve_again(self, parked: ParkedDeliveries) -> bool:
        """Take a superseded sink back, once its routes match or its relays are gone; True if a session follows."""
        leases, spec = self.leases, self.spec
        if not leases.superseded or leases.held or self._next is not None or self.stopping.is_set():
            return False
        differs = tuple(leases.row.patterns) != tuple(spec.patterns) or leases.row.claim != spec.claim
        if (differs and not leases.abandoned) or (spec.queued and not self._may_follow(parked, spec)):
            return False
        result = await self.ticker.refresh()
        generation = await self.store.reregister_sink(
            *(spec.name, spec.patterns, leases.row.generation, result.tick),
            queued=spec.queued,
            server=result.incarnation,
        )
        if generation is None:
            return False
        leases.serve(generation, spec.routes)
        if self._next is not None:  # meanwhile
            leases.reconfigure()
            return False
        return self._follow(parked, Reloaded("the relays with the other configuration are gone"))

    async def leave(self) -> None:
        """Release the leases and rows of the last sessions, once their sinks can no longer send them."""
        try:
            if not self._drained:
                await asyncio.gather(*(sink.reset() for sink in self.sinks))
        finally:
            await self._give_rows_back()
        await self.lease_manager.give_doubtful_back(self.leases)
        if self.leases.held:
            await self.lease_manager.release(self.leases, set(self.leases.held))
