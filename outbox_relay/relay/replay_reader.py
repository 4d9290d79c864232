"""The reading of the log for a replay: a walk by id to a fixed end, and its ledger.

A replay's events are those of a fixed range of ids that its filter matches. A position is the last id that is settled.
With each settlement the number of events is recorded that became settled by it, and the events that it passed by,
behind the fence of their shards: so each event is counted once, whatever crashes.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any
from uuid import UUID

from outbox_relay.domain.attempts import AttemptRecord
from outbox_relay.domain.errors import LeaseLost
from outbox_relay.domain.event import ID, StoredEvent, pop_passed_by
from outbox_relay.domain.in_flight import Chunk, ShardGroup
from outbox_relay.domain.window import BEGINNING, EVERYTHING, MAX_ID, Position, Tick, WindowSlice
from outbox_relay.postgres.log import MOST_PAYLOAD, WindowRequest
from outbox_relay.postgres.rows import NewRow
from outbox_relay.postgres.store import Store
from outbox_relay.relay.log_reader import NEVER, REST_SECONDS, Answer, LogReader
from outbox_relay.relay.sink_spec import ReplaySpec

PER_SLOT = 4
"""Events in one read for each request that may be in flight, so that a pause need not wait for many of them."""
MOST_WAIT_SECONDS = 1.0
"""Maximum wait before a replay with a rate asks again how many events it may read."""
PASSED_BY_SECONDS = 0.1
"""Wait before a replay looks again whether the events that it passed by are settled."""
MOST_PASSED_BY = 20_000
"""Maximum number of events that were passed by and wait for a settlement."""


class ReplayLog:
    """Reads and settles the events of a replay, and counts those that are settled."""

    def __init__(self, store: Store, replay: ReplaySpec) -> None:
        self._store = store
        self.replay = replay
        self.delete_rows, self.update_rows = store.delete_rows, store.update_rows
        self._unsettled: defaultdict[int, list[int]] = defaultdict(list)
        """The ids of the events that were read and are not settled, in order, by shard."""
        self._passed_by: defaultdict[int, list[StoredEvent]] = defaultdict(list)
        """The events that were passed by since the last settlement, in the same way."""

    def positions(self, shards: Collection[int], *, server: str | None) -> dict[int, Position]:
        """Return the stored positions of these shards, each in the window of the replay's ids."""
        found = self._store.replay_positions(self.replay.id, shards, server=server)
        if len(found) < len(shards):
            raise LeaseLost(f"replay {self.replay.id}: it has ended")
        for shard in shards:
            self._unsettled.pop(shard, None)
            self._passed_by.pop(shard, None)
        return {shard: _position(*place) for shard, place in found.items()}

    def read(
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
        return self._store.read_replay(self.replay.id, shards, bounds, rows, payload_bytes, most_payload, server)

    def take(self, events: Sequence[StoredEvent], passed_by: Sequence[StoredEvent]) -> None:
        """Count ``events`` as read, and others of the same read as passed by, each in id order."""
        for event in events:
            self._unsettled[event.shard].append(event.id)
        for event in passed_by:
            self._passed_by[event.shard].append(event)

    def has_capacity(self) -> bool:
        """Return True if fewer than ``MOST_PASSED_BY`` events that were passed by wait for a settlement."""
        return sum(map(len, self._passed_by.values())) < MOST_PASSED_BY

    def spend(self, events: int) -> float:
        """Pay for events that were read; return how many may be read now."""
        return self._store.spend_replay(self.replay.id, events)

    # -- settlements ------------------------------------------------------------------------------------------

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
        """Write a settlement as ``Store.settle``, with the number of events that its positions pass."""
        places = {shard: (epoch, _settled_id(position)) for shard, (epoch, position) in positions.items()}
        passed = {shard: bisect_right(self._unsettled[shard], last) for shard, (_, last) in places.items()}
        passed_by = {
            shard: self._passed_by[shard][: bisect_right(self._passed_by[shard], last, key=ID)]
            for shard, (_, last) in places.items()
        }
        reasons = {event.id: event.fault or "" for events in passed_by.values() for event in events}
        mine = self._store.settle_replay(
            *(self.replay.id, owner, places, sum(passed.values()), rows, epochs),
            passed_by=reasons, records=records, relay=relay, server=server,
        )  # fmt: skip
        if not mine:
            raise LeaseLost(f"sink {sink}: a shard to settle has another owner")
        for shard, count in passed.items():
            del self._unsettled[shard][:count]
            del self._passed_by[shard][: len(passed_by[shard])]

    def reset_crashes(self, sink: str, owner: UUID, held: Mapping[int, int]) -> None:
        """Reset the crash count of shards (shard → epoch)."""
        self._store.reset_crashes(sink, owner, held)


class ReplayReader(LogReader):
    """Reads the owned shards of one replay in one session. Its windows are open from the start, and none follows.

    The shard groups that are behind are read first, up to the position of the next one, and joined with it. So the log
    is walked through once, however often shards change their owner.
    """

    def __init__(self, replay_log: ReplayLog, *parts: Any) -> None:
        super().__init__(*parts)
        self._log = replay_log
        self._passed_by: list[StoredEvent] = []
        self._tokens = NEVER if replay_log.replay.rate is None else 0.0

    def next_at(self) -> float:
        """Return when ``read`` has something to do, in seconds of the clock."""
        return NEVER if self._dispatcher.saturated else super().next_at()

    def read(self, now: float) -> None:
        """Read one chunk for the group that is farthest behind.

        Raises ``IncarnationChanged`` if anything that was read may be wrong.
        """
        if not self._in_flight.readable or self._outcomes.handing_over or now < self._not_before:
            return
        self._check(self._result)
        if now >= self._look_at and not self._tick(now):
            return
        self._in_flight.join(inside=True)
        group = min(self._open(), key=_last_id, default=None)
        if group is None or self._dispatcher.saturated or not self._settler.has_capacity() or not self._may_read(now):
            return
        self._read(group)
        self._settler.moved()

    def _tick(self, now: float) -> bool:
        is_read = super()._tick(now)
        self._look_at = now + REST_SECONDS
        return is_read

    def _may_read(self, now: float) -> bool:
        """Return False while the rate allows no event, or too many that were passed by are not settled."""
        if not self._log.has_capacity():
            self._not_before = now + PASSED_BY_SECONDS
            return False
        rate = self._log.replay.rate
        if rate is not None and self._tokens < 1.0:
            self._tokens = self._log.spend(0)
        if rate is not None and self._tokens < 1.0:
            self._not_before = now + min(MOST_WAIT_SECONDS, (1.0 - self._tokens) / rate)
            return False
        return True

    def _next_request(self, now: float) -> WindowRequest | None:
        """Return None: the windows of a replay are open."""

    def _positions(self, gained: Collection[int]) -> dict[int, Position]:
        return self._log.positions(gained, server=self._server)

    def _next_slice(self, start: Position) -> WindowSlice:
        """Return the next slice, which ends at the position of the next group at the latest."""
        if self._log.replay.named:
            self._max_ids = MAX_ID
        piece = super()._next_slice(start)
        ahead = [last for group in self._open() if (last := _last_id(group)) > piece.after]
        upto = min(ahead, default=piece.upto)
        return replace(piece, upto=upto, last=False) if upto < piece.upto else piece

    def _most_events(self, group: ShardGroup) -> int:
        most = super()._most_events(group)
        if not self._parts.sink.keeps_order:
            most = min(most, PER_SLOT * self._outcomes.slots.limit)
        return int(min(most, max(1.0, self._tokens)))

    def _fetch(
        self, group: ShardGroup, piece: WindowSlice, most: int, most_bytes: int, most_payload: int
    ) -> list[StoredEvent]:
        events = self._log.read(sorted(group.shards), piece, most, most_bytes, most_payload, self._server)
        if self._log.replay.rate is not None:
            self._tokens = self._log.spend(sum(1 for event in events if event.uid))
        return events

    def _ask_for_small(self, group: ShardGroup, piece: WindowSlice, most: int, most_payload: int) -> Answer | None:
        """Return None, since a replay has a reading statement of its own."""

    def _ask(self, group: ShardGroup, piece: WindowSlice, most_payload: int = MOST_PAYLOAD) -> Answer:
        """Keep the events that are passed by until the others are handed over."""
        events, upto = super()._ask(group, piece, most_payload)
        self._passed_by = pop_passed_by(events)
        return events, upto

    def _take(self, group: ShardGroup, chunk: Chunk) -> None:
        self._log.take(chunk.events, self._passed_by)
        super()._take(group, chunk)


def _position(last_id: int, from_id: int, upto_id: int) -> Position:
    """Return the position behind ``last_id`` in the window that contains all ids up to ``upto_id``."""
    end = Position(BEGINNING._replace(seq=from_id), Tick(upto_id, EVERYTHING, BEGINNING.next_xid), last_id)
    return end.closed() if last_id >= upto_id else end


def _settled_id(position: Position) -> int:
    return position.a.seq if position.b is None else max(position.a.seq, position.last)


def _last_id(group: ShardGroup) -> int:
    return max(group.position.a.seq, group.position.last)
