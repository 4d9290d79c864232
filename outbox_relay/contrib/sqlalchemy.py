"""Emitting and consuming over a session or connection of SQLAlchemy 2.

docs/emitting.md and docs/consumers.md show every use.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Any, Final, TypeAlias, Unpack, cast
from uuid import UUID

from sqlalchemy import ARRAY, Connection, LargeBinary, String, TextClause, bindparam, text
from sqlalchemy.exc import DBAPIError
from sqlalchemy.orm import Session, scoped_session

from outbox_relay.emit_rows import (
    NOT_GIVEN,
    Declared,
    Event,
    InvalidEvent,
    NotInTransaction,
    encoding_error,
    row_of,
    rows_of,
    warn_outside,
)
from outbox_relay.emit_spans import CreateSpans, Row
from outbox_relay.inbox_marks import InvalidMark, NoTransaction, consumer_of, outside, uid_of
from outbox_relay.statements import (
    COLUMNS,
    PAYLOAD,
    EventOptions,
    Parameters,
    Statement,
    event_time,
    event_uid,
    many_events,
    mark,
    one_event,
    statements,
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
REFUSED: Final = "22023"
"""The SQLSTATE of an event or a mark that the database refuses."""
STATEMENTS: Final = statements(lambda name, _: f":{name}")


def _typed(statement: Statement, *, many: bool = False) -> TextClause:
    """Return a statement whose parameters are sent with the types that it casts them from."""
    clause = text(statement.sql)
    kinds = {name: LargeBinary() if name == PAYLOAD else String() for name in (*COLUMNS, "at", "consumer")}
    used = [name for name in kinds if f":{name} " in statement.sql]
    return clause.bindparams(*(bindparam(name, type_=ARRAY(kinds[name]) if many else kinds[name]) for name in used))


CLAUSES: Final[Mapping[Statement, TextClause]] = {
    statement: _typed(statement, many=statement is STATEMENTS.many) for statement in STATEMENTS
}


def emit(
    conn: Caller,
    type: str | Declared,  # noqa: A002 - as for outbox.emit
    payload: Any = NOT_GIVEN,
    **options: Unpack[EventOptions],
) -> UUID:
    """Emit one event in the transaction of a session or connection, in one round trip; return its uid.

    A session is flushed, so that its pending changes are written first. The arguments are those of
    ``outbox.emit``. Never commits. Warns with :class:`NotInTransaction` in autocommit mode.

    Raises :class:`InvalidEvent` for an event that the outbox refuses, ``sqlalchemy.exc.SQLAlchemyError`` for all other
    failures.
    """
    connection = _connection(_caller(conn))
    row = row_of(Event(type, payload, **options))
    if is_autocommit(connection):
        warn_outside(REMEDY, 2)
    return _insert_one(connection, row)


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
    return _insert_many(connection, rows)


async def aemit(
    conn: AsyncCaller,
    type: str | Declared,  # noqa: A002 - as for outbox.emit
    payload: Any = NOT_GIVEN,
    **options: Unpack[EventOptions],
) -> UUID:
    """Emit one event in the transaction of an asynchronous session or connection, as :func:`emit` does."""
    connection = await _async_connection(_async_caller(conn))
    row = row_of(Event(type, payload, **options))
    if await connection.run_sync(is_autocommit):
        warn_outside(f"async {REMEDY}", 2)
    return await connection.run_sync(_insert_one, row)


async def aemit_many(conn: AsyncCaller, events: Iterable[Event | Declared]) -> list[UUID]:
    """Emit all events in the transaction of an asynchronous session or connection, as :func:`emit_many` does."""
    caller, rows = _async_caller(conn), rows_of(events)
    if not rows:
        return []
    connection = await _async_connection(caller)
    if await connection.run_sync(is_autocommit):
        warn_outside(f"async {REMEDY}", 2)
    return await connection.run_sync(_insert_many, rows)


def cancel(conn: Caller, uid: UUID) -> bool:
    """Cancel a scheduled event in the transaction of a session or connection; return True if that was in time.

    As ``outbox.cancel``, but raises ``sqlalchemy.exc.SQLAlchemyError``. A session is flushed first.
    """
    parameters = event_uid(uid)
    return bool(_fetch(_connection(_caller(conn, "cancel")), STATEMENTS.cancel, parameters))


def reschedule(conn: Caller, uid: UUID, at: datetime) -> bool:
    """Move a scheduled event to ``at``, an aware datetime; return True if that was in time.

    As ``outbox.reschedule``, but raises ``sqlalchemy.exc.SQLAlchemyError``. A session is flushed first.
    """
    parameters = event_time(uid, at)
    return bool(_fetch(_connection(_caller(conn, "reschedule")), STATEMENTS.reschedule, parameters))


async def acancel(conn: AsyncCaller, uid: UUID) -> bool:
    """Cancel a scheduled event in the transaction of an asynchronous session or connection, as :func:`cancel` does."""
    parameters = event_uid(uid)
    connection = await _async_connection(_async_caller(conn, "cancel"))
    return bool(await connection.run_sync(_fetch, STATEMENTS.cancel, parameters))


async def areschedule(conn: AsyncCaller, uid: UUID, at: datetime) -> bool:
    """Move a scheduled event over an asynchronous session or connection, as :func:`reschedule` does."""
    parameters = event_time(uid, at)
    connection = await _async_connection(_async_caller(conn, "reschedule"))
    return bool(await connection.run_sync(_fetch, STATEMENTS.reschedule, parameters))


def once(conn: Caller, consumer: str, uid: UUID | str) -> bool:
    """Mark an event as handled in the transaction of a session or connection; return True the first time.

    The arguments are those of ``inbox.once``. A session is not flushed: the event is marked before its changes are
    written. Never commits.

    Raises :class:`NoTransaction` in autocommit mode, :class:`InvalidMark` for a name or a uid that the inbox refuses,
    ``sqlalchemy.exc.SQLAlchemyError`` for all other failures.
    """
    caller, parameters = _caller(conn, "once"), mark(consumer, uid)
    connection = caller if isinstance(caller, Connection) else caller.connection()
    if is_autocommit(connection):
        raise outside(REMEDY)
    return bool(_fetch(connection, STATEMENTS.once, parameters))


async def aonce(conn: AsyncCaller, consumer: str, uid: UUID | str) -> bool:
    """Mark an event in the transaction of an asynchronous session or connection, as :func:`once` does."""
    caller, parameters = _async_caller(conn, "once"), mark(consumer, uid)
    connection = await _async_connection(caller, flush=False)
    if await connection.run_sync(is_autocommit):
        raise outside(f"async {REMEDY}")
    return bool(await connection.run_sync(_fetch, STATEMENTS.once, parameters))


# -- the statements -----------------------------------------------------------------------------------------------


def _insert_one(connection: Connection, row: Row) -> UUID:
    with CreateSpans([row]) as spans:
        return spans.emitted(_uids(_fetch(connection, STATEMENTS.one, one_event(*spans.rows))))[0]


def _insert_many(connection: Connection, rows: list[Row]) -> list[UUID]:
    with CreateSpans(rows) as spans:
        return spans.emitted(_uids(_fetch(connection, STATEMENTS.many, many_events(spans.rows))))


def _uids(rows: Sequence[Sequence[Any]]) -> list[UUID]:
    return [UUID(row[0]) for row in rows]


def _fetch(connection: Connection, statement: Statement, parameters: Parameters) -> Sequence[Sequence[Any]]:
    """Run a statement and return its rows. Raises ``InvalidEvent``, ``InvalidMark`` or ``SQLAlchemyError``."""
    try:
        return connection.execute(CLAUSES[statement], parameters).all()
    except UnicodeEncodeError as error:
        raise statement.unencodable(error) from None
    except DBAPIError as error:
        if (lacking := encoding_error(error.orig)) is not None:  # asyncpg's own error, whose message shows the text
            raise statement.unencodable(lacking) from None
        if (refused := statement.refusal(_refused_because(error))) is not None:
            raise refused from None
        error.hide_parameters = True  # they hold the payload
        raise


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


def is_autocommit(connection: Connection) -> bool:
    """Return True if each statement of the connection is a transaction of its own."""
    return bool(getattr(connection.connection.dbapi_connection, "autocommit", False))


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
