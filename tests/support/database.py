"""One database of a test's own inside a PostgreSQL server."""

from dataclasses import dataclass
from typing import Any

import psycopg
from psycopg.rows import TupleRow

from tests.support.postgres import SUPERUSER, PostgresServer


@dataclass(frozen=True)
class Database:
    """A database, dropped by its maker."""

    server: PostgresServer
    name: str

    @property
    def dsn(self) -> str:
        """The superuser's connection string."""
        return self.server.dsn(self.name)

    def dsn_as(self, user: str, **options: str) -> str:
        """Another user's connection string; `options` are libpq's."""
        return self.server.dsn(self.name, user, **options)

    def connect(self, *, user: str = SUPERUSER, autocommit: bool = False) -> psycopg.Connection[TupleRow]:
        """A new connection, which the caller closes."""
        return psycopg.connect(self.dsn_as(user, connect_timeout="10"), autocommit=autocommit)

    async def aconnect(self, *, user: str = SUPERUSER, autocommit: bool = False) -> psycopg.AsyncConnection[TupleRow]:
        """A new asynchronous connection, which the caller closes."""
        dsn = self.dsn_as(user, connect_timeout="10")
        return await psycopg.AsyncConnection.connect(dsn, autocommit=autocommit)

    def pgbench(self, script: str, *, transactions: int, clients: int = 1, options: tuple[str, ...] = ()) -> str:
        """See :meth:`tests.support.postgres.PostgresServer.pgbench`."""
        return self.server.pgbench(self.name, script, transactions=transactions, clients=clients, options=options)


class Asker:
    """A connection on which many queries are asked, each in a transaction of its own.

    To connect takes ten times as long as most queries. If the server has ended the connection since the last one, a new
    one is opened.
    """

    def __init__(self, database: Database) -> None:
        self._database = database
        self._connection: psycopg.Connection[TupleRow] | None = None

    def ask(self, text: str, *parameters: Any) -> list[tuple[Any, ...]]:
        """Return the rows of a query."""
        if self._connection is not None:
            try:
                return self._connection.execute(text.encode(), parameters).fetchall()
            except psycopg.OperationalError:
                if not self._connection.broken:
                    raise
                self.close()
        self._connection = self._database.connect(autocommit=True)
        return self._connection.execute(text.encode(), parameters).fetchall()

    def close(self) -> None:
        """Close the connection."""
        if self._connection is not None:
            self._connection.close()
        self._connection = None


def query(database: Database, text: str, *parameters: Any) -> list[tuple[Any, ...]]:
    """Return the rows of a statement, which is run in a transaction of its own."""
    with database.connect(autocommit=True) as connection:
        return connection.execute(text.encode(), parameters).fetchall()
