"""The relay of one sink: claim → deliver → settle, in sessions that end when what they hold may be wrong."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import cast

from structlog.stdlib import BoundLogger

from outbox_relay.domain.errors import DatabaseUnusable, RelayError, Reloaded
from outbox_relay.domain.in_flight import ShardGroup
from outbox_relay.domain.sink_spec import SinkSpec
from outbox_relay.postgres.connection_slots import caller, sink_caller
from outbox_relay.postgres.store import Store
from outbox_relay.relay.breaker import CircuitBreaker
from outbox_relay.relay.context import DeliveryContext
from outbox_relay.relay.dispatcher import dispatcher_for
from outbox_relay.relay.leases import LeaseManager
from outbox_relay.relay.limiter import ConcurrencyLimiter
from outbox_relay.relay.log_reader import LogReader
from outbox_relay.relay.parked import ParkedDeliveries
from outbox_relay.relay.settler import Settler
from outbox_relay.relay.sink_leases import SinkLeases
from outbox_relay.relay.sink_report import ClientTrouble
from outbox_relay.relay.ticker import Ticker
from outbox_relay.sinks import Sink

LOOK_SECONDS = 1.0
"""How long the loop waits when nothing wakes it."""
DRAIN_SECONDS = 0.01
"""The same while shards are being drained."""


@dataclass(slots=True)
class SinkRelay:
    """One sink, served until told to stop. ``leases`` is what ``lease_manager`` has of the sink."""

    spec: SinkSpec
    sink: Sink
    store: Store
    ticker: Ticker
    lease_manager: LeaseManager
    leases: SinkLeases
    log: BoundLogger
    stopping: asyncio.Event
    noise: Callable[[], float] = lambda: random.uniform(-1.0, 1.0)  # noqa: S311 - jitter is no secret
    _next: tuple[SinkSpec, int] | None = None
    _breaker: CircuitBreaker | None = None
    _limiter: ConcurrencyLimiter | None = None
    _drained: bool = True
    settler: Settler | None = None
    """What is in hand, in the session under way."""
    refusal: str | None = None
    """Why the database cannot be used, since the last session; None once one has begun."""
    restarts: Counter[str] = field(default_factory=Counter[str])
    """How many sessions ended other than by the relay's stop, by ``RelayError.reason``."""

    @property
    def circuit(self) -> str:
        """The state of the sink's circuit in this process."""
        return self._breaker.state if self._breaker else "closed"

    @property
    def in_flight_limit(self) -> int:
        """How many requests may be under way at once, now: fewer for a while after the destination asked for less."""
        return self._limiter.limit if self._limiter else self.sink.max_in_flight

    @property
    def in_hand(self) -> int:
        """Events that were read and are neither delivered nor parked."""
        return self.settler.in_hand if self.settler else 0

    @property
    def readers(self) -> Sequence[ShardGroup]:
        """The readers of the session under way: where its shards stand, and what of them is in hand."""
        return self.settler.readers if self.settler else ()

    def reload(self, spec: SinkSpec, generation: int) -> None:
        """Go on with the routes of ``spec``, once everything in hand is settled and every shard released.

        The database already says so: until then this relay counts as one with an older configuration.
        """
        if generation != self.leases.generation:
            self._next = (replace(self.spec, patterns=spec.patterns, types=spec.types), generation)

    async def run(self) -> None:
        """One session: everything from the ledger on, until told to stop and drained.

        Raises ``SessionReset``, ``DatabaseUnavailable``, ``StatementFailed`` or ``DatabaseUnusable``, which is counted;
        the next session then begins from the ledger.
        """
        caller.set(sink_caller(self.spec.name))
        try:
            await self._session()
        except RelayError as error:
            self.refusal = str(error) if isinstance(error, DatabaseUnusable) else None
            if not self.stopping.is_set():
                self.restarts[error.reason] += 1
            raise

    async def _session(self) -> None:
        self._drained = False
        await self.sink.reset()
        await self.store.check_session()
        server, session_epoch = (await self.ticker.refresh()).incarnation, self.ticker.session_epoch
        await self.lease_manager.reclaim(self.leases)
        await self.store.give_rows_back(self.spec.name, self.lease_manager.relay)
        floor = await self.store.floor()
        self.refusal = None
        self.settler = settler = Settler(self.store, self.leases, self.lease_manager.relay, server)
        context = self._context(settler)
        dispatcher = dispatcher_for(context)
        parked = ParkedDeliveries(context, self.store, self.lease_manager.relay, self.log)
        context.adopt_slow_request, context.schedule_wakeup = parked.adopt_slow_request, parked.schedule_wakeup
        log_reader = LogReader(
            self.spec,
            self.store,
            self.ticker,
            self.lease_manager,
            self.leases,
            settler,
            context.breaker,
            dispatcher,
            context.defer,
            floor,
            session_epoch,
            lambda: parked.under_way,
        )
        client = ClientTrouble(self.store, self.spec.name, lambda: self.sink.trouble)
        self.leases.changed = log_reader.changed
        context.want_more = log_reader.wake.set
        try:
            async with asyncio.TaskGroup() as parts:
                loops = (dispatcher, settler, parked, context.breaker, client)
                running = [parts.create_task(loop.run()) for loop in loops]
                await self._claim_deliver_settle(log_reader, parked)
                for part in running:
                    part.cancel()
        except BaseExceptionGroup as group:
            raise first(group) from None
        self._drained = True

    async def leave(self) -> None:
        """After the last session: what it left behind is anybody's again, and nothing of it is sent later."""
        if not self._drained:
            await self.sink.reset()
        await self.store.give_rows_back(self.spec.name, self.lease_manager.relay)
        await self.lease_manager.give_doubtful_back(self.leases)
        if self.leases.held:
            await self.lease_manager.release(self.leases, set(self.leases.held))

    async def _claim_deliver_settle(self, log_reader: LogReader, parked: ParkedDeliveries) -> None:
        """The loop. What it reads is handed to ``dispatcher``, what becomes of that is settled as it comes."""
        while not self.stopping.is_set() or self.leases.held or parked.under_way:
            self._adopt_reload(parked)
            await self._serve_again()
            log_reader.wake.clear()
            await log_reader.adopt()
            if not await log_reader.step():
                await _within(DRAIN_SECONDS if self._draining(log_reader) else LOOK_SECONDS, log_reader.wake)

    def _adopt_reload(self, parked: ParkedDeliveries) -> None:
        """End the session for the one of the new configuration, once nothing of this one is under way."""
        if self._next is None or self.leases.held or parked.under_way:
            return
        (self.spec, generation), self._next = self._next, None
        self.lease_manager.serve(self.spec.name, generation)
        raise Reloaded("the configuration was reloaded")

    async def _serve_again(self) -> None:
        """Serve a sink that another configuration took away, once that is this one again or its relays are gone."""
        leases, spec = self.leases, self.spec
        if not leases.superseded or leases.held or self._next is not None or self.stopping.is_set():
            return
        if leases.patterns != tuple(spec.patterns) and not leases.abandoned:
            return
        look = await self.ticker.refresh()
        generation = await self.store.reregister_sink(
            spec.name, spec.patterns, leases.newest, look.tick, server=look.incarnation
        )
        if generation is not None:
            self.lease_manager.serve(spec.name, generation)
            raise Reloaded("no relay serves the other configuration of this sink any more")

    def _draining(self, log_reader: LogReader) -> bool:
        return log_reader.draining or self.stopping.is_set()

    def _context(self, settler: Settler) -> DeliveryContext:
        self._breaker = CircuitBreaker(self.store, self.leases, self.spec, lambda: settler.unsettled)
        self._limiter = ConcurrencyLimiter(self.sink.max_in_flight, self._breaker.limited)
        return DeliveryContext(
            spec=self.spec,
            sink=self.sink,
            leases=self.leases,
            settler=settler,
            breaker=self._breaker,
            now=self.ticker.now,
            noise=self.noise,
            limiter=self._limiter,
        )


def first(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """The exception of a group that says most: one that is not ours, if there is any, else the first."""
    leaves: list[BaseException] = []
    pending: list[BaseException] = [group]
    while pending:
        exception = pending.pop(0)
        if isinstance(exception, BaseExceptionGroup):
            pending.extend(cast("BaseExceptionGroup[BaseException]", exception).exceptions)
        else:
            leaves.append(exception)
    return next((leaf for leaf in leaves if not isinstance(leaf, RelayError)), leaves[0])


async def _within(seconds: float, event: asyncio.Event) -> None:
    try:
        async with asyncio.timeout(seconds):
            await event.wait()
    except TimeoutError:
        return
