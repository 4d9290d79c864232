"""Emitting and consuming over a connection of asyncpg, in its transaction.

docs/emitting.md and docs/consumers.md show every use.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from datetime import datetime
from typing import TYPE_CHECKING, Any, Final, TypeAlias
from uuid import UUID

import asyncpg
from asyncpg.pool import PoolConnectionProxy

from outbox_relay import emit_spans
from outbox_relay.emit_rows import (
    NOT_GIVEN,
    Declared,
    Dumps,
    Event,
    InvalidEvent,
    NotInTransaction,
    columns,
    encoding_error,
    refusal,
    row_of,
    rows_of,
    time_text,
    uid_text,
    unencodable,
    warn_outside,
)
from outbox_relay.emit_spans import Row
from outbox_relay.inbox_marks import (
    InvalidMark,
    NoTransaction,
    consumer_of,
    mark_of,
    outside,
    refused_mark,
    uid_of,
    unencodable_mark,
)

if TYPE_CHECKING:
    Connection: TypeAlias = asyncpg.Connection[Any] | PoolConnectionProxy[Any]

__all__ = [
    "Event",
    "InvalidEvent",
    "InvalidMark",
    "NoTransaction",
    "NotInTransaction",
    "cancel",
    "consumer_of",
    "emit",
    "emit_many",
    "once",
    "reschedule",
    "uid_of",
]

# Every parameter but the payload is sent as text, whatever codecs the application has set for other types.
ONE: Final = """
select outbox.emit_raw($1::text, $2::bytea, $3::text, $4::text::jsonb, $5::text::timestamptz, $6::text::uuid,
                       $7::text, $8::text, $9::text::integer, $10::text)::text
"""
MANY: Final = """
with locked as materialized (select outbox.lock_unique_keys($1::text[], $10::text[]) as number)
select outbox.emit_raw(e.type, e.payload, e.key, e.headers::jsonb, e.deliver_at::timestamptz, e.uid::uuid,
                       e.content_type, e.tenant, e.priority::integer, e.unique_key)::text,
       outbox.event_index(null)
  from locked
 cross join unnest($1::text[], $2::bytea[], $3::text[], $4::text[], $5::text[], $6::text[], $7::text[], $8::text[],
                   $9::text[], $10::text[])
       with ordinality e (type, payload, key, headers, deliver_at, uid, content_type, tenant, priority, unique_key,
                          place)
 where locked.number is not null and outbox.event_index(e.place - 1) is not null
