"""A bounded pool of connections, and statements with deadlines.

Every call sends one statement in a transaction of its own. This takes one round trip and no session state, so nothing
changes behind a transaction-pooling proxy, and a client that vanishes leaves no transaction open.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import cache
from importlib import resources
from typing import Any, LiteralString, TypeVar, cast

import psycopg
from psycopg import AsyncConnection
from psycopg.rows import AsyncRowFactory, namedtuple_row, tuple_row
from psycopg_pool import AsyncConnectionPool, PoolClosed, PoolTimeout

from outbox_relay.domain.cancellation import propagate_cancellation
from outbox_relay.domain.errors import (
    ConfigurationError,
    DatabaseUnavailable,
    DatabaseUnusable,
    IncarnationChanged,
    StatementFailed,
)
from outbox_relay.domain.file_reading import CONNECTION_FILES
from outbox_relay.domain.thread_shortage import is_thread_shortage
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
from outbox_relay.postgres.connection_slots import ConnectionSlots, caller
from outbox_relay.postgres.conninfo import find_authorities, parsed
from outbox_relay.postgres.errors import (
    NOT_DIRECT,
    action_refusals,
    encoding_fault,
    explain,
    explain_statement,
    is_starved,
)
from outbox_relay.postgres.look_thread import LookThread
from outbox_relay.postgres.rows import Look, TickResult, WindowRequest
from outbox_relay.postgres.session_settings import (
    NEWEST_SERVER,
    settings_of,
    short_timeout,
    wrong_settings,
    wrong_settings_message,
)

T = TypeVar("T")
TUPLES: AsyncRowFactory[Any] = cast(Any, tuple_row)

CALL_SECONDS = 10.0
"""Longest wait for the answer to a statement, COMMIT included: no setting of the server limits a COMMIT that waits for
a synchronous standby."""
ACTION_SECONDS = 600.0
"""Longest duration of an action that a person waits for."""
OUT_OF_TIME = "57014"
"""The SQLSTATE of a cancelled statement. The server's timeout cancels too."""
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


