"""Emitting and consuming over a session or connection of SQLAlchemy 2.

docs/emitting.md and docs/consumers.md show every use.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from datetime import datetime
from typing import Any, Final, TypeAlias, cast
from uuid import UUID

from sqlalchemy import ARRAY, Connection, LargeBinary, String, TextClause, bindparam, text
from sqlalchemy.exc import DBAPIError
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncSession, async_scoped_session
from sqlalchemy.orm import Session, scoped_session

from outbox_relay import emit_spans
from outbox_relay.emit_rows import (
    NOT_GIVEN,
    PLAIN,
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
AsyncCaller: TypeAlias = AsyncSession | async_scoped_session[Any] | AsyncConnection

REFUSED: Final = "22023"
"""The SQLSTATE of an event or a mark that the database refuses."""
REMEDY: Final = "with engine.begin() as conn:"
"""The remedy for a call in autocommit mode."""
NAMES: Final = ("type", "payload", "key", "headers", "deliver_at", "uid", "content_type")
QUEUED_NAMES: Final = (*NAMES, "tenant", "priority", "unique_key")


def _one(statement: str, names: tuple[str, ...]) -> TextClause:
    return text(statement).bindparams(
        *(bindparam(name, type_=LargeBinary() if name == "payload" else String()) for name in names)
    )


def _many(statement: str, names: tuple[str, ...]) -> TextClause:
    return text(statement).bindparams(
        *(bindparam(name, type_=ARRAY(LargeBinary() if name == "payload" else String())) for name in names)
    )


_ONE: Final = _one(
    """
select cast(outbox.emit_raw(cast(:type as text), :payload, cast(:key as text),
                            cast(cast(:headers as text) as jsonb),
                            cast(cast(:deliver_at as text) as timestamptz),
                            cast(cast(:uid as text) as uuid), cast(:content_type as text)) as text)
""",
    NAMES,
)
_ONE_QUEUED: Final = _one(
    """
select cast(outbox.emit_raw(cast(:type as text), :payload, cast(:key as text),
                            cast(cast(:headers as text) as jsonb),
                            cast(cast(:deliver_at as text) as timestamptz),
                            cast(cast(:uid as text) as uuid), cast(:content_type as text), cast(:tenant as text),
                            cast(cast(:priority as text) as integer), cast(:unique_key as text)) as text)
""",
    QUEUED_NAMES,
)
_MANY: Final = _many(
    """
select cast(outbox.emit_raw(e.type, e.payload, e.key, cast(e.headers as jsonb), cast(e.deliver_at as timestamptz),
                            cast(e.uid as uuid), e.content_type) as text),
       set_config('outbox.event_index', '', true)
  from unnest(cast(:type as text[]), cast(:payload as bytea[]), cast(:key as text[]), cast(:headers as text[]),
              cast(:deliver_at as text[]), cast(:uid as text[]), cast(:content_type as text[]))
       with ordinality e (type, payload, key, headers, deliver_at, uid, content_type, place)
 where set_config('outbox.event_index', cast(e.place - 1 as text), true) is not null
""",
    NAMES,
)
_MANY_QUEUED: Final = _many(
    """
with locked as materialized (
    select outbox.lock_unique_keys(cast(:type as text[]), cast(:unique_key as text[])) as number
)
select cast(outbox.emit_raw(e.type, e.payload, e.key, cast(e.headers as jsonb), cast(e.deliver_at as timestamptz),
                            cast(e.uid as uuid), e.content_type, e.tenant, cast(e.priority as integer),
                            e.unique_key) as text),
       set_config('outbox.event_index', '', true)
  from locked
 cross join unnest(cast(:type as text[]), cast(:payload as bytea[]), cast(:key as text[]), cast(:headers as text[]),
                   cast(:deliver_at as text[]), cast(:uid as text[]), cast(:content_type as text[]),
                   cast(:tenant as text[]), cast(:priority as text[]), cast(:unique_key as text[]))
       with ordinality e (type, payload, key, headers, deliver_at, uid, content_type, tenant, priority, unique_key,
                          place)
 where locked.number is not null
   and set_config('outbox.event_index', cast(e.place - 1 as text), true) is not null
