"""The log and the ledger of one replay in one session.

A replay's events are those of a fixed range of ids that its filter matches. A position is the last id that is settled.
With each settlement the number of events is recorded that became settled by it, and the events that it passed by,
behind the fence of their shards: so each event is counted once, whatever crashes.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from uuid import UUID

from outbox_relay.domain.attempts import AttemptRecord
from outbox_relay.domain.errors import LeaseLost
from outbox_relay.domain.event import ID, StoredEvent
from outbox_relay.domain.sink_spec import ReplaySpec
from outbox_relay.domain.window import BEGINNING, EVERYTHING, Position, Tick, WindowSlice
from outbox_relay.postgres.rows import NewRow
from outbox_relay.postgres.store import Store

MOST_PASSED_BY = 20_000
"""Maximum number of events that were passed by and wait for a settlement."""


class ReplayLog:
    """Reads and settles the events of a replay, and counts those that are settled."""

    def __init__(self, store: Store, replay: ReplaySpec) -> None:
        self._store = store
        self.replay = replay
        self._unsettled: defaultdict[int, list[int]] = defaultdict(list)
        """The ids of the events that were read and are not settled, in order, by shard."""
        self._passed_by: defaultdict[int, list[StoredEvent]] = defaultdict(list)
        """The events that were passed by since the last settlement, in the same way."""

    async def positions(self, shards: Collection[int], *, server: str | None) -> dict[int, Position]:
        """Return the stored positions of these shards, each in the window of the replay's ids."""
        found = await self._store.replay_positions(self.replay.id, shards, server=server)
        if len(found) < len(shards):
            raise LeaseLost(f"replay {self.replay.id}: it has ended")
        for shard in shards:
            self._unsettled.pop(shard, None)
            self._passed_by.pop(shard, None)
        return {shard: _position(*place) for shard, place in found.items()}

    async def read(
        self,
        shards: Sequence[int],
        piece: WindowSlice,
        rows: int,
        payload_bytes: int,
        most_payload: int,
        server: str | None,
    ) -> list[StoredEvent]:
        """Return the next events of ``piece``, with those that are passed by."""
        bounds = (piece.after, piece.upto)
        return await self._store.read_replay(
            self.replay.id, shards, bounds, rows, payload_bytes, most_payload, server
        )  # fmt: skip

    def take(self, events: Sequence[StoredEvent], passed_by: Sequence[StoredEvent]) -> None:
        """Count ``events`` as read, and others of the same read as passed by, each in id order."""
        for event in events:
            self._unsettled[event.shard].append(event.id)
        for event in passed_by:
            self._passed_by[event.shard].append(event)

    def has_capacity(self) -> bool:
        """Return True if fewer than ``MOST_PASSED_BY`` events that were passed by wait for a settlement."""
        return sum(map(len, self._passed_by.values())) < MOST_PASSED_BY

    async def spend(self, events: int) -> float:
        """Pay for events that were read; return how many may be read now."""
        return await self._store.spend_replay(self.replay.id, events)

    # -- settlements ------------------------------------------------------------------------------------------

    async def settle(
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
        """Write a settlement as ``Store.settle``, with the number of events that its positions pass."""
        places = {shard: (epoch, _last_id(position)) for shard, (epoch, position) in positions.items()}
        passed = {shard: bisect_right(self._unsettled[shard], last) for shard, (_, last) in places.items()}
        passed_by = {
            shard: self._passed_by[shard][: bisect_right(self._passed_by[shard], last, key=ID)]
            for shard, (_, last) in places.items()
        }
        reasons = {event.id: event.fault or "" for events in passed_by.values() for event in events}
        mine = await self._store.settle_replay(
            *(self.replay.id, owner, places, sum(passed.values()), rows, epochs),
            passed_by=reasons, records=records, relay=relay, server=server,
        )  # fmt: skip
        if not mine:
            raise LeaseLost(f"sink {sink}: a shard to settle has another owner")
        for shard, count in passed.items():
            del self._unsettled[shard][:count]
            del self._passed_by[shard][: len(passed_by[shard])]

    async def reset_crashes(self, sink: str, owner: UUID, held: Mapping[int, int]) -> None:
        """Reset the crash count of shards (shard → epoch)."""
        await self._store.reset_crashes(sink, owner, held)


def _position(last_id: int, from_id: int, upto_id: int) -> Position:
    """Return the position behind ``last_id`` in the window that contains all ids up to ``upto_id``."""
    end = Position(BEGINNING._replace(seq=from_id), Tick(upto_id, EVERYTHING, BEGINNING.next_xid), last_id)
    return end.closed() if last_id >= upto_id else end


def _last_id(position: Position) -> int:
    return position.a.seq if position.b is None else max(position.a.seq, position.last)
