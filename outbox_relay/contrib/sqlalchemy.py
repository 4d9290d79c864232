"""Emitting and consuming over a session or connection of SQLAlchemy 2.

docs/emitting.md and docs/consumers.md show every use.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from datetime import datetime
from typing import Any, Final, TypeAlias, cast
from uuid import UUID

from sqlalchemy import ARRAY, Connection, LargeBinary, String, bindparam, text
from sqlalchemy.exc import DBAPIError
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncSession, async_scoped_session
from sqlalchemy.orm import Session, scoped_session

from outbox_relay import emit_spans
from outbox_relay.emit_rows import (
    Dumps,
    Event,
    InvalidEvent,
    NotInTransaction,
    columns,
    refusal,
    row_of,
    rows_of,
    unencodable,
    warn_outside,
)
from outbox_relay.emit_spans import Row
from outbox_relay.inbox_marks import (
    InvalidMark,
    Mark,
    NoTransaction,
    consumer_of,
    mark_of,
    outside,
    refused_mark,
    uid_of,
    unencodable_mark,
)

__all__ = [
    "Event",
    "InvalidEvent",
    "InvalidMark",
    "NoTransaction",
    "NotInTransaction",
    "aemit",
    "aemit_many",
    "aonce",
    "consumer_of",
    "emit",
    "emit_many",
    "once",
    "uid_of",
]

Caller: TypeAlias = Session | scoped_session[Any] | Connection
AsyncCaller: TypeAlias = AsyncSession | async_scoped_session[Any] | AsyncConnection

REFUSED: Final = "22023"
"""The SQLSTATE of an event or a mark that the database refuses."""
REMEDY: Final = "with engine.begin() as conn:"
"""The remedy for a call in autocommit mode."""
NAMES: Final = ("type", "payload", "key", "headers", "deliver_at", "uid", "content_type")
_ONE: Final = text("""
select cast(outbox.emit_raw(cast(:type as text), :payload, cast(:key as text),
                            cast(cast(:headers as text) as jsonb),
                            cast(cast(:deliver_at as text) as timestamptz),
                            cast(cast(:uid as text) as uuid), cast(:content_type as text)) as text)
""").bindparams(*(bindparam(name, type_=LargeBinary() if name == "payload" else String()) for name in NAMES))
_MANY: Final = text("""
select cast(outbox.emit_raw(e.type, e.payload, e.key, cast(e.headers as jsonb), cast(e.deliver_at as timestamptz),
                            cast(e.uid as uuid), e.content_type) as text),
       set_config('outbox.event_index', '', true)
  from unnest(cast(:type as text[]), cast(:payload as bytea[]), cast(:key as text[]), cast(:headers as text[]),
              cast(:deliver_at as text[]), cast(:uid as text[]), cast(:content_type as text[]))
       with ordinality e (type, payload, key, headers, deliver_at, uid, content_type, place)
 where set_config('outbox.event_index', cast(e.place - 1 as text), true) is not null