class Database:
    """A pool of at most ``connections`` connections, and the statements of ``sql/`` by name.

    A call raises ``DatabaseUnavailable`` if its connection was lost, so that it is unknown whether the statement took
    effect. It raises ``StatementFailed`` if the statement failed and the connection did not, which affects this caller
    only, and ``DatabaseUnusable`` for an error that waiting does not fix.

    ``call_seconds`` is the longest wait for an answer, which tests with a silent server shorten.
    """

    def __init__(
        self, dsn: Callable[[], str], *, pooler: bool, connections: int, call_seconds: float = CALL_SECONDS
    ) -> None:
        self._dsn = dsn
        self._has_dsn = False
        self._sql = dict(statements())
        self._pooler = pooler
        self._prepare_after = None if pooler else 2
        self._connections = connections
        self._slots = ConnectionSlots(connections)
        self._look_thread = LookThread(dsn, self._sql, pooler=pooler)
        self._replaced_losses = 0
        self._call_seconds = call_seconds
        self._pool: AsyncConnectionPool[Connection] | None = None
        self.connection_losses = 0
        """Incremented when a call loses its connection or reaches another server. Readers compare it to detect stale
        data."""

    async def open(self) -> None:
        """Connect once to report errors, then open the pool.

        Raises ``DatabaseUnavailable`` or ``DatabaseUnusable``.
        """
        await self.close()
        dsn = await self._read_dsn()
        try:
            async with asyncio.timeout(CONNECT_SECONDS * 2):
                connection = await self._connect(dsn)
                problem = encoding_fault(connection.info)
                try:
                    await self._try(connection)
                finally:
                    await connection.close()
        except TimeoutError:
            raise DatabaseUnavailable(f"the database did not answer within {CONNECT_SECONDS * 2} s") from None
        if problem:
            raise DatabaseUnusable(problem)
        self._pool = AsyncConnectionPool(
            connection_class=Connection,
            conninfo=self._conninfo,
            min_size=1,
            max_size=self._connections,
            timeout=CONNECT_SECONDS,
            max_lifetime=3600,
            reconnect_timeout=CONNECT_SECONDS,
            kwargs={**CONNECTION_DEFAULTS, "autocommit": True},
            configure=self._configure,
            open=False,
        )
        await self._pool.open()
        await self._look_thread.open()

    async def close(self) -> None:
        """Close every connection, after at most a second for those in use."""
        await self._look_thread.close()
        if self._pool is not None:
            pool, self._pool = self._pool, None
            await pool.close(timeout=1.0)

    async def replace_lost_connections(self) -> None:
        """Replace every connection if one was lost since the last call.

        The others are not checked: a connection that was lost silently never answers, and the pool's ``check`` can
        swallow the timeout that limits it.
        """
        if self._pool is not None and self.connection_losses != self._replaced_losses:
            self._replaced_losses = self.connection_losses
            self._look_thread.renew()
            await self._pool.drain()

    async def check_session(self) -> None:
        """Check the settings of a session behind a pooler. A direct connection sets them itself.

        Raises ``DatabaseUnusable`` if the relay cannot work with them.
        """
        if not self._pooler:
            return
        began = time.monotonic()
        try:
            self._judge(await self._rows("session_settings", {"names": list(settings_of(NEWEST_SERVER))}))
        except StatementFailed as error:
            if (short := short_timeout(error.sqlstate, time.monotonic() - began)) is None:
                raise
            raise DatabaseUnusable(wrong_settings_message([short])) from None

    async def database_identity(self) -> tuple[str, int]:
        """Return the identity of the database: see ``connection.database_identity``."""
        async with self._connection(self._call_seconds, "database_identity") as connection:
            return await database_identity(connection)

    async def named(self, name: str, parameters: Mapping[str, Any], deadline: float | None = None) -> list[Any]:
        """Return the rows of a statement file as named tuples, for queries outside the data path."""
        return await self._rows(name, parameters, cast(Any, namedtuple_row), deadline)

    async def call(
        self, name: str, parameters: Mapping[str, Any], grant: str, deadline: float | None = None
    ) -> list[Any]:
        """Return the rows of a statement that operators run, as ``named`` does.

        Raises ``NotFound`` or ``ConfigurationError``, in the words of the schema, if it refuses a parameter. Raises
        ``DatabaseUnusable``, which names the kind ``grant``, if the role has no right to it.
        """
        async with self._connection(deadline or self._call_seconds, name) as connection:
            cursor = connection.cursor(binary=True, row_factory=cast(Any, namedtuple_row))
            try:
                with action_refusals(grant):
                    await cursor.execute(self._sql[name], parameters)
                    return await cursor.fetchall()
            except (MemoryError, ValueError, ArithmeticError) as error:  # a value that cannot be loaded
                raise explain_statement(error, name) from None

    async def action(self, name: str, parameters: Mapping[str, Any], seconds: float = ACTION_SECONDS) -> list[Any]:
        """Return the rows of a statement file that acts for a person, as named tuples, after at most ``seconds``.

        Raises as ``errors.action_refusals``, too.
        """
        async with self.transaction(seconds) as connection:
            await connection.execute("select set_config('statement_timeout', %s, true)", (str(int(seconds * 1000)),))
            with action_refusals("operate"):
                cursor = connection.cursor(row_factory=cast(Any, namedtuple_row))
                await cursor.execute(self._sql[name], parameters)
                return await cursor.fetchall()

    async def by_index(self, name: str, parameters: Mapping[str, Any], grant: str) -> list[Any]:
        """Return the rows of a statement that reads little only if it walks an index in its order, as ``call`` does.

        The planner takes a column that is second in an index for random on the disk, and reads and sorts everything.
        """
        async with self.transaction(self._call_seconds) as connection:
            await connection.execute(BY_INDEX)
            cursor = connection.cursor(binary=True, row_factory=cast(Any, namedtuple_row))
            try:
                with action_refusals(grant):
                    await cursor.execute(self._sql[name], parameters)
                    return await cursor.fetchall()
            except (MemoryError, ValueError, ArithmeticError) as error:  # a value that cannot be sent, or loaded
                raise explain_statement(error, name) from None

    @asynccontextmanager
    async def transaction(self, deadline: float = CALL_SECONDS) -> AsyncGenerator[AsyncConnection[Any]]:
        """Open a transaction that ends with the block and takes at most ``deadline`` seconds, outside the data path."""
        async with self._connection(deadline) as connection, connection.transaction():
            yield connection

    # -- connecting ---------------------------------------------------------------------------------------

    async def _conninfo(self) -> str:
        dsn = await self._read_dsn()
        return dsn if self._pooler else direct(dsn)

    async def _read_dsn(self) -> str:
        try:
            parsed(dsn := await CONNECTION_FILES.acall(self._dsn))
        except (ConfigurationError, psycopg.ProgrammingError) as error:
            known = error if isinstance(error, ConfigurationError) else explain(error)
            # Once there was one, its file may be on the way to be replaced.
            raise (DatabaseUnavailable(str(known)) if self._has_dsn else known) from None
        self._has_dsn = True
        find_authorities(dsn)
        return dsn

    async def _connect(self, dsn: str) -> Connection:
        conninfo = dsn if self._pooler else direct(dsn)
        try:
            return await Connection.connect(conninfo, autocommit=True, **cast(Any, CONNECTION_DEFAULTS))
        except psycopg.Error as error:
            raise explain(error, dsn) from None
        except RuntimeError as error:
            if not is_thread_shortage(error):
                raise
            raise DatabaseUnavailable(f"no connection to the database: {error}") from None

    async def _try(self, connection: Connection) -> None:
        """Raise the error of a new connection, if it has one."""
        began = time.monotonic()
        try:
            await self._configure(connection)
            if self._pooler:
                cursor = await connection.execute(
                    self._sql["session_settings"], {"names": list(settings_of(NEWEST_SERVER))}
                )
                self._judge(await cursor.fetchall())
            elif not await is_direct(connection):
                raise DatabaseUnusable(NOT_DIRECT)
        except psycopg.Error as error:
            short = short_timeout(error.sqlstate, time.monotonic() - began) if self._pooler else None
            raise (DatabaseUnusable(wrong_settings_message([short])) if short else explain(error)) from None

    async def _configure(self, connection: Connection) -> None:
        connection.prepare_threshold = self._prepare_after
        if self._pooler:
            return
        try:
            await fix_settings(connection)
        except BaseException:
            await connection.close()
            raise

    def _judge(self, found: Sequence[Any]) -> None:
        if wrong := wrong_settings(found):
            raise DatabaseUnusable(wrong_settings_message(wrong))

    # -- running statements -------------------------------------------------------------------------------

    @asynccontextmanager
    async def _connection(self, deadline: float, name: str = "transaction") -> AsyncGenerator[AsyncConnection[Any]]:
        """Lend a connection for at most ``deadline`` seconds, after at most as long a wait for a free slot."""
        if self._pool is None:
            raise DatabaseUnavailable("there is no connection to the database")
        lent = alive = False
        try:
            with propagate_cancellation():
                async with (
                    self._slots.taken(caller.get(), name, deadline),
                    asyncio.timeout(deadline),
                    self._pool.connection(timeout=min(deadline, CONNECT_SECONDS)) as connection,
                ):
                    lent = True
                    try:
                        yield connection
                    except BaseException:
                        alive = is_alive(connection)
                        raise
        except (PoolTimeout, PoolClosed):
            said = "no database connection is available"
            raise DatabaseUnavailable(f"{said}: {self.look_trouble}" if self.look_trouble else said) from None
        except TimeoutError:
            self.connection_losses += lent and not alive
            said = f"the database did not answer within {deadline:g} s"
            raise (
                StatementFailed(f"{said}: statement {name}", OUT_OF_TIME) if alive else DatabaseUnavailable(said)
            ) from None
        except psycopg.Error as error:
            explained = explain_statement(error, name) if alive or is_starved(error) else explain(error)
            self.connection_losses += isinstance(explained, DatabaseUnavailable | IncarnationChanged)
            raise explained from None

    async def _rows(
        self,
        name: str,
        parameters: Mapping[str, Any],
        row_factory: AsyncRowFactory[T] = TUPLES,
        deadline: float | None = None,
    ) -> list[T]:
        """Return the rows of a statement. ``deadline`` in seconds; None means the default of the store."""
        async with self._connection(deadline or self._call_seconds, name) as connection:
            cursor = connection.cursor(binary=True, row_factory=row_factory)
            try:
                await cursor.execute(self._sql[name], parameters)
                return await cursor.fetchall()
            except (MemoryError, ValueError, ArithmeticError) as error:  # a value that cannot be sent, or loaded
                raise explain_statement(error, name) from None

    async def _look(
        self,
        request: WindowRequest | None,
        deadline: float,
        patience: float,
        is_news: Callable[[TickResult, float], bool],
    ) -> Look:
        """Look as ``LookThread.look`` does.

        Behind a pooler no window is read: the server may have no time limit that ends a slow read before the relay
        gives up the connection.
        """
        try:
            return await self._look_thread.look(None if self._pooler else request, deadline, patience, is_news)
        except DatabaseUnavailable:
            self.connection_losses += 1
            raise

    async def _mark(self, deadline: float) -> None:
        """Mark the server, on the connection of the looks."""
        try:
            await self._look_thread.execute("arm", deadline)
        except DatabaseUnavailable:
            self.connection_losses += 1
            raise

    def prepare_look(self) -> bool:
        """Return True if there is a connection for looks. If there is none, or if it is old, begin to make another."""
        return self._look_thread.prepare()

    def give_up_looks(self) -> None:
        """Take no more looks on the present connection, and make another."""
        self._look_thread.renew()

    @property
    def look_trouble(self) -> str | None:
        """Why no connection for looks can be made, or None."""
        return self._look_thread.trouble

    async def _do(self, name: str, parameters: Mapping[str, Any], deadline: float | None = None) -> int:
        """Run a statement, and return the number of rows that it changed."""
        async with self._connection(deadline or self._call_seconds, name) as connection:
            try:
                return (await connection.execute(self._sql[name], parameters)).rowcount
            except (MemoryError, ValueError, ArithmeticError) as error:
                raise explain_statement(error, name) from None
