"""The bound ``rows_max`` of a sink with ``claim = "rows"``."""

from __future__ import annotations

import asyncio
import time

from outbox_relay.domain.errors import StatementFailed
from outbox_relay.domain.event import SHARDS
from outbox_relay.domain.sink_spec import SinkSpec
from outbox_relay.postgres.store import Store
from outbox_relay.relay.parked_limit import ParkedLimit
from outbox_relay.relay.settler import Settler
from outbox_relay.relay.sink_leases import SinkLeases

COUNT_PAGE = 100_000
"""Maximum number of rows that one statement counts."""
RECOUNT_SECONDS = 60.0
"""Maximum interval between two counts while rows are made, however far the bound is."""


class QueueLimit(ParkedLimit):
    """The bound of the rows of a queue that are to be delivered, excluding scheduled events.

    Rows are counted in pages, and seldom while the bound is far. Between two counts the rows that this relay makes and
    delivers count for those of all relays, by its part of the shards.
    """

    def __init__(
        self, store: Store, spec: SinkSpec, settler: Settler, changed: asyncio.Event, leases: SinkLeases
    ) -> None:
        super().__init__(store, spec, settler, changed)
        self._leases = leases
        self._most = spec.rows_max
        self._changed_since = 0.0
        self._counted_at = float("-inf")
        self._left = 0.0
        self._failure: str | None = None
        self._was_full = False
        self._uncounted = True

    @property
    def full(self) -> bool:
        """True if no more rows may be made."""
        return self._parked_count + self._changed_since >= self._most

    def add(self, count: int = 1) -> None:
        """Count rows that were made."""
        self._changed_since += count * self._weight
        self._count_due.set()

    def remove(self, count: int) -> None:
        """Count rows that were delivered."""
        self._changed_since -= count * self._weight

    @property
    def _weight(self) -> float:
        return SHARDS / max(1, len(self._leases.held))

    def admits(self) -> bool:
        """Return True if more rows may be made. If they are too many, say so in the notice."""
        full = self.full
        if full != self._was_full:
            self._was_full = full
            self._show()
        return self.has_capacity

    def report_failure(self, error: str | None) -> None:
        """Record why rows cannot be made; None: they can."""
        if error != self._failure:
            self._failure = error
            self._show()

    def _show(self) -> None:
        """Show the state in the notice."""
        text = self._troubles.text
        if self._was_full:
            text = f"{self._most} events wait as rows, and no more than that may (rows_max): the sink waits for them"
        elif self._failure is not None:
            text = f"events do not become rows: {self._failure}"
        self._set_notice(text)

    async def _count(self, asked_at: float) -> None:
        """Count the rows in the database, unless the bound is far.

        A count that failed leaves the last one, which later deliveries reduce.
        """
        if self._troubles:
            self._forget_troubles(asked_at, waiting=False)
        near = self._changed_since >= self._left / 2
        if not near and not self.full and time.monotonic() - self._counted_at < RECOUNT_SECONDS:
            return
        before = self._changed_since
        try:
            count = await self._count_pages()
        except StatementFailed:
            return
        self._parked_count = count
        self._changed_since -= before
        self._counted_at = time.monotonic()
        self._left = self._most - count

    async def _count_pages(self) -> int:
        count, last = 0, 0
        while count <= self._most:
            found, last = await self._store.count_queued(self._spec.name, last, COUNT_PAGE)
            count += found
            if found < COUNT_PAGE:
                break
        return count
