"""The delivery of parked events: rows of ``delivery``, claimed with leases.

Any relay that serves a sink may claim its rows. A row of a key is claimed only if no earlier row of its key takes part
in the order, or together with the earlier ones for a sink that keeps the order of its calls. The rows of a key are
therefore delivered one after another, by whichever relay.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence
from itertools import chain
from uuid import UUID

from structlog.stdlib import BoundLogger

from outbox_relay.domain.lease_clock import lease_clock
from outbox_relay.domain.outcomes import Delivered, Unavailable, Verdict, next_attempt
from outbox_relay.postgres.rows import ClaimedRow, RowUpdate
from outbox_relay.postgres.store import Store
from outbox_relay.relay.attempt_recorder import AttemptRecorder
from outbox_relay.relay.breaker import Permit
from outbox_relay.relay.claimed_calls import ClaimedCalls
from outbox_relay.relay.context import LEASE_MARGIN_SECONDS, DeliveryContext
from outbox_relay.relay.lease_extensions import LeaseExtensions
from outbox_relay.relay.parked_claims import BUSY_POLL_SECONDS, MOST_ROWS, ParkedClaims
from outbox_relay.relay.parked_pace import CLAIM_SECONDS, FAIR_CLAIM_SECONDS, ParkedPace
from outbox_relay.relay.parked_settler import ParkedSettler
from outbox_relay.relay.queue_claims import QueueClaims, RowsInHand
from outbox_relay.relay.slow_requests import SlowRequest, SlowRequests

START_SECONDS = 1.0
"""Time after a claim within which the calls with its rows begin. Rows of later ones go back."""
MOST_CLAIMS = 5
"""Claims without an outcome after which a row is dead, since it may stop every relay that delivers it."""


class ParkedDeliveries:
    """Claims, delivers and settles the rows of one sink, those of slow requests too."""

    def __init__(
        self,
        context: DeliveryContext,
        store: Store,
        relay: UUID,
        log: BoundLogger,
        slow_requests: SlowRequests,
        recorder: AttemptRecorder,
        in_hand: RowsInHand | None = None,
    ) -> None:
        self._context = context
        self._slow_requests = slow_requests
        self._claims = (
            QueueClaims(context, store, relay, log, in_hand or RowsInHand())
            if context.spec.queued
            else ParkedClaims(context, store, relay, log)
        )
        self._settler = ParkedSettler(context, store, self._claims, log, recorder)
        self._pace = ParkedPace(context.limiter, FAIR_CLAIM_SECONDS if context.spec.fair else CLAIM_SECONDS)
        self._extensions = LeaseExtensions(context, store)
        self._ahead: asyncio.Task[ClaimedCalls] | None = None
        """The claim of rows that follow those whose calls begin at present."""

    @property
    def under_way(self) -> int:
        """The number of rows that were claimed here and are not settled."""
        return self._settler.awaited + len(self._slow_requests) + self._settler.unsettled

    async def run(self) -> None:
        """Claim, deliver and settle rows, until cancelled.

        Raises ``SessionReset`` or ``DatabaseUnavailable``.
        """
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._settler.run())
            tasks.create_task(self._settler.unblock_keys())
            tasks.create_task(self._adopt_slow_requests(tasks))
            tasks.create_task(self._extensions.run())
            while True:
                if self._ahead is None:
                    await self._claims.wait_until_due()
                if self._context.leases.serving:
                    await self._claim_and_deliver(tasks)
                else:
                    await self._give_ahead_back()
                    await asyncio.sleep(BUSY_POLL_SECONDS)

    # -- slow requests ----------------------------------------------------------------------------------------

    async def _adopt_slow_requests(self, tasks: asyncio.TaskGroup) -> None:
        """Settle slow requests, each in a task of its own, until cancelled.

        This must not wait for a slot or for the circuit, since slow requests keep theirs until they are settled.
        """
        try:
            while True:
                slow = await self._slow_requests.take()
                tasks.create_task(self._settle_slow(slow))
        finally:
            self._slow_requests.close()

    async def _settle_slow(self, slow: SlowRequest) -> None:
        """Settle the row by the verdict, once the row is in the database."""
        try:
            self._extensions.watch([slow.row])
            [verdict], seconds = await slow.request
        finally:
            self._extensions.forget([slow.row])
            self._context.limiter.release()
        await self._context.settler.committed(slow.settlement)
        self._settler.decide(slow.row, verdict, slow.permit, seconds)
        self._slow_requests.decided(slow)

    # -- claimed rows -----------------------------------------------------------------------------------------

    async def _claim_and_deliver(self, tasks: asyncio.TaskGroup) -> None:
        """Claim rows once, and start their delivery.

        Only a probe is claimed while the circuit is not closed.

        A slot is acquired before the permit, as for events of the log: a probe must not wait for a slot.
        """
        context = self._context
        await self._settler.wait_for_capacity()
        await self._take_slot()
        permit = context.breaker.admit_at_once() or await self._admitted()
        calls = await (self._claim(permit) if self._ahead is None else self._claimed_ahead())
        if not calls.rows:
            self._pace.release_slot()
            if permit.probe:
                context.breaker.unused(permit)
        elif context.sink.keeps_order and self._claims.suspect_was_last:
            await self._call_alone(calls)
        else:
            await self._start(tasks, calls)

    async def _take_slot(self) -> None:
        """Wait for a slot. Rows that were claimed ahead go back if there is none soon."""
        if self._ahead is not None:
            try:
                async with asyncio.timeout(START_SECONDS):
                    await self._pace.take_slot()
            except TimeoutError:
                await self._give_ahead_back()
            else:
                return
        await self._pace.take_slot()

    async def _admitted(self) -> Permit:
        """Wait for the circuit. Rows that were claimed ahead go back, since the destination may be down for long."""
        await self._give_ahead_back()
        return await self._context.breaker.admit()

    async def _claim(self, permit: Permit) -> ClaimedCalls:
        """Claim rows, and return the calls that deliver them."""
        sent, most = lease_clock(), 1 if permit.probe else self._claim_rows()
        claimed = await self._claims.claim(most)
        rows = self._deliverable(claimed)
        self._settler.expect(len(rows))
        size = self._context.sink.max_batch
        calls = deque(rows[first : first + size] for first in range(0, len(rows), size))
        return ClaimedCalls(calls, sent + LEASE_MARGIN_SECONDS, permit, is_full=len(claimed) == most)

    def _claim_rows(self) -> int:
        """Return the number of rows of the next claim."""
        sink = self._context.sink
        return min(MOST_ROWS, sink.max_batch) if sink.keeps_order else self._pace.rows(MOST_ROWS)

    # -- claims ahead -----------------------------------------------------------------------------------------

    def _begin_ahead(self, tasks: asyncio.TaskGroup, calls: ClaimedCalls) -> None:
        """Claim the next rows of a queue once half of these calls have begun, so that no slot waits for a claim."""
        queued = self._context.spec.queued and not calls.permit.probe
        if queued and calls.is_full and len(calls.rows) > self._pace.free:
            self._ahead = tasks.create_task(self._claim_ahead(calls))

    async def _claim_ahead(self, before: ClaimedCalls) -> ClaimedCalls:
        await before.half_begun.wait()
        if before.given_back or not self._settler.has_capacity or not self._may_send(before.permit):
            return ClaimedCalls(deque(), before.until, before.permit)
        return await self._claim(before.permit)

    async def _claimed_ahead(self) -> ClaimedCalls:
        """Return the calls of the claim ahead. They go back if the circuit has changed, or their time is over."""
        assert self._ahead is not None  # noqa: S101 - the caller has looked
        calls = await self._ahead
        self._ahead = None
        if not self._may_send(calls.permit) or lease_clock() >= calls.until:
            self._give_back(calls)
        return calls

    async def _give_ahead_back(self) -> None:
        """Give back the rows that were claimed ahead."""
        if self._ahead is not None:
            self._give_back(await self._claimed_ahead())

    # -- calls ------------------------------------------------------------------------------------------------

    async def _start(self, tasks: asyncio.TaskGroup, calls: ClaimedCalls) -> None:
        """Start the calls of one claim one after another; the first one has its slot.

        Rows go back if their call cannot begin soon, since another relay may deliver them meanwhile.
        """
        tasks.create_task(self._call_in_turn(calls, calls.next()))
        self._begin_ahead(tasks, calls)
        try:
            async with asyncio.timeout(START_SECONDS):
                while calls.rows and await self._slot_for_next(calls.permit):
                    tasks.create_task(self._call_in_turn(calls, calls.next()))
        except TimeoutError:
            pass
        self._give_back(calls)

    async def _slot_for_next(self, permit: Permit) -> bool:
        """Take a slot for the next call of a claim. Return False if nothing may be sent any more."""
        await self._pace.wait_for_turn()
        await self._pace.take_slot()
        if self._may_send(permit):
            return True
        self._pace.release_slot()
        return False

    def _may_send(self, permit: Permit) -> bool:
        breaker = self._context.breaker
        return breaker.holds(permit) and not breaker.handing_over and self._context.leases.serving

    def _give_back(self, calls: ClaimedCalls) -> None:
        """Give back the rows whose calls have not begun."""
        for row in chain(*calls.give_back()):
            self._settler.send_back(row, RowUpdate(row.event.id, row.lease, row.attempts))
            self._settler.arrived(1)

    def _deliverable(self, claimed: list[ClaimedRow]) -> list[ClaimedRow]:
        """Return the rows that may be sent.

        Rows that can never be delivered are dead. With when_dead = "hold" the later rows of their keys go back.
        """
        context, rows, stopped = self._context, list[ClaimedRow](), set[str]()
        for row in claimed:
            key = row.event.key if row.ordered else None
            if key in stopped:
                self._settler.send_back(row, RowUpdate(row.event.id, row.lease, row.attempts))
            elif not self._stops_relays(row) and not self._is_faulty(row):
                rows.append(row)
            elif key is not None and context.spec.hold:
                stopped.add(key)
        return rows

    def _is_faulty(self, row: ClaimedRow) -> bool:
        """Return True, and make the row dead, if no relay can deliver its event."""
        if row.event.fault is None:
            return False
        back = RowUpdate(row.event.id, row.lease, row.attempts, "dead", None, row.event.fault)
        self._settler.send_back(row, back, "undeliverable")
        return True

    def _stops_relays(self, row: ClaimedRow) -> bool:
        """Return True, and make the row dead, if it was claimed too often."""
        if row.claims <= MOST_CLAIMS:
            return False
        error = f"claimed {row.claims - 1} times without an outcome: it may have crashed the relays that delivered it"
        self._settler.send_back(row, RowUpdate(row.event.id, row.lease, row.attempts, "dead", None, error), "crashes")
        return True

    async def _call_in_turn(self, calls: ClaimedCalls, rows: list[ClaimedRow]) -> None:
        """Deliver rows with one call, and those of the next calls one after another while the slot may be kept."""
        try:
            while rows:
                await self._call(rows, calls.until, calls.permit)
                rows = calls.next() if self._pace.keeps_slot and self._may_send(calls.permit) else []
        finally:
            self._pace.release_slot()

    async def _call_alone(self, calls: ClaimedCalls) -> None:
        """Deliver rows with one call, and wait for its end."""
        try:
            await self._call(calls.next(), calls.until, calls.permit)
        finally:
            self._pace.release_slot()

    async def _call(self, rows: list[ClaimedRow], until: float, permit: Permit) -> None:
        """Deliver rows with one call."""
        self._extensions.watch(rows)
        try:
            answer = await self._context.call([row.event for row in rows], until, next_attempt(rows[0].attempts))
            self._pace.observe(answer.seconds)
            self._apply(rows, *answer, permit)
        finally:
            self._extensions.forget(rows)
            self._settler.arrived(len(rows))

    def _apply(self, rows: list[ClaimedRow], verdicts: Sequence[Verdict], seconds: float, permit: Permit) -> None:
        """Settle the rows of a call.

        A row that is unavailable because of an earlier row of its key goes back with no attempt counted.
        """
        if len(verdicts) == len(rows) and all(isinstance(verdict, Delivered) for verdict in verdicts):
            self._context.delivered(permit)
            self._context.limiter.increase()
            self._settler.measure_delivered(rows, seconds)
            for row, verdict in zip(rows, verdicts, strict=True):
                self._settler.delivered(row, verdict)
            return
        stopped: set[str] = set()
        for row, verdict in zip(rows, verdicts, strict=True):
            key = row.event.key if self._context.keyed(row.event) else None
            if key in stopped and isinstance(verdict, Unavailable):
                self._settler.send_back(row, RowUpdate(row.event.id, row.lease, row.attempts))
                continue
            self._settler.decide(row, verdict, permit, seconds)
            if key is not None and not isinstance(verdict, Delivered):
                stopped.add(key)