"""
CANCEL: Final = "select 1 where outbox.cancel($1::text::uuid)"
RESCHEDULE: Final = "select 1 where outbox.reschedule($1::text::uuid, $2::text::timestamptz)"
ONCE: Final = "select 1 where outbox.once($1::text, $2::text::uuid)"
REMEDY: Final = "async with conn.transaction():"
"""The remedy for a call outside a transaction."""


async def emit(
    conn: Connection,
    type: str | Declared,  # noqa: A002 - as for outbox.emit
    payload: Any = NOT_GIVEN,
    *,
    key: str | None = None,
    headers: Mapping[str, str] | None = None,
    deliver_at: datetime | None = None,
    uid: UUID | None = None,
    content_type: str | None = None,
    dumps: Dumps | None = None,
    tenant: str | None = None,
    priority: int | None = None,
    unique_key: str | None = None,
) -> UUID:
    """Emit one event in the transaction of ``conn``, in one round trip; return its uid.

    The arguments are those of ``outbox.emit``. Never commits. Warns with :class:`NotInTransaction` outside a
    transaction.

    Raises :class:`InvalidEvent` for an event that the outbox refuses, ``asyncpg.PostgresError`` for all other failures.
    """
    connection = _connection(conn)
    event = Event(type, payload, key, headers, deliver_at, uid, content_type, dumps, tenant, priority, unique_key)
    row = row_of(event)
    _warn_outside(connection)
    if (spans := emit_spans.begin((row,))) is None:
        return await _insert(connection, row)
    with spans:
        return spans.emitted([await _insert(connection, *spans.rows)])[0]


async def emit_many(conn: Connection, events: Iterable[Event | Declared]) -> list[UUID]:
    """Emit all events in order with one statement, as :func:`emit` does; return their uids.

    If one event is refused none is emitted, and :class:`InvalidEvent` has its index. Without events there is no round
    trip.
    """
    connection = _connection(conn)
    rows = rows_of(events)
    if not rows:
        return []
    _warn_outside(connection)
    if (spans := emit_spans.begin(rows)) is None:
        return await _insert_many(connection, rows)
    with spans:
        return spans.emitted(await _insert_many(connection, spans.rows))


async def cancel(conn: Connection, uid: UUID) -> bool:
    """Cancel a scheduled event in the transaction of ``conn``; return True if that was in time.

    As ``outbox.cancel``, but raises ``asyncpg.PostgresError``.
    """
    return await _change(_connection(conn, "cancel"), CANCEL, uid_text(uid))


async def reschedule(conn: Connection, uid: UUID, at: datetime) -> bool:
    """Move a scheduled event to ``at``, an aware datetime; return True if that was in time.

    As ``outbox.reschedule``, but raises ``asyncpg.PostgresError``.
    """
    return await _change(_connection(conn, "reschedule"), RESCHEDULE, uid_text(uid), time_text("at", at))


async def once(conn: Connection, consumer: str, uid: UUID | str) -> bool:
    """Mark an event as handled in the transaction of ``conn``, in one round trip; return True the first time.

    The arguments are those of ``inbox.once``. Never commits.

    Raises :class:`NoTransaction` outside a transaction, :class:`InvalidMark` for a name or a uid that the inbox
    refuses, ``asyncpg.PostgresError`` for all other failures.
    """
    connection = _connection(conn, "once", "docs/consumers.md")
    mark = mark_of(consumer, uid)
    if not connection.is_in_transaction():
        raise outside(REMEDY)
    try:
        return await connection.fetchrow(ONCE, *mark) is not None
    except asyncpg.InvalidParameterValueError as error:
        if (refused := refused_mark(error.message)) is not None:
            raise refused from None
        raise
    except asyncpg.DataError as error:
        if (lacking := encoding_error(error)) is not None:
            raise unencodable_mark(lacking) from None
        raise


async def _insert(connection: Connection, row: Row) -> UUID:
    try:
        return UUID(await connection.fetchval(ONE, *row))
    except asyncpg.DataError as error:
        if (refused := _refusal(error)) is not None:
            raise refused from None
        raise


async def _insert_many(connection: Connection, rows: list[Row]) -> list[UUID]:
    try:
        many = await connection.fetch(MANY, *columns(rows))
        return [UUID(found[0]) for found in many]
    except asyncpg.DataError as error:
        if (refused := _refusal(error)) is not None:
            raise refused from None
        raise


async def _change(connection: Connection, statement: str, *parameters: str) -> bool:
    try:
        return await connection.fetchrow(statement, *parameters) is not None
    except asyncpg.InvalidParameterValueError as error:
        if (refused := refusal(error.message)) is not None:
            raise refused from None
        raise


def _refusal(error: asyncpg.DataError) -> InvalidEvent | None:
    """Return the error about the event, or None for another one. asyncpg's own would show the text it cannot encode."""
    if (lacking := encoding_error(error)) is not None:
        return unencodable(lacking)
    return refusal(error.message) if isinstance(error, asyncpg.InvalidParameterValueError) else None


def _connection(conn: object, name: str = "emit", page: str = "docs/emitting.md") -> Connection:
    if isinstance(conn, asyncpg.Connection | PoolConnectionProxy):
        return conn  # pyright: ignore[reportUnknownVariableType] - the class of its records
    kind = f"{conn.__class__.__module__}.{conn.__class__.__qualname__}"
    raise TypeError(f"{name} takes a connection of asyncpg, not {kind}; {page} has the functions for others")


def _warn_outside(connection: Connection) -> None:
    """Warn at the caller of the public function, two frames up, if no transaction is open."""
    if not connection.is_in_transaction():
        warn_outside(REMEDY, 3)
