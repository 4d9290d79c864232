"""The reading of the log for a sink with ``claim = "rows"``: each window becomes rows inside the database.

The rules of windows, rounds and shard groups are those of ``LogReader``. No event comes into memory: one statement
makes the rows of a slice and moves the positions of their shards.
"""

from __future__ import annotations

from outbox_relay.domain.errors import DatabaseUnusable, StatementFailed
from outbox_relay.domain.in_flight import Chunk, ShardGroup
from outbox_relay.domain.window import Position, WindowSlice, position_after
from outbox_relay.postgres.log import WindowRequest
from outbox_relay.relay.log_reader import (
    AGAIN_SECONDS,
    IDS_PER_READ,
    MOST_IDS_PER_READ,
    LogReader,
    reason_of_failed_read,
)

QUEUE_EVENTS = 1000
"""Maximum number of events in one statement, for which it keeps their shards locked: renewals wait for it."""
QUEUE_BYTES = 4 << 20
"""Maximum bytes of events in one statement, not counting the last event."""

FULL_SECONDS = 0.25
"""Wait before it is looked again whether more rows may be made."""


class QueueReader(LogReader):
    """Makes rows of the events of the owned shards of one sink in one session."""

    def read(self, now: float) -> None:
        """Make rows of one slice of a group with an open window, unless no more rows may be made."""
        if now < self._not_before:
            return
        if self._outcomes.bound.has_capacity(now):
            super().read(now)
        else:
            self._not_before = now + FULL_SECONDS

    def _is_stalled(self, now: float) -> bool:  # noqa: ARG002
        """Return True if no rows can be made. Limits of calls delay rows, which keep no shard."""
        return not self._outcomes.flows

    def _next_request(self, now: float) -> WindowRequest | None:  # noqa: ARG002
        """Return None: no event may come with a tick, since it would be delivered without a row."""
        return None

    def _read(self, group: ShardGroup) -> None:
        """Make rows of the next slice of ``group``.

        A statement that failed is tried again, so that rows under way are not given up: with a smaller slice, and
        after a pause if that is not likely to help.
        """
        start = group.position
        if start.b is None:
            return
        piece = self._next_slice(start)
        try:
            self._park(group, start, piece)
        except StatementFailed as error:
            if error.sqlstate != StatementFailed.NO_CONNECTION:  # otherwise its turn comes
                self._failed(group, start, piece, error)
        except DatabaseUnusable as error:  # no event is the reason
            self._outcomes.bound.report_failure(str(error))
            self._not_before = self._parts.clock.monotonic() + AGAIN_SECONDS
        else:
            self._steps.succeeded()
            self._outcomes.bound.report_failure(None)

    def _failed(self, group: ShardGroup, start: Position, piece: WindowSlice, error: StatementFailed) -> None:
        """Reduce the next slice. An event that fails alone repeatedly becomes a dead row without its payload."""
        reason = reason_of_failed_read(error)
        self._steps.failed()
        self._max_ids = IDS_PER_READ
        if reason is not None and self._steps.exhausted:
            self._park(group, start, piece, f"its row could not be made, {reason}")
            return
        self._outcomes.bound.report_failure(str(error))
        if reason is None or self._steps.limit(QUEUE_EVENTS) == 1:
            self._not_before = self._parts.clock.monotonic() + AGAIN_SECONDS

    def _park(self, group: ShardGroup, start: Position, piece: WindowSlice, reason: str | None = None) -> None:
        """Make rows of the next events of ``piece``, dead ones if there is a ``reason``, and move the group."""
        outcomes, end = self._outcomes, position_after(start, piece)
        with self._parts.measures.settle.time():
            parked = self._store.park_window(
                *(self._spec.name, self._parts.relay, self._leases.epochs(group.shards)),
                *(self._spec.types, start, end, piece),
                *(self._steps.limit(QUEUE_EVENTS), self._steps.limit(QUEUE_BYTES)),
                fair=self._spec.fair,
                reason=reason,
                server=self._server,
            )
        reached = end if parked.upto is None else start.at(parked.upto)
        self._in_flight.take(group, Chunk((), start, reached))
        self._settler.wrote(dict.fromkeys(parked.shards, reached))
        self._max_ids = IDS_PER_READ if parked.rows else min(self._max_ids * 2, MOST_IDS_PER_READ)
        if parked.rows:
            outcomes.bound.add(parked.rows)
            outcomes.due_in(0.0)
        if parked.due_in is not None:
            outcomes.due_in(max(parked.due_in, 0.0))
        self._parts.measures.died("undeliverable" for _ in range(parked.dead))
