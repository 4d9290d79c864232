"""The delivery of parked events: rows of ``delivery``, claimed with leases.

Any relay that serves a sink may claim its rows. A row of a key is claimed only if no earlier row of its key takes part
in the order, or together with the earlier ones for a sink that keeps the order of its calls. The rows of a key are
therefore delivered one after another, by whichever relay.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Iterable, Sequence
from itertools import chain
from uuid import UUID

from structlog.stdlib import BoundLogger

from outbox_relay.domain.lease_clock import lease_clock
from outbox_relay.domain.outcomes import DELIVERED, Delivered, Unavailable, Verdict, next_attempt
from outbox_relay.postgres.rows import ClaimedRow, RowUpdate
from outbox_relay.postgres.store import Store
from outbox_relay.relay.attempt_recorder import AttemptRecorder
from outbox_relay.relay.breaker import Permit
from outbox_relay.relay.context import LEASE_MARGIN_SECONDS, DeliveryContext
from outbox_relay.relay.lease_extensions import LeaseExtensions
from outbox_relay.relay.parked_claims import BUSY_POLL_SECONDS, MOST_ROWS, ParkedClaims
from outbox_relay.relay.parked_pace import ParkedPace
from outbox_relay.relay.parked_settler import ParkedSettler
from outbox_relay.relay.queue_claims import QueueClaims, RowsInHand
from outbox_relay.relay.shared_limits import UNLIMITED, Admission
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
        self._pace = ParkedPace(context.limiter)
        self._extensions = LeaseExtensions(context, store)
        self._expects_rows = False

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
                await self._claims.wait_until_due()
                if self._context.leases.serving:
                    await self._claim_and_deliver(tasks)
                else:
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
            with self._extensions.watching([slow.row]):
                [verdict], seconds = await slow.request
        finally:
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
        await self._pace.take_slot()
        permit = await context.breaker.admit()
        if not context.limits.active:
            await self._claim_admitted(tasks, permit, UNLIMITED, self._claim_rows(permit))
        elif not self._expects_rows:
            await self._claim_first(tasks, permit)
        elif (admission := await self._admitted(permit)) is not None:
            rows = (
                min(self._claim_rows(permit), admission.events)
                if context.sink.keeps_order
                else self._claim_rows(permit)
            )
            await self._claim_admitted(tasks, permit, admission, context.limits.soon(rows))
        else:
            self._end_claim(permit)

    async def _claim_admitted(self, tasks: asyncio.TaskGroup, permit: Permit, admission: Admission, most: int) -> None:
        """Claim rows with an admission for their first call, and start their delivery.

        The limits outlast this session: an admission whose claim fails must be given back.
        """
        context, sent = self._context, lease_clock()
        try:
            claimed = await self._claims.claim(most)
        except BaseException:
            context.limits.withdraw(admission)
            raise
        rows = self._deliverable(claimed)
        self._expects_rows = bool(claimed)
        size = context.sink.max_batch
        calls = deque(rows[first : first + size] for first in range(0, len(rows), size))
        self._settler.expect(len(rows))
        if not calls:
            context.limits.withdraw(admission)
            self._end_claim(permit)
        elif context.sink.keeps_order and self._claims.suspect_was_last:
            context.limits.refund(admission, len(rows))
            try:
                await self._call(calls.popleft(), sent + LEASE_MARGIN_SECONDS, permit, admission)
            finally:
                admission.end()
        else:
            await self._start(tasks, calls, sent, permit, admission)

    async def _claim_first(self, tasks: asyncio.TaskGroup, permit: Permit) -> None:
        """Claim one row, if any is due, of a sink with limits across all relays, and only then ask for an admission.

        Otherwise relays without a row would wait for what others could use. The row goes back if that takes long.
        """
        sent = lease_clock()
        claimed = await self._claims.claim(1)
        rows = self._deliverable(claimed)
        self._expects_rows = bool(claimed)
        self._settler.expect(len(rows))
        admission = None
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(START_SECONDS):
                admission = await self._admitted(permit) if rows else None
        if admission is not None:
            self._begin(tasks, rows, sent + LEASE_MARGIN_SECONDS, permit, admission)
            return
        self._end_claim(permit)
        self._return(rows)

    def _end_claim(self, permit: Permit) -> None:
        """Release the slot of a claim without calls, and its permit if that is a probe."""
        self._pace.release_slot()
        if permit.probe:
            self._context.breaker.unused(permit)

    def _return(self, rows: Iterable[ClaimedRow]) -> None:
        """Give back rows whose calls do not begin."""
        for row in rows:
            self._settler.send_back(row, RowUpdate(row.event.id, row.lease, row.attempts))
            self._settler.arrived(1)

    def _claim_rows(self, permit: Permit) -> int:
        """Return the number of rows of the next claim."""
        if permit.probe:
            return 1
        sink = self._context.sink
        return min(MOST_ROWS, sink.max_batch) if sink.keeps_order else self._pace.rows(MOST_ROWS)

    async def _admitted(self, permit: Permit) -> Admission | None:
        """Wait for the limits of all relays. Return None if nothing may be sent any more."""
        context = self._context
        admission = await context.admit("parked", 1 if permit.probe else min(MOST_ROWS, context.sink.max_batch))
        if self._may_send(permit):
            return admission
        context.limits.withdraw(admission)
        return None

    def _may_send(self, permit: Permit) -> bool:
        """Return True if a call that was admitted before may still be sent."""
        breaker = self._context.breaker
        holds = permit.probe or breaker.holds(permit)
        return holds and not breaker.handing_over and self._context.leases.serving

    async def _start(
        self,
        tasks: asyncio.TaskGroup,
        calls: deque[list[ClaimedRow]],
        sent: float,
        permit: Permit,
        admission: Admission,
    ) -> None:
        """Start the calls of one claim one after another; the first one has its slot.

        Rows go back if their call cannot begin soon, since another relay may deliver them meanwhile.
        """
        until = sent + LEASE_MARGIN_SECONDS
        self._begin(tasks, calls.popleft(), until, permit, admission)
        try:
            async with asyncio.timeout(START_SECONDS):
                while calls and (following := await self._slot_for_next(permit)) is not None:
                    self._begin(tasks, calls.popleft(), until, permit, following)
        except TimeoutError:
            pass
        self._return(chain(*calls))

    def _begin(
        self, tasks: asyncio.TaskGroup, rows: list[ClaimedRow], until: float, permit: Permit, admission: Admission
    ) -> None:
        """Start a call, which ends its admission."""
        self._context.limits.refund(admission, len(rows))
        task = tasks.create_task(self._call(rows, until, permit, admission))
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

    async def _call(
        self, rows: list[ClaimedRow], until: float, permit: Permit, admission: Admission = UNLIMITED
    ) -> None:
        """Deliver rows with one call, and release its slot."""
        events, attempt = [row.event for row in rows], next_attempt(rows[0].attempts)
        try:
            with self._extensions.watching(rows):
                answer = await self._context.call(events, until, admission, attempt)
            self._pace.observe(answer.seconds)
            self._apply(rows, *answer, permit)
        finally:
            self._settler.arrived(len(rows))
            self._pace.release_slot()

    def _apply(self, rows: list[ClaimedRow], verdicts: Sequence[Verdict], seconds: float, permit: Permit) -> None:
        """Settle the rows of a call.

        A row that is unavailable because of an earlier row of its key goes back with no attempt counted.
        """
        if verdicts.count(DELIVERED) == len(rows):
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
