"""Rows of deliveries: settlements, claims and their outcomes, and windows that become rows."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple
from uuid import UUID

from outbox_relay.domain.attempts import AttemptRecord
from outbox_relay.domain.errors import LeaseLost
from outbox_relay.domain.event import StoredEvent
from outbox_relay.domain.outcomes import Attempt
from outbox_relay.domain.window import Position, WindowSlice
from outbox_relay.postgres.database import Database
from outbox_relay.postgres.log import MOST_PAYLOAD
from outbox_relay.postgres.parameters import PositionColumns, array_text, attempt_json, columns, record_columns

COUNT_SECONDS: Final = 2.0
"""Longest wait for a count of rows, which the loop of a sink waits for before it delivers."""


@dataclass(frozen=True, slots=True)
class RowUpdate:
    """The update of a leased row that was not delivered.

    ``attempts`` is the new count. ``state`` and ``due_in`` (seconds) are left unchanged if they are None. ``record`` is
    the attempt to be recorded, if any.
    """

    id: int
    lease: UUID
    attempts: int
    state: str | None = None
    due_in: float | None = None
    error: str | None = None
    status: int | None = None
    attempt: Attempt | None = None
    record: AttemptRecord | None = None


@dataclass(frozen=True, slots=True)
class NewRow:
    """A row of ``delivery`` to be created from an event of the log.

    ``due_in`` is in seconds from now. None means the event's ``deliver_at``, or now if it has none. A row that is
    created leased, because its request is in flight, has ``lease`` and ``lease_for`` seconds. ``record`` is the
    attempt to be recorded, if any.
    """

    id: int
    shard: int
    state: str
    ordered: bool
    due_in: float | None = None
    attempts: int = 0
    claims: int = 0
    lease: UUID | None = None
    lease_for: float | None = None
    error: str | None = None
    status: int | None = None
    attempt: Attempt | None = None
    record: AttemptRecord | None = None


class RowPlace(NamedTuple):
    """A place in the order in which claims find rows: when a row was due, in seconds since 1970, and its id."""

    due: float
    id: int


class ClaimedRow(NamedTuple):
    """A leased row of ``delivery``: its event, its counters, and the lease that fences its settlement.

    An ``ordered`` row takes part in the order of its key: later rows of the key wait for it. ``tried`` is False if it
    is known that there was no attempt before. ``due`` is the time in seconds since 1970 at which the row was due, or
    None where it is not read.
    """

    event: StoredEvent
    ordered: bool
    attempts: int
    claims: int
    lease: UUID
    tried: bool = True
    due: float | None = None

    @property
    def place(self) -> RowPlace | None:
        """The place in the order in which claims find rows, or None if it was not read."""
        return None if self.due is None else RowPlace(self.due, self.event.id)


class DeliveredRow(NamedTuple):
    """A leased row that was delivered, and the attempt to be recorded, if any."""

    id: int
    lease: UUID
    record: AttemptRecord | None = None


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
    """Rows that were claimed from a queue, and where the next walk over tenants begins.

    ``unfinished`` is True if no row was found, and a bound ended the search.
    """

    rows: list[ClaimedRow]
    walk_end: str | None
    unfinished: bool = False


class RowStatements(Database):
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
        at = list(dict.fromkeys(position for _, position in positions.values()))
        places = {position: place for place, position in enumerate(at, 1)}
        parameters = {
            "sink": sink,
            "owner": owner,
            "server": server,
            "shards": array_text(positions),
            "epochs": array_text(epoch for epoch, _ in positions.values()),
            "places": array_text(places[position] for _, position in positions.values()),
            **columns("position_", PositionColumns._fields, [PositionColumns.of(position) for position in at]),
            **settled_rows(rows, epochs, records, relay),
        }
        if not self.value("settle", parameters):
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
        blocked = self.named("blocked_keys", parameters)
        keys = [(row.key, row.shard) for row in blocked if row.key is not None]
        return keys, len(keys) < len(blocked)

    def still_blocked(self, sink: str, keys: Sequence[str], hold: bool, *, server: str | None = None) -> set[str]:
        """Return those of ``keys`` that still have such rows."""
        parameters = {"sink": sink, "keys": keys, "hold": hold, "server": server}
        return {row.key for row in self.named("still_blocked", parameters)}

    def held_keys(self, sink: str, after: str | None, most: int) -> list[str]:
        """Return the next keys with held rows after ``after`` (None: from the first one), at most ``most``."""
        return [row.key for row in self.named("held_keys", {"sink": sink, "after": after, "most": most})]

    # -- discard marks ----------------------------------------------------------------------------------------

    def highest_discarded(self, sink: str, *, server: str | None = None) -> int | None:
        """Return the highest id of an event that was discarded; None if there is none."""
        return self.value("highest_discarded", {"sink": sink, "server": server})

    def discarded(self, sink: str, events: Sequence[tuple[int, UUID]], *, server: str | None = None) -> set[int]:
        """Return the ids of those events, each an id and a uid, that were discarded."""
        parameters = {"sink": sink, "ids": [e[0] for e in events], "uids": [e[1] for e in events], "server": server}
        return {row.id for row in self.named("discarded", parameters)}

    # -- windows that become rows -----------------------------------------------------------------------------

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
            "server": server,
            "fair": fair,
            "reason": reason,
            "shards": list(epochs),
            "epochs": list(epochs.values()),
            "types": None if types is None else list(types),
            **PositionColumns.of(start)._asdict(),
            **{f"end_{name}": value for name, value in PositionColumns.of(end)._asdict().items()},
            "late": piece.late,
            "after": piece.after,
            "upto": piece.upto,
            "rows": rows,
            "bytes": payload_bytes,
        }
        [row] = self.named("park_window", parameters)
        if not row.mine:
            raise LeaseLost(f"sink {sink}: a shard whose events were to become rows has another owner")
        return ParkedWindow(row.upto, row.passed, row.parked, row.dead, row.due_in)

    # -- claims -----------------------------------------------------------------------------------------------

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
            **_claim(sink, owner, lease, lease_seconds, rows, payload_bytes, most_payload),
            "hold": hold,
            "keys": list(keys),
            "suspects": suspects,
            "with_followers": with_followers,
            "after_due": after and after.due,
            "after_id": after and after.id,
        }
        return [_claimed(row) for row in self.named("claim_rows", parameters)]

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
        after: str | None = None,
    ) -> QueueClaim:
        """Claim rows in the order in which they are to be delivered: see ``outbox_internal.claim_queued``."""
        parameters = _claim(sink, owner, lease, lease_seconds, rows, payload_bytes, most_payload)
        claimed = self.named("claim_queued", {**parameters, "fair": fair, "after": after})
        if not claimed:
            return QueueClaim([], after)
        first = claimed[0]
        if first.shard < 0:
            return QueueClaim([], first.walk_end, unfinished=first.place > 0)
        return QueueClaim([_claimed(row) for row in claimed], first.walk_end)

    def extend_leases(self, sink: str, rows: Sequence[tuple[int, UUID, float]]) -> set[int]:
        """Let the leases of rows, each an id, a lease and seconds from now, end later; return the ids of valid ones."""
        ids, leases, seconds = zip(*rows, strict=True) if rows else ((), (), ())
        parameters = {"ids": array_text(ids), "leases": array_text(leases), "seconds": array_text(seconds)}
        return {row.id for row in self.named("extend_leases", {"sink": sink, **parameters})}

    def row_payload(self, sink: str, event_id: int, lease: UUID) -> tuple[bytes | None, str | None] | None:
        """Return the payload of a row that is under ``lease``, or the fault of one above the ceiling of the schema.

        None if there is no such row, or it has no payload.
        """
        return next(iter(self.named("row_payload", {"sink": sink, "id": event_id, "lease": lease})), None)

    def count_parked(self, sink: str, most: int, *, trouble: bool) -> tuple[int, bool]:
        """Count the rows of the sink that are to be delivered, up to ``most`` with and ``most`` without an order.

        With ``trouble``, also return whether one of them returned without a counted attempt, so that it waits for a
        part of the destination.
        """
        parameters = {"sink": sink, "most": most, "trouble": trouble}
        return self.named("count_parked", parameters, deadline=COUNT_SECONDS)[0]

    def count_queued(self, sink: str, after: int, most: int) -> tuple[int, int]:
        """Count rows that are to be delivered with ids above ``after``, up to ``most``; also return the last id."""
        return self.named("count_queued", {"sink": sink, "after": after, "most": most})[0]

    # -- leases that end without an outcome -------------------------------------------------------------------

    def give_rows_back(self, sink: str, owner: UUID) -> int:
        """End the leases of rows that ``owner`` claimed and no longer delivers; return their number."""
        return self.value("give_rows_back", {"sink": sink, "owner": owner})

    def give_leases_back(self, sink: str, leases: Sequence[UUID]) -> int:
        """End these leases of rows that were claimed and not tried; return the number of rows."""
        return self.value("give_leases_back", {"sink": sink, "leases": list(leases)})

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

    # -- outcomes ---------------------------------------------------------------------------------------------

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
            "only_tried": only_tried,
            **columns("row_", ("id", "lease"), done),
            **record_columns([row.record if relay is not None else None for row in done]),
        }
        return dict(self.named("delete_rows", parameters))

    def update_rows(self, sink: str, updates: Sequence[RowUpdate], *, relay: str | None = "") -> set[int]:
        """Update rows that were not delivered and end their leases; return the ids of those that were still leased.

        Their records are written under the name of the ``relay``, none if that is None.
        """
        parameters = {
            "sink": sink,
            "relay": relay,
            **_outcomes(updates),
            **record_columns([row.record if relay is not None else None for row in updates]),
        }
        return {row.id for row in self.named("update_rows", parameters)}


def settled_rows(
    rows: Sequence[NewRow], epochs: Mapping[int, int], records: Sequence[AttemptRecord], relay: str | None
) -> dict[str, Any]:
    """Return new rows, the epochs that fence them, and the records of a settlement as its parameters."""
    fence = sorted({row.shard for row in rows})
    recorded = [*(row.record for row in rows if row.record is not None), *records] if relay is not None else []
    return {
        **_outcomes(rows),
        **columns("row_", ("ordered", "claims", "lease_for"), rows),
        "fence_shards": array_text(fence),
        "fence_epochs": array_text(epochs.get(shard, -1) for shard in fence),
        "relay": relay,
        **record_columns(recorded),
    }


def _outcomes(rows: Sequence[NewRow] | Sequence[RowUpdate]) -> dict[str, str]:
    """Return the columns that new and changed rows have in common."""
    return {
        **columns("row_", ("id", "lease", "state", "due_in", "attempts", "error", "status"), rows),
        "row_last_attempt": array_text(attempt_json(row.attempt) for row in rows),
    }


def _claim(
    sink: str, owner: UUID, lease: UUID, lease_seconds: float, rows: int, payload_bytes: int, most_payload: int
) -> dict[str, Any]:
    """Return the parameters that all claims have."""
    return {
        "sink": sink,
        "owner": owner,
        "lease": lease,
        "lease_for": lease_seconds,
        "rows": rows,
        "bytes": payload_bytes,
        "most_payload": most_payload,
    }


def _claimed(row: Any) -> ClaimedRow:
    event = len(StoredEvent._fields)
    return ClaimedRow(StoredEvent(*row[:event]), *row[event : event + len(ClaimedRow._fields) - 1])
