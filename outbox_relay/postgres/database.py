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
from functools import cache, partial
from importlib import resources
from typing import Any, LiteralString, NamedTuple, cast

import psycopg
from psycopg.pq import TransactionStatus
from psycopg.rows import RowFactory, namedtuple_row

from outbox_relay.domain.errors import (
    ConfigurationError,
    DatabaseUnavailable,
    DatabaseUnusable,
    IncarnationChanged,
    RelayError,
    StatementFailed,
)
from outbox_relay.postgres.connection import Connection, connect, database_identity, is_alive
from outbox_relay.postgres.dsn import parsed
from outbox_relay.postgres.errors import encoding_fault, explain, explain_refusal, explain_statement
from outbox_relay.postgres.session_settings import CHECKED_SETTINGS, wrong_settings

CALL_SECONDS = 10.0
"""Longest wait for the answer to a statement, COMMIT included: no setting of the server limits a COMMIT that waits for
a synchronous standby."""
ACTION_SECONDS = 600.0
"""Longest duration of an action that a person waits for."""
LIFETIME_SECONDS = 3600.0
"""Age at which a connection is replaced, so that the relay follows changes of addresses and passwords."""
BY_INDEX: tuple[LiteralString, ...] = (
    "set local enable_seqscan = off",
    "set local enable_bitmapscan = off",
    "set local enable_sort = off",
    "set local jit = off",
    "set local random_page_cost = 1",
    "set local max_parallel_workers_per_gather = 0",
    "set local plan_cache_mode = force_custom_plan",
)
"""Settings of a transaction in which the planner walks indexes."""
BRIEFLY: tuple[LiteralString, ...] = (
    "set local statement_timeout = '1s'",
    "set local lock_timeout = '100ms'",
    "set local synchronous_commit = off",
)
"""Settings for figures. Their commit waits for no disk: figures that a crash takes are measured again."""


@cache
def statements() -> Mapping[str, LiteralString]:
    """Return the text of every statement file by its name without ``.sql``."""
    folder = resources.files("outbox_relay.postgres") / "sql"
    return {
        f.name.removesuffix(".sql"): cast(LiteralString, f.read_text(encoding="utf-8"))
        for f in folder.iterdir()
        if f.name.endswith(".sql")
    }


