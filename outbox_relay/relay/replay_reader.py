"""The reading of the log for a replay: a walk by id to a fixed end.

The shard groups of a relay that are behind are read first, up to the position of the next one, and joined with it. So
the log is walked through once, however often shards change their owner.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from dataclasses import replace
from typing import Any

from outbox_relay.domain.event import StoredEvent, pop_passed_by
from outbox_relay.domain.in_flight import Chunk, ShardGroup
from outbox_relay.domain.window import MAX_ID, Position, WindowSlice
from outbox_relay.postgres.rows import MOST_PAYLOAD
from outbox_relay.relay.failed_reads import Answer
from outbox_relay.relay.log_reader import LogReader
from outbox_relay.relay.replay_log import ReplayLog

PER_SLOT = 4
"""Events in one read for each request that may be in flight, so that a pause need not wait for many of them."""
MOST_WAIT_SECONDS = 1.0
"""Maximum wait before a replay with a rate asks again how many events it may read."""
PASSED_BY_SECONDS = 0.1
"""Wait before a replay looks again whether the events that it passed by are settled."""


class ReplayReader(LogReader):
    """Reads the owned shards of one replay in one session. Its windows are open from the start, and none follows."""

    def __init__(self, replay_log: ReplayLog, *parts: Any) -> None:
        super().__init__(*parts)
        self._log = replay_log
        self._passed_by: list[StoredEvent] = []
        self._tokens = float("inf") if replay_log.replay.rate is None else 0.0

    async def step(self) -> bool:
        """Read one chunk for the group that is farthest behind.

        Return False if the caller should wait before the next step.

        Raises ``IncarnationChanged`` if anything that was read may be wrong.
        """
        if self._breaker.handing_over or not await self._is_current():
            return False
        self._in_flight.join(inside=True)
        group = min(self._open(), key=_last_id, default=None)
        if group is None or self._dispatcher.saturated or not self._settler.has_capacity():
            return False
        if not await self._may_read() or not self._may_pass_by():
            return False
        await self._read(group)
        self._settler.moved()
        return True

    async def _is_current(self) -> bool:
        """Return False while the server, or the configuration of the target, is not known to be the same."""
        if self._ticker.since(self._session_epoch) is None:
            self._ticker.want(self._leases.wake)
            return False
        return self._config_versions == self._ticker.config_versions or await self._check_configuration()

    async def _may_read(self) -> bool:
        """Return False, and wake the loop later, while the rate allows no event."""
        if self._log.replay.rate is None:
            return True
        if self._tokens < 1.0:
            self._tokens = await self._log.spend(0)
        if self._tokens >= 1.0:
            return True
        delay = min(MOST_WAIT_SECONDS, (1.0 - self._tokens) / self._log.replay.rate)
        asyncio.get_running_loop().call_later(delay, self._leases.wake.set)
        return False

    def _may_pass_by(self) -> bool:
        """Return False, and wake the loop later, while too many events that were passed by are not settled."""
        if self._log.has_capacity():
            return True
        asyncio.get_running_loop().call_later(PASSED_BY_SECONDS, self._leases.wake.set)
        return False

    async def _positions(self, gained: Collection[int]) -> dict[int, Position]:
        return await self._log.positions(gained, server=self._server)

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
        if not self._context.sink.keeps_order:
            most = min(most, PER_SLOT * self._context.limiter.limit)
        return int(min(most, max(1.0, self._tokens)))

    async def _fetch(
        self, group: ShardGroup, piece: WindowSlice, most: int, most_bytes: int, most_payload: int
    ) -> list[StoredEvent]:
        events = await self._log.read(sorted(group.shards), piece, most, most_bytes, most_payload, self._server)
        if self._log.replay.rate is not None:
            self._tokens = await self._log.spend(sum(1 for event in events if event.uid))
        return events

    async def _ask_for_small(
        self, group: ShardGroup, piece: WindowSlice, most: int, most_payload: int
    ) -> Answer | None:
        """Return None, since a replay has a reading statement of its own."""

    async def _ask(self, group: ShardGroup, piece: WindowSlice, most_payload: int = MOST_PAYLOAD) -> Answer:
        """Keep the events that are passed by until the others are handed over."""
        events, upto = await super()._ask(group, piece, most_payload)
        self._passed_by = pop_passed_by(events)
        return events, upto

    def _hand_over(self, group: ShardGroup, chunk: Chunk) -> None:
        self._log.take(chunk.events, self._passed_by)
        super()._hand_over(group, chunk)


def _last_id(group: ShardGroup) -> int:
    position = group.position
    return max(position.a.seq, position.last)