""",
    QUEUED_NAMES,
)
_CANCEL: Final = text("""
select 1 where outbox.cancel(cast(cast(:uid as text) as uuid))
""").bindparams(bindparam("uid", type_=String()))
_RESCHEDULE: Final = text("""
select 1 where outbox.reschedule(cast(cast(:uid as text) as uuid), cast(cast(:at as text) as timestamptz))
""").bindparams(bindparam("uid", type_=String()), bindparam("at", type_=String()))
_ONCE: Final = text("""
select 1 where outbox.once(cast(:consumer as text), cast(cast(:uid as text) as uuid))
""").bindparams(bindparam("consumer", type_=String()), bindparam("uid", type_=String()))


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
    if _is_autocommit(connection):
        warn_outside(REMEDY, 2)
    if (spans := emit_spans.begin((row,))) is None:
        return _insert(connection, row)
    with spans:
        return spans.emitted([_insert(connection, *spans.rows)])[0]


def emit_many(conn: Caller, events: Iterable[Event | Declared]) -> list[UUID]:
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
    if await connection.run_sync(_is_autocommit):
        warn_outside(f"async {REMEDY}", 2)
    if (spans := emit_spans.begin((row,))) is None:
        return await connection.run_sync(_insert, row)
    with spans:
        return spans.emitted([await connection.run_sync(_insert, *spans.rows)])[0]


async def aemit_many(conn: AsyncCaller, events: Iterable[Event | Declared]) -> list[UUID]:
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


def cancel(conn: Caller, uid: UUID) -> bool:
    """Cancel a scheduled event in the transaction of a session or connection; return True if that was in time.

    As ``outbox.cancel``, but raises ``sqlalchemy.exc.SQLAlchemyError``. A session is flushed first.
    """
    parameters = {"uid": uid_text(uid)}
    return _change(_connection(_caller(conn, "cancel")), _CANCEL, parameters)


def reschedule(conn: Caller, uid: UUID, at: datetime) -> bool:
    """Move a scheduled event to ``at``, an aware datetime; return True if that was in time.

    As ``outbox.reschedule``, but raises ``sqlalchemy.exc.SQLAlchemyError``. A session is flushed first.
    """
    parameters = {"uid": uid_text(uid), "at": time_text("at", at)}
    return _change(_connection(_caller(conn, "reschedule")), _RESCHEDULE, parameters)


async def acancel(conn: AsyncCaller, uid: UUID) -> bool:
    """Cancel a scheduled event in the transaction of an asynchronous session or connection, as :func:`cancel` does."""
    parameters = {"uid": uid_text(uid)}
    connection = await _async_connection(_async_caller(conn, "cancel"))
    return await connection.run_sync(_change, _CANCEL, parameters)


async def areschedule(conn: AsyncCaller, uid: UUID, at: datetime) -> bool:
    """Move a scheduled event over an asynchronous session or connection, as :func:`reschedule` does."""
    parameters = {"uid": uid_text(uid), "at": time_text("at", at)}
    connection = await _async_connection(_async_caller(conn, "reschedule"))
    return await connection.run_sync(_change, _RESCHEDULE, parameters)


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
        statement, names = (_ONE, NAMES) if len(row) == PLAIN else (_ONE_QUEUED, QUEUED_NAMES)
        return UUID(connection.execute(statement, dict(zip(names, row, strict=True))).scalar_one())
    except UnicodeEncodeError as error:
        raise unencodable(error) from None
    except DBAPIError as error:
        if (refused := _refusal(error)) is not None:
            raise refused from None
        error.hide_parameters = True  # they hold the payload
        raise


def _insert_many(connection: Connection, rows: list[Row]) -> list[UUID]:
    values = columns(rows)
    statement, names = (_MANY, NAMES) if len(values) == PLAIN else (_MANY_QUEUED, QUEUED_NAMES)
    try:
        found = connection.execute(statement, dict(zip(names, values, strict=True)))
        return [UUID(uid) for uid, _ in found.all()]
    except UnicodeEncodeError as error:
        raise unencodable(error) from None
    except DBAPIError as error:
        if (refused := _refusal(error)) is not None:
            raise refused from None
        error.hide_parameters = True  # they hold the payload
        raise


def _change(connection: Connection, statement: TextClause, parameters: Mapping[str, str]) -> bool:
    try:
        return connection.execute(statement, parameters).first() is not None
    except DBAPIError as error:
        if (refused := _refusal(error)) is not None:
            raise refused from None
        raise


def _mark(connection: Connection, mark: Mark, remedy: str) -> bool:
    if _is_autocommit(connection):
        raise outside(remedy)
    try:
        return connection.execute(_ONCE, dict(zip(("consumer", "uid"), mark, strict=True))).first() is not None
    except UnicodeEncodeError as error:
        raise unencodable_mark(error) from None
    except DBAPIError as error:
        if (lacking := encoding_error(error.orig)) is not None:
            raise unencodable_mark(lacking) from None
        if (refused := refused_mark(_refused_because(error))) is not None:
            raise refused from None
        raise


def _refusal(error: DBAPIError) -> InvalidEvent | None:
    """Return the error with the message about the event, or None if neither driver nor database refused the event."""
    lacking = encoding_error(error.orig)  # asyncpg's own error, whose message shows the text
    return refusal(_refused_because(error)) if lacking is None else unencodable(lacking)


def _refused_because(error: DBAPIError) -> str | None:
    """Return the message of the database for a value that it refuses, or None for another error."""
    found: Any = error.orig
    fields = _fields_of_pg8000(found)
    if REFUSED not in (getattr(found, "sqlstate", None), getattr(found, "pgcode", None), fields.get("C")):
        return None
    diagnosis = getattr(found, "diag", None)  # of psycopg; asyncpg's own error is the cause
    return fields.get("M", str(found.__cause__ or found)) if diagnosis is None else diagnosis.message_primary


def _fields_of_pg8000(error: Any) -> Mapping[str, str]:
    """Return the fields of an error of pg8000, which is made of them; none for another driver."""
    [first, *_] = error.args or (None,)
    return cast("Mapping[str, str]", first) if isinstance(first, dict) else {}


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
