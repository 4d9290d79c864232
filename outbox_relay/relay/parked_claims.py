"""Claims of deliveries that are due."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from uuid import UUID, uuid4

from structlog.stdlib import BoundLogger

from outbox_relay.domain.errors import StatementFailed
from outbox_relay.postgres.store import MOST_PAYLOAD, ClaimedRow, Store
from outbox_relay.relay.context import LEASE_MARGIN_SECONDS, DeliveryContext
from outbox_relay.relay.portions import (
    FIRST_PAUSE_SECONDS,
    MOST_TRIES,
    SHRINK,
    is_for_its_size,
    pause,
)

POLL_SECONDS = 1.0
"""How often rows are looked for that nobody here knows of, the heads of all keys among them."""
SWEEP_SECONDS = 5.0
"""The same for held rows while no key is blocked here: only a relay that crashed leaves such rows behind."""
BUSY_POLL_SECONDS = 0.1
"""The same while keys are blocked."""
MOST_ROWS = 1000
"""Rows in one claim, at most."""
MOST_BYTES = 16 << 20
"""Bytes of payload, key and headers in one claim, at most, beyond the first row."""
MOST_KEYS = 1000
"""Keys in one question, at most, and in one sweep."""
MOST_PAUSE_SECONDS = 1.0
"""Longest pause between two claims that fail."""


class ClaimSize:
    """How much one claim may hold: less after one that failed, more after those that did not."""

    def __init__(self) -> None:
        self.rows = MOST_ROWS
        self.payload_bytes = MOST_BYTES
        self.failed = 0
        """Claims in a row that failed."""
        self.bare = False
        """Whether not even a single row could be claimed: the next comes without its payload."""

    def pause_seconds(self) -> float:
        """Return how long to wait before the next claim, after one that failed."""
        return min(MOST_PAUSE_SECONDS, FIRST_PAUSE_SECONDS * 2.0**self.failed)

    def failure(self, error: StatementFailed) -> None:
        """Claim less next time, unless the failure says nothing about the size."""
        self.failed += 1
        if not is_for_its_size(error):
            return
        self.bare = self.rows == 1
        self.rows = max(1, self.rows // SHRINK)
        self.payload_bytes = self.payload_bytes // SHRINK if self.rows > 1 else 0

    def success(self) -> None:
        """Claim more again."""
        self.failed = 0
        if not self.bare:
            self.rows = min(MOST_ROWS, 2 * self.rows)
            self.payload_bytes = min(MOST_BYTES, max(1 << 10, 2 * self.payload_bytes))
        self.bare = False


class ParkedClaims:
    """The claims of one sink's rows that are due: which rows, how many, and when to ask again."""

    def __init__(self, context: DeliveryContext, store: Store, relay: UUID, log: BoundLogger) -> None:
        self._context = context
        self._store = store
        self._relay = relay
        self._log = log
        self._wake = asyncio.Event()
        self._due_at = float("inf")
        self._asked_at = self._swept_at = self._suspected_at = float("-inf")
        self._swept: str | None = None
        self._size = ClaimSize()
        self._suspects = False
        self.suspect_was_last = False
        """Whether the last claim was for a row that may have killed its owners."""
        self._heads: set[str] = set()
        self._doubtful: list[UUID] = []
        """Leases of claims that failed here and may have taken effect in the database."""

    def schedule_wakeup(self, seconds: float) -> None:
        """A row will be due in ``seconds``."""
        self._due_at = min(self._due_at, time.monotonic() + seconds)
        self._wake.set()

    def follow(self, gone: list[ClaimedRow]) -> None:
        """The rows behind those that are gone may be claimed."""
        self._heads.update(row.event.key for row in gone if row.ordered and row.event.key is not None)
        self._wake.set()

    async def wait_until_due(self) -> None:
        """Wait until a row may be due."""
        most = BUSY_POLL_SECONDS if len(self._context.settler.blocked) else POLL_SECONDS
        while not self._heads:
            left = min(self._due_at, self._asked_at + most) - time.monotonic()
            if left <= 0:
                return
            self._wake.clear()
            try:
                async with asyncio.timeout(left):
                    await self._wake.wait()
            except TimeoutError:
                return

    async def claim(self, most: int) -> list[ClaimedRow]:
        """Rows to deliver now: one that may have killed its owners comes alone, in turn with the others."""
        now = time.monotonic()
        due = self._suspects or now - self._suspected_at >= POLL_SECONDS
        if due and not self.suspect_was_last and (suspect := await self._ask_suspect(now)):
            return suspect
        often = self._swept is not None or len(self._context.settler.blocked)
        if now - self._swept_at >= (POLL_SECONDS if often else SWEEP_SECONDS) and len(self._heads) < MOST_KEYS:
            await self._sweep(now)
        heads = [self._heads.pop() for _ in range(min(len(self._heads), MOST_KEYS))]
        if self._due_at <= now:
            self._due_at = float("inf")
        most, most_bytes = min(most, self._size.rows), self._size.payload_bytes
        claimed = await self._ask(most, heads)
        if not claimed and self.suspect_was_last:
            claimed = await self._ask_suspect(now)
        else:
            self.suspect_was_last = False
        cut = len(claimed) == most or 2 * sum(len(row.event.payload or b"") for row in claimed) > most_bytes
        if cut or self._size.failed:
            self._heads.update(heads)
        elif not claimed:
            self._asked_at = now
        return claimed

    async def _sweep(self, now: float) -> None:
        """Look at the next keys with held rows: what another relay left behind is found in the end.

        All have their turn, ``MOST_KEYS`` in a second, so that many cost no more than few.
        """
        self._swept_at = now
        try:
            keys = await self._store.held_keys(self._context.spec.name, self._swept, MOST_KEYS)
        except StatementFailed:
            return
        self._swept = keys[-1] if len(keys) == MOST_KEYS else None
        self._heads.update(keys)

    async def _ask_suspect(self, now: float) -> list[ClaimedRow]:
        """One that may have killed its owners; ``_suspects`` says whether the last such question found one."""
        claimed = await self._ask(1, (), suspects=True)
        self._suspected_at, self._suspects, self.suspect_was_last = now, bool(claimed), bool(claimed)
        return claimed

    async def _ask(self, most: int, heads: Sequence[str], *, suspects: bool = False) -> list[ClaimedRow]:
        """Claim up to ``most`` rows: fewer after a claim that failed, none when this one does."""
        context, size, bare = self._context, self._size, self._size.bare
        lease, lease_seconds = uuid4(), context.sink.timeout_seconds + 2 * LEASE_MARGIN_SECONDS
        try:
            await self._give_doubtful_back()
            self._doubtful.append(lease)
            claimed = await self._store.claim_rows(
                context.spec.name,
                self._relay,
                lease,
                lease_seconds,
                min(most, size.rows),
                size.payload_bytes,
                hold=context.spec.hold,
                keys=heads,
                suspects=suspects,
                with_followers=context.sink.keeps_order,
                most_payload=0 if bare else MOST_PAYLOAD,
            )
        except StatementFailed as error:
            if size.failed.bit_count() <= 1:  # not each of many in a row
                self._log.warning("claim of rows failed", sink=context.spec.name, reason=str(error), rows=size.rows)
            size.failure(error)
            await asyncio.sleep(size.pause_seconds())
            return []
        self._doubtful.clear()
        size.success()
        return [await self.with_payload(row) for row in claimed] if bare else claimed

    async def _give_doubtful_back(self) -> None:
        """Give back what a claim took whose answer did not come, or could not be loaded.

        Else its rows would wait for the end of their leases, with a claim counted against each that was never tried.
        """
        if self._doubtful:
            await self._store.give_leases_back(self._context.spec.name, self._doubtful)
            self._doubtful.clear()

    async def with_payload(self, row: ClaimedRow) -> ClaimedRow:
        """Return ``row`` with its payload, which it was claimed without; one that cannot be read is its fault.

        Raises ``StatementFailed`` when something else than the payload is the reason, again and again.
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
