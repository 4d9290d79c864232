"""The limits of one sink that all relays share, for its log, its parked deliveries and its replays."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping
from contextlib import AbstractContextManager
from typing import Any
from uuid import UUID

from structlog.stdlib import BoundLogger

from outbox_relay.domain.errors import first
from outbox_relay.postgres.store import Store
from outbox_relay.relay.shared_rate import SharedRate
from outbox_relay.relay.shared_slots import SharedSlots
from outbox_relay.relay.sink_leases import SinkLeases
from outbox_relay.relay.turns import Source

DRAIN_SECONDS = 1.0
"""Time for the events in flight from which on shards are handed over with them."""
EVENTS_PER_SLOT = 10
"""Events in flight for each slot of all relays from which on shards are handed over with them."""
SOON_SECONDS = 0.5
"""Time for which rows are claimed at once."""


class Admission:
    """The admission of a request with at most ``events`` events.

    The request begins before the ``lease_clock()`` value ``until``. ``end`` gives its slot back. It is called when the
    request has ended or will not begin.
    """

    __slots__ = ("_lasting", "_slots", "events", "until")

    def __init__(self, events: int, until: float = float("inf"), slots: SharedSlots | None = None) -> None:
        self.events = events
        self.until = until
        self._slots = slots
        self._lasting: asyncio.Future[None] | None = None

    @property
    def leased_until(self) -> float:
        """The ``lease_clock()`` value at which the request must have ended, however long it may last."""
        return float("inf") if self._slots is None else self._slots.leased_until

    def lasts(self, ended: Coroutine[Any, Any, None]) -> None:
        """Keep the slot of a cancelled request until it has ``ended``."""
        self._lasting = asyncio.ensure_future(ended)

    def end(self, _: Any = None) -> None:
        """Give the slot back, once."""
        slots, self._slots = self._slots, None
        if slots is None:
            return
        if self._lasting is None:
            slots.give_back()
        else:
            self._lasting.add_done_callback(lambda _: slots.give_back())


UNLIMITED = Admission(1 << 31)
"""The admission to a sink without limits."""


class SharedLimits:
    """The rate and the slots of one sink in this relay. A sink without these limits costs no statement."""

    def __init__(self, store: Store, relay: UUID, leases: SinkLeases, lease_seconds: float, log: BoundLogger) -> None:
        self.rate = SharedRate(store, leases, log)
        self.slots = SharedSlots(store, relay, leases, lease_seconds, log)
        self._running = False

    @property
    def active(self) -> bool:
        """True if the sink has a limit."""
        return self.rate.per_second is not None or self.slots.total is not None

    @property
    def waiting(self) -> int:
        """The number of calls that wait for a limit. The next call of a sink that takes batches is one."""
        return self.rate.waiting + self.slots.waiting

    async def admit(self, source: Source, request_seconds: float, most: int = 1) -> Admission:
        """Wait until a request of at most ``request_seconds`` may begin, with one event or more, up to ``most``.

        The slot comes first, since tokens are not kept for long.
        """
        while True:
            slotted = await self.slots.take(source, request_seconds)
            try:
                events = await self.rate.spend(source, most)
            except BaseException:
                if slotted:
                    self.slots.give_back()
                raise
            if not slotted:
                return Admission(events)
            if self.slots.valid:
                return Admission(events, self.slots.until, self.slots)
            self.rate.refund(events)
            self.slots.give_back()

    def refund(self, admission: Admission, sent: int) -> None:
        """Give back what an admission has beyond the ``sent`` events of its request."""
        if admission is not UNLIMITED:
            self.rate.refund(admission.events - sent)

    def withdraw(self, admission: Admission) -> None:
        """Give back an admission whose request does not begin."""
        self.refund(admission, 0)
        admission.end()

    def outlasting(self, deadlines: Callable[[], Mapping[int, float]]) -> AbstractContextManager[None]:
        """Keep the slots of requests that may last longer than planned until their ``deadlines``."""
        return self.slots.outlasting(deadlines)

    def soon(self, most: int) -> int:
        """Return how many rows, of at most ``most``, can be delivered soon after they are claimed."""
        rate, total = self.rate.per_second, self.slots.total
        if rate is not None:
            most = min(most, int(rate * SOON_SECONDS))
        if total is not None:
            most = min(most, 1 + self.slots.free)
        return max(1, most)

    def stall(self, events: int) -> bool:
        """Return True if ``events`` in flight would take long, so that shards are handed over with them."""
        rate, total = self.rate.per_second, self.slots.total
        if self.waiting and not self._running:
            return True
        if rate is not None and (events > rate * DRAIN_SECONDS or self.rate.starved):
            return True
        return total is not None and (events > total * EVENTS_PER_SLOT or self.slots.starved)

    async def run(self) -> None:
        """Keep the limits until cancelled. Raises ``DatabaseUnavailable``.

        This must outlast every session of the sink and of its replays, whose requests wait for it.
        """
        self._running = True
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self.rate.run())
                tasks.create_task(self.slots.run())
        except BaseExceptionGroup as group:
            raise first(group) from None
        finally:
            self._running = False

    async def leave(self) -> None:
        """Give up the slots of this relay that are not in use."""
        await self.slots.leave()
