"""Reading emitted events over the connections of applications. Imports none of their packages but what they have."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, TypeAlias
from uuid import UUID

OF_TRANSACTION = """
select cast(uid as text), type, key, payload, content_type, cast(headers as text), deliver_at from outbox.emitted()
"""
NEWEST = "select coalesce(max(id), 0) from outbox.event"
SINCE = """
select cast(uid as text), type, key, payload, content_type, cast(headers as text), deliver_at
  from outbox.event where id > {:d} order by id
"""
"""The events above an id, which are those committed meanwhile and those of the own transaction."""
NO_RIGHT = "42501"
"""The SQLSTATE of a missing privilege."""

Rows: TypeAlias = Sequence[Sequence[Any]]
Read: TypeAlias = Callable[[str], Rows]
AsyncRead: TypeAlias = Callable[[str], Awaitable[Rows]]


@dataclass(frozen=True, slots=True)
class EmittedEvent:
    """An event that was emitted. ``payload`` is decoded if its content type is JSON, and bytes otherwise."""

    uid: UUID
    type: str
    key: str | None
    payload: Any
    content_type: str
    headers: dict[str, str] | None
    deliver_at: datetime | None


def events_of(rows: Rows) -> list[EmittedEvent]:
    """Return the events of the rows of a query."""
    return [
        EmittedEvent(UUID(uid), kind, key, _decoded(bytes(payload), content_type), content_type, _headers(headers), at)
        for uid, kind, key, payload, content_type, headers, at in rows
    ]


def _decoded(payload: bytes, content_type: str) -> Any:
    media = content_type.partition(";")[0].strip().lower()
    if media != "application/json" and not media.endswith("+json"):
        return payload
    try:
        return json.loads(payload)
    except ValueError:
        return payload


def _headers(text: str | None) -> dict[str, str] | None:
    return None if text is None else json.loads(text)


def reader(conn: object) -> Read:
    """Return a function that queries over a synchronous connection. Raises TypeError for anything else."""
    if isinstance(conn, str):
        return _django(conn)
    found: Any = _unscoped(conn)
    match _package(found), _name(found):
        case "psycopg", "Connection" | "Cursor":
            return _psycopg(found)
        case "sqlalchemy", "Session" | "Connection":
            return _sqlalchemy(found)
        case _:
            raise TypeError(
                _wrong(conn, "an asynchronous connection has aemitted, aassert_emitted and arefute_emitted")
            )


def async_reader(conn: object) -> AsyncRead:
    """Return a function that queries over an asynchronous connection. Raises TypeError for anything else."""
    found: Any = _unscoped(conn)
    match _package(found), _name(found):
        case "psycopg", "AsyncConnection" | "AsyncCursor":
            return _async_psycopg(found)
        case "sqlalchemy", "AsyncSession" | "AsyncConnection":
            return _async_sqlalchemy(found)
        case "asyncpg", _:
            return found.fetch
        case _:
            raise TypeError(_wrong(conn, "a synchronous connection has emitted, assert_emitted and refute_emitted"))


def is_missing_right(error: Exception) -> bool:
    """Return True if the database refused a query for lack of a privilege, in the words of any driver."""
    found: Any = error
    while found is not None:
        if NO_RIGHT in (getattr(found, "sqlstate", None), getattr(found, "pgcode", None)):
            return True
        found = getattr(found, "orig", None) or found.__cause__
    return False


def _unscoped(conn: object) -> object:
    """Return the session of a scoped session, else the argument."""
    made: Any = conn
    return made() if type(conn).__name__ in ("scoped_session", "async_scoped_session") else conn


def _package(conn: object) -> str:
    return _class(conn).__module__.partition(".")[0]


def _name(conn: object) -> str:
    return _class(conn).__name__


def _class(conn: object) -> type:
    """Return the first class of a known package: applications have subclasses of their own."""
    known = ("psycopg", "sqlalchemy", "asyncpg")
    return next((each for each in type(conn).__mro__ if each.__module__.partition(".")[0] in known), type(conn))


def _wrong(conn: object, other: str) -> str:
    kind = f"{type(conn).__module__}.{type(conn).__qualname__}"
    return (
        "outbox_events takes a connection of psycopg or asyncpg, a session or connection of SQLAlchemy, or a database "
        f"alias of Django; this is {kind}, and {other}"
    )


# -- one function for each kind -----------------------------------------------------------------------------------


def _psycopg(conn: Any) -> Read:
    import psycopg
    from psycopg.rows import tuple_row

    connection = conn.connection if isinstance(conn, psycopg.Cursor) else conn

    def read(query: str) -> Rows:
        with psycopg.Cursor(connection, row_factory=tuple_row) as cursor:
            return cursor.execute(query.encode()).fetchall()

    return read


def _async_psycopg(conn: Any) -> AsyncRead:
    import psycopg
    from psycopg.rows import tuple_row

    connection = conn.connection if isinstance(conn, psycopg.AsyncCursor) else conn

    async def read(query: str) -> Rows:
        async with psycopg.AsyncCursor(connection, row_factory=tuple_row) as cursor:
            await cursor.execute(query.encode())
            return await cursor.fetchall()

    return read


def _sqlalchemy(conn: Any) -> Read:
    from sqlalchemy import text

    return lambda query: conn.execute(text(query)).all()


def _async_sqlalchemy(conn: Any) -> AsyncRead:
    from sqlalchemy import text

    async def read(query: str) -> Rows:
        found = await conn.execute(text(query))
        return found.all()

    return read


def _django(alias: str) -> Read:
    from django.db import connections

    def read(query: str) -> Rows:
        with connections[alias].cursor() as cursor:
            cursor.execute(query)
            return cursor.fetchall()

    return read
