"""The rows of ``delivery``: claimed with leases, delivered, settled under the fence of their lease.

Any relay that serves a sink may claim its rows. A row of a key is claimed only when no earlier row of its key
takes part in the order, or together with those before it for a sink that keeps the order of its calls; so the rows of a
key come one after another, whoever delivers them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Sequence
from uuid import UUID

from structlog.stdlib import BoundLogger

from outbox_relay.domain.errors import SessionReset
from outbox_relay.domain.lease_clock import lease_clock
from outbox_relay.domain.outcomes import (
    DELIVERED,
    Delivered,
    Unavailable,
    Verdict,
)
from outbox_relay.postgres.store import ClaimedRow, RowBack, Store
from outbox_relay.relay.breaker import Permit
from outbox_relay.relay.context import LEASE_MARGIN_SECONDS, DeliveryContext
from outbox_relay.relay.parked_claims import BUSY_POLL_SECONDS, MOST_ROWS, ParkedClaims
from outbox_relay.relay.parked_settler import ParkedSettler

MOST_CLAIMS = 5
"""A row that was claimed this often without ever being settled is dead: it stops whoever delivers it."""


class ParkedDeliveries:
    """Everything this relay does with the rows of one sink."""

    def __init__(self, context: DeliveryContext, store: Store, relay: UUID, log: BoundLogger) -> None:
        self._context = context
        self._claims = ParkedClaims(context, store, relay, log)
        self._settler = ParkedSettler(context, store, self._claims, log)
        self._tasks: asyncio.TaskGroup | None = None
        self._under_way = 0

    def adopt_slow_request(self, row: ClaimedRow, permit: Permit, verdict: Awaitable[Verdict]) -> None:
        """``row`` was made of a request that is under way: settle it by the ``verdict`` to come.

        Raises ``SessionReset`` when the session is ending, since nothing is settled after that.
        """
        if self._tasks is None:
            raise RuntimeError("rows are not being settled")
        later = self._settle_later(row, permit, verdict)
        try:
            self._tasks.create_task(later)
        except RuntimeError:  # the group is shutting down
            later.close()
            raise SessionReset(f"sink {self._context.spec.name}: the session is ending") from None
        self._under_way += 1

    async def _settle_later(self, row: ClaimedRow, permit: Permit, verdict: Awaitable[Verdict]) -> None:
        try:
            self._settler.decide(row, await verdict, permit)
        finally:
            self._under_way -= 1

    def schedule_wakeup(self, seconds: float) -> None:
        """A row will be due in ``seconds``."""
        self._claims.schedule_wakeup(seconds)

    @property
    def under_way(self) -> int:
        """Rows that are being delivered here or wait to be settled."""
        return self._under_way + self._settler.unsettled

    async def run(self) -> None:
        """Claim, deliver and settle rows, until cancelled. Raises ``SessionReset`` or ``DatabaseUnavailable``."""
        async with asyncio.TaskGroup() as tasks:
            self._tasks = tasks
            tasks.create_task(self._settler.run())
            tasks.create_task(self._settler.unblock_keys())
            while True:
                await self._claims.wait_until_due()
                if self._context.leases.serving:
                    await self._claim_and_deliver(tasks)
                else:
                    await asyncio.sleep(BUSY_POLL_SECONDS)

    async def _claim_and_deliver(self, tasks: asyncio.TaskGroup) -> None:
        """One claim and what follows from it. Only a probe is claimed while the circuit is not closed.

        A slot comes before the leave to send, as for events of the log: whoever has the probe never waits for a slot.
        """
        context = self._context
        await self._settler.wait_for_capacity()
        await context.limiter.acquire()
        permit = await context.breaker.admit()
        slots, most = await self._take_slots(1 if permit.probe else MOST_ROWS)
        sent = lease_clock()
        claimed = await self._claims.claim(most)
        until = sent + LEASE_MARGIN_SECONDS
        rows = self._deliverable(claimed)
        calls = [rows[first : first + context.sink.max_batch] for first in range(0, len(rows), context.sink.max_batch)]
        self._give_slots(slots - len(calls))
        if not rows and permit.probe:
            context.breaker.unused(permit)
        for call in calls:
            if context.sink.keeps_order and self._claims.suspect_was_last:
                await self._call(call, until, permit)
            else:
                tasks.create_task(self._call(call, until, permit))

    async def _take_slots(self, most: int) -> tuple[int, int]:
        """Calls that may begin, the one that was waited for among them, and how many rows they hold, up to ``most``."""
        context, taken = self._context, 1
        if context.sink.keeps_order:
            return taken, min(most, context.sink.max_batch)
        while taken < most and not context.limiter.full():
            await context.limiter.acquire()
            taken += 1
        return taken, taken

    def _give_slots(self, count: int) -> None:
        for _ in range(count):
            self._context.limiter.release()

    def _deliverable(self, claimed: list[ClaimedRow]) -> list[ClaimedRow]:
        """Return the rows that may be sent.

        One that can never be is dead, and with when_dead = "hold" those behind it go back.
        """
        context, rows, stopped = self._context, list[ClaimedRow](), set[str]()
        for row in claimed:
            key = row.event.key if row.ordered else None
            if key in stopped:
                self._settler.send_back(row, RowBack(row.event.id, row.lease, row.attempts))
            elif not self._stops_everybody(row) and not self._is_faulty(row):
                rows.append(row)
            elif key is not None and context.spec.hold:
                stopped.add(key)
        return rows

    def _is_faulty(self, row: ClaimedRow) -> bool:
        """Whether the event of ``row`` cannot be delivered by any relay; then it is dead."""
        if row.event.fault is None:
            return False
        self._settler.send_back(row, RowBack(row.event.id, row.lease, row.attempts, "dead", None, row.event.fault))
        return True

    def _stops_everybody(self, row: ClaimedRow) -> bool:
        """Whether ``row`` was claimed too often without an outcome; then it is dead."""
        if row.claims <= MOST_CLAIMS:
            return False
        error = f"claimed {row.claims - 1} times without an outcome: whoever delivers it may have died of it"
        self._settler.send_back(row, RowBack(row.event.id, row.lease, row.attempts, "dead", None, error))
        return True

    async def _deliver(self, rows: list[ClaimedRow], until: float, permit: Permit) -> None:
        self._under_way += len(rows)
        try:
            verdicts = await self._context.sink.deliver([row.event for row in rows], until, rows[0].attempts + 1)
            self._sort_out(rows, verdicts, permit)
        finally:
            self._under_way -= len(rows)

    def _sort_out(self, rows: list[ClaimedRow], verdicts: Sequence[Verdict], permit: Permit) -> None:
        """Settle row by row; what was not delivered only because of a row before it says nothing of its own."""
        if verdicts.count(DELIVERED) == len(rows):
            self._context.breaker.delivered(permit)
            self._context.limiter.increase()
            self._settler.delivered(rows)
            return
        stopped: set[str] = set()
        for row, verdict in zip(rows, verdicts, strict=True):
            key = row.event.key if self._context.keyed(row.event) else None
            if key in stopped and isinstance(verdict, Unavailable):
                self._settler.send_back(row, RowBack(row.event.id, row.lease, row.attempts))
                continue
            self._settler.decide(row, verdict, permit)
            if key is not None and not isinstance(verdict, Delivered):
                stopped.add(key)

    async def _call(self, rows: list[ClaimedRow], until: float, permit: Permit) -> None:
        try:
            await self._deliver(rows, until, permit)
        finally:
            self._context.limiter.release()
