"""The delivery of parked events: rows of ``delivery``, claimed with leases.

Any relay that serves a sink may claim its rows. A row of a key is claimed only if no earlier row of its key takes part
in the order, or together with the earlier ones for a sink that keeps the order of its calls. The rows of a key are
therefore delivered one after another, by whichever relay.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from itertools import chain
from uuid import UUID

from structlog.stdlib import BoundLogger

from outbox_relay.domain.lease_clock import lease_clock
from outbox_relay.domain.outcomes import next_attempt
from outbox_relay.postgres.rows import ClaimedRow, RowUpdate
from outbox_relay.postgres.store import Store
from outbox_relay.relay.attempt_recorder import AttemptRecorder
from outbox_relay.relay.breaker import Permit
from outbox_relay.relay.claimed_calls import ClaimedCalls
from outbox_relay.relay.context import LEASE_MARGIN_SECONDS, DeliveryContext
from outbox_relay.relay.finishing import Finishing
from outbox_relay.relay.lease_extensions import LeaseExtensions
from outbox_relay.relay.parked_claims import BUSY_POLL_SECONDS, MOST_ROWS, ParkedClaims
from outbox_relay.relay.parked_pace import ParkedPace
from outbox_relay.relay.parked_settler import ParkedSettler
from outbox_relay.relay.queue_claims import QueueClaims, RowsInHand
from outbox_relay.relay.shared_limits import UNLIMITED, Admission
from outbox_relay.relay.slow_deliveries import SlowDeliveries
from outbox_relay.relay.slow_requests import SlowRequests
from outbox_relay.sinks import Prefetches

START_SECONDS = 1.0
"""Time after a claim within which the calls with its rows begin. Rows of later ones go back."""
TURN_CALLS = 64
"""Calls in all kept slots together after which other tasks have their turn, even if none of these calls had to wait."""


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
        self._pace = ParkedPace.for_sink(context)
        self._extensions = LeaseExtensions(context, store)
        self._slow_deliveries = SlowDeliveries(context, slow_requests, self._settler, self._extensions)
        self._calls_wait = isinstance(context.sink, Prefetches)
        """True if each call waits for another process, and so gives other tasks their turn."""
        self._finishing = Finishing()
        self._ahead: asyncio.Task[ClaimedCalls] | None = None
        """The claim of the rows that follow those whose calls begin at present."""

    @property
    def under_way(self) -> int:
        """The number of rows that were claimed here and are not settled."""
        return self._settler.awaited + len(self._slow_requests) + self._settler.unsettled

    @property
    def _claims_rows(self) -> bool:
        """True while rows may be claimed, and the calls of claimed ones may begin."""
        return self._context.leases.serving and not self._finishing.begun

    async def finish(self) -> None:
        """Claim no more rows, and wait until those under way are settled. Those whose calls have not begun go back."""
        await self._finishing.begin()
        await self._settler.wait_until_settled()

    async def run(self) -> None:
        """Claim, deliver and settle rows, until cancelled.

        Raises ``SessionReset`` or ``DatabaseUnavailable``.
        """
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._settler.run())
                tasks.create_task(self._settler.unblock_keys())
                tasks.create_task(self._slow_deliveries.run(tasks))
                tasks.create_task(self._extensions.run())
                await self._claim_and_deliver_all(tasks)
        finally:
            self._context.limiter.leave()

    async def _claim_and_deliver_all(self, tasks: asyncio.TaskGroup) -> None:
        while not self._finishing.begun:
            if self._ahead is None:
                await self._claims.wait_until_due()
                await self._pace.rest()
            if self._claims_rows:
                await self._claim_and_deliver(tasks)
            else:
                await self._give_ahead_back()
                await asyncio.sleep(BUSY_POLL_SECONDS)
        await self._give_ahead_back()
        self._finishing.claims_ended()

    # -- claimed rows -----------------------------------------------------------------------------------------

    async def _claim_and_deliver(self, tasks: asyncio.TaskGroup) -> None:
        """Claim rows once, and start their delivery.

        Only a probe is claimed while the circuit is not closed.

        A slot is acquired before the permit, as for events of the log: a probe must not wait for a slot.
        """
        context = self._context
        if not await self._take_slot():
            return
        permit = context.breaker.admit_at_once() or await self._wait_for_circuit()
        if permit is None:
            self._pace.release_slot()
        elif self._ahead is not None:
            await self._deliver(tasks, await self._claimed_ahead(), UNLIMITED)
        elif not context.limits.active:
            await self._claim_admitted(tasks, permit, UNLIMITED, self._claim_rows(permit))
        elif (admission := await self._admitted(permit)) is not None:
            rows = self._claim_rows(permit)
            most = min(rows, admission.events) if context.sink.keeps_order else rows
            await self._claim_admitted(tasks, permit, admission, context.limits.soon(most))
        else:
            self._end_claim(permit)

    async def _take_slot(self) -> bool:
        """Wait for a slot, and until outcomes can be written. Rows that were claimed ahead do not wait for long.

        Return False, without a slot, if the session finishes.
        """
        if self._ahead is not None:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(START_SECONDS):
                    return await self._wait_for_slot()
            await self._give_ahead_back()
        return await self._finishing.unless_begun(self._wait_for_slot()) is not None

    async def _wait_for_slot(self) -> bool:
        await self._settler.wait_for_capacity()
        await self._pace.take_slot()
        return True

    async def _wait_for_circuit(self) -> Permit | None:
        """Wait for the circuit. Rows that were claimed ahead go back, since the destination may be down for long.

        Return None if the session finishes.
        """
        await self._give_ahead_back()
        return await self._finishing.unless_begun(self._context.breaker.admit())

    async def _claim_admitted(self, tasks: asyncio.TaskGroup, permit: Permit, admission: Admission, most: int) -> None:
        """Claim rows with an admission for their first call, and start their delivery.

        The limits outlast this session: an admission whose claim fails must be given back. Rows that were claimed for a
        sink without limits go back if it got some meanwhile.
        """
        limits = self._context.limits
        try:
            calls = await self._claim(permit, most)
        except BaseException:
            limits.withdraw(admission)
            raise
        if admission is UNLIMITED and limits.active:
            self._give_back(calls)
        await self._deliver(tasks, calls, admission)

    async def _claim(self, permit: Permit, most: int) -> ClaimedCalls:
        """Claim at most ``most`` rows, and return the calls that deliver them."""
        sent = lease_clock()
        claimed = await self._claims.claim(most)
        self._pace.claimed(lease_clock() - sent)
        rows = self._settler.deliverable(claimed)
        self._settler.expect(len(rows))
        size = self._context.sink.max_batch
        calls = deque(rows[first : first + size] for first in range(0, len(rows), size))
        return ClaimedCalls(calls, sent + LEASE_MARGIN_SECONDS, permit, is_full=len(claimed) == most)

    def _claim_rows(self, permit: Permit) -> int:
        """Return the number of rows of the next claim."""
        return 1 if permit.probe else self._pace.rows(MOST_ROWS)

    async def _admitted(self, permit: Permit) -> Admission | None:
        """Wait for the limits of all relays. Return None if nothing may be sent any more."""
        context = self._context
        most = 1 if permit.probe else min(MOST_ROWS, context.sink.max_batch)
        admission = await self._finishing.unless_begun(context.admit("parked", most))
        if admission is None or self._may_send(permit):
            return admission
        context.limits.withdraw(admission)
        return None

    def _may_send(self, permit: Permit) -> bool:
        """Return True if a call that was admitted before may still be sent."""
        breaker = self._context.breaker
        holds = permit.probe or breaker.holds(permit)
        return holds and not breaker.handing_over and self._claims_rows

    # -- claims ahead -----------------------------------------------------------------------------------------

    @property
    def _works_ahead(self) -> bool:
        """True if rows may be claimed ahead, and a slot may serve several calls.

        The events of a log must find slots, and limits across all relays have to admit each call.
        """
        return self._context.spec.queued and not self._context.limits.active

    def _begin_ahead(self, tasks: asyncio.TaskGroup, calls: ClaimedCalls) -> None:
        """Claim the next rows while these are delivered, so that no slot waits for a claim.

        That is done if there are more of these calls than slots, and more rows are probably due.
        """
        more = calls.is_full and calls.left > 0 and len(calls.rows) > self._pace.free
        if more and self._works_ahead and not calls.permit.probe:
            self._ahead = tasks.create_task(self._claim_ahead(calls))

    async def _claim_ahead(self, before: ClaimedCalls) -> ClaimedCalls:
        """Claim rows whose calls follow those of ``before``.

        All rows whose calls have not begun are together at most as many as one claim takes. The next claim begins when
        half as many are left.
        """
        await before.wait_until_few(self._claim_rows(before.permit) // 2)
        most = self._claim_rows(before.permit) - before.left
        may_claim = self._works_ahead and self._settler.has_capacity and self._may_send(before.permit)
        if most > 0 and may_claim and not before.given_back:
            return await self._claim(before.permit, most)
        return ClaimedCalls(deque(), before.until, before.permit)

    async def _claimed_ahead(self) -> ClaimedCalls:
        """Return the calls of the claim ahead. They go back if they may not be sent any more, or their time is over."""
        assert self._ahead is not None  # noqa: S101 - the caller has looked
        calls = await self._ahead
        self._ahead = None
        if not (self._works_ahead and self._may_send(calls.permit)) or lease_clock() + START_SECONDS >= calls.until:
            self._give_back(calls)
        return calls

    async def _give_ahead_back(self) -> None:
        """Give back the rows that were claimed ahead."""
        if self._ahead is not None:
            self._give_back(await self._claimed_ahead())

    # -- calls ------------------------------------------------------------------------------------------------

    async def _deliver(self, tasks: asyncio.TaskGroup, calls: ClaimedCalls, admission: Admission) -> None:
        """Start the calls of a claim, of which the first has a slot and an admission.

        The rows go back if they may not be sent any more: a claim takes a moment.
        """
        limits = self._context.limits
        if not self._may_send(calls.permit):
            self._give_back(calls)
        if not calls.rows:
            limits.withdraw(admission)
            self._end_claim(calls.permit)
        elif self._context.sink.keeps_order and self._claims.suspect_was_last:
            rows = calls.next()
            limits.refund(admission, len(rows))
            try:
                await self._call_in_turn(calls, rows, admission)
            finally:
                admission.end()
        else:
            await self._start(tasks, calls, admission)

    def _end_claim(self, permit: Permit) -> None:
        """Release the slot of a claim without calls, and its permit if that is a probe."""
        self._pace.release_slot()
        if permit.probe:
            self._context.breaker.unused(permit)

    def _give_back(self, calls: ClaimedCalls) -> None:
        """Give back the rows whose calls have not begun."""
        for row in chain(*calls.give_back()):
            self._settler.send_back(row, RowUpdate(row.event.id, row.lease, row.attempts))
            self._settler.arrived(1)

    async def _start(self, tasks: asyncio.TaskGroup, calls: ClaimedCalls, admission: Admission) -> None:
        """Start the calls of one claim one after another; the first one has its slot.

        Rows go back if their call cannot begin soon, since another relay may deliver them meanwhile.
        """
        self._begin(tasks, calls, admission)
        self._begin_ahead(tasks, calls)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(START_SECONDS):
                while calls.rows and (following := await self._slot_for_next(calls.permit)) is not None:
                    self._begin(tasks, calls, following)
        self._give_back(calls)

    def _begin(self, tasks: asyncio.TaskGroup, calls: ClaimedCalls, admission: Admission) -> None:
        """Start the next call, which ends its admission. Its slot is free if other slots have served all calls."""
        rows = calls.next()
        self._context.limits.refund(admission, len(rows))
        if not rows:
            admission.end()
            self._pace.release_slot()
            return
        task = tasks.create_task(self._call_in_turn(calls, rows, admission))
        if admission is not UNLIMITED:
            task.add_done_callback(admission.end)

    async def _slot_for_next(self, permit: Permit) -> Admission | None:
        """Take a slot for the next call of a claim. Return None if nothing may be sent any more."""
        limits = self._context.limits
        await self._pace.wait_for_turn()
        await self._pace.take_slot()
        try:
            admission = await self._context.admit("parked") if limits.active else UNLIMITED
        except asyncio.CancelledError:  # out of time
            self._pace.release_slot()
            raise
        if self._context.breaker.holds(permit) and self._may_send(permit):
            return admission
        limits.withdraw(admission)
        self._pace.release_slot()
        return None

    async def _call_in_turn(self, calls: ClaimedCalls, rows: list[ClaimedRow], admission: Admission) -> None:
        """Deliver rows with one call, and those of the next calls while the slot may be kept, and release it."""
        served = 0
        try:
            while rows:
                await self._call(rows, calls.until, calls.permit)
                served += self._context.limiter.limit  # as many calls as all slots make meanwhile
                if served >= TURN_CALLS and not self._calls_wait:
                    served = 0
                    await asyncio.sleep(0)
                rows = calls.next() if self._keeps_slot(calls.permit, admission) else []
        finally:
            self._pace.release_slot()

    def _keeps_slot(self, permit: Permit, admission: Admission) -> bool:
        """Return True if the slot of a call that ended may serve the next one."""
        if admission is not UNLIMITED or permit.probe or not self._works_ahead:
            return False
        return self._may_send(permit) and not self._pace.over_share()

    async def _call(self, rows: list[ClaimedRow], until: float, permit: Permit) -> None:
        """Deliver rows with one call."""
        events, attempt = [row.event for row in rows], next_attempt(rows[0].attempts)
        self._extensions.watch(rows)
        try:
            answer = await self._context.call(events, until, attempt)
            self._pace.observe(answer.seconds)
            self._settler.settle_call(rows, *answer, permit)
        finally:
            self._extensions.forget(rows)
            self._settler.arrived(len(rows))
