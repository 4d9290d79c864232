"""Emitting events from Python, and changing scheduled ones, in the caller's own transaction and over its connection.

This module imports only psycopg, the standard library and modules that do the same. docs/emitting.md shows every use.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from datetime import datetime
from typing import Any, Final, TypeAlias, Unpack
from uuid import UUID

import psycopg

from outbox_relay.callers import (
    STATEMENTS,
    AnyConnection,
    afetch,
    ainsert_many,
    ainsert_one,
    async_connection_of,
    connection_of,
    fetch,
    insert_many,
    insert_one,
    is_outside_transaction,
)
from outbox_relay.emit_rows import (
    NOT_GIVEN,
    Declared,
    Dumps,
    Event,
    InvalidEvent,
    NotInTransaction,
    row_of,
    rows_of,
    warn_outside,
)
from outbox_relay.statements import EventOptions, event_time, event_uid

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

Caller: TypeAlias = psycopg.Connection[Any] | psycopg.Cursor[Any]
AsyncCaller: TypeAlias = psycopg.AsyncConnection[Any] | psycopg.AsyncCursor[Any]
REMEDY: Final = "with conn.transaction():"


def emit(
    conn: Caller,
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
    return insert_one(connection, row)


async def aemit(
    conn: AsyncCaller,
    type: str | Declared,  # noqa: A002 - as for emit
    payload: Any = NOT_GIVEN,
    **options: Unpack[EventOptions],
) -> UUID:
    """Emit one event over an asynchronous connection or cursor, as :func:`emit` does."""
    connection = async_connection_of(conn, "emit")
    row = row_of(Event(type, payload, **options))
    _warn_outside(connection)
    return await ainsert_one(connection, row)


def emit_many(conn: Caller, events: Iterable[Event | Declared]) -> list[UUID]:
    """Emit all events in order with one statement, as :func:`emit` does; return their uids.

    If one event is refused none is emitted, and :class:`InvalidEvent` has its index. Without events there is no round
    trip.
    """
    connection = connection_of(conn, "emit")
    if not (rows := rows_of(events)):
        return []
    _warn_outside(connection)
    return insert_many(connection, rows)


async def aemit_many(conn: AsyncCaller, events: Iterable[Event | Declared]) -> list[UUID]:
    """Emit all events over an asynchronous connection or cursor, as :func:`emit_many` does."""
    connection = async_connection_of(conn, "emit")
    if not (rows := rows_of(events)):
        return []
    _warn_outside(connection)
    return await ainsert_many(connection, rows)


def cancel(conn: Caller, uid: UUID) -> bool:
    """Cancel a scheduled event in the transaction of ``conn``; return True if that was in time.

    True means that no sink delivers the event once the transaction is committed. False means that it has entered the
    log, or that there is no such event, and nothing has changed. Events are cancelled by the role that emitted them.

    Raises :class:`InvalidEvent` for the event of another role, TypeError for a ``uid`` that is no UUID,
    ``psycopg.Error`` for all other failures.
    """
    return bool(fetch(connection_of(conn, "cancel"), STATEMENTS.cancel, event_uid(uid)))


async def acancel(conn: AsyncCaller, uid: UUID) -> bool:
    """Cancel a scheduled event over an asynchronous connection or cursor, as :func:`cancel` does."""
    return bool(await afetch(async_connection_of(conn, "cancel"), STATEMENTS.cancel, event_uid(uid)))


def reschedule(conn: Caller, uid: UUID, at: datetime) -> bool:
    """Move a scheduled event to ``at``, an aware datetime; return True if that was in time.

    A time that has passed makes the event due at once. Otherwise as :func:`cancel`.
    """
    return bool(fetch(connection_of(conn, "reschedule"), STATEMENTS.reschedule, event_time(uid, at)))


async def areschedule(conn: AsyncCaller, uid: UUID, at: datetime) -> bool:
    """Move a scheduled event over an asynchronous connection or cursor, as :func:`reschedule` does."""
    return bool(await afetch(async_connection_of(conn, "reschedule"), STATEMENTS.reschedule, event_time(uid, at)))


def _warn_outside(connection: AnyConnection) -> None:
    """Warn at the caller of the public function, two frames up, if no transaction is open."""
    if is_outside_transaction(connection):
        warn_outside(REMEDY, 3)
