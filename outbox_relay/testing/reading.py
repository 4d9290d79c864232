"""Reading emitted events over the connections of applications. Imports a driver only for one of its connections."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from typing import Any, TypeAlias, cast
from uuid import UUID

OF_TRANSACTION = """
select cast(uid as text), type, key, payload, content_type, cast(headers as text),
       cast(extract(epoch from deliver_at) as text)
  from outbox.emitted()
"""
NEWEST = "select coalesce(max(id), 0) from outbox.event"
SINCE = """
select cast(uid as text), type, key, payload, coalesce(content_type, 'application/json'), cast(headers as text),
       cast(extract(epoch from deliver_at) as text)
  from outbox.event where id > {:d} order by id
"""
"""The events above an id: those committed meanwhile, and those of the own transaction."""
NO_RIGHT = "42501"
"""The SQLSTATE of a missing privilege."""

FIRST_TIME, LAST_TIME = datetime.min.replace(tzinfo=UTC), datetime.max.replace(tzinfo=UTC)
OUTSIDE = (
    "no transaction is open on this connection, so nothing that was emitted can be seen: begin it before the code under"
    " test, or use `with outbox_events(conn):` around code that commits"
)

Rows: TypeAlias = Sequence[Sequence[Any]]
Read: TypeAlias = Callable[[str], Rows]
AsyncRead: TypeAlias = Callable[[str], Awaitable[Rows]]


@dataclass(frozen=True, slots=True)
class EmittedEvent:
    """An event that was emitted. ``payload`` is decoded if its content type is JSON, and bytes otherwise.

    ``deliver_at`` is in UTC, and the first or last time that Python has if it lies outside of them.
    """

    uid: UUID
    type: str
    key: str | None
    payload: Any
    content_type: str
    headers: dict[str, str] | None
    deliver_at: datetime | None


def events_of(rows: Rows) -> list[EmittedEvent]:
    """Return the events of the rows of a query."""
    return [_event(*row) for row in rows]


def _event(uid: Any, kind: Any, key: Any, payload: Any, content_type: Any, headers: Any, epoch: Any) -> EmittedEvent:
    media, members, seconds = _text(content_type) or "", _text(headers), _text(epoch)
    return EmittedEvent(
        UUID(_text(uid)),
        _text(kind) or "",
        _text(key),
        _decoded(bytes(payload), media),
        media,
        None if members is None else json.loads(members),
        None if seconds is None else _time(seconds),
    )


def _text(value: str | bytes | None) -> str | None:
    """Return a text, which drivers give as bytes if the connection has the encoding SQL_ASCII."""
    return value.decode() if isinstance(value, bytes) else value


def _time(epoch: str) -> datetime:
    """Return a time that is given in seconds since 1970, which no setting of the session changes."""
    seconds = Decimal(epoch)
    try:
        return datetime(1970, 1, 1, tzinfo=UTC) + timedelta(microseconds=int(seconds * 1_000_000))
    except (OverflowError, ValueError):
        return LAST_TIME if seconds > 0 else FIRST_TIME


def _decoded(payload: bytes, content_type: str) -> Any:
    media = content_type.partition(";")[0].strip().lower()
    if media != "application/json" and not media.endswith("+json"):
        return payload
    try:
        return json.loads(payload)
    except (ValueError, RecursionError):  # JSON of PostgreSQL may be nested more deeply than Python reads
        return payload


def reader(conn: object) -> Read:
    """Return a function that queries over a synchronous connection, and begins no transaction that stays open.

    It raises RuntimeError for ``OF_TRANSACTION`` if no transaction is open. Raises TypeError for anything else.
    """
    if isinstance(conn, str):
        return _django(conn)
    found: Any = _unscoped(conn)
    if _is_a(found, "psycopg", "Connection"):
        return _psycopg(found)
    if _is_a(found, "psycopg", "Cursor"):
        return _psycopg(found.connection)
    if _is_a(found, "sqlalchemy", "Session", "Connection"):
        return lambda query: _sqlalchemy(found, query)
    raise TypeError(_wrong(conn, "an asynchronous connection has aemitted, aassert_emitted and arefute_emitted"))


def async_reader(conn: object) -> AsyncRead:
    """Return a function that queries over an asynchronous connection, as ``reader`` does."""
    found: Any = _unscoped(conn)
    if _is_a(found, "psycopg", "AsyncConnection"):
        return _async_psycopg(found)
    if _is_a(found, "psycopg", "AsyncCursor"):
        return _async_psycopg(found.connection)
    if _is_a(found, "sqlalchemy", "AsyncSession", "AsyncConnection"):
        return lambda query: found.run_sync(_sqlalchemy, query)
    if _is_a(found, "asyncpg", "Connection", "PoolConnectionProxy"):
        return _asyncpg(found)
    raise TypeError(_wrong(conn, "a synchronous connection has emitted, assert_emitted and refute_emitted"))


def is_missing_right(error: Exception) -> bool:
    """Return True if the database refused a query for lack of a privilege, in the words of any driver."""
    found: Any = error
    while found is not None:
        if NO_RIGHT in (getattr(found, "sqlstate", None), getattr(found, "pgcode", None), _code_of_pg8000(found)):
            return True
        found = getattr(found, "orig", None) or found.__cause__
    return False


def _code_of_pg8000(error: Exception) -> object:
    """Return the SQLSTATE of an error of pg8000, which is made of fields; None for another driver."""
    fields = error.args[0] if error.args else None
    return cast("dict[str, object]", fields).get("C") if isinstance(fields, dict) else None


def _unscoped(conn: object) -> object:
    """Return the session of a scoped session, else the argument."""
    made: Any = conn
    return made() if _is_a(conn, "sqlalchemy", "scoped_session", "async_scoped_session") else conn


def _is_a(conn: object, package: str, *names: str) -> bool:
    """Return True for an object of one of these classes, or of a class that an application has derived from one."""
    return any(each.__module__.partition(".")[0] == package and each.__name__ in names for each in type(conn).__mro__)


def _wrong(conn: object, other: str) -> str:
    kind = f"{type(conn).__module__}.{type(conn).__qualname__}"
    return (
        "outbox_events takes a connection of psycopg or asyncpg, a session or connection of SQLAlchemy, or a database "
        f"alias of Django; this is {kind}, and {other}"
    )


# -- one function for each kind -----------------------------------------------------------------------------------


def _require(query: str, *, is_open: bool) -> None:
    """Raise RuntimeError if the query needs an open transaction and there is none."""
    if query == OF_TRANSACTION and not is_open:
        raise RuntimeError(OUTSIDE)


def _psycopg(connection: Any) -> Read:
    import psycopg
    from psycopg.pq import TransactionStatus
    from psycopg.rows import tuple_row

    def read(query: str) -> Rows:
        idle = connection.info.transaction_status == TransactionStatus.IDLE
        _require(query, is_open=not idle)
        try:
            with psycopg.Cursor(connection, row_factory=tuple_row) as cursor:
                return cursor.execute(query.encode()).fetchall()
        finally:
            if idle:
                connection.rollback()

    return read


def _async_psycopg(connection: Any) -> AsyncRead:
    import psycopg
    from psycopg.pq import TransactionStatus
    from psycopg.rows import tuple_row

    async def read(query: str) -> Rows:
        idle = connection.info.transaction_status == TransactionStatus.IDLE
        _require(query, is_open=not idle)
        try:
            async with psycopg.AsyncCursor(connection, row_factory=tuple_row) as cursor:
                await cursor.execute(query.encode())
                return await cursor.fetchall()
        finally:
            if idle:
                await connection.rollback()

    return read


def _sqlalchemy(conn: Any, query: str) -> Rows:
    """Query in the transaction of a session or connection, else in that of the connection that a session is bound to.

    Without an open transaction a connection of its own is used: one that began here would be in the way of the code.
    """
    from sqlalchemy import text

    below = conn if conn.in_transaction() or not hasattr(conn, "get_bind") else conn.get_bind()
    is_open = hasattr(below, "in_transaction") and below.in_transaction()
    _require(query, is_open=is_open)
    if is_open:
        return below.execute(text(query)).all()
    with below.engine.connect() as own:
        return own.execute(text(query)).all()


def _asyncpg(connection: Any) -> AsyncRead:
    async def read(query: str) -> Rows:
        _require(query, is_open=connection.is_in_transaction())
        return await connection.fetch(query)

    return read


def _django(alias: str) -> Read:
    from django.db import connections

    def read(query: str) -> Rows:
        connection = connections[alias]
        _require(query, is_open=connection.in_atomic_block or not connection.get_autocommit())
        with connection.cursor() as cursor:
            cursor.execute(query)
            return cursor.fetchall()

    return read
