"""Emitting events from Python, and changing scheduled ones, in the caller's own transaction and over its connection.

This module imports only psycopg, the standard library, ``callers``, ``emit_rows`` and ``emit_spans``. docs/emitting.md
shows every use.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from typing import Any, Final, LiteralString
from uuid import UUID

import psycopg
from psycopg import errors
from psycopg.rows import TupleRow, tuple_row

from outbox_relay import emit_spans
from outbox_relay.callers import AnyConnection, async_connection_of, connection_of, is_outside_transaction
from outbox_relay.emit_rows import (
    NOT_GIVEN,
    Declared,
    Dumps,
    Event,
    InvalidEvent,
    NotInTransaction,
    columns,
    refusal,
    row_of,
    rows_of,
    time_text,
    uid_text,
    unencodable,
    warn_outside,
)
from outbox_relay.emit_spans import Row

__all__ = [
    "Event",
    "InvalidEvent",
    "NotInTransaction",
    "acancel",
    "aemit",
    "aemit_many",
    "areschedule",
    "cancel",
    "emit",
    "emit_many",
    "reschedule",
]

# Every parameter is cast, because the type of a string depends on the dumpers that the application registered.
ONE: Final[LiteralString] = """
select outbox.emit_raw(%s::text, %b::bytea, %s::text, %s::jsonb, %s::timestamptz, %s::uuid, %s::text, %s::text,
                       %s::text::integer, %s::text)
"""

# unnest returns rows in the order of its arrays, and the query keeps it; a sort would copy every payload.
# The setting, made before and reset after each call, lets an error name the refused event.
# Unique keys are locked in an order that all transactions share, before the first event is emitted.
MANY: Final[LiteralString] = """
with locked as materialized (select outbox.lock_unique_keys(%s::text[], %s::text[]) as number)
select outbox.emit_raw(e.type, e.payload, e.key, e.headers, e.deliver_at, e.uid, e.content_type, e.tenant, e.priority,
                       e.unique_key),
       outbox.event_index(null)
  from locked
 cross join unnest(%s::text[], %b::bytea[], %s::text[], %s::jsonb[], %s::timestamptz[], %s::uuid[], %s::text[],
                   %s::text[], %s::text[]::integer[], %s::text[])
       with ordinality e (type, payload, key, headers, deliver_at, uid, content_type, tenant, priority, unique_key,
                          place)
 where locked.number is not null and outbox.event_index(e.place - 1) is not null
"""

# A row if it was in time, whatever loaders the application has for booleans.
CANCEL: Final[LiteralString] = "select 1 where outbox.cancel(%s::text::uuid)"
RESCHEDULE: Final[LiteralString] = "select 1 where outbox.reschedule(%s::text::uuid, %s::text::timestamptz)"


def emit(
    conn: psycopg.Connection[Any] | psycopg.Cursor[Any],
    type: str | Declared,  # noqa: A002 - the name that SQL, Kafka headers and CloudEvents use
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

    ``payload`` is any argument of ``json.dumps``, stored as compact UTF-8, or ``bytes`` together with
    ``content_type``. ``dumps`` replaces ``json.dumps`` for any payload, and returns str or bytes. ``key`` has at most
    1,024 bytes; events of a key keep their order. Names of ``headers`` are HTTP tokens. ``deliver_at`` is an aware
    datetime before which the event is not delivered. ``uid`` makes a retry idempotent: an event whose uid was already
    emitted is not emitted again, and the uid is returned. ``tenant`` is whose event it is, and ``priority`` its rank,
    from -32768 to 32767, 0 by default; both are stored. ``unique_key`` merges events of one type: while an earlier one
    with it is not done, nothing is emitted, and that one's uid is returned.

    Never commits. Warns with :class:`NotInTransaction` in autocommit mode outside a transaction.

    Raises :class:`InvalidEvent` for an event that the outbox refuses, ``psycopg.Error`` for all other failures.
    """
    connection = connection_of(conn, "emit")
    event = Event(type, payload, key, headers, deliver_at, uid, content_type, dumps, tenant, priority, unique_key)
    row = row_of(event)
    _warn_outside(connection)
    if (spans := emit_spans.begin((row,))) is None:
        return insert(connection, row)
    with spans:
        return spans.emitted([insert(connection, *spans.rows)])[0]


