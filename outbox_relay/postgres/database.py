"""A bounded number of connections, and statements with time limits.

Every call sends one statement in a transaction of its own. This takes one round trip and no session state, so nothing
changes behind a transaction-pooling proxy, and a client that vanishes leaves no transaction open.

A thread waits for one statement at a time, on a connection that it borrows, and makes it itself if none is idle. The
sinks share a number of connections that the other threads do not use, and the replays another: sinks whose statements
wait for locks keep them from each other, and not from the leases.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from importlib import resources
from typing import Any, LiteralString, TypeVar, cast

import psycopg
from psycopg.pq import TransactionStatus
from psycopg.rows import RowFactory, namedtuple_row, tuple_row

from outbox_relay.domain.errors import (
    ConfigurationError,
    DatabaseUnavailable,
    DatabaseUnusable,
    IncarnationChanged,
    RelayError,
    StatementFailed,
)
from outbox_relay.postgres.connection import (
    CONNECT_SECONDS,
    CONNECTION_DEFAULTS,
    Connection,
    database_identity,
    direct,
    fix_settings,
    is_alive,
    is_direct,
)
from outbox_relay.postgres.conninfo import find_authorities, parsed
from outbox_relay.postgres.errors import (
    NOT_DIRECT,
    action_refusals,
    encoding_fault,
    explain,
    explain_statement,
    is_starved,
)
from outbox_relay.postgres.session_settings import (
    NEWEST_SERVER,
    settings_of,
    short_timeout,
    wrong_settings,
    wrong_settings_message,
)

T = TypeVar("T")
TUPLES: RowFactory[Any] = cast(Any, tuple_row)
NAMED: RowFactory[Any] = cast(Any, namedtuple_row)

CALL_SECONDS = 10.0
"""Longest wait for the answer to a statement, COMMIT included: no setting of the server limits a COMMIT that waits for
a synchronous standby."""
ACTION_SECONDS = 600.0
"""Longest duration of an action that a person waits for."""
LIFETIME_SECONDS = 3600.0
"""Age at which a connection is replaced, so that the relay follows changes of addresses and passwords."""
BY_INDEX: LiteralString = """
select set_config(name, value, true)
  from (values ('enable_seqscan', 'off'), ('enable_bitmapscan', 'off'), ('enable_sort', 'off'), ('jit', 'off'),
               ('random_page_cost', '1'), ('max_parallel_workers_per_gather', '0'),
               ('plan_cache_mode', 'force_custom_plan')
       ) s (name, value)"""
"""Settings of a transaction in which the planner walks indexes."""


@cache
def statements() -> Mapping[str, LiteralString]:
    """Return the text of every statement file by its name without ``.sql``."""
    folder = resources.files("outbox_relay.postgres") / "sql"
    return {
        f.name.removesuffix(".sql"): cast(LiteralString, f.read_text(encoding="utf-8"))
        for f in folder.iterdir()
        if f.name.endswith(".sql")
    }


class PooledConnection(Connection):
    """A connection of ``Database``: ``losses`` and ``made_at`` are the state when it was made."""

    losses = 0
    made_at = 0.0


class Database:
    """At most ``connections`` connections, more for sinks and for replays, and the statements of ``sql/`` by name.

    A call raises ``DatabaseUnavailable`` if its connection was lost, so that it is unknown whether the statement took
    effect. It raises ``StatementFailed`` if the statement failed and the connection did not, which affects this caller
    only, and ``DatabaseUnusable`` for an error that waiting does not fix.

    Replays use those of sinks without ``replay_connections``, and both the others without ``sink_connections``.
    ``call_seconds`` is the longest wait for an answer, which tests with a silent server shorten.
    """

    def __init__(
        self,
        dsn: Callable[[], str],
        *,
        pooler: bool,
        connections: int,
        sink_connections: int = 0,
        replay_connections: int = 0,
        call_seconds: float = CALL_SECONDS,
    ) -> None:
        self._dsn = dsn
        self._has_dsn = False
        self._sql = dict(statements())
        self.pooler = pooler
        self.call_seconds = call_seconds
        self._slots = threading.Semaphore(connections)
        self._sink_slots = threading.Semaphore(sink_connections) if sink_connections else self._slots
        self._replay_slots = threading.Semaphore(replay_connections) if replay_connections else self._sink_slots
        self._thread = threading.local()
        self._idle: list[PooledConnection] = []
        self._is_open = False
        self.give_up_at = float("inf")
        """The ``time.monotonic()`` value from which nothing waits for an answer of the database."""
        self.connection_losses = 0
        """Incremented when a call loses its connection or reaches another server. Readers compare it to detect stale
        data. The connections that were made before are replaced: one that was lost silently never answers."""

    def open(self) -> None:
        """Make the first connection. Raises ``DatabaseUnavailable`` or ``DatabaseUnusable``."""
        self.close()
        connection = self._connect()
        began = time.monotonic()
        try:
            self._try(connection)
        except (psycopg.Error, TimeoutError) as error:
            connection.close()
            short = short_timeout(getattr(error, "sqlstate", None), time.monotonic() - began) if self.pooler else None
            raise (DatabaseUnusable(wrong_settings_message([short])) if short else _explain(error)) from None
        except DatabaseUnusable:
            connection.close()
            raise
        self._is_open = True
        self._idle.append(connection)

    def close(self) -> None:
        """Close the connections that are idle now, and the others when they are returned."""
        self._is_open = False
        self._close_idle()

    def as_sink(self, *, replay: bool = False) -> None:
        """Let this thread use the connections of the sinks, or of the replays."""
        self._thread.slots = self._replay_slots if replay else self._sink_slots

    def limit_calls(self, seconds: float) -> None:
        """Let calls of this thread that have no time limit of their own take at most ``seconds``."""
        self._thread.seconds = seconds

    def check_session(self) -> None:
        """Check the settings of a session behind a pooler. A direct connection sets them itself.

        Raises ``DatabaseUnusable`` if the relay cannot work with them.
        """
        if not self.pooler:
            return
        began = time.monotonic()
        try:
            self._judge(self._rows("session_settings", {"names": list(settings_of(NEWEST_SERVER))}))
        except StatementFailed as error:
            if (short := short_timeout(error.sqlstate, time.monotonic() - began)) is None:
                raise
            raise DatabaseUnusable(wrong_settings_message([short])) from None

    def database_identity(self) -> tuple[str, int]:
        """Return the identity of the database: see ``connection.database_identity``."""
        with self._connection(None, "database_identity") as connection:
            return database_identity(connection)

    def named(self, name: str, parameters: Mapping[str, Any], deadline: float | None = None) -> list[Any]:
        """Return the rows of a statement file as named tuples, for queries outside the data path."""
        return self._rows(name, parameters, NAMED, deadline)

    def value(self, name: str, parameters: Mapping[str, Any] | None = None, deadline: float | None = None) -> Any:
        """Return the value of a statement file with one row of one column."""
        [(value,)] = self._rows(name, parameters or {}, TUPLES, deadline)
        return value

    def call(self, name: str, parameters: Mapping[str, Any], grant: str, deadline: float | None = None) -> list[Any]:
        """Return the rows of a statement that operators run, as ``named`` does.

        Raises ``NotFound`` or ``ConfigurationError``, in the words of the schema, if it refuses a parameter. Raises
        ``DatabaseUnusable``, which names the kind ``grant``, if the role has no right to it.
        """
        with self._connection(deadline, name) as connection, action_refusals(grant):
            return self._fetched(connection, name, parameters)

    def action(self, name: str, parameters: Mapping[str, Any], seconds: float = ACTION_SECONDS) -> list[Any]:
        """Return the rows of a statement file that acts for a person, as named tuples, after at most ``seconds``.

        Raises as ``errors.action_refusals``, too.
        """
        with self._connection(seconds, name) as connection, connection.transaction(), action_refusals("operate"):
            connection.execute("select set_config('statement_timeout', %s, true)", (str(int(seconds * 1000)),))
            return self._fetched(connection, name, parameters)

    def by_index(self, name: str, parameters: Mapping[str, Any], grant: str) -> list[Any]:
        """Return the rows of a statement that reads little only if it walks an index in its order, as ``call`` does.

        The planner takes a column that is second in an index for random on the disk, and reads and sorts everything.
        """
        with self._connection(None, name) as connection, connection.transaction(), action_refusals(grant):
            connection.execute(BY_INDEX)
            return self._fetched(connection, name, parameters)

    @contextmanager
    def transaction(self) -> Generator[Connection]:
        """Open a transaction that ends with the block, outside the data path."""
        with self._connection(None) as connection, connection.transaction():
            yield connection

    # -- statements -------------------------------------------------------------------------------------------

    def _rows(
        self,
        name: str,
        parameters: Mapping[str, Any],
        row_factory: RowFactory[T] = TUPLES,
        deadline: float | None = None,
    ) -> list[T]:
        """Return the rows of a statement. ``deadline`` in seconds; None means the default of the store."""
        with self._connection(deadline, name) as connection:
            return self._fetched(connection, name, parameters, row_factory)

    def _do(self, name: str, parameters: Mapping[str, Any], deadline: float | None = None) -> int:
        """Run a statement, and return the number of rows that it changed."""
        with self._connection(deadline, name) as connection, _loadable(name):
            return connection.execute(self._sql[name], parameters).rowcount

    def _message(self, limits: Sequence[LiteralString], name: str, parameters: Mapping[str, Any]) -> list[Any]:
        """Return the rows of a statement that is sent with its ``limits`` as one message, as named tuples.

        The server ends it, and a process that is stopped meanwhile keeps no lock.
        """
        with self._connection(None, name) as connection:
            cursor = psycopg.ClientCursor(connection, row_factory=NAMED)
            cursor.execute("; ".join((*limits, self._sql[name])), parameters)
            for _ in limits:
                cursor.nextset()
            return cursor.fetchall()

    def _fetched(
        self, connection: Connection, name: str, parameters: Mapping[str, Any], row_factory: RowFactory[T] = NAMED
    ) -> list[T]:
        with _loadable(name):
            cursor = connection.cursor(binary=True, row_factory=row_factory)
            return cursor.execute(self._sql[name], parameters).fetchall()

    @contextmanager
    def _connection(self, deadline: float | None, name: str = "transaction") -> Generator[Connection]:
        """Lend a connection for the statement ``name``, which has ``deadline`` seconds to be answered."""
        deadline = deadline or min(self.call_seconds, getattr(self._thread, "seconds", self.call_seconds))
        until = time.monotonic() + deadline
        slots: threading.Semaphore = getattr(self._thread, "slots", self._slots)
        if not slots.acquire(timeout=max(0.0, min(until, self.give_up_at) - time.monotonic())):
            raise StatementFailed(
                f"statement {name} had to wait: every connection that it may use was busy",
                StatementFailed.NO_CONNECTION,
            )
        try:
            connection = self._taken()
            connection.until = until
            try:
                yield connection
            except (psycopg.Error, TimeoutError) as error:
                raise self._explained(error, connection, name) from None
            finally:
                self._returned(connection)
        finally:
            slots.release()

    def _explained(self, error: psycopg.Error | TimeoutError, connection: PooledConnection, name: str) -> RelayError:
        """Return the error of a statement, and count the connection if it was lost."""
        if isinstance(error, TimeoutError):
            explained: RelayError = DatabaseUnavailable(f"the database did not answer in time: statement {name}")
        elif is_alive(connection) or is_starved(error):
            explained = explain_statement(error, name)
        else:
            explained = explain(error)
        known = connection.losses != self.connection_losses
        if isinstance(explained, DatabaseUnavailable | IncarnationChanged) and not known:
            self.connection_losses += 1
            self._close_idle()
        return explained

    # -- connections ------------------------------------------------------------------------------------------

    def _taken(self) -> PooledConnection:
        """Return an idle connection, or a new one."""
        if not self._is_open or time.monotonic() > self.give_up_at:
            raise DatabaseUnavailable("there is no connection to the database")
        while (connection := self._popped()) is not None:
            if connection.losses == self.connection_losses and time.monotonic() < connection.made_at + LIFETIME_SECONDS:
                return connection
            connection.close()
        try:
            return self._connect()
        except DatabaseUnusable as error:
            # A connection was made before: a password may be on the way to be replaced.
            raise DatabaseUnavailable(str(error)) from None

    def _returned(self, connection: PooledConnection) -> None:
        if self._is_open and connection.pgconn.transaction_status == TransactionStatus.IDLE:
            self._idle.append(connection)
            if not self._is_open:  # it was closed meanwhile
                self._close_idle()
        else:
            connection.close()

    def _popped(self) -> PooledConnection | None:
        try:
            return self._idle.pop()
        except IndexError:
            return None

    def _close_idle(self) -> None:
        while (connection := self._popped()) is not None:
            connection.close()

    def _connect(self) -> PooledConnection:
        """Return a new connection. Raises ``ConfigurationError``, ``DatabaseUnavailable`` or ``DatabaseUnusable``."""
        losses, began = self.connection_losses, time.monotonic()
        dsn = self._read_dsn()
        try:
            connection = PooledConnection.connect(
                dsn if self.pooler else direct(dsn),
                autocommit=True,
                prepare_threshold=None if self.pooler else 2,
                **cast(Any, CONNECTION_DEFAULTS),
            )
        except psycopg.Error as error:
            raise explain(error, dsn) from None
        connection.losses, connection.made_at = losses, began
        connection.until, connection.give_up_at = began + 2 * CONNECT_SECONDS, lambda: self.give_up_at
        try:
            if not self.pooler:
                fix_settings(connection)
        except (psycopg.Error, TimeoutError) as error:
            connection.close()
            raise _explain(error) from None
        return connection

    def _read_dsn(self) -> str:
        try:
            parsed(dsn := self._dsn())
        except (ConfigurationError, psycopg.ProgrammingError) as error:
            known = error if isinstance(error, ConfigurationError) else explain(error)
            # Once there was one, its file may be on the way to be replaced.
            raise (DatabaseUnavailable(str(known)) if self._has_dsn else known) from None
        self._has_dsn = True
        find_authorities(dsn)
        return dsn

    def _try(self, connection: Connection) -> None:
        """Raise the error of a new connection, if it has one."""
        if self.pooler:
            names = {"names": list(settings_of(NEWEST_SERVER))}
            self._judge(connection.execute(self._sql["session_settings"], names).fetchall())
        elif not is_direct(connection):
            raise DatabaseUnusable(NOT_DIRECT)
        if problem := encoding_fault(connection.info):
            raise DatabaseUnusable(problem)

    def _judge(self, found: Sequence[Any]) -> None:
        if wrong := wrong_settings(found):
            raise DatabaseUnusable(wrong_settings_message(wrong))


@contextmanager
def _loadable(name: str) -> Generator[None]:
    """Raise ``StatementFailed`` for a value that cannot be sent, or loaded."""
    try:
        yield
    except (MemoryError, ValueError, ArithmeticError) as error:
        raise explain_statement(error, name) from None


def _explain(error: psycopg.Error | TimeoutError) -> RelayError:
    if isinstance(error, TimeoutError):
        return DatabaseUnavailable("the database did not answer in time")
    return explain(error)
