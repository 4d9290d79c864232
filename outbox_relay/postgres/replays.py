"""Replays: their events, positions, settlements and rates."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple
from uuid import UUID

from outbox_relay.domain.attempts import AttemptRecord
from outbox_relay.domain.event import ID, StoredEvent
from outbox_relay.postgres.database import Database
from outbox_relay.postgres.rows import NewRow, settled_rows


class ReplayRow(NamedTuple):
    """A replay that is not cleared.

    ``named`` is True if its uids were given. ``rate`` is in events per second. ``walking`` is False if only rows are
    left of it.
    """

    id: int
    target: str
    running: bool
    named: bool
    rate: int | None
    walking: bool


class ReplayPosition(NamedTuple):
    """The last id that is settled of a shard of a replay, whose ids are in (``from_id``, ``upto_id``]."""

    last_id: int
    from_id: int
    upto_id: int


class ReplayStatements(Database):
    """Replays. ``server`` as in ``LogStatements``."""

    def replays(self) -> list[ReplayRow]:
        """Return the replays that are not cleared, the oldest first."""
        return self.named("running_replays", {}, row=ReplayRow)

    def tend_replay(self, replay: int) -> None:
        """Count events of a replay, move its dead letters, and end or clear it, a step of each."""
        self.named("tend_replay", {"replay": replay})

    def spend_replay(self, replay: int, spent: int) -> float:
        """Pay for ``spent`` events of a replay that has a rate; return the number that may be read now.

        It is 0.0 if the replay was cleared.
        """
        return self.value("spend_replay", {"replay": replay, "spent": spent}) or 0.0

    def read_replay(
        self,
        replay: int,
        shards: Sequence[int],
        bounds: tuple[int, int],
        rows: int,
        payload_bytes: int,
        most_payload: int,
        server: str | None,
    ) -> list[StoredEvent]:
        """Return the events of a replay with ids in (after, upto], the ``bounds``, as ``LogStatements.read_rest``.

        Those that it passes by are among them: see ``event.pop_passed_by``.
        """
        parameters = {
            "replay": replay,
            "shards": shards,
            "after": bounds[0],
            "upto": bounds[1],
            "rows": rows,
            "bytes": payload_bytes,
            "most_payload": most_payload,
            "server": server,
        }
        return sorted(self.named("read_replay", parameters, row=StoredEvent), key=ID)

    def replay_positions(
        self, replay: int, shards: Iterable[int], *, server: str | None = None
    ) -> dict[int, ReplayPosition]:
        """Return the positions of these shards; none if the replay was cleared."""
        parameters = {"replay": replay, "shards": list(shards), "server": server}
        rows = self.named("replay_positions", parameters)
        return {row.shard: ReplayPosition(row.last_id, row.from_id, row.upto_id) for row in rows}

    def settle_replay(
        self,
        replay: int,
        owner: UUID,
        places: Mapping[int, tuple[int, int]],
        seen: int,
        rows: Sequence[NewRow],
        epochs: Mapping[int, int],
        *,
        passed_by: Mapping[int, str] | None = None,
        records: Sequence[AttemptRecord] = (),
        relay: str | None = "",
        server: str | None = None,
    ) -> bool:
        """Write ``places`` (shard → epoch, last id), with ``seen`` events settled since, and ``rows``, all or none.

        ``passed_by`` are the ids of the events that these places pass by, with the reasons.
        Return False, with nothing written, if ``owner`` does not own one of their shards at its epoch.
        """
        parameters: dict[str, Any] = {
            "replay": replay,
            "owner": owner,
            "server": server,
            "shards": list(places),
            "epochs": [epoch for epoch, _ in places.values()],
            "lasts": [last for _, last in places.values()],
            "seen": seen,
            "passed_ids": list(passed_by or {}),
            "passed_reasons": list((passed_by or {}).values()),
            **settled_rows(rows, epochs, records, relay),
        }
        return bool(self.value("settle_replay", parameters))
