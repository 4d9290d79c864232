"""The reading of the log for a sink with ``claim = "rows"``: each window becomes rows inside the database.

The rules of windows, rounds and shard groups are those of ``LogReader``. No event comes into memory: one statement
makes the rows of a slice and moves the positions of their shards.
"""

from __future__ import annotations

import asyncio
from typing import Any

from outbox_relay.domain.errors import DatabaseUnusable, StatementFailed
from outbox_relay.domain.in_flight import Chunk, ShardGroup
from outbox_relay.domain.window import Position, WindowSlice, position_after
from outbox_relay.postgres.queue_statements import ParkedWindow
from outbox_relay.postgres.rows import WindowRequest
from outbox_relay.relay.failed_reads import reason_of_failed_read
from outbox_relay.relay.log_reader import (
    AGAIN_SECONDS,
    IDS_PER_READ,
    MOST_IDS_PER_READ,
    LogReader,
)
from outbox_relay.relay.queue_limit import QueueLimit
from outbox_relay.relay.timing import timed

QUEUE_EVENTS = 1000
"""Maximum number of events in one statement, for which it keeps their shards locked: renewals wait for it."""
QUEUE_BYTES = 4 << 20
"""Maximum bytes of events in one statement, not counting the last event."""


class QueueReader(LogReader):
    """Makes rows of the events of the owned shards of one sink in one session."""

    def __init__(self, limit: QueueLimit, *parts: Any) -> None:
        super().__init__(*parts)
        self._limit = limit

    async def step(self) -> bool:
        """Make rows of one slice for every group with an open window.

        Return False if the caller should wait before the next step, also while no more rows may be made.

        Raises ``IncarnationChanged`` if anything that was read may be wrong.
        """
        if self._limit.admits():
            return await super().step()
        self._ticker.since(self._session_epoch)
        return False

    def _is_stalled(self) -> bool:
        """Return True if no rows can be made. Limits of requests delay rows, which keep no shard."""
        return not self._context.flows

    def _next_request(self) -> WindowRequest | None:
        """Return None: no event may come with a tick, since it would be delivered without a row."""
        return None

    async def _read(self, group: ShardGroup) -> None:
        """Make rows of the next slice of ``group``.

        A statement that failed is tried again, so that rows under way are not given up: with a smaller slice, and
        after a pause if that is not likely to help.
        """
        start = group.position
        if start.b is None:
            return
        piece = self._next_slice(start)
        try:
            await self._park(group, start, piece)
        except StatementFailed as error:
            if error.sqlstate != StatementFailed.NO_CONNECTION:  # otherwise its turn comes
                await self._failed(group, start, piece, error)
        except DatabaseUnusable as error:  # no event is the reason
            self._limit.report_failure(str(error))
            await asyncio.sleep(AGAIN_SECONDS)
        else:
            self._steps.succeeded()
            self._limit.report_failure(None)
        self._ticker.since(self._session_epoch)

    async def _failed(self, group: ShardGroup, start: Position, piece: WindowSlice, error: StatementFailed) -> None:
        """Reduce the next slice. An event that fails alone repeatedly becomes a dead row without its payload."""
        reason = reason_of_failed_read(error)
        self._steps.failed()
        self._max_ids = IDS_PER_READ
        if reason is not None and self._steps.exhausted:
            await self._park(group, start, piece, f"its row could not be made, {reason}")
            return
        self._limit.report_failure(str(error))
        if reason is None or self._steps.limit(QUEUE_EVENTS) == 1:
            await asyncio.sleep(AGAIN_SECONDS)

    async def _park(self, group: ShardGroup, start: Position, piece: WindowSlice, reason: str | None = None) -> None:
        """Make rows of the next events of ``piece``, dead ones if there is a ``reason``, and move the group."""
        context, end = self._context, position_after(start, piece)

        async def write() -> dict[int, Position]:
            with timed(context.measures.settle):
                parked = await self._store.park_window(
                    *(self._spec.name, self._lease_manager.relay, self._leases.epochs(group.shards)),
                    *(self._spec.types, start, end, piece),
                    *(self._steps.limit(QUEUE_EVENTS), self._steps.limit(QUEUE_BYTES)),
                    fair=self._spec.fair,
                    reason=reason,
                    server=self._server,
                )
            reached = end if parked.upto is None else start.at(parked.upto)
            self._in_flight.take(group, Chunk((), start, reached))
            self._observe(parked)
            return dict.fromkeys(parked.shards, reached)

        await self._settler.write_alone(write)

    def _observe(self, parked: ParkedWindow) -> None:
        """Let the rows be claimed, and count them."""
        context = self._context
        self._max_ids = IDS_PER_READ if parked.rows else min(self._max_ids * 2, MOST_IDS_PER_READ)
        if parked.rows:
            self._limit.add(parked.rows)
            context.due_timer.schedule_wakeup(0.0)
        if parked.due_in is not None:
            context.due_timer.schedule_wakeup(max(parked.due_in, 0.0))
        context.measures.died("undeliverable" for _ in range(parked.dead))