def rows_of(row: type[NamedTuple]) -> RowFactory[Any]:
    """Return the factory of rows of a named tuple, whose fields are the columns of the answer."""

    def make(cursor: Any) -> Callable[[Sequence[Any]], Any]:
        columns = tuple(column.name for column in cursor.description or ())
        if columns and columns != row._fields:
            raise TypeError(f"the columns of {row.__name__} are {row._fields}, and the answer has {columns}")
        return partial(cast(Any, tuple).__new__, row)  # called for every row: a partial is one call without a frame

    return make


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
        self._idle: list[Connection] = []
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
        try:
            self._check(connection)
        except (psycopg.Error, TimeoutError) as error:
            connection.close()
            raise explain(error) from None
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
        if self.pooler:
            with self._connection("session_settings") as connection:
                self._check(connection)

    def database_identity(self) -> tuple[str, int]:
        """Return the identity of the database: see ``connection.database_identity``."""
        with self._connection("database_identity") as connection:
            return database_identity(connection)

    def named(
        self,
        name: str,
        parameters: Mapping[str, Any],
        deadline: float | None = None,
        *,
        row: type[NamedTuple] | None = None,
    ) -> list[Any]:
        """Return the rows of a statement file as named tuples, those of ``row`` if it is given.

        ``deadline`` is in seconds; None means the default of the thread or the store.
        """
        return self._run(name, parameters, row, deadline=deadline)[0]

    def value(self, name: str, parameters: Mapping[str, Any] | None = None, deadline: float | None = None) -> Any:
        """Return the value of a statement file with one row of one column."""
        [(value,)] = self.named(name, parameters or {}, deadline=deadline)
        return value

    def call(
        self,
        name: str,
        parameters: Mapping[str, Any],
        grant: str,
        deadline: float | None = None,
        settings: Sequence[LiteralString] = (),
    ) -> list[Any]:
        """Return the rows of a statement that operators run, as named tuples.

        Raises ``NotFound`` or ``ConfigurationError``, in the words of the schema, if it refuses a parameter. Raises
        ``DatabaseUnusable``, which names the kind ``grant``, if the role has no right to it.
        """
        return self._run(name, parameters, None, deadline=deadline, grant=grant, settings=settings)[0]

    def action(self, name: str, parameters: Mapping[str, Any], seconds: float = ACTION_SECONDS) -> list[Any]:
        """Return the rows of a statement that acts for a person, as ``call`` does, after at most ``seconds``."""
        limit = cast(LiteralString, f"set local statement_timeout = '{int(seconds * 1000)}ms'")
        return self.call(name, parameters, "operate", seconds, (limit,))

    def by_index(self, name: str, parameters: Mapping[str, Any], grant: str) -> list[Any]:
        """Return the rows of a statement that reads little only if it walks an index in its order, as ``call`` does.

        The planner takes a column that is second in an index for random on the disk, and reads and sorts everything.
        """
        return self.call(name, parameters, grant, settings=BY_INDEX)

    def measure(self, name: str, parameters: Mapping[str, Any]) -> list[Any]:
        """Return the rows of a statement as named tuples.

        The server ends it after a second, or after 0.1 s of waiting for a lock.
        """
        return self._run(name, parameters, None, settings=BRIEFLY)[0]

    @contextmanager
    def transaction(self) -> Generator[Connection]:
        """Open a transaction that ends with the block, outside the data path."""
        with self._connection("transaction") as connection, connection.transaction():
            yield connection

    # -- statements -------------------------------------------------------------------------------------------

    def _do(self, name: str, parameters: Mapping[str, Any]) -> int:
        """Run a statement, and return the number of rows that it changed."""
        return self._run(name, parameters, None)[1]

    def _run(
        self,
        name: str,
        parameters: Mapping[str, Any],
        row: type[NamedTuple] | None,
        *,
        deadline: float | None = None,
        grant: str | None = None,
        settings: Sequence[LiteralString] = (),
    ) -> tuple[list[Any], int]:
        """Return the rows of a statement, and the number of rows that it returned or changed.

        With ``settings`` of its transaction, both are one message: the server ends it, and a process that is stopped
        meanwhile keeps no lock.
        """
        factory: RowFactory[Any] = rows_of(row) if row else namedtuple_row
        with self._connection(name, deadline, grant) as connection:
            try:
                if settings:
                    cursor: Any = psycopg.ClientCursor(connection, row_factory=factory)
                    cursor.execute("; ".join((*settings, self._sql[name])), parameters)
                    for _ in settings:
                        cursor.nextset()
                else:
                    cursor = connection.cursor(binary=True, row_factory=factory)
                    cursor.execute(self._sql[name], parameters)
                return cursor.fetchall() if cursor.description else [], cursor.rowcount
            except (MemoryError, ValueError, ArithmeticError) as error:  # a value cannot be sent, or loaded
                raise explain_statement(error, name) from None

    @contextmanager
    def _connection(self, name: str, deadline: float | None = None, grant: str | None = None) -> Generator[Connection]:
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
                refusal = explain_refusal(error, grant) if grant and isinstance(error, psycopg.Error) else None
                raise refusal or self._explained(error, connection, name) from None
            finally:
                self._returned(connection)
        finally:
            slots.release()

    def _explained(self, error: psycopg.Error | TimeoutError, connection: Connection, name: str) -> RelayError:
        """Return the error of a statement, and count the connection if it was lost."""
        explained = explain_statement(error, name) if is_alive(connection, error) else explain(error, statement=name)
        known = connection.losses != self.connection_losses
        if isinstance(explained, DatabaseUnavailable | IncarnationChanged) and not known:
            self.connection_losses += 1
            self._close_idle()
        return explained

    # -- connections ------------------------------------------------------------------------------------------

    def _taken(self) -> Connection:
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

    def _returned(self, connection: Connection) -> None:
        if self._is_open and connection.pgconn.transaction_status == TransactionStatus.IDLE:
            self._idle.append(connection)
            if not self._is_open:  # it was closed meanwhile
                self._close_idle()
        else:
            connection.close()

    def _popped(self) -> Connection | None:
        try:
            return self._idle.pop()
        except IndexError:
            return None

    def _close_idle(self) -> None:
        while (connection := self._popped()) is not None:
            connection.close()

    def _connect(self) -> Connection:
        """Return a new connection. Raises ``ConfigurationError``, ``DatabaseUnavailable`` or ``DatabaseUnusable``."""
        losses, began = self.connection_losses, time.monotonic()
        connection = connect(self._read_dsn(), pooler=self.pooler, give_up_at=lambda: self.give_up_at)
        connection.losses, connection.made_at = losses, began
        return connection

    def _read_dsn(self) -> str:
        try:
            parsed(dsn := self._dsn())
        except (ConfigurationError, psycopg.ProgrammingError) as error:
            known = error if isinstance(error, ConfigurationError) else explain(error)
            # Once there was one, its file may be on the way to be replaced.
            raise (DatabaseUnavailable(str(known)) if self._has_dsn else known) from None
        self._has_dsn = True
        return dsn

    def _check(self, connection: Connection) -> None:
        """Raise ``DatabaseUnusable`` if the relay cannot work with this connection."""
        if self.pooler:
            names = {"names": list(CHECKED_SETTINGS)}
            if wrong := wrong_settings(connection.execute(self._sql["session_settings"], names).fetchall()):
                raise DatabaseUnusable(wrong)
        if problem := encoding_fault(connection.info):
            raise DatabaseUnusable(problem)
