"""The psycopg connection behind the objects that applications pass to ``outbox`` and ``inbox``. Imports psycopg."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, TypeAlias, cast

import psycopg
from psycopg.pq import TransactionStatus

AnyConnection: TypeAlias = psycopg.Connection[Any] | psycopg.AsyncConnection[Any]

_SQL: Final = "the SQL function outbox.{0} over this connection, or {0} with a connection of psycopg 3"
OF_LIBRARIES: Final[Mapping[str, str]] = {
    "sqlalchemy": "{0} or a{0} of outbox_relay.contrib.sqlalchemy",
    "asyncpg": "{0} of outbox_relay.contrib.asyncpg",
    "django": "{0} of outbox_relay.contrib.django",
    "psycopg2": _SQL,
    "pg8000": _SQL,
}
"""The functions for the objects of other packages."""
PAGES: Final[Mapping[str, str]] = {
    "emit": "docs/emitting.md",
    "cancel": "docs/emitting.md",
    "reschedule": "docs/emitting.md",
    "once": "docs/consumers.md",
}
"""The page about each function."""


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


def _wrong(found: object, name: str, takes: str, other: str) -> str:
    kind = f"{type(found).__module__}.{type(found).__qualname__}"
    packages = {each.__module__.partition(".")[0] for each in type(found).__mro__}
    for package, instead in OF_LIBRARIES.items():
        if package in packages:
            return f"{takes}, not {kind}; use {instead.format(name)}, see {PAGES[name]}"
    return f"{takes}, not {kind}; there is {other}, and {PAGES[name]} for other libraries"
