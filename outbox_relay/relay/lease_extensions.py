"""Leases of rows whose deliveries take longer than the time limit of their sink, because their handlers said so."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence
from uuid import UUID

from outbox_relay.domain.errors import StatementFailed
from outbox_relay.domain.lease_clock import lease_clock
from outbox_relay.postgres.rows import ClaimedRow
from outbox_relay.postgres.store import Store
from outbox_relay.relay.context import DeliveryContext
from outbox_relay.sinks import ExtendsDeliveries

LOOK_SECONDS = 0.5
"""Interval between two looks at the deliveries of a sink. Leases outlast the limit by more than that."""


class LeaseExtensions:
    """Extends the leases of rows under way, of a sink whose deliveries can be extended."""

    def __init__(self, context: DeliveryContext, store: Store) -> None:
        self._context = context
        self._store = store
        self._leases: dict[int, UUID] = {}
        self._written: dict[int, float] = {}

    def watch(self, rows: Sequence[ClaimedRow]) -> None:
        """Extend the leases of ``rows`` until ``forget`` is called."""
        for row in rows:
            self._leases[row.event.id] = row.lease

    def forget(self, rows: Sequence[ClaimedRow]) -> None:
        """Extend the leases of ``rows`` no more."""
        for row in rows:
            self._leases.pop(row.event.id, None)
            if self._written:
                self._written.pop(row.event.id, None)

    async def run(self) -> None:
        """Extend leases until cancelled. Raises ``DatabaseUnavailable``."""
        sink = self._context.sink
        if isinstance(sink, ExtendsDeliveries):
            await self._extend(sink)

    async def _extend(self, sink: ExtendsDeliveries) -> None:
        while True:
            now, ends = lease_clock(), sink.deadlines()
            due = {
                event: end
                for event, end in ends.items()
                if event in self._leases and end > self._written.get(event, 0.0) + LOOK_SECONDS
            }
            if due:
                rows = [(event, self._leases[event], end - now) for event, end in due.items()]
                with contextlib.suppress(StatementFailed):  # the next look tries again
                    extended = await self._store.extend_leases(self._context.leases.sink, rows)
                    self._written.update((event, due[event]) for event in extended if event in self._leases)
            await asyncio.sleep(LOOK_SECONDS)
