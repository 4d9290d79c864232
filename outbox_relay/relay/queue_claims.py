"""Claims from the queue of a sink with ``claim = "rows"``."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from uuid import UUID

from structlog.stdlib import BoundLogger

from outbox_relay.domain.errors import StatementFailed
from outbox_relay.postgres.rows import MOST_PAYLOAD, ClaimedRow, RowPlace
from outbox_relay.postgres.store import Store
from outbox_relay.relay.context import DeliveryContext
from outbox_relay.relay.parked_claims import ParkedClaims

QUEUE_POLL_SECONDS = 0.25
"""Interval between claims for rows that another relay has made."""
OTHER_TURNS = 8
"""Number of claims of which one takes rows that were made under another ``fair_by``, if there are any."""
MOST_UNFINISHED = 10
"""Consecutive claims that a bound ended before they found a row, after which the next one waits."""


@dataclass(slots=True)
class RowsInHand:
    """The claims of one session that are not settled.

    A session that ends by an error leaves rows with leases behind. They are given back by these, since no index finds
    them.
    """

    rows: dict[int, UUID] = field(default_factory=dict[int, UUID])
    """The leases of claimed rows, by id."""
    doubtful: list[UUID] = field(default_factory=list[UUID])
    """Leases of claims that have no answer and may have taken effect in the database."""

    async def give_back(self, store: Store, sink: str, relay: UUID) -> None:
        """End all of these leases. Rows that are not found come back when their leases lapse."""
        if self.rows:
            await store.give_claimed_back(sink, self.rows.items())
            self.rows.clear()
        await self.give_doubtful_back(store, sink, relay)

    async def give_doubtful_back(self, store: Store, sink: str, relay: UUID) -> None:
        """End the leases of claims without an answer, as far as their rows are found."""
        if not self.doubtful:
            return
        with contextlib.suppress(StatementFailed):
            await store.give_queued_back(sink, relay, self.doubtful)
        self.doubtful.clear()


class QueueClaims(ParkedClaims):
    """Claims rows by priority, or by turns of tenants."""

    def __init__(
        self, context: DeliveryContext, store: Store, relay: UUID, log: BoundLogger, in_hand: RowsInHand
    ) -> None:
        super().__init__(context, store, relay, log)
        self._in_hand = in_hand
        self._doubtful = in_hand.doubtful
        self._tenant: str | None = None
        self._unfinished = 0
        self._turn = 0

    async def wait_until_due(self) -> None:
        """Wait until a row may be due."""
        timer = self._context.due_timer
        while not 0 < self._unfinished < MOST_UNFINISHED:
            left = min(timer.next_at, self._asked_at + QUEUE_POLL_SECONDS) - time.monotonic()
            if left <= 0:
                self._unfinished = 0
                return
            await timer.wait(left)

    def written(self, rows: list[ClaimedRow], gone: int) -> None:
        """Forget the leases of rows whose outcomes are in the database, and count those that were deleted."""
        self._context.parked_limit.remove(gone)
        in_hand = self._in_hand.rows
        for row in rows:
            if in_hand.get(row.event.id) == row.lease:  # not one that went back and was claimed again
                del in_hand[row.event.id]

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
        if suspects:
            rows = await super()._fetch(lease, lease_seconds, most, heads, suspects=suspects, after=after)
        else:
            rows = await self._fetch_queued(lease, lease_seconds, most)
        self._in_hand.rows.update((row.event.id, lease) for row in rows)
        return rows

    async def _fetch_queued(self, lease: UUID, lease_seconds: float, most: int) -> list[ClaimedRow]:
        fair = self._context.spec.fair
        self._turn = (self._turn + 1) % OTHER_TURNS
        if not self._turn and (rows := await self._fetch_in_turn(lease, lease_seconds, most, fair=not fair)):
            return rows
        return await self._fetch_in_turn(lease, lease_seconds, most, fair=fair)

    async def _fetch_in_turn(self, lease: UUID, lease_seconds: float, most: int, *, fair: bool) -> list[ClaimedRow]:
        claim = await self._store.claim_queued(
            *(self._context.spec.name, self._relay, lease, lease_seconds, most, self._size.payload_bytes),
            most_payload=0 if self._size.bare else MOST_PAYLOAD,
            fair=fair,
            after_tenant=self._tenant,
            tenants=self._context.spec.tenants,
        )
        self._tenant = claim.tenant
        self._unfinished = self._unfinished + 1 if claim.unfinished else 0
        return claim.rows

    async def _give_doubtful_back(self) -> None:
        await self._in_hand.give_doubtful_back(self._store, self._context.spec.name, self._relay)
