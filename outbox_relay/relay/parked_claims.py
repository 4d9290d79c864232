"""Claims of parked deliveries that are due."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from itertools import islice
from uuid import UUID

from structlog.stdlib import BoundLogger

from outbox_relay.domain.errors import StatementFailed
from outbox_relay.domain.event import max_wire_bytes
from outbox_relay.postgres.rows import MOST_PAYLOAD, ClaimedRow, RowPlace
from outbox_relay.postgres.store import Store
from outbox_relay.relay.context import LEASE_MARGIN_SECONDS, DeliveryContext
from outbox_relay.relay.portions import FIRST_PAUSE_SECONDS, MOST_TRIES, SHRINK, is_for_its_size, pause
from outbox_relay.relay.row_leases import new_row_lease
from outbox_relay.relay.timing import timed

POLL_SECONDS = 1.0
"""Interval between claims for rows whose due time this relay does not know, and between sweeps while keys are held."""
FOLLOWED_POLL_SECONDS = 0.05
"""The first of these intervals after many rows that were due unexpectedly.

It doubles with each claim that begins at the first row and finds none.
"""
FOLLOWED_ROWS = 20
"""Number of rows in a claim that count as many. Fewer are retries of other relays, which poll for those themselves."""
SWEEP_SECONDS = 5.0
"""Interval between sweeps while no key is blocked here. Only a relay that crashed leaves such rows behind."""
BUSY_POLL_SECONDS = 0.1
"""Interval between claims while keys are blocked."""
MOST_ROWS = 1000
"""Maximum number of rows in one claim."""
MOST_BYTES = 16 << 20
"""Maximum bytes of payload, key and headers in one claim, not counting its first row. A claim ahead may add as many."""
MOST_KEYS = 1000
"""Maximum number of keys in one question and in one sweep."""
FEWEST_KEYS, KEYS_PER_ROW = 100, 4
"""Number of keys in a claim: ``KEYS_PER_ROW`` for each row that it may take, and at least ``FEWEST_KEYS``."""
MOST_PAUSE_SECONDS = 1.0
"""Maximum pause after a claim that failed."""


class ClaimSize:
    """The limits of the next claim.

    They are smaller after a claim that failed, and larger after those that succeeded.
    """

    def __init__(self) -> None:
        self.rows = MOST_ROWS
        self.payload_bytes = MOST_BYTES
        self.failed = 0
        """The number of consecutive claims that failed."""
        self.bare = False
        """True if a claim of a single row failed, so that the next one comes without its payload."""

    def pause_seconds(self) -> float:
        """Return the pause in seconds after a claim that failed."""
        return min(MOST_PAUSE_SECONDS, FIRST_PAUSE_SECONDS * 2.0**self.failed)

    def failure(self, error: StatementFailed) -> None:
        """Reduce the limits after a failure that a smaller claim may avoid."""
        self.failed += 1
        if not is_for_its_size(error):
            return
        self.bare = self.rows == 1
        self.rows = max(1, self.rows // SHRINK)
        self.payload_bytes = self.payload_bytes // SHRINK if self.rows > 1 else 0

    def success(self) -> None:
        """Raise the limits after a claim that succeeded."""
        self.failed = 0
        if not self.bare:
            self.rows = min(MOST_ROWS, 2 * self.rows)
            self.payload_bytes = min(MOST_BYTES, max(1 << 10, 2 * self.payload_bytes))
        self.bare = False


class ParkedClaims:
    """Claims rows of one sink.

    These are rows that are due, the first rows of keys, and rows that may have killed a relay.
    """

    def __init__(self, context: DeliveryContext, store: Store, relay: UUID, log: BoundLogger) -> None:
        self._context = context
        self._store = store
        self._relay = relay
        self._log = log
        self._asked_at = self._swept_at = self._suspected_at = float("-inf")
        self._swept: str | None = None
        self._poll_seconds = POLL_SECONDS
        self._size = ClaimSize()
        self._place: RowPlace | None = None
        """The place at which the last claim ended, if it got as many rows as it may."""
        self._began_at = float("-inf")
        """The time at which a claim last began at the first row that is due."""
        self._suspects = False
        self.suspect_was_last = False
        """True if the last claim was of a row that may have killed its owners."""
        self._heads: dict[str, None] = {}
        """Keys whose first row may have become claimable, those that were looked up longest ago first."""
        self._doubtful: list[UUID] = []
        """Leases of claims that failed here and may have taken effect in the database."""

    def follow(self, settled: list[ClaimedRow]) -> None:
        """Let the rows be claimed that wait for those that were settled."""
        self._heads.update((row.event.key, None) for row in settled if row.ordered and row.event.key is not None)
        self._context.due_timer.wake()

    def written(self, rows: list[ClaimedRow], gone: int) -> None:
        """Record that the outcomes of claimed rows are in the database, from which ``gone`` of them were deleted."""

    async def wait_until_due(self) -> None:
        """Wait until a row may be due."""
        interval = BUSY_POLL_SECONDS if len(self._context.blocked) else self._poll_seconds
        timer = self._context.due_timer
        while not self._heads:
            left = min(timer.next_at, self._asked_at + interval) - time.monotonic()
            if left <= 0:
                return
            await timer.wait(left)

    async def claim(self, most: int) -> list[ClaimedRow]:
        """Return at most ``most`` rows to deliver now.

        A row that may have killed its owners is returned alone, in turn with the others.
        """
        now = time.monotonic()
        due = self._suspects or now - self._suspected_at >= POLL_SECONDS
        if due and not self.suspect_was_last and (suspect := await self._claim_suspect(now)):
            return suspect
        often = self._swept is not None or len(self._context.blocked)
        if now - self._swept_at >= (POLL_SECONDS if often else SWEEP_SECONDS) and len(self._heads) < MOST_KEYS:
            await self._sweep(now)
        most, most_bytes = min(most, self._size.rows), self._size.payload_bytes
        heads = list(islice(self._heads, min(MOST_KEYS, max(FEWEST_KEYS, KEYS_PER_ROW * most))))
        for key in heads:
            del self._heads[key]
        is_expected = bool(heads) or self._context.due_timer.next_at <= now
        self._context.due_timer.forget(now)
        after = self._place_of_next(now, by_key=bool(heads))
        claimed = await self._claim(most, heads, after=after)
        if claimed or after is None:
            self._adapt_poll(len(claimed), is_expected=is_expected)
        full = len(claimed) == most
        self._place = _end(claimed) if full else None
        if not claimed and self.suspect_was_last:
            claimed = await self._claim_suspect(now)
        else:
            self.suspect_was_last = False
        cut = full or after is not None or 2 * max_wire_bytes([row.event for row in claimed]) > most_bytes
        if cut or self._size.failed:
            self._heads.update(dict.fromkeys(heads))
            self._asked_at = float("-inf")  # more rows may be due
        elif not claimed:
            self._asked_at = now
        return claimed

    def _place_of_next(self, now: float, *, by_key: bool) -> RowPlace | None:
        """Return the place behind which the next claim looks for rows, or None if it begins at the first one.

        Most rows before the place are in flight, so that a claim would look at them in vain. At least every
        ``POLL_SECONDS``, and after rows of keys were settled, a claim begins at the first row, since some of them may
        have come back, or a row that was due later may have moved the place beyond them.
        """
        if self._place is not None and not by_key and now - self._began_at < POLL_SECONDS:
            return self._place
        self._began_at = now
        return None

    def _adapt_poll(self, found: int, *, is_expected: bool) -> None:
        """Poll often after many rows whose due time was not known here, as a bulk retry makes them due in steps."""
        if not found:
            self._poll_seconds = min(POLL_SECONDS, 2 * self._poll_seconds)
        elif not is_expected and found >= FOLLOWED_ROWS:
            self._poll_seconds = FOLLOWED_POLL_SECONDS

    async def _sweep(self, now: float) -> None:
        """Add the next keys with held rows, which another relay may have left behind.

        All keys have their turn, at most ``MOST_KEYS`` in a second, so that many cost no more than few.
        """
        self._swept_at = now
        try:
            keys = await self._store.held_keys(self._context.spec.name, self._swept, MOST_KEYS)
        except StatementFailed:
            return
        self._swept = keys[-1] if len(keys) == MOST_KEYS else None
        self._heads.update(dict.fromkeys(keys))

    async def _claim_suspect(self, now: float) -> list[ClaimedRow]:
        """Claim a row that may have killed its owners."""
        claimed = await self._claim(1, (), suspects=True)
        self._suspected_at, self._suspects, self.suspect_was_last = now, bool(claimed), bool(claimed)
        return claimed

    async def _claim(
        self, most: int, heads: Sequence[str], *, suspects: bool = False, after: RowPlace | None = None
    ) -> list[ClaimedRow]:
        """Claim at most ``most`` rows.

        These are fewer after a claim that failed, and none if this one fails.
        """
        context, size, bare = self._context, self._size, self._size.bare
        lease = new_row_lease(context.now())
        lease_seconds = context.sink.timeout_seconds + 2 * LEASE_MARGIN_SECONDS
        try:
            await self._give_doubtful_back()
            self._doubtful.append(lease)
            most = min(most, size.rows)
            with timed(context.measures.claim):
                claimed = await self._fetch(lease, lease_seconds, most, heads, suspects=suspects, after=after)
        except StatementFailed as error:
            if size.failed.bit_count() <= 1:  # fewer and fewer lines while claims fail
                self._log.warning("rows.claim_failed", sink=context.spec.name, reason=str(error), rows=size.rows)
            size.failure(error)
            await asyncio.sleep(size.pause_seconds())
            return []
        self._doubtful.clear()
        size.success()
        return [await self.with_payload(row) for row in claimed] if bare else claimed

    async def _fetch(
        self,
        lease: UUID,
        lease_seconds: float,
        most: int,
        heads: Sequence[str],
        *,
        suspects: bool,
        after: RowPlace | None,
    ) -> list[ClaimedRow]:
        context, size = self._context, self._size
        claimed = await self._store.claim_rows(
            *(context.spec.name, self._relay, lease, lease_seconds, most, size.payload_bytes),
            hold=context.spec.hold,
            keys=heads,
            suspects=suspects,
            with_followers=context.sink.keeps_order,
            most_payload=0 if size.bare else MOST_PAYLOAD,
            after=after,
        )
        return await self._with_tenants(claimed) if context.spec.tenants else claimed

    async def _with_tenants(self, claimed: list[ClaimedRow]) -> list[ClaimedRow]:
        events = await self._store.with_tenants([row.event for row in claimed])
        return [row._replace(event=event) for row, event in zip(claimed, events, strict=True)]

    async def _give_doubtful_back(self) -> None:
        """Return the rows of claims whose answer was lost or could not be loaded.

        Otherwise they would wait for the end of their leases, with a claim counted although they were never tried.
        """
        if self._doubtful:
            await self._store.give_leases_back(self._context.spec.name, self._doubtful)
            self._doubtful.clear()

    async def with_payload(self, row: ClaimedRow) -> ClaimedRow:
        """Return a row with its payload, or with the reason why it cannot be read.

        Rows are claimed without their payload after claims that failed.

        Raises ``StatementFailed`` if reads fail repeatedly for another reason than the payload.
        """
        event, reason = row.event, ""
        if event.fault is None or not event.fault.startswith("payload"):
            return row
        for tries in range(1, MOST_TRIES):
            try:
                found = await self._store.row_payload(self._context.spec.name, event.id, row.lease)
            except StatementFailed as error:
                if tries == MOST_TRIES - 1 and not is_for_its_size(error):
                    raise
                reason = str(error)
                await pause(tries)
            else:
                if found is None:
                    return row
                payload, fault = found
                return row._replace(event=event._replace(payload=payload or b"", fault=fault))
        return row._replace(event=event._replace(fault=f"its payload could not be read: {reason}"))


def _end(claimed: Sequence[ClaimedRow]) -> RowPlace | None:
    """Return the last place of rows that were claimed, or None if some of them may have been found by their keys."""
    places = [row.place for row in claimed if row.place is not None and not row.ordered]
    return max(places) if places and len(places) == len(claimed) else None
