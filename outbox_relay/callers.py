"""psycopg's connections behind the objects that applications pass, and the statements that run over them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final, TypeAlias, cast
from uuid import UUID

import psycopg
from psycopg import errors
from psycopg.pq import TransactionStatus
from psycopg.rows import TupleRow, tuple_row

from outbox_relay.emit_spans import CreateSpans, Row
from outbox_relay.statements import PAYLOAD, Parameters, Statement, many_events, one_event, statements

AnyConnection: TypeAlias = psycopg.Connection[Any] | psycopg.AsyncConnection[Any]

STATEMENTS: Final = statements(lambda name, _: f"%({name}){'b' if name == PAYLOAD else 's'}")
_SQL: Final = "the SQL function outbox.{0} over this connection, or {0} with a connection of psycopg 3"
OF_LIBRARIES: Final[Mapping[str, str]] = {
    "sqlalchemy": "{0} or a{0} of outbox_relay.contrib.sqlalchemy",
    "asyncpg": "{0} of outbox_relay.contrib.asyncpg",
    "django": "{0} of outbox_relay.contrib.django",
    "psycopg2": _SQL,
    "pg8000": _SQL,
}
"""The functions for the objects of other packages."""


def page_of(name: str) -> str:
    """Return the page about a function."""
    return "docs/consumers.md" if name == "once" else "docs/emitting.md"


def connection_of(conn: object, name: str) -> psycopg.Connection[Any]:
    """Return the connection of a connection or cursor that was passed to the function ``name``.

    Raises TypeError, which names the right function, for anything else.
    """
    found = cast(object, conn.connection) if isinstance(conn, psycopg.Cursor) else conn
    if isinstance(found, psycopg.Connection):
        return cast("psycopg.Connection[Any]", found)
    takes = f"{name} takes a psycopg Connection or Cursor"
    raise TypeError(_wrong(found, name, takes, f"a{name} for an AsyncConnection"))


def async_connection_of(conn: object, name: str) -> psycopg.AsyncConnection[Any]:
    """Return the connection of an asynchronous one or its cursor, as :func:`connection_of` does."""
    found = cast(object, conn.connection) if isinstance(conn, psycopg.AsyncCursor) else conn
    if isinstance(found, psycopg.AsyncConnection):
        return cast("psycopg.AsyncConnection[Any]", found)
    takes = f"a{name} takes a psycopg AsyncConnection or AsyncCursor"
    raise TypeError(_wrong(found, name, takes, f"{name} for a Connection"))


def is_outside_transaction(connection: AnyConnection) -> bool:
    """Return True if each statement on this connection is committed by itself."""
    return connection.autocommit and connection.info.transaction_status == TransactionStatus.IDLE


def insert_one(connection: psycopg.Connection[Any], row: Row) -> UUID:
    """Insert an event and return its uid. Raises as ``outbox.emit``."""
    with CreateSpans([row]) as spans:
        return spans.emitted(_uids(fetch(connection, STATEMENTS.one, one_event(*spans.rows))))[0]


async def ainsert_one(connection: psycopg.AsyncConnection[Any], row: Row) -> UUID:
    """Insert an event over an asynchronous connection."""
    with CreateSpans([row]) as spans:
        return spans.emitted(_uids(await afetch(connection, STATEMENTS.one, one_event(*spans.rows))))[0]


def insert_many(connection: psycopg.Connection[Any], rows: Sequence[Row]) -> list[UUID]:
    """Insert events in order and return their uids. Raises as ``outbox.emit_many``."""
    with CreateSpans(rows) as spans:
        return spans.emitted(_uids(fetch(connection, STATEMENTS.many, many_events(spans.rows))))


async def ainsert_many(connection: psycopg.AsyncConnection[Any], rows: Sequence[Row]) -> list[UUID]:
    """Insert events in order over an asynchronous connection."""
    with CreateSpans(rows) as spans:
        return spans.emitted(_uids(await afetch(connection, STATEMENTS.many, many_events(spans.rows))))


def fetch(connection: psycopg.Connection[Any], statement: Statement, parameters: Parameters) -> list[TupleRow]:
    """Run a statement and return its rows. Raises ``InvalidEvent``, ``InvalidMark`` or ``psycopg.Error``."""
    try:
        with psycopg.Cursor(connection, row_factory=tuple_row) as cursor:
            return cursor.execute(statement.sql.encode(), parameters, prepare=False).fetchall()
    except (errors.InvalidParameterValue, UnicodeEncodeError) as error:
        raise _refusal(statement, error) from None


async def afetch(
    connection: psycopg.AsyncConnection[Any], statement: Statement, parameters: Parameters
) -> list[TupleRow]:
    """Run a statement over an asynchronous connection, as :func:`fetch` does."""
    try:
        async with psycopg.AsyncCursor(connection, row_factory=tuple_row) as cursor:
            await cursor.execute(statement.sql.encode(), parameters, prepare=False)
            return await cursor.fetchall()
    except (errors.InvalidParameterValue, UnicodeEncodeError) as error:
        raise _refusal(statement, error) from None


def _refusal(statement: Statement, error: errors.InvalidParameterValue | UnicodeEncodeError) -> Exception:
    """Return the error with the message about the event or the mark, else the error unchanged."""
    if isinstance(error, UnicodeEncodeError):
        return statement.unencodable(error)
    return statement.refusal(error.diag.message_primary) or error


def _uids(rows: Sequence[TupleRow]) -> list[UUID]:
    return [UUID(row[0]) for row in rows]


def _wrong(found: object, name: str, takes: str, other: str) -> str:
    kind = f"{type(found).__module__}.{type(found).__qualname__}"
    packages = {each.__module__.partition(".")[0] for each in type(found).__mro__}
    for package, instead in OF_LIBRARIES.items():
        if package in packages:
            return f"{takes}, not {kind}; use {instead.format(name)}, see {page_of(name)}"
    return f"{takes}, not {kind}; there is {other}, and {page_of(name)} for other libraries"
