"""Statements on sinks with ``claim = "rows"``: windows that become rows, and claims from the queue."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple
from uuid import UUID

from outbox_relay.domain.errors import LeaseLost
from outbox_relay.domain.event import StoredEvent
from outbox_relay.domain.window import MAX_ID, Position, WindowSlice
from outbox_relay.postgres.database import Database
from outbox_relay.postgres.rows import MOST_PAYLOAD, ClaimedRow


class ParkedWindow(NamedTuple):
    """The rows that were made of a slice of a window.

    ``upto`` is the last id that was read, or None if the slice was read completely. ``shards`` are those whose
    positions were written. ``dead`` of the ``rows`` can never be delivered. ``due_in`` is the number of seconds until
    the first of the rows that are not due is.
    """

    upto: int | None
    shards: Sequence[int]
    rows: int
    dead: int
    due_in: float | None


class QueueClaim(NamedTuple):
    """Rows that were claimed from a queue, and the tenant behind which the next walk over tenants begins.

    ``unfinished`` is True if no row was found, and a bound ended the search.
    """

    rows: list[ClaimedRow]
    tenant: str | None
    unfinished: bool = False


class QueueStatements(Database):
    """The rows of sinks with ``claim = "rows"``. ``server`` as in ``LogStatements``."""

    def park_window(
        self,
        sink: str,
        owner: UUID,
        epochs: Mapping[int, int],
        types: Sequence[str] | None,
        start: Position,
        end: Position,
        piece: WindowSlice,
        rows: int,
        payload_bytes: int,
        *,
        fair: bool = False,
        reason: str | None = None,
        server: str | None = None,
    ) -> ParkedWindow:
        """Make rows of the next events of ``piece``, and move the positions of their shards, or neither.

        ``epochs`` (shard → epoch) fence the shards that are read. ``end`` is the position after the whole slice of the
        window at ``start``. With ``fair``, tenants take turns in claims. With ``reason``, the rows are dead for it.

        Raises ``LeaseLost``, with nothing written, if a shard has another owner or epoch.
        """
        parameters = {
            "sink": sink,
            "owner": owner,
            "shards": list(epochs),
            "epochs": list(epochs.values()),
            "types": None if types is None else list(types),
            **_position("", start),
            "late": piece.late,
            "after": piece.after,
            "upto": piece.upto,
            "rows": rows,
            "bytes": payload_bytes,
            **_position("end_", end),
            "end_last": min(end.last, MAX_ID),
            "fair": fair,
            "reason": reason,
            "server": server,
        }
        [(mine, *parked)] = self._rows("park_window", parameters)
        if not mine:
            raise LeaseLost(f"sink {sink}: a shard whose events were to become rows has another owner")
        return ParkedWindow(*parked)

    def claim_queued(
        self,
        sink: str,
        owner: UUID,
        lease: UUID,
        lease_seconds: float,
        rows: int,
        payload_bytes: int,
        *,
        most_payload: int = MOST_PAYLOAD,
        fair: bool = False,
        after_tenant: str | None = None,
        tenants: bool = False,
    ) -> QueueClaim:
        """Claim rows in the order in which they are to be delivered: see ``outbox_internal.claim_queued``.

        With ``tenants``, the events have theirs.
        """
        parameters = {
            "sink": sink,
            "owner": owner,
            "lease": lease,
            "lease_for": lease_seconds,
            "rows": rows,
            "bytes": payload_bytes,
            "most_payload": most_payload,
            "fair": fair,
            "after_tenant": after_tenant,
            "tenants": tenants,
        }
        found = self._rows("claim_queued", parameters)
        if not found:
            return QueueClaim([], after_tenant)
        shard, place, tenant = found[0][1], *found[0][-2:]
        if shard < 0:
            return QueueClaim([], tenant, unfinished=place > 0)
        found.sort(key=lambda row: row[-2])
        rows_claimed = [ClaimedRow._make((StoredEvent(*row[:-6]), *row[-6:-3], lease, row[-3], None)) for row in found]
        return QueueClaim(rows_claimed, tenant)

    def give_claimed_back(self, sink: str, rows: Iterable[tuple[int, UUID]]) -> int:
        """End the leases of claimed rows, each an id and a lease, that are not delivered; return their number."""
        given = list(rows)
        parameters = {"sink": sink, "ids": [row[0] for row in given], "leases": [row[1] for row in given]}
        return self._do("give_claimed_back", parameters)

    def give_queued_back(self, sink: str, owner: UUID, leases: Sequence[UUID]) -> int:
        """End these leases of claims that were not answered; return the number of rows.

        Rows that are far behind in the queue keep their leases until these lapse.
        """
        return self.value("give_queued_back", {"sink": sink, "owner": owner, "leases": list(leases)})

    def count_queued(self, sink: str, after: int, most: int) -> tuple[int, int]:
        """Count rows that are to be delivered with ids above ``after``, up to ``most``; also return the last id."""
        [(count, last)] = self._rows("count_queued", {"sink": sink, "after": after, "most": most})
        return count, last


def _position(prefix: str, position: Position) -> dict[str, Any]:
    a, b, _ = position
    return {
        f"{prefix}a_seq": a.seq,
        f"{prefix}a_snapshot": a.snapshot,
        f"{prefix}a_next": a.next_xid,
        f"{prefix}b_seq": b.seq if b else None,
        f"{prefix}b_snapshot": b.snapshot if b else None,
        f"{prefix}b_next": b.next_xid if b else None,
    }
