"""Databases for the benchmarks, filled with events."""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType
from typing import Any, Self

import psycopg
from psycopg import sql
from psycopg.conninfo import make_conninfo
from psycopg.rows import TupleRow

CONNECT_SECONDS = 10
CHUNK = 50_000
"""Number of events inserted by one statement; signals are checked between statements."""
KEYS = 5_000
TYPE = "order.created"
PAYLOAD = '{"order_id": 123456, "customer": "c-1234", "total": "12.34", "note": "' + "x" * 180 + '"}'
"""About 250 bytes."""
FILL = """insert into outbox.event (shard, type, key, payload)
select outbox_internal.shard_of(k.key, null), %s, k.key, convert_to(%s, 'UTF8')
  from generate_series(%s::bigint, %s::bigint) g
 cross join lateral (select 'k' || (g %% %s)) k (key)"""


class BenchDatabase:
    """A database with the outbox schema; leaving the context closes the connection to it."""

    def __init__(self, dsn: str) -> None:
        self.dsn = make_conninfo(dsn, connect_timeout=CONNECT_SECONDS)
        self.connection: psycopg.Connection[TupleRow] = psycopg.connect(self.dsn, autocommit=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.connection.close()

    @property
    def name(self) -> str:
        """Return the name of the database."""
        return self.connection.info.dbname

    def run(self, statement: str, *parameters: object) -> None:
        """Run a statement, in the current transaction if there is one."""
        self.connection.execute(statement.encode(), parameters or None)

    def value(self, statement: str, *parameters: object) -> Any:
        """Run a query and return the first column of its first row."""
        row = self.connection.execute(statement.encode(), parameters or None).fetchone()
        return row[0] if row else None

    def fill(self, events: int, check: Callable[[], None]) -> None:
        """Insert events in one transaction. `check` is called between statements and may raise."""
        with self.connection.transaction():
            for first in range(1, events + 1, CHUNK):
                check()
                last = min(first + CHUNK - 1, events)
                self.run(FILL, TYPE, PAYLOAD, first, last, KEYS)

    def settle(self) -> None:
        """Vacuum, analyse and write out the log, as if the backlog had been there for a while."""
        self.run("vacuum analyze outbox.event")
        self.checkpoint()

    def checkpoint(self) -> bool:
        """Run a checkpoint. Return False if the role has no permission."""
        try:
            self.run("checkpoint")
        except psycopg.errors.InsufficientPrivilege:
            return False
        return True


def create_database(admin: str, name: str, template: str) -> str:
    """Create a copy of the database `template` and return its connection string."""
    command = sql.SQL("create database {} template {}").format(sql.Identifier(name), sql.Identifier(template))
    with psycopg.connect(admin, autocommit=True) as connection:
        connection.execute(command)
    return make_conninfo(admin, dbname=name)


def drop_database(admin: str, name: str) -> None:
    """Drop a database if it exists, and terminate its connections."""
    with psycopg.connect(admin, autocommit=True) as connection:
        connection.execute(sql.SQL("drop database if exists {} with (force)").format(sql.Identifier(name)))