""").bindparams(*(bindparam(name, type_=ARRAY(LargeBinary() if name == "payload" else String())) for name in NAMES))
_ONCE: Final = text("""
select 1 where outbox.once(cast(:consumer as text), cast(cast(:uid as text) as uuid))
""").bindparams(bindparam("consumer", type_=String()), bindparam("uid", type_=String()))


def emit(
    conn: Caller,
    type: str,  # noqa: A002 - as for outbox.emit
    payload: Any,
    *,
    key: str | None = None,
    headers: Mapping[str, str] | None = None,
    deliver_at: datetime | None = None,
    uid: UUID | None = None,
    content_type: str | None = None,
    dumps: Dumps | None = None,
) -> UUID:
    """Emit one event in the transaction of a session or connection, in one round trip; return its uid.

    A session is flushed, so that its pending changes are written first. The arguments are those of
    ``outbox.emit``. Never commits. Warns with :class:`NotInTransaction` in autocommit mode.

    Raises :class:`InvalidEvent` for an event that the outbox refuses, ``sqlalchemy.exc.SQLAlchemyError`` for all other
    failures.
    """
    connection = _connection(_caller(conn))
    row = row_of(Event(type, payload, key, headers, deliver_at, uid, content_type, dumps))
    if _is_autocommit(connection):
        warn_outside(REMEDY, 2)
    if (spans := emit_spans.begin((row,))) is None:
        return _insert(connection, row)
    with spans:
        return spans.emitted([_insert(connection, *spans.rows)])[0]


def emit_many(conn: Caller, events: Iterable[Event]) -> list[UUID]:
    """Emit all events in order with one statement, as :func:`emit` does; return their uids.

    If one event is refused none is emitted, and :class:`InvalidEvent` has its index. Without events there is no round
    trip.
    """
    caller, rows = _caller(conn), rows_of(events)
    if not rows:
        return []
    connection = _connection(caller)
    if _is_autocommit(connection):
        warn_outside(REMEDY, 2)
    if (spans := emit_spans.begin(rows)) is None:
        return _insert_many(connection, rows)
    with spans:
        return spans.emitted(_insert_many(connection, spans.rows))


async def aemit(
    conn: AsyncCaller,
    type: str,  # noqa: A002 - as for outbox.emit
    payload: Any,
    *,
    key: str | None = None,
    headers: Mapping[str, str] | None = None,
    deliver_at: datetime | None = None,
    uid: UUID | None = None,
    content_type: str | None = None,
    dumps: Dumps | None = None,
) -> UUID:
    """Emit one event in the transaction of an asynchronous session or connection, as :func:`emit` does."""
    connection = await _async_connection(_async_caller(conn))
    row = row_of(Event(type, payload, key, headers, deliver_at, uid, content_type, dumps))
    if await connection.run_sync(_is_autocommit):
        warn_outside(f"async {REMEDY}", 2)
    if (spans := emit_spans.begin((row,))) is None:
        return await connection.run_sync(_insert, row)
    with spans:
        return spans.emitted([await connection.run_sync(_insert, *spans.rows)])[0]


async def aemit_many(conn: AsyncCaller, events: Iterable[Event]) -> list[UUID]:
    """Emit all events in the transaction of an asynchronous session or connection, as :func:`emit_many` does."""
    caller, rows = _async_caller(conn), rows_of(events)
    if not rows:
        return []
    connection = await _async_connection(caller)
    if await connection.run_sync(_is_autocommit):
        warn_outside(f"async {REMEDY}", 2)
    if (spans := emit_spans.begin(rows)) is None:
        return await connection.run_sync(_insert_many, rows)
    with spans:
        return spans.emitted(await connection.run_sync(_insert_many, spans.rows))


def once(conn: Caller, consumer: str, uid: UUID | str) -> bool:
    """Mark an event as handled in the transaction of a session or connection; return True the first time.

    The arguments are those of ``inbox.once``. A session is not flushed: the event is marked before its changes are
    written. Never commits.

    Raises :class:`NoTransaction` in autocommit mode, :class:`InvalidMark` for a name or a uid that the inbox refuses,
    ``sqlalchemy.exc.SQLAlchemyError`` for all other failures.
    """
    caller, mark = _caller(conn, "once"), mark_of(consumer, uid)
    return _mark(caller if isinstance(caller, Connection) else caller.connection(), mark, REMEDY)


async def aonce(conn: AsyncCaller, consumer: str, uid: UUID | str) -> bool:
    """Mark an event in the transaction of an asynchronous session or connection, as :func:`once` does."""
    caller, mark = _async_caller(conn, "once"), mark_of(consumer, uid)
    connection = caller if isinstance(caller, AsyncConnection) else await caller.connection()
    return await connection.run_sync(_mark, mark, f"async {REMEDY}")


# -- the statements -----------------------------------------------------------------------------------------------


def _insert(connection: Connection, row: Row) -> UUID:
    try:
        return UUID(connection.execute(_ONE, dict(zip(NAMES, row, strict=True))).scalar_one())
    except UnicodeEncodeError as error:
        raise unencodable(error) from None
    except DBAPIError as error:
        if (refused := _refusal(error)) is not None:
            raise refused from None
        error.hide_parameters = True  # they hold the payload
        raise


def _insert_many(connection: Connection, rows: list[Row]) -> list[UUID]:
    try:
        found = connection.execute(_MANY, dict(zip(NAMES, columns(rows), strict=True)))
        return [UUID(uid) for uid, _ in found.all()]
    except UnicodeEncodeError as error:
        raise unencodable(error) from None
    except DBAPIError as error:
        if (refused := _refusal(error)) is not None:
            raise refused from None
        error.hide_parameters = True  # they hold the payload
        raise


def _mark(connection: Connection, mark: Mark, remedy: str) -> bool:
    if _is_autocommit(connection):
        raise outside(remedy)
    try:
        return connection.execute(_ONCE, dict(zip(("consumer", "uid"), mark, strict=True))).first() is not None
    except UnicodeEncodeError as error:
        raise unencodable_mark(error) from None
    except DBAPIError as error:
        if (refused := refused_mark(_refused_because(error))) is not None:
            raise refused from None
        raise


def _refusal(error: DBAPIError) -> InvalidEvent | None:
    """Return the error with the message about the event, or None if the database did not refuse the event."""
    return refusal(_refused_because(error))


def _refused_because(error: DBAPIError) -> str | None:
    """Return the message of the database for a value that it refuses, or None for another error."""
    found: Any = error.orig
    if REFUSED not in (getattr(found, "sqlstate", None), getattr(found, "pgcode", None)):
        return None
    diagnosis = getattr(found, "diag", None)  # of psycopg; asyncpg's own error is the cause
    return str(found.__cause__ or found) if diagnosis is None else diagnosis.message_primary


# -- the connection -----------------------------------------------------------------------------------------------


def _caller(conn: object, name: str = "emit") -> Session | Connection:
    found = cast("scoped_session[Session]", conn)() if isinstance(conn, scoped_session) else conn
    if isinstance(found, Session | Connection):
        return found
    takes = f"{name} takes a Session or Connection"
    raise TypeError(_wrong(found, name, takes, f"a{name} for an AsyncSession or AsyncConnection"))


def _async_caller(conn: object, name: str = "emit") -> AsyncSession | AsyncConnection:
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


async def _async_connection(caller: AsyncSession | AsyncConnection) -> AsyncConnection:
    """Return the connection of the caller's transaction, after the changes of a session are written."""
    if isinstance(caller, AsyncConnection):
        return caller
    await caller.flush()
    return await caller.connection()


def _is_autocommit(connection: Connection) -> bool:
    return bool(getattr(connection.connection.dbapi_connection, "autocommit", False))
