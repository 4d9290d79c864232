"""The settlement of claimed rows, and the keys that become free by it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Collection, Sequence

from structlog.stdlib import BoundLogger

from outbox_relay.domain.attempts import AttemptRecord, delivery_record, failure_record
from outbox_relay.domain.errors import StatementFailed
from outbox_relay.domain.measures import DeadReason, DeliveredCall
from outbox_relay.domain.outcomes import (
    DELIVERED,
    DeadLetter,
    Delivered,
    Done,
    RetryLater,
    StandStill,
    Unavailable,
    Verdict,
    decide,
)
from outbox_relay.postgres.rows import ClaimedRow, DeliveredRow, RowUpdate
from outbox_relay.postgres.store import Store
from outbox_relay.relay.attempt_recorder import AttemptRecorder
from outbox_relay.relay.breaker import Permit
from outbox_relay.relay.context import DeliveryContext
from outbox_relay.relay.parked_claims import BUSY_POLL_SECONDS, MOST_KEYS, MOST_PAUSE_SECONDS, MOST_ROWS, ParkedClaims
from outbox_relay.relay.portions import write_in_portions
from outbox_relay.relay.timing import timed

MOST_CLAIMS = 5
"""Claims without an outcome after which a row is dead, since it may stop every relay that delivers it."""
MOST_UNSETTLED = 4 * MOST_ROWS
"""Approximate maximum of outcomes to be written. At that number no row is claimed."""
GATHER_SECONDS = 0.025
"""Maximum wait for more outcomes before a settlement, while other rows are being delivered.

