"""One database of a test's own inside a PostgreSQL server."""

import weakref
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar
from uuid import uuid4

import psycopg
from psycopg.pq import ExecStatus
from psycopg.rows import RowFactory, TupleRow, tuple_row

from tests.support.postgres import SUPERUSER, PostgresServer

Row = TypeVar("Row")


@dataclass(frozen=True)
class Database:
    """A database, dropped by its maker."""

    server: PostgresServer
    name: str
    _kept: list[psycopg.Connection[TupleRow]] = field(default_factory=list[Any], compare=False, repr=False)
    """Connections of :meth:`run` that are not in use."""

    def __post_init__(self) -> None:
        """Close the kept connections when this is given up."""
        weakref.finalize(self, _close, self._kept)

    @property
    def dsn(self) -> str:
        """The superuser's connection string."""
        return self.server.dsn(self.name)

    def dsn_as(self, user: str, **options: str) -> str:
        """Another user's connection string; `options` are libpq's."""
        return self.server.dsn(self.name, user, **options)

    def connect(self, *, user: str = SUPERUSER, autocommit: bool = False) -> psycopg.Connection[TupleRow]:
        """Return a new connection, which the caller closes."""
        return psycopg.connect(self.dsn_as(user, connect_timeout="10"), autocommit=autocommit)

    async def aconnect(self, *, user: str = SUPERUSER, autocommit: bool = False) -> psycopg.AsyncConnection[TupleRow]:
        """Return a new asynchronous connection, which the caller closes."""
        dsn = self.dsn_as(user, connect_timeout="10")
        return await psycopg.AsyncConnection.connect(dsn, autocommit=autocommit)

    def pgbench(self, script: str, *, transactions: int, clients: int = 1, options: tuple[str, ...] = ()) -> str:
        """See :meth:`tests.support.postgres.PostgresServer.pgbench`."""
        return self.server.pgbench(self.name, script, transactions=transactions, clients=clients, options=options)

    def run(self, text: str, parameters: Sequence[Any] = (), rows: RowFactory[Row] = tuple_row) -> list[Row]:
        """Run a statement as superuser in a transaction of its own, and return its rows, [] if it has none.

        To connect takes ten times as long as most statements: connections are kept. Statements must therefore change
        no setting of their session, and lock nothing for it. If the server has ended a connection since, another one is
        used.
        """
        while True:
            try:
                connection = self._kept.pop()
            except IndexError:
                connection = self.connect(autocommit=True)
                connection.prepare_threshold = None
                return self._run(connection, text, parameters, rows)
            try:
                return self._run(connection, text, parameters, rows)
            except psycopg.OperationalError:
                if not connection.broken:
                    raise

    def _run(
        self, connection: psycopg.Connection[TupleRow], text: str, parameters: Sequence[Any], rows: RowFactory[Row]
    ) -> list[Row]:
        """Run a statement on a connection, and keep that unless it is broken."""
        try:
            with connection.cursor(row_factory=rows) as cursor:
                cursor.execute(text.encode(), parameters)
                has_rows = cursor.pgresult is not None and cursor.pgresult.status == ExecStatus.TUPLES_OK
                return cursor.fetchall() if has_rows else []
        finally:
            if connection.closed:
                connection.close()
            else:
                self._kept.append(connection)

    def close(self) -> None:
        """Close the kept connections."""
        _close(self._kept)


def _close(connections: list[psycopg.Connection[TupleRow]]) -> None:
    while connections:
        connections.pop().close()


@contextmanager
def new_database(server: PostgresServer, template: str) -> Generator[Database]:
    """Create a database of a name of its own as a copy of `template`, and drop it at the end."""
    name = f"test_{uuid4().hex}"
    server.create_database(name, template=template)
    database = Database(server, name)
    try:
        yield database
    finally:
        database.close()
        server.drop_database(name)


def query(database: Database, text: str, *parameters: Any) -> list[tuple[Any, ...]]:
    """Return the rows of a statement, which is run in a transaction of its own (see :meth:`Database.run`)."""
    return database.run(text, parameters)


def end_connections(database: Database) -> None:
    """End every other connection to the database, as a server does that crashes."""
    query(
        database,
        "select pg_terminate_backend(pid) from pg_stat_activity "
        "where datname = current_database() and pid <> pg_backend_pid()",
    )
