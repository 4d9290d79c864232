"""Statements on the log, its ticks and its metadata."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, cast

from psycopg import AsyncCursor

from outbox_relay.domain.errors import DatabaseUnusable
from outbox_relay.domain.event import StoredEvent
from outbox_relay.domain.window import Tick
from outbox_relay.postgres.connection_slots import OTHER, called_by
from outbox_relay.postgres.database import TUPLES, Database
from outbox_relay.postgres.looks import tick_of
from outbox_relay.postgres.rows import Look, TickResult, WindowRequest

TICK_SECONDS = 5.0
"""Longest wait for a tick, which reads next to nothing. It is the first call to notice a connection that was lost
silently, so that the relay delivers again within 20 s. The driver takes up to 10 s more to give up."""


def event_row(_cursor: AsyncCursor[Any]) -> Callable[[Sequence[Any]], StoredEvent]:
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

    async def schema(self) -> tuple[int, int]:
        """Return the version of the schema, and the oldest schema version whose relays work on it."""
        return (await self._rows("schema", {}))[0]

    async def max_payload_bytes(self) -> int | None:
        """Return the largest payload that applications may emit, in bytes; None if the stored value is no number."""
        [(found,)] = await self._rows("max_payload_bytes", {})
        return found

    async def floor(self) -> int:
        """Return the floor of the numbering (see ``outbox.rebase``).

        Raises ``DatabaseUnusable`` if the log comes from another cluster, or if it holds ids or xids that the server
        has not assigned yet.
        """
        [(floor, ids_ahead, highest_xid, elsewhere)] = await self._rows("floor", {})
        if elsewhere:
            raise DatabaseUnusable(
                "the log comes from another cluster, as after a restore, a move or pg_upgrade: stop every relay, then "
                "run outbox-relay rebase"
            )
        if ids_ahead or highest_xid > (await self.tick()).tick.next_xid:
            raise DatabaseUnusable(
                "the log holds ids or transaction numbers that this server has not given out yet, as after a restore "
                "into another cluster: stop every relay, then run outbox-relay rebase"
            )
        return floor

    async def arm(self, *, to_look: bool = False) -> None:
        """Mark the server, so that a restart after a crash of one of its processes is noticed: ``outbox_internal.arm``.

        With ``to_look``, mark the one that looks are taken on.
        """
        if to_look:
            await self._mark(self._tick_seconds())
        else:
            with called_by(OTHER):
                await self._rows("arm", {}, TUPLES, self._tick_seconds())

    async def tick(self) -> TickResult:
        """Take a tick on a connection of the pool, which is not one of the sinks'."""
        with called_by(OTHER):
            [row] = await self._rows("tick", {"known": self._known_incarnation}, TUPLES, self._tick_seconds())
        result = tick_of(row)
        self._known_incarnation = result.incarnation
        return result

    async def look(
        self, request: WindowRequest | None, patience: float, is_news: Callable[[TickResult, float], bool]
    ) -> Look:
        """Take a tick, and read the requested window up to it if that is small.

        Repeat that at a steady pace until ``is_news`` returns True for a tick and its duration in seconds, or for
        ``patience`` seconds. ``is_news`` is called in another thread.
        """
        return await self._look(request, self._tick_seconds(), patience, is_news)

    def _tick_seconds(self) -> float:
        return min(TICK_SECONDS, self._call_seconds)

    async def read_rest(
        self,
        shards: Sequence[int],
        types: Sequence[str] | None,
        a: Tick,
        b: Tick,
        after: int,
        upto: int,
        rows: int,
        payload_bytes: int,
        *,
        most_payload: int | None = None,
        server: str | None = None,
    ) -> list[StoredEvent]:
        """Return the events of the window from ``a`` to ``b`` with ids above ``a.seq``, in id order.

        The ids are in (``after``, ``upto``]. ``types`` are SQL LIKE patterns. The read ends after ``rows`` events, or
        with the event that exceeds ``payload_bytes``.

        With ``most_payload``, an event with a larger payload has a ``fault`` and no payload, and ``payload_bytes``
        limits payloads, keys and headers together. Without it, ``payload_bytes`` limits payloads alone.
        """
        bounds = (after, upto, rows, payload_bytes, most_payload)
        return await self._read("read_rest", shards, types, (a, b), bounds, server)

    async def read_small(
        self,
        shards: Sequence[int],
        types: Sequence[str] | None,
        a: Tick,
        b: Tick,
        after: int,
        upto: int,
        rows: int,
        event_bytes: int,
        *,
        most_payload: int | None = None,
        server: str | None = None,
    ) -> list[StoredEvent]:
        """Return the events of the window from ``a`` to ``b`` as ``read_rest``, with contents only if they are small.

        Those of more than ``event_bytes`` are to be read again: see ``event.cut_unread``.
        """
        bounds = (after, upto, rows, event_bytes, most_payload)
        return await self._read("read_small", shards, types, (a, b), bounds, server)

    async def read_late(
        self,
        shards: Sequence[int],
        types: Sequence[str] | None,
        a: Tick,
        b: Tick,
        after: int,
        upto: int,
        rows: int,
        payload_bytes: int,
        *,
        most_payload: int | None = None,
        server: str | None = None,
    ) -> list[StoredEvent]:
        """Return the latecomers of the window from ``a`` to ``b``, otherwise as ``read_rest``.

        With ``most_payload`` the read may be incomplete: see ``event.pop_scan_end``.
        """
        bounds = (after, upto, rows, payload_bytes, most_payload)
        return await self._read("read_late", shards, types, (a, b), bounds, server)

    async def _read(
        self,
        name: str,
        shards: Sequence[int],
        types: Sequence[str] | None,
        window: tuple[Tick, Tick],
        bounds: tuple[int, int, int, int, int | None],
        server: str | None,
    ) -> list[StoredEvent]:
        a, b = window
        parameters = {
            "shards": shards,
            "types": None if types is None else list(types),
            "a": a.snapshot,
            "a_next": a.next_xid,
            "b": b.snapshot,
            **dict(zip(("after", "upto", "rows", "bytes", "most_payload"), bounds, strict=True)),
            "server": server,
        }
        return await self._rows(name, parameters, event_row)

    async def with_tenants(self, events: Sequence[StoredEvent]) -> list[StoredEvent]:
        """Return the events with their tenants. An event that is no longer in the log has none."""
        if not events:
            return []
        parameters = {
            "ids": [event.id for event in events],
            "shards": [event.shard for event in events],
            "uids": [event.uid for event in events],
            "times": [event.created_at for event in events],
        }
        tenants: dict[int, str] = dict(await self._rows("tenants", parameters))
        return [event._replace(tenant=tenants.get(event.id)) for event in events]

    async def make_partitions(self) -> int:
        """Create the missing partitions of the coming days; return their number."""
        [(made,)] = await self._rows("make_partitions", {})
        return made

    async def make_attempt_partitions(self) -> int:
        """Create the missing partitions of recorded attempts of the coming days; return their number."""
        [(made,)] = await self._rows("make_attempt_partitions", {})
        return made
