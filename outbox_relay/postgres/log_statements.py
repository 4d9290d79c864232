"""Statements on the log, its ticks and its metadata."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial, partialmethod
from typing import Any, cast

from psycopg import Cursor

from outbox_relay.domain.errors import DatabaseUnusable
from outbox_relay.domain.event import StoredEvent
from outbox_relay.domain.window import Tick
from outbox_relay.postgres.database import TUPLES, Database
from outbox_relay.postgres.looks import look_parameters, tick_of, window_of
from outbox_relay.postgres.rows import Look, TickResult, WindowRequest

TICK_SECONDS = 5.0
"""Longest wait for a tick, which reads next to nothing. It is the first call to notice a connection that was lost
silently, so that the relay delivers again within 20 s. The driver takes up to 10 s more to give up."""


def event_row(_cursor: Cursor[Any]) -> Callable[[Sequence[Any]], StoredEvent]:
    """Return the row factory for columns in the order of ``StoredEvent``.

    It is called for every event: a partial is one call without a frame.
    """
    return partial(cast(Any, tuple).__new__, StoredEvent)


class LogStatements(Database):
    """Ticks, reads of the log, its partitions, and the metadata of the schema.

    ``server`` is the incarnation that the caller's ticks come from. Any other server refuses the statement with
    ``IncarnationChanged``. None means any server.
    """

    _known_incarnation: str | None = None

    def schema(self) -> tuple[int, int]:
        """Return the version of the schema, and the oldest schema version whose relays work on it."""
        return (self._rows("schema", {}))[0]

    def max_payload_bytes(self) -> int | None:
        """Return the largest payload that applications may emit, in bytes; None if the stored value is no number."""
        return self.value("max_payload_bytes", {})

    def floor(self) -> int:
        """Return the floor of the numbering (see ``outbox.rebase``).

        Raises ``DatabaseUnusable`` if the log comes from another cluster, or if it holds ids or xids that the server
        has not assigned yet.
        """
        [(floor, ids_ahead, highest_xid, elsewhere)] = self._rows("floor", {})
        if elsewhere:
            raise DatabaseUnusable(
                "the log comes from another cluster, as after a restore, a move or pg_upgrade: stop every relay, then "
                "run outbox-relay rebase"
            )
        if ids_ahead or highest_xid > (self.tick()).tick.next_xid:
            raise DatabaseUnusable(
                "the log holds ids or transaction numbers that this server has not given out yet, as after a restore "
                "into another cluster: stop every relay, then run outbox-relay rebase"
            )
        return floor

    def arm(self) -> None:
        """Mark the server, so that a restart after a crash of one of its processes is noticed."""
        self._rows("arm", {}, TUPLES, self._tick_seconds())

    def tick(self) -> TickResult:
        """Take a tick."""
        [row] = self._rows("tick", {"known": self._known_incarnation}, TUPLES, self._tick_seconds())
        result = tick_of(row)
        self._known_incarnation = result.incarnation
        return result

    def look(self, request: WindowRequest | None) -> Look:
        """Take a tick, and read the requested window up to it if that is small, in one round trip.

        Behind a pooler no window is read: the server may have no time limit that ends a slow read before the relay
        gives up the connection.
        """
        asked = None if self.pooler else request
        began = time.monotonic()
        parameters = {**look_parameters(asked), "known": self._known_incarnation}
        rows = self._rows("look", parameters, TUPLES, self._tick_seconds())
        result = tick_of(rows[0])
        self._known_incarnation = result.incarnation
        return Look(result, window_of(rows, result.tick, asked), time.monotonic() - began)

    def _tick_seconds(self) -> float:
        return min(TICK_SECONDS, self.call_seconds)

    def _read(
        self,
        name: str,
        shards: Sequence[int],
        types: Sequence[str] | None,
        a: Tick,
        b: Tick,
        after: int,
        upto: int,
        rows: int,
        size: int,
        *,
        most_payload: int | None = None,
        server: str | None = None,
    ) -> list[StoredEvent]:
        """Return events of the window from ``a`` to ``b`` with ids in (``after``, ``upto``], in id order.

        ``types`` are SQL LIKE patterns. The read ends after ``rows`` events, or with the event that exceeds ``size``
        bytes.

        With ``most_payload``, an event with a larger payload has a ``fault`` and no payload, and ``size`` limits
        payloads, keys and headers together. Without it, ``size`` limits payloads alone.
        """
        parameters = {
            "shards": shards,
            "types": None if types is None else list(types),
            "a": a.snapshot,
            "a_next": a.next_xid,
            "b": b.snapshot,
            "after": after,
            "upto": upto,
            "rows": rows,
            "bytes": size,
            "most_payload": most_payload,
            "server": server,
        }
        return self._rows(name, parameters, event_row)

    read_rest = partialmethod(_read, "read_rest")
    """Read the events with ids above ``a.seq``: see ``_read``."""
    read_small = partialmethod(_read, "read_small")
    """Read as ``read_rest``, with contents only of events of at most ``size`` bytes.

    The others are to be read again: see ``event.cut_unread``."""
    read_late = partialmethod(_read, "read_late")
    """Read the latecomers. With ``most_payload`` the read may be incomplete: see ``event.pop_scan_end``."""

    def with_tenants(self, events: Sequence[StoredEvent]) -> list[StoredEvent]:
        """Return the events with their tenants. An event that is no longer in the log has none."""
        if not events:
            return []
        parameters = {
            "ids": [event.id for event in events],
            "shards": [event.shard for event in events],
            "uids": [event.uid for event in events],
            "times": [event.created_at for event in events],
        }
        tenants: dict[int, str] = dict(self._rows("tenants", parameters))
        return [event._replace(tenant=tenants.get(event.id)) for event in events]
