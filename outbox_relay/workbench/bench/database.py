"""A database of the bench's own: filled with events, asked what it did."""

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
"""Events that one statement inserts; between two of them somebody may want the bench to end."""
KEYS = 5_000
TYPE = "order.created"
PAYLOAD = '{"order_id": 123456, "customer": "c-1234", "total": "12.34", "note": "' + "x" * 180 + '"}'
"""About 250 bytes."""
FILL = """insert into outbox.event (uid, type, key, payload, content_type, deliver_at)
select outbox.uuid7(), %s, 'k' || (g %% %s), convert_to(%s, 'UTF8'), 'application/json', %s
  from generate_series(%s::bigint, %s::bigint) g"""


class BenchDatabase:
    """One database with the outbox in it; closing it closes the bench's own connection."""

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
        """What it is called."""
        return self.connection.info.dbname

    def run(self, statement: str, *parameters: object) -> None:
        """Run a statement by itself, or in the transaction under way."""
        self.connection.execute(statement.encode(), parameters or None)

    def value(self, statement: str, *parameters: object) -> Any:
        """The first column of the first row."""
        row = self.connection.execute(statement.encode(), parameters or None).fetchone()
        return row[0] if row else None

    def fill(
        self,
        events: int,
        check: Callable[[], None],
        *,
        keys: int = KEYS,
        due: object = None,
        payload: str = PAYLOAD,
    ) -> None:
        """Insert events of `keys` keys in one transaction; `check` is called now and then and may raise.

        With `due`, a time, they are scheduled for it.
        """
        with self.connection.transaction():
            for first in range(1, events + 1, CHUNK):
                check()
                last = min(first + CHUNK - 1, events)
                self.run(FILL, TYPE, keys, payload, due, first, last)

    def settle(self) -> None:
        """Make it look like a backlog that has lain there for a while: vacuumed, analysed, written out."""
        self.run("vacuum analyze outbox.event")
        self.checkpoint()

    def checkpoint(self) -> bool:
        """Write everything out; False where this role may not ask for it."""
        try:
            self.run("checkpoint")
        except psycopg.errors.InsufficientPrivilege:
            return False
        return True


def create_database(admin: str, name: str, template: str) -> str:
    """Make a database as a copy of another, over the connection string `admin`; its own connection string."""
    command = sql.SQL("create database {} template {}").format(sql.Identifier(name), sql.Identifier(template))
    with psycopg.connect(admin, autocommit=True) as connection:
        connection.execute(command)
    return make_conninfo(admin, dbname=name)


def drop_database(admin: str, name: str) -> None:
    """Remove a database with whoever is connected to it; nothing happens if there is none."""
    with psycopg.connect(admin, autocommit=True) as connection:
        connection.execute(sql.SQL("drop database if exists {} with (force)").format(sql.Identifier(name)))
