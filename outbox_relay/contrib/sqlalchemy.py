"""Emitting and consuming over a session or connection of SQLAlchemy 2.

docs/emitting.md and docs/consumers.md show every use.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from datetime import datetime
from typing import TYPE_CHECKING, Any, Final, TypeAlias, cast
from uuid import UUID

from sqlalchemy import Connection
from sqlalchemy.orm import Session, scoped_session

from outbox_relay import emit_spans
from outbox_relay.contrib.sqlalchemy_statements import (
    CANCEL,
    RESCHEDULE,
    change,
    insert,
    insert_many,
    insert_mark,
    is_autocommit,
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
    time_text,
    uid_text,
    warn_outside,
)
from outbox_relay.inbox_marks import (
    InvalidMark,
    NoTransaction,
    consumer_of,
    mark_of,
    uid_of,
)

if TYPE_CHECKING:  # imported when it is used, because it needs greenlet, which plain SQLAlchemy does not install
    from sqlalchemy.ext.asyncio import AsyncConnection, AsyncSession, async_scoped_session

    AsyncCaller: TypeAlias = AsyncSession | async_scoped_session[Any] | AsyncConnection

__all__ = [
    "Event",
    "InvalidEvent",
    "InvalidMark",
    "NoTransaction",
    "NotInTransaction",
    "acancel",
    "aemit",
    "aemit_many",
    "aonce",
    "areschedule",
    "cancel",
    "consumer_of",
    "emit",
    "emit_many",
    "once",
    "reschedule",
    "uid_of",
]

Caller: TypeAlias = Session | scoped_session[Any] | Connection

REMEDY: Final = "with engine.begin() as conn:"
"""The remedy for a call in autocommit mode."""


def emit(
    conn: Caller,
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
    """Emit one event in the transaction of a session or connection, in one round trip; return its uid.

    A session is flushed, so that its pending changes are written first. The arguments are those of
    ``outbox.emit``. Never commits. Warns with :class:`NotInTransaction` in autocommit mode.

    Raises :class:`InvalidEvent` for an event that the outbox refuses, ``sqlalchemy.exc.SQLAlchemyError`` for all other
    failures.
    """
    connection = _connection(_caller(conn))
    event = Event(type, payload, key, headers, deliver_at, uid, content_type, dumps, tenant, priority, unique_key)
    row = row_of(event)
    if is_autocommit(connection):
        warn_outside(REMEDY, 2)
    if (spans := emit_spans.begin((row,))) is None:
        return insert(connection, row)
    with spans:
        return spans.emitted([insert(connection, *spans.rows)])[0]


def emit_many(conn: Caller, events: Iterable[Event | Declared]) -> list[UUID]:
    """Emit all events in order with one statement, as :func:`emit` does; return their uids.

    If one event is refused none is emitted, and :class:`InvalidEvent` has its index. Without events there is no round
    trip.
    """
    caller, rows = _caller(conn), rows_of(events)
    if not rows:
        return []
    connection = _connection(caller)
    if is_autocommit(connection):
        warn_outside(REMEDY, 2)
    if (spans := emit_spans.begin(rows)) is None:
        return insert_many(connection, rows)
    with spans:
        return spans.emitted(insert_many(connection, spans.rows))


async def aemit(
    conn: AsyncCaller,
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
    """Emit one event in the transaction of an asynchronous session or connection, as :func:`emit` does."""
    connection = await _async_connection(_async_caller(conn))
    event = Event(type, payload, key, headers, deliver_at, uid, content_type, dumps, tenant, priority, unique_key)
    row = row_of(event)
    if await connection.run_sync(is_autocommit):
        warn_outside(f"async {REMEDY}", 2)
    if (spans := emit_spans.begin((row,))) is None:
        return await connection.run_sync(insert, row)
    with spans:
        return spans.emitted([await connection.run_sync(insert, *spans.rows)])[0]


async def aemit_many(conn: AsyncCaller, events: Iterable[Event | Declared]) -> list[UUID]:
    """Emit all events in the transaction of an asynchronous session or connection, as :func:`emit_many` does."""
    caller, rows = _async_caller(conn), rows_of(events)
    if not rows:
        return []
    connection = await _async_connection(caller)
    if await connection.run_sync(is_autocommit):
        warn_outside(f"async {REMEDY}", 2)
    if (spans := emit_spans.begin(rows)) is None:
        return await connection.run_sync(insert_many, rows)
    with spans:
        return spans.emitted(await connection.run_sync(insert_many, spans.rows))


def cancel(conn: Caller, uid: UUID) -> bool:
    """Cancel a scheduled event in the transaction of a session or connection; return True if that was in time.

    As ``outbox.cancel``, but raises ``sqlalchemy.exc.SQLAlchemyError``. A session is flushed first.
    """
    parameters = {"uid": uid_text(uid)}
    return change(_connection(_caller(conn, "cancel")), CANCEL, parameters)


def reschedule(conn: Caller, uid: UUID, at: datetime) -> bool:
    """Move a scheduled event to ``at``, an aware datetime; return True if that was in time.

    As ``outbox.reschedule``, but raises ``sqlalchemy.exc.SQLAlchemyError``. A session is flushed first.
    """
    parameters = {"uid": uid_text(uid), "at": time_text("at", at)}
    return change(_connection(_caller(conn, "reschedule")), RESCHEDULE, parameters)


async def acancel(conn: AsyncCaller, uid: UUID) -> bool:
    """Cancel a scheduled event in the transaction of an asynchronous session or connection, as :func:`cancel` does."""
    parameters = {"uid": uid_text(uid)}
    connection = await _async_connection(_async_caller(conn, "cancel"))
    return await connection.run_sync(change, CANCEL, parameters)


async def areschedule(conn: AsyncCaller, uid: UUID, at: datetime) -> bool:
    """Move a scheduled event over an asynchronous session or connection, as :func:`reschedule` does."""
    parameters = {"uid": uid_text(uid), "at": time_text("at", at)}
    connection = await _async_connection(_async_caller(conn, "reschedule"))
    return await connection.run_sync(change, RESCHEDULE, parameters)


def once(conn: Caller, consumer: str, uid: UUID | str) -> bool:
    """Mark an event as handled in the transaction of a session or connection; return True the first time.

    The arguments are those of ``inbox.once``. A session is not flushed: the event is marked before its changes are
    written. Never commits.

    Raises :class:`NoTransaction` in autocommit mode, :class:`InvalidMark` for a name or a uid that the inbox refuses,
    ``sqlalchemy.exc.SQLAlchemyError`` for all other failures.
    """
    caller, mark = _caller(conn, "once"), mark_of(consumer, uid)
    return insert_mark(caller if isinstance(caller, Connection) else caller.connection(), mark, REMEDY)


async def aonce(conn: AsyncCaller, consumer: str, uid: UUID | str) -> bool:
    """Mark an event in the transaction of an asynchronous session or connection, as :func:`once` does."""
    caller, mark = _async_caller(conn, "once"), mark_of(consumer, uid)
    connection = await _async_connection(caller, flush=False)
    return await connection.run_sync(insert_mark, mark, f"async {REMEDY}")


# -- the connection -----------------------------------------------------------------------------------------------


def _caller(conn: object, name: str = "emit") -> Session | Connection:
    found = cast("scoped_session[Session]", conn)() if isinstance(conn, scoped_session) else conn
    if isinstance(found, Session | Connection):
        return found
    takes = f"{name} takes a Session or Connection"
    raise TypeError(_wrong(found, name, takes, f"a{name} for an AsyncSession or AsyncConnection"))


def _async_caller(conn: object, name: str = "emit") -> AsyncSession | AsyncConnection:
    from sqlalchemy.ext.asyncio import AsyncConnection, AsyncSession, async_scoped_session

    found = cast("async_scoped_session[AsyncSession]", conn)() if isinstance(conn, async_scoped_session) else conn
    if isinstance(found, AsyncSession | AsyncConnection):
        return found
    takes = f"a{name} takes an AsyncSession or AsyncConnection"
    raise TypeError(_wrong(found, name, takes, f"{name} for a Session or Connection"))


def _wrong(found: object, name: str, takes: str, other: str) -> str:
    kind = f"{found.__class__.__module__}.{found.__class__.__qualname__}"
    page = "docs/consumers.md" if name == "once" else "docs/emitting.md"
    return f"{takes} of SQLAlchemy, not {kind}; there is {other}, and {page} for other libraries"


def _connection(caller: Session | Connection) -> Connection:
    """Return the connection of the caller's transaction, after the changes of a session are written."""
    if isinstance(caller, Connection):
        return caller
    caller.flush()
    return caller.connection()


async def _async_connection(caller: AsyncSession | AsyncConnection, *, flush: bool = True) -> AsyncConnection:
    """Return the connection of the caller's transaction, after the changes of a session are written if asked to."""
    from sqlalchemy.ext.asyncio import AsyncConnection

    if isinstance(caller, AsyncConnection):
        return caller
    if flush:
        await caller.flush()
    return await caller.connection()