A statement for each row would cost more than its delivery.
"""


class ParkedSettler:
    """Decides what becomes of claimed rows, and writes it."""

    def __init__(
        self, context: DeliveryContext, store: Store, claims: ParkedClaims, log: BoundLogger, recorder: AttemptRecorder
    ) -> None:
        self._context = context
        self._store = store
        self._claims = claims
        self._log = log
        self._recorder = recorder
        self._done: list[tuple[ClaimedRow, AttemptRecord | None]] = []
        self._back: list[tuple[ClaimedRow, RowUpdate, DeadReason | None]] = []
        self._unmeasured: list[DeliveredCall] = []
        self._due = asyncio.Event()
        self._settled = asyncio.Event()
        self._gathered = asyncio.Event()
        """Set if the outcomes are to be written without a wait for more of them."""
        self.awaited = 0
        """The number of claimed rows that have no outcome yet."""

    @property
    def unsettled(self) -> int:
        """The number of rows whose outcome is not in the database."""
        return len(self._done) + len(self._back)

    @property
    def has_capacity(self) -> bool:
        """True if fewer than ``MOST_UNSETTLED`` outcomes are to be written."""
        return self.unsettled < MOST_UNSETTLED

    async def wait_for_capacity(self) -> None:
        """Wait until fewer than ``MOST_UNSETTLED`` outcomes are to be written."""
        while not self.has_capacity:
            self._settled.clear()
            await self._settled.wait()

    async def wait_until_settled(self) -> None:
        """Wait until every claimed row has an outcome, and all of them are in the database."""
        while self.awaited or self.unsettled:
            self._settled.clear()
            await self._settled.wait()

    # -- claimed rows -----------------------------------------------------------------------------------------

    def deliverable(self, claimed: list[ClaimedRow]) -> list[ClaimedRow]:
        """Return the rows that may be sent.

        Rows that can never be delivered are dead. With when_dead = "hold" the later rows of their keys go back.
        """
        context, rows, stopped = self._context, list[ClaimedRow](), set[str]()
        for row in claimed:
            key = row.event.key if row.ordered else None
            if key in stopped:
                self.send_back(row, RowUpdate(row.event.id, row.lease, row.attempts))
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
        self.send_back(row, back, "undeliverable")
        return True

    def _stops_relays(self, row: ClaimedRow) -> bool:
        """Return True, and make the row dead, if it was claimed too often."""
        if row.claims <= MOST_CLAIMS:
            return False
        error = f"claimed {row.claims - 1} times without an outcome: it may have crashed the relays that delivered it"
        self.send_back(row, RowUpdate(row.event.id, row.lease, row.attempts, "dead", None, error), "crashes")
        return True

    # -- outcomes ---------------------------------------------------------------------------------------------

    def expect(self, count: int) -> None:
        """Record that the outcomes of ``count`` rows will follow."""
        self.awaited += count

    def arrived(self, count: int) -> None:
        """Record that ``count`` rows that were expected have an outcome, or that their call failed."""
        self.awaited -= count
        if not self.awaited:
            self._gathered.set()

    def measure_delivered(self, rows: list[ClaimedRow], seconds: float) -> None:
        """Count rows that one call of ``seconds`` delivered. Those of calls with a single row are counted together."""
        if len(rows) == 1:
            self._unmeasured.append(DeliveredCall(rows[0].event, seconds, time.monotonic()))
        else:
            self._context.measures.delivered([row.event for row in rows], seconds, self._context.now())

    def _measure(self) -> None:
        """Count the rows that were delivered since this was called last."""
        calls, self._unmeasured = self._unmeasured, []
        self._context.measures.delivered_each(calls, self._context.now(), time.monotonic())

    def delivered(self, row: ClaimedRow, verdict: Verdict) -> None:
        """Settle a row that was delivered."""
        record = None
        if isinstance(verdict, Delivered):
            mode = self._context.spec.record_attempts
            record = delivery_record(mode, row.event, verdict, row.attempts, time.monotonic(), tried=row.tried)
        self._done.append((row, record))
        self._wake(row)

    def send_back(self, row: ClaimedRow, back: RowUpdate, dead: DeadReason | None = None) -> None:
        """Settle a row that was not delivered, and stays as ``back`` states; ``dead`` is why it is dead."""
        if back.state == "dead":
            self._context.report.dead(row.event, back.status, back.attempt)
        self._back.append((row, back, dead))
        self._wake(row)

    def settle_call(self, rows: list[ClaimedRow], verdicts: Sequence[Verdict], seconds: float, permit: Permit) -> None:
        """Settle the rows of a call. Those that were not tried, such as behind a failed row of their key, go back."""
        if verdicts.count(DELIVERED) == len(rows):
            self._context.delivered(permit)
            self._context.limiter.increase()
            self.measure_delivered(rows, seconds)
            for row, verdict in zip(rows, verdicts, strict=True):
                self.delivered(row, verdict)
            return
        stopped: set[str] = set()
        for row, verdict in zip(rows, verdicts, strict=True):
            key = row.event.key if self._context.keyed(row.event) else None
            if isinstance(verdict, Unavailable) and (verdict.untouched or key in stopped):
                if verdict.untouched:
                    self._context.breaker.unused(permit)
                self.send_back(row, RowUpdate(row.event.id, row.lease, row.attempts))
                continue
            self.decide(row, verdict, permit, seconds)
            if key is not None and not isinstance(verdict, Delivered):
                stopped.add(key)

    def decide(self, row: ClaimedRow, verdict: Verdict, permit: Permit, seconds: float) -> None:
        """Settle a row by its verdict, which a call of ``seconds`` returned."""
        context, event = self._context, row.event
        dead: DeadReason | None = None
        judged = context.judged(event, verdict, permit, seconds, failed_before=row.attempts > 0)
        settlement = decide(row.attempts, judged, context.spec.retry, context.noise())
        record = failure_record(context.spec.record_attempts, event, settlement, row.attempts, time.monotonic())
        match settlement:
            case Done():
                self.measure_delivered([row], seconds)
                self.delivered(row, judged)
                return
            case RetryLater(delay, attempts, error, status, attempt):
                state = "waiting"
            case DeadLetter(attempts, error, status, attempt, refused):
                state, delay, dead = "dead", None, "refused" if refused else "exhausted"
            case StandStill(error, status, retry_after, attempt):
                state, attempts = None, row.attempts
                delay = max(context.breaker.retry_delay(), retry_after or 0.0)
        back = RowUpdate(event.id, row.lease, attempts, state, delay, error, status, attempt, record)
        self.send_back(row, back, dead)

    # -- settlements ------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Write outcomes as they come, together if there are several, until cancelled."""
        try:
            while True:
                await self._due.wait()
                await self._gather()
                self._due.clear()
                await self.settle()
        finally:
            self._measure()

    async def _gather(self) -> None:
        """Wait for more outcomes, at most for ``GATHER_SECONDS``, while rows are being delivered.

        A row that was claimed before without an outcome does not wait. If another row crashed the relay meanwhile, it
        would be claimed once more, and after ``MOST_CLAIMS`` be dead for the crashes of the other.
        """
        if self.awaited:
            try:
                async with asyncio.timeout(GATHER_SECONDS):
                    await self._gathered.wait()
            except TimeoutError:
                pass
        self._gathered.clear()

    def _wake(self, row: ClaimedRow) -> None:
        if row.claims > 1:
            self._gathered.set()
        self._due.set()

    async def settle(self) -> None:
        """Write all outcomes. If the database fails with them, write smaller portions.

        Outcomes that were not written are kept in any case. Raises ``StatementFailed`` after repeated failures.
        """
        self._measure()
        done, back = len(self._done), len(self._back)

        async def write(most: int) -> bool:
            nonlocal done, back
            if done:
                done -= await self._write_done(min(done, most))
            elif back:
                back -= await self._write_back(min(back, most))
            return bool(done or back)

        await write_in_portions(MOST_UNSETTLED, write)

    async def _write_done(self, count: int) -> int:
        done = self._done[:count]
        deleted = [DeliveredRow(row.event.id, row.lease, record) for row, record in done]
        spec = self._context.spec
        only_tried = spec.record_attempts == "failures"

        async def delete(name: str | None) -> dict[int, bool]:
            return await self._store.delete_rows(spec.name, deleted, relay=name, only_tried=only_tried)

        with timed(self._context.measures.settle):
            ours = await self._recorder.settle(sum(d.record is not None for d in deleted), delete)
        del self._done[:count]
        rows = [row for row, _ in done]
        self._written(rows, ours, gone=len(ours))
        self._claims.follow([row for row in rows if ours.get(row.event.id)])
        return count

    async def _write_back(self, count: int) -> int:
        back, spec = self._back[:count], self._context.spec
        updates = [update for _, update, _ in back]

        async def update(name: str | None) -> set[int]:
            return await self._store.update_rows(spec.name, updates, relay=name)

        with timed(self._context.measures.settle):
            ours = await self._recorder.settle(sum(u.record is not None for u in updates), update)
        del self._back[:count]
        self._written([row for row, _, _ in back], ours)
        self._context.measures.died(dead for row, _, dead in back if dead and row.event.id in ours)
        for _, b, _ in back:
            if b.due_in is not None:
                self._context.due_timer.schedule_wakeup(b.due_in)
        self._claims.follow([row for row, b, _ in back if b.state == "dead" and not spec.hold])
        return count

    def _written(self, rows: list[ClaimedRow], ours: Collection[int], gone: int = 0) -> None:
        self._settled.set()
        self._claims.written(rows, gone)
        lost = sum(row.event.id not in ours for row in rows)
        if lost:
            self._context.measures.lost_rows(lost)
            self._log.warning("rows.lost", sink=self._context.spec.name, rows=lost)

    # -- blocked keys -----------------------------------------------------------------------------------------

    async def unblock_keys(self) -> None:
        """Free blocked keys until cancelled.

        While there are none, the next settlement is waited for, since it alone can block keys.
        """
        blocked = self._context.blocked
        while True:
            if not len(blocked):
                await self._context.settler.committed(blocked.collecting)
            await self.unblock_once()
            await asyncio.sleep(BUSY_POLL_SECONDS / 2)

    async def unblock_once(self) -> None:
        """Free the keys of which no row is left.

        Their events are delivered straight from the log again.
        """
        blocked, context = self._context.blocked, self._context
        asked_at, keys = blocked.settled(MOST_KEYS)
        if keys:
            server = context.settler.server
            try:
                still = await self._store.still_blocked(context.spec.name, keys, context.spec.hold, server=server)
            except StatementFailed:  # the keys stay blocked until their next turn
                await asyncio.sleep(MOST_PAUSE_SECONDS)
            else:
                blocked.free(asked_at, keys, still)
