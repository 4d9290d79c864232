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
from outbox_relay.relay.dispatch import Desk, delivering
from outbox_relay.relay.gate import ClientTrouble, Gate, Slots
from outbox_relay.relay.leases import Holding, Ownership
from outbox_relay.relay.log_reader import Reading
from outbox_relay.relay.parked import Rows
from outbox_relay.relay.settler import Settling
from outbox_relay.relay.ticker import Ticking
from outbox_relay.sinks import Sink

LOOK_SECONDS = 1.0
"""How long the loop waits when nothing wakes it."""
DRAIN_SECONDS = 0.01
"""The same while shards are being drained."""


@dataclass(slots=True)
class SinkRelay:
    """One sink, served until told to stop. ``holding`` is what ``ownership`` has of the sink."""

    spec: SinkSpec
    sink: Sink
    store: Store
    ticking: Ticking
    ownership: Ownership
    holding: Holding
    log: BoundLogger
    stopping: asyncio.Event
    noise: Callable[[], float] = lambda: random.uniform(-1.0, 1.0)  # noqa: S311 - jitter is no secret
    _next: tuple[SinkSpec, int] | None = None
    _gate: Gate | None = None
    _slots: Slots | None = None
    _drained: bool = True
    settling: Settling | None = None
    """What is in hand, in the session under way."""
    refusal: str | None = None
    """Why the database cannot be used, since the last session; None once one has begun."""
    restarts: Counter[str] = field(default_factory=Counter[str])
    """How many sessions ended other than by the relay's stop, by ``RelayError.reason``."""

    @property
    def circuit(self) -> str:
        """The state of the sink's circuit in this process."""
        return self._gate.state if self._gate else "closed"

    @property
    def in_flight_limit(self) -> int:
        """How many requests may be under way at once, now: fewer for a while after the destination asked for less."""
        return self._slots.limit if self._slots else self.sink.max_in_flight

    @property
    def in_hand(self) -> int:
        """Events that were read and are neither delivered nor parked."""
        return self.settling.in_hand if self.settling else 0

    @property
    def readers(self) -> Sequence[ShardGroup]:
        """The readers of the session under way: where its shards stand, and what of them is in hand."""
        return self.settling.readers if self.settling else ()

    def reload(self, spec: SinkSpec, generation: int) -> None:
        """Go on with the routes of ``spec``, once everything in hand is settled and every shard released.

        The database already says so: until then this relay counts as one with an older configuration.
        """
        if generation != self.holding.generation:
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
        server, era = (await self.ticking.refresh()).incarnation, self.ticking.era
        await self.ownership.reclaim(self.holding)
        await self.store.give_rows_back(self.spec.name, self.ownership.relay)
        floor = await self.store.floor()
        self.refusal = None
        self.settling = settling = Settling(self.store, self.holding, self.ownership.relay, server)
        desk = self._desk(settling)
        direct, rows = delivering(desk), Rows(desk, self.store, self.ownership.relay, self.log)
        desk.overdue, desk.due_in = rows.overdue, rows.due_in
        reading = Reading(
            self.spec,
            self.store,
            self.ticking,
            self.ownership,
            self.holding,
            settling,
            desk.gate,
            direct,
            desk.put_off,
            floor,
            era,
            lambda: rows.under_way,
        )
        client = ClientTrouble(self.store, self.spec.name, lambda: self.sink.trouble)
        self.holding.changed = reading.changed
        desk.hungry = reading.wake.set
        try:
            async with asyncio.TaskGroup() as parts:
                running = [parts.create_task(part.run()) for part in (direct, settling, rows, desk.gate, client)]
                await self._claim_deliver_settle(reading, rows)
                for part in running:
                    part.cancel()
        except BaseExceptionGroup as group:
            raise first(group) from None
        self._drained = True

    async def leave(self) -> None:
        """After the last session: what it left behind is anybody's again, and nothing of it is sent later."""
        if not self._drained:
            await self.sink.reset()
        await self.store.give_rows_back(self.spec.name, self.ownership.relay)
        await self.ownership.give_doubtful_back(self.holding)
        if self.holding.held:
            await self.ownership.release(self.holding, set(self.holding.held))

    async def _claim_deliver_settle(self, reading: Reading, rows: Rows) -> None:
        """The loop. What it reads is handed to ``direct``, what becomes of that is settled as it comes."""
        while not self.stopping.is_set() or self.holding.held or rows.under_way:
            self._adopt_reload(rows)
            await self._serve_again()
            reading.wake.clear()
            await reading.adopt()
            if not await reading.step():
                await _within(DRAIN_SECONDS if self._draining(reading) else LOOK_SECONDS, reading.wake)

    def _adopt_reload(self, rows: Rows) -> None:
        """End the session for the one of the new configuration, once nothing of this one is under way."""
        if self._next is None or self.holding.held or rows.under_way:
            return
        (self.spec, generation), self._next = self._next, None
        self.ownership.serve(self.spec.name, generation)
        raise Reloaded("the configuration was reloaded")

    async def _serve_again(self) -> None:
        """Serve a sink that another configuration took away, once that is this one again or its relays are gone."""
        holding, spec = self.holding, self.spec
        if not holding.superseded or holding.held or self._next is not None or self.stopping.is_set():
            return
        if holding.patterns != tuple(spec.patterns) and not holding.abandoned:
            return
        look = await self.ticking.refresh()
        generation = await self.store.reregister_sink(
            spec.name, spec.patterns, holding.newest, look.tick, server=look.incarnation
        )
        if generation is not None:
            self.ownership.serve(spec.name, generation)
            raise Reloaded("no relay serves the other configuration of this sink any more")

    def _draining(self, reading: Reading) -> bool:
        return reading.draining or self.stopping.is_set()

    def _desk(self, settling: Settling) -> Desk:
        self._gate = Gate(self.store, self.holding, self.spec, lambda: settling.unsettled)
        self._slots = Slots(self.sink.max_in_flight, self._gate.limited)
        return Desk(
            spec=self.spec,
            sink=self.sink,
            holding=self.holding,
            settling=settling,
            gate=self._gate,
            now=self.ticking.now,
            noise=self.noise,
            slots=self._slots,
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
