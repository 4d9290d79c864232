"""Statements on deliveries: settlements, claims of rows, and the keys that rows block."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any
from uuid import UUID

from outbox_relay.domain.attempts import AttemptRecord
from outbox_relay.domain.errors import LeaseLost
from outbox_relay.domain.event import StoredEvent
from outbox_relay.domain.window import MAX_ID, Position
from outbox_relay.postgres.attempt_values import array_text, attempt_json, record_columns, recorded_events
from outbox_relay.postgres.database import Database
from outbox_relay.postgres.rows import MOST_PAYLOAD, ClaimedRow, DeliveredRow, NewRow, RowPlace, RowUpdate

COUNT_SECONDS = 2.0
"""Longest wait for a count of rows, which the loop of a sink waits for before it delivers."""


class DeliveryStatements(Database):
    """Settlements, and the rows of ``delivery``. ``server`` as in ``LogStatements``."""

    def settle(
        self,
        sink: str,
        owner: UUID,
        positions: Mapping[int, tuple[int, Position]],
        rows: Sequence[NewRow],
        epochs: Mapping[int, int],
        *,
        records: Sequence[AttemptRecord] = (),
        relay: str | None = "",
        server: str | None = None,
    ) -> None:
        """Write ``positions`` (shard → epoch, position) and ``rows``, all or none.

        The rows are fenced: ``owner`` must still own each of their shards at its epoch of ``epochs``. The records of
        the rows and ``records``, of events without a row, are written with them under the name of the ``relay``; none
        of them if that is None.

        Raises ``LeaseLost``, with nothing written, if it does not.
        """
        kept = [*(row.record for row in rows if row.record is not None), *records]
        recorded = kept if relay is not None else []
        parameters = {
            "sink": sink,
            "owner": owner,
            "relay": relay,
            "server": server,
            **_positions(positions),
            **new_row_columns(rows, epochs),
            **recorded_events(recorded),
            **record_columns(recorded),
        }
        [(mine,)] = self._rows("settle", parameters)
        if not mine:
            raise LeaseLost(f"sink {sink}: a shard with rows to settle has another owner")

    # -- blocked keys -----------------------------------------------------------------------------------------

    def blocked_keys(
        self, sink: str, shards: Iterable[int], hold: bool, *, server: str | None = None
    ) -> tuple[list[tuple[str, int]], bool]:
        """Return the keys of these shards, as (key, shard), with rows that are to be delivered in order.

        With ``hold``, also return True if the sink has dead rows that block their keys. Those keys are not listed, and
        the rows may be of any shard.
        """
        parameters = {"sink": sink, "shards": list(shards), "hold": hold, "server": server}
        found = self._rows("blocked_keys", parameters)
        keys = [(key, shard) for key, shard in found if key is not None]
        return keys, len(keys) < len(found)

    def still_blocked(self, sink: str, keys: Sequence[str], hold: bool, *, server: str | None = None) -> set[str]:
        """Return those of ``keys`` that still have such rows."""
        parameters = {"sink": sink, "keys": keys, "hold": hold, "server": server}
        return {key for (key,) in self._rows("still_blocked", parameters)}

    def held_keys(self, sink: str, after: str | None, most: int) -> list[str]:
        """Return the next keys with held rows after ``after`` (None: from the first one), at most ``most``."""
        return [key for (key,) in self._rows("held_keys", {"sink": sink, "after": after, "most": most})]

    # -- discard marks ----------------------------------------------------------------------------------------

    def highest_discarded(self, sink: str, *, server: str | None = None) -> int | None:
        """Return the highest id of an event that was discarded; None if there is none."""
        return self.value("highest_discarded", {"sink": sink, "server": server})

    def discarded(self, sink: str, events: Sequence[tuple[int, UUID]], *, server: str | None = None) -> set[int]:
        """Return the ids of those events, each an id and a uid, that were discarded."""
        parameters = {"sink": sink, "ids": [e[0] for e in events], "uids": [e[1] for e in events], "server": server}
        return {event_id for (event_id,) in self._rows("discarded", parameters)}

    # -- claims of rows ---------------------------------------------------------------------------------------

    def extend_leases(self, sink: str, rows: Sequence[tuple[int, UUID, float]]) -> set[int]:
        """Let the leases of rows, each an id, a lease and seconds from now, end later; return the ids of valid ones."""
        ids, leases, seconds = ([row[place] for row in rows] for place in range(3))
        parameters = {"sink": sink, "ids": ids, "leases": leases, "seconds": seconds}
        return {event_id for (event_id,) in self._rows("extend_leases", parameters)}

    def claim_rows(
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
        after: RowPlace | None = None,
    ) -> list[ClaimedRow]:
        """Claim rows that are due, in id order: see ``outbox_internal.claim_rows`` in the schema.

        With ``after``, rows that wait are only found behind that place.
        """
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
            "after_due": after and after.due,
            "after_id": after and after.id,
        }
        claimed = self._rows("claim_rows", parameters)
        claimed.sort(key=lambda row: row[0])
        return [ClaimedRow._make((StoredEvent(*row[:-5]), *row[-5:-2], lease, row[-1], row[-2])) for row in claimed]

    def row_payload(self, sink: str, event_id: int, lease: UUID) -> tuple[bytes | None, str | None] | None:
        """Return the payload of a row that is under ``lease``, or the fault of one above the ceiling of the schema.

        None if there is no such row, or it has no payload.
        """
        found = self._rows("row_payload", {"sink": sink, "id": event_id, "lease": lease})
        return found[0] if found else None

    def count_parked(self, sink: str, most: int, *, trouble: bool) -> tuple[int, bool]:
        """Count the rows of the sink that are to be delivered, up to ``most`` with and ``most`` without an order.

        With ``trouble``, also return whether one of them returned without a counted attempt, so that it waits for a
        part of the destination.
        """
        parameters = {"sink": sink, "most": most, "trouble": trouble}
        [(count, waiting)] = self._rows("count_parked", parameters, deadline=COUNT_SECONDS)
        return count, waiting

    def give_rows_back(self, sink: str, owner: UUID) -> int:
        """End the leases of rows that ``owner`` claimed and no longer delivers; return their number."""
        return self.value("give_rows_back", {"sink": sink, "owner": owner})

    def give_leases_back(self, sink: str, leases: Sequence[UUID]) -> int:
        """End these leases of rows that were claimed and not tried; return the number of rows."""
        return self.value("give_leases_back", {"sink": sink, "leases": list(leases)})

    # -- outcomes of rows -------------------------------------------------------------------------------------

    def delete_rows(
        self, sink: str, done: Sequence[DeliveredRow], *, relay: str | None = "", only_tried: bool = False
    ) -> dict[int, bool]:
        """Delete delivered rows; return the ids of those whose lease was still valid.

        The value of an id is True if its row had a key and a row of that key is left to be delivered in order.

        Their records are written under the name of the ``relay``, none if that is None; with ``only_tried``, only of
        events tried before.
        """
        parameters = {
            "sink": sink,
            "relay": relay,
            "ids": array_text([d.id for d in done]),
            "leases": array_text([d.lease for d in done]),
            "only_tried": only_tried,
            **record_columns([d.record if relay is not None else None for d in done]),
        }
        return dict(self._rows("delete_rows", parameters))

    def update_rows(self, sink: str, updates: Sequence[RowUpdate], *, relay: str | None = "") -> set[int]:
        """Update rows that were not delivered and end their leases; return the ids of those that were still leased.

        Their records are written under the name of the ``relay``, none if that is None.
        """
        parameters = {
            "sink": sink,
            "relay": relay,
            "ids": [r.id for r in updates],
            "leases": [r.lease for r in updates],
            "states": [r.state for r in updates],
            **_outcomes(updates),
            **record_columns([r.record if relay is not None else None for r in updates]),
        }
        return {row_id for (row_id,) in self._rows("update_rows", parameters)}


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


def new_row_columns(rows: Sequence[NewRow], epochs: Mapping[int, int]) -> dict[str, Any]:
    """Return the columns of new rows, and the epochs that fence them."""
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
        "last_attempts": [attempt_json(r.attempt) for r in rows],
    }