async def aemit(
    conn: psycopg.AsyncConnection[Any] | psycopg.AsyncCursor[Any],
    type: str | Declared,  # noqa: A002 - as for emit
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
    """Emit one event over an asynchronous connection or cursor, as :func:`emit` does."""
    connection = async_connection_of(conn, "emit")
    event = Event(type, payload, key, headers, deliver_at, uid, content_type, dumps, tenant, priority, unique_key)
    row = row_of(event)
    _warn_outside(connection)
    if (spans := emit_spans.begin((row,))) is None:
        return await _ainsert(connection, row)
    with spans:
        return spans.emitted([await _ainsert(connection, *spans.rows)])[0]


def emit_many(conn: psycopg.Connection[Any] | psycopg.Cursor[Any], events: Iterable[Event | Declared]) -> list[UUID]:
    """Emit all events in order with one statement, as :func:`emit` does; return their uids.

    If one event is refused none is emitted, and :class:`InvalidEvent` has its index. Without events there is no round
    trip.
    """
    connection = connection_of(conn, "emit")
    rows = rows_of(events)
    if not rows:
        return []
    _warn_outside(connection)
    if (spans := emit_spans.begin(rows)) is None:
        return insert_many(connection, rows)
    with spans:
        return spans.emitted(insert_many(connection, spans.rows))


async def aemit_many(
    conn: psycopg.AsyncConnection[Any] | psycopg.AsyncCursor[Any], events: Iterable[Event | Declared]
) -> list[UUID]:
    """Emit all events over an asynchronous connection or cursor, as :func:`emit_many` does."""
    connection = async_connection_of(conn, "emit")
    rows = rows_of(events)
    if not rows:
        return []
    _warn_outside(connection)
    if (spans := emit_spans.begin(rows)) is None:
        return await _ainsert_many(connection, rows)
    with spans:
        return spans.emitted(await _ainsert_many(connection, spans.rows))


# -- the statements -----------------------------------------------------------------------------------------------


def insert(connection: psycopg.Connection[Any], row: Row) -> UUID:
    """Insert an event and return its uid. Raises as :func:`emit`."""
    try:
        with psycopg.Cursor(connection, row_factory=tuple_row) as cursor:
            return _uid(cursor.execute(ONE, row, prepare=False).fetchone())
    except (errors.InvalidParameterValue, UnicodeEncodeError) as error:
        raise _refusal(error) from None


async def _ainsert(connection: psycopg.AsyncConnection[Any], row: Row) -> UUID:
    try:
        async with psycopg.AsyncCursor(connection, row_factory=tuple_row) as cursor:
            await cursor.execute(ONE, row, prepare=False)
            return _uid(await cursor.fetchone())
    except (errors.InvalidParameterValue, UnicodeEncodeError) as error:
        raise _refusal(error) from None


def insert_many(connection: psycopg.Connection[Any], rows: list[Row]) -> list[UUID]:
    """Insert events in order and return their uids. Raises as :func:`emit_many`."""
    try:
        with psycopg.Cursor(connection, row_factory=tuple_row) as cursor:
            return [_uid(row) for row in cursor.execute(*_many(rows), prepare=False).fetchall()]
    except (errors.InvalidParameterValue, UnicodeEncodeError) as error:
        raise _refusal(error) from None


async def _ainsert_many(connection: psycopg.AsyncConnection[Any], rows: list[Row]) -> list[UUID]:
    try:
        async with psycopg.AsyncCursor(connection, row_factory=tuple_row) as cursor:
            await cursor.execute(*_many(rows), prepare=False)
            return [_uid(row) for row in await cursor.fetchall()]
    except (errors.InvalidParameterValue, UnicodeEncodeError) as error:
        raise _refusal(error) from None


def _many(rows: list[Row]) -> tuple[LiteralString, Sequence[object]]:
    """Return the statement for these events, and its parameters."""
    values = columns(rows)
    return MANY, (values[0], values[-1], *values)


# -- scheduled events ---------------------------------------------------------------------------------------------


def cancel(conn: psycopg.Connection[Any] | psycopg.Cursor[Any], uid: UUID) -> bool:
    """Cancel a scheduled event in the transaction of ``conn``; return True if that was in time.

    True means that no sink delivers the event once the transaction is committed. False means that it has entered the
    log, or that there is no such event, and nothing has changed. Events are cancelled by the role that emitted them.

    Raises :class:`InvalidEvent` for the event of another role, TypeError for a ``uid`` that is no UUID,
    ``psycopg.Error`` for all other failures.
    """
    return change(connection_of(conn, "cancel"), CANCEL, (uid_text(uid),))


async def acancel(conn: psycopg.AsyncConnection[Any] | psycopg.AsyncCursor[Any], uid: UUID) -> bool:
    """Cancel a scheduled event over an asynchronous connection or cursor, as :func:`cancel` does."""
    return await _achange(async_connection_of(conn, "cancel"), CANCEL, (uid_text(uid),))


def reschedule(conn: psycopg.Connection[Any] | psycopg.Cursor[Any], uid: UUID, at: datetime) -> bool:
    """Move a scheduled event to ``at``, an aware datetime; return True if that was in time.

    A time that has passed makes the event due at once. Otherwise as :func:`cancel`.
    """
    return change(connection_of(conn, "reschedule"), RESCHEDULE, (uid_text(uid), time_text("at", at)))


async def areschedule(conn: psycopg.AsyncConnection[Any] | psycopg.AsyncCursor[Any], uid: UUID, at: datetime) -> bool:
    """Move a scheduled event over an asynchronous connection or cursor, as :func:`reschedule` does."""
    return await _achange(async_connection_of(conn, "reschedule"), RESCHEDULE, (uid_text(uid), time_text("at", at)))


def change(connection: psycopg.Connection[Any], statement: LiteralString, parameters: Sequence[str]) -> bool:
    """Change a scheduled event and return True if that was in time. Raises as :func:`cancel`."""
    try:
        with psycopg.Cursor(connection, row_factory=tuple_row) as cursor:
            return cursor.execute(statement, parameters, prepare=False).fetchone() is not None
    except errors.InvalidParameterValue as error:
        raise _refusal(error) from None


async def _achange(
    connection: psycopg.AsyncConnection[Any], statement: LiteralString, parameters: Sequence[str]
) -> bool:
    try:
        async with psycopg.AsyncCursor(connection, row_factory=tuple_row) as cursor:
            await cursor.execute(statement, parameters, prepare=False)
            return await cursor.fetchone() is not None
    except errors.InvalidParameterValue as error:
        raise _refusal(error) from None


# -- the connection -----------------------------------------------------------------------------------------------


def _warn_outside(connection: AnyConnection) -> None:
    """Warn at the caller of the public function, two frames up, if no transaction is open."""
    if is_outside_transaction(connection):
        warn_outside("with conn.transaction():", 3)


def _uid(row: TupleRow | None) -> UUID:
    if row is None:
        raise psycopg.InternalError("outbox.emit_raw returned no row")
    return row[0] if isinstance(row[0], UUID) else UUID(str(row[0]))


def _refusal(error: errors.InvalidParameterValue | UnicodeEncodeError) -> Exception:
    """Return ``InvalidEvent`` with the message about the event, else the error unchanged."""
    if isinstance(error, UnicodeEncodeError):
        return unencodable(error)
    return refusal(error.diag.message_primary) or error
