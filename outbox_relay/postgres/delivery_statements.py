"""Statements on deliveries: settlements, claims of rows, and the keys that rows block."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any
from uuid import UUID

from outbox_relay.domain.errors import LeaseLost
from outbox_relay.domain.event import StoredEvent
from outbox_relay.domain.outcomes import Attempt, printable
from outbox_relay.domain.window import MAX_ID, Position
from outbox_relay.postgres.database import Database
from outbox_relay.postgres.rows import MOST_PAYLOAD, ClaimedRow, NewRow, RowUpdate


class DeliveryStatements(Database):
    """Settlements, and the rows of ``delivery``. ``server`` as in ``LogStatements``."""

    async def settle(
        self,
        sink: str,
        owner: UUID,
        positions: Mapping[int, tuple[int, Position]],
        rows: Sequence[NewRow],
        epochs: Mapping[int, int],
        *,
        server: str | None = None,
    ) -> None:
        """Write ``positions`` (shard → epoch, position) and ``rows``, all or none.

        The rows are fenced: ``owner`` must still own each of their shards at its epoch of ``epochs``.

        Raises ``LeaseLost``, with nothing written, if it does not.
        """
        parameters = {"sink": sink, "owner": owner, **_positions(positions), **_new_rows(rows, epochs)}
        [(mine,)] = await self._rows("settle", {**parameters, "server": server})
        if not mine:
            raise LeaseLost(f"sink {sink}: a shard with rows to settle has another owner")

    # -- blocked keys -----------------------------------------------------------------------------------------

    async def blocked_keys(
        self, sink: str, shards: Iterable[int], hold: bool, *, server: str | None = None
    ) -> list[tuple[str, int]]:
        """Return the keys of these shards, as (key, shard), with rows that take part in their order."""
        parameters = {"sink": sink, "shards": list(shards), "hold": hold, "server": server}
        return await self._rows("blocked_keys", parameters)

    async def still_blocked(self, sink: str, keys: Sequence[str], hold: bool, *, server: str | None = None) -> set[str]:
        """Return those of ``keys`` that still have such rows."""
        parameters = {"sink": sink, "keys": keys, "hold": hold, "server": server}
        return {key for (key,) in await self._rows("still_blocked", parameters)}

    async def held_keys(self, sink: str, after: str | None, most: int) -> list[str]:
        """Return the next keys with held rows after ``after`` (None: from the first one), at most ``most``."""
        return [key for (key,) in await self._rows("held_keys", {"sink": sink, "after": after, "most": most})]

    # -- claims of rows ---------------------------------------------------------------------------------------

    async def claim_rows(
        self,
        sink: str,
        owner: UUID,
        lease: UUID,
        lease_seconds: float,
        rows: int,
        payload_bytes: int,
        *,
        hold: bool,
        keys: Sequence[str] = (),
        suspects: bool = False,
        with_followers: bool = False,
        most_payload: int = MOST_PAYLOAD,
    ) -> list[ClaimedRow]:
        """Claim rows that are due, in id order: see ``outbox.claim_rows`` in the schema."""
        parameters = {
            "sink": sink,
            "owner": owner,
            "lease": lease,
            "lease_for": lease_seconds,
            "rows": rows,
            "bytes": payload_bytes,
            "hold": hold,
            "keys": list(keys),
            "suspects": suspects,
            "with_followers": with_followers,
            "most_payload": most_payload,
        }
        claimed = await self._rows("claim_rows", parameters)
        claimed.sort(key=lambda row: row[0])
        return [ClaimedRow._make((StoredEvent(*row[:-3]), *row[-3:], lease)) for row in claimed]

    async def row_payload(self, sink: str, event_id: int, lease: UUID) -> tuple[bytes | None, str | None] | None:
        """Return the payload of a row that is under ``lease``, or the fault of one above the ceiling of the schema.

        None if there is no such row, or it has no payload.
        """
        found = await self._rows("row_payload", {"sink": sink, "id": event_id, "lease": lease})
        return found[0] if found else None

    async def count_parked(self, sink: str, most: int, *, trouble: bool) -> tuple[int, bool]:
        """Count the rows of the sink that are to be delivered, up to ``most`` with and ``most`` without an order.

        With ``trouble``, also return whether one of them returned without a counted attempt, so that it waits for a
        part of the destination.
        """
        parameters = {"sink": sink, "most": most, "trouble": trouble}
        [(count, waiting)] = await self._rows("count_parked", parameters)
        return count, waiting

    async def give_rows_back(self, sink: str, owner: UUID) -> int:
        """End the leases of rows that ``owner`` claimed and no longer delivers; return their number."""
        [(count,)] = await self._rows("give_rows_back", {"sink": sink, "owner": owner})
        return count

    async def give_leases_back(self, sink: str, leases: Sequence[UUID]) -> int:
        """End these leases of rows that were claimed and not tried; return the number of rows."""
        [(count,)] = await self._rows("give_leases_back", {"sink": sink, "leases": list(leases)})
        return count

    # -- outcomes of rows -------------------------------------------------------------------------------------

    async def delete_rows(self, sink: str, done: Sequence[tuple[int, UUID]]) -> set[int]:
        """Delete delivered rows (id, lease); return the ids of those whose lease was still valid."""
        parameters = {"sink": sink, "ids": [d[0] for d in done], "leases": [d[1] for d in done]}
        return {row_id for (row_id,) in await self._rows("delete_rows", parameters)}

    async def update_rows(self, sink: str, updates: Sequence[RowUpdate]) -> set[int]:
        """Update rows that were not delivered and end their leases; return the ids of those that were still leased."""
        parameters = {
            "sink": sink,
            "ids": [r.id for r in updates],
            "leases": [r.lease for r in updates],
            "states": [r.state for r in updates],
            **_outcomes(updates),
        }
        return {row_id for (row_id,) in await self._rows("update_rows", parameters)}


def _positions(positions: Mapping[int, tuple[int, Position]]) -> dict[str, Any]:
    """Return each position once, and for each shard the number of its position."""
    at = list(dict.fromkeys(position for _, position in positions.values()))
    places = {position: place for place, position in enumerate(at, 1)}
    return {
        "shards": list(positions),
        "epochs": [epoch for epoch, _ in positions.values()],
        "places": [places[position] for _, position in positions.values()],
        "a_seqs": [p.a.seq for p in at],
        "a_snapshots": [p.a.snapshot for p in at],
        "a_nexts": [p.a.next_xid for p in at],
        "b_seqs": [p.b.seq if p.b else None for p in at],
        "b_snapshots": [p.b.snapshot if p.b else None for p in at],
        "b_nexts": [p.b.next_xid if p.b else None for p in at],
        "lasts": [min(p.last, MAX_ID) for p in at],
    }


def _new_rows(rows: Sequence[NewRow], epochs: Mapping[int, int]) -> dict[str, Any]:
    fence = sorted({row.shard for row in rows})
    return {
        "ids": [r.id for r in rows],
        "states": [r.state for r in rows],
        "ordereds": [r.ordered for r in rows],
        "claims": [r.claims for r in rows],
        "leases": [r.lease for r in rows],
        "lease_for": [r.lease_for for r in rows],
        **_outcomes(rows),
        "fence_shards": fence,
        "fence_epochs": [epochs.get(shard, -1) for shard in fence],
    }


def _outcomes(rows: Sequence[NewRow] | Sequence[RowUpdate]) -> dict[str, Any]:
    """Return the columns that new and updated rows have in common."""
    return {
        "due_in": [r.due_in for r in rows],
        "attempts": [r.attempts for r in rows],
        "errors": [r.error for r in rows],
        "statuses": [r.status for r in rows],
        "last_attempts": [_attempt(r.attempt) for r in rows],
    }


def _attempt(attempt: Attempt | None) -> str | None:
    """Return an attempt as a JSON object without its unknown values, or None."""
    if attempt is None:
        return None
    answer = None if attempt.answer is None else printable(attempt.answer)
    known = {"code": attempt.code, "seconds": attempt.seconds, "answer": answer, "steps": dict(attempt.steps)}
    return json.dumps({name: value for name, value in known.items() if value not in (None, {})})
