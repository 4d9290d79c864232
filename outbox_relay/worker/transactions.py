"""Handlers inside a transaction of the application's own connection, with the mark of the event."""

from __future__ import annotations

import select
from asyncio import CancelledError
from collections import deque
from collections.abc import AsyncGenerator, Callable, Generator
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager, contextmanager
from typing import Any, NoReturn, TypeVar

import psycopg
from psycopg import errors
from psycopg.conninfo import conninfo_to_dict
from psycopg.pq import PipelineStatus, TransactionStatus
from psycopg.rows import tuple_row

from outbox_relay import inbox
from outbox_relay.delivery import Delivery
from outbox_relay.inbox_marks import consumer_of
from outbox_relay.worker.answers import DatabaseDown, check_result, described
from outbox_relay.worker.clock import clock
from outbox_relay.worker.handler import Unusable
from outbox_relay.worker.statements import CONTROL, AsyncGuardedCursor, GuardedCursor, TransactionEnded

LEAST_CONNECT_SECONDS, CONNECT_SECONDS = 2, 10
"""Limits of making a connection, of which libpq knows none below 2 s."""
RESET = b"""set session authorization default; reset all; reset role; close all; unlisten *; discard temp;
discard sequences; select pg_advisory_unlock_all()"""
"""Reset what a handler may have changed in a session. `DISCARD ALL` would also drop the prepared statements."""
OWN_SESSION = b"select pg_backend_pid()"
"""The process that serves a session. A pooler tells its clients another one."""
NO_INBOX = "its database has no inbox for this role: run outbox-relay migrate --inbox --grant-consume ROLE there"
_MISSING = (errors.UndefinedFunction, errors.InvalidSchemaName, errors.InsufficientPrivilege, errors.UndefinedTable)

ConnectionT = TypeVar("ConnectionT", psycopg.Connection[Any], psycopg.AsyncConnection[Any])
Call = Callable[[Delivery], Any]


class Transactions:
    """The connections of one worker, each used by one delivery at a time and kept between them."""

    def __init__(self, dsn: str, consumer: str) -> None:
        try:
            given = conninfo_to_dict(dsn)
        except (psycopg.Error, UnicodeError):
            raise Unusable("dsn is not a connection string of PostgreSQL") from None
        self._dsn = dsn
        self._named: dict[str, Any] = {"fallback_application_name": f"outbox-relay handler {consumer}"}
        self._limits_connect = "connect_timeout" not in given
        self._consumer = consumer
        self._idle: deque[Any] = deque()
        self._pooled: bool | None = None
        """True if a pooler gives the sessions, which other clients use, too; None while that is not known."""

    # -- plain handlers ---------------------------------------------------------------------------------------

    def run(self, delivery: Delivery, handler: Call, ends_at: float) -> None:
        """Call ``handler`` in a transaction that marks the event, unless it is marked. Raises as the handler."""
        connection = self._take(psycopg.Connection)
        try:
            connection = connection or self._connect(ends_at)
            with self._marked(connection, delivery) as is_first:
                if is_first:
                    delivery.connection = connection
                    check_result(handler(delivery))
                    _check_open(connection)
        except DatabaseDown:
            if connection is not None:
                connection.close()
            raise
        finally:
            was_called, delivery.connection = delivery.connection is not None, None
            if connection is not None:
                if _is_idle(connection) and (not was_called or self._reset(connection)):
                    self._idle.append(connection)
                else:
                    connection.close()

    def _connect(self, ends_at: float) -> psycopg.Connection[Any]:
        options = self._options(ends_at)
        try:
            connection = psycopg.Connection.connect(self._dsn, autocommit=True, cursor_factory=GuardedCursor, **options)
            try:
                if self._pooled is None:
                    [[pid]] = psycopg.Cursor(connection).execute(OWN_SESSION).fetchall()
                    self._pooled = pid != connection.info.backend_pid
            except BaseException:
                connection.close()
                raise
        except psycopg.Error as error:
            _down(error)
        return connection

    def _reset(self, connection: psycopg.Connection[Any]) -> bool:
        """Take back what the handler may have changed. Return False if that failed, which is no fault of the event.

        The sessions of a pooler are left alone: they may be those of other clients, and settings of the pooler's.
        """
        connection.row_factory, connection.cursor_factory = tuple_row, GuardedCursor
        try:
            if not self._pooled:
                psycopg.Cursor(connection).execute(RESET, prepare=False)
        except Exception:
            return False
        return True

    @contextmanager
    def _marked(self, connection: psycopg.Connection[Any], delivery: Delivery) -> Generator[bool]:
        """Begin a transaction with the mark of the event; yield True if there was none. Commit after the block."""
        name, transaction = consumer_of(self._consumer, delivery.headers), connection.transaction()
        with ExitStack() as stack:
            try:
                entered = stack.enter_context(transaction)
                is_first = inbox.once(connection, name, delivery.uid)
            except psycopg.Error as error:
                _down(error)
            yield is_first
        _check_committed(entered)

    # -- asynchronous handlers --------------------------------------------------------------------------------

    async def arun(self, delivery: Delivery, handler: Call, ends_at: float) -> None:
        """Call an asynchronous ``handler`` as :meth:`run` does."""
        connection = self._take(psycopg.AsyncConnection)
        try:
            connection = connection or await self._aconnect(ends_at)
            async with self._amarked(connection, delivery) as is_first:
                if is_first:
                    delivery.connection = connection
                    check_result(await handler(delivery))
                    _check_open(connection)
        except DatabaseDown:
            if connection is not None:
                await connection.close()
            raise
        finally:
            was_called, delivery.connection = delivery.connection is not None, None
            if connection is not None:
                if _is_idle(connection) and (not was_called or await self._areset(connection)):
                    self._idle.append(connection)
                else:
                    await connection.close()

    async def _aconnect(self, ends_at: float) -> psycopg.AsyncConnection[Any]:
        options = self._options(ends_at)
        try:
            connection = await psycopg.AsyncConnection.connect(
                self._dsn, autocommit=True, cursor_factory=AsyncGuardedCursor, **options
            )
            try:
                if self._pooled is None:
                    [[pid]] = await (await psycopg.AsyncCursor(connection).execute(OWN_SESSION)).fetchall()
                    self._pooled = pid != connection.info.backend_pid
            except BaseException:
                await connection.close()
                raise
        except psycopg.Error as error:
            _down(error)
        return connection

    async def _areset(self, connection: psycopg.AsyncConnection[Any]) -> bool:
        """Do as :meth:`_reset` does."""
        connection.row_factory, connection.cursor_factory = tuple_row, AsyncGuardedCursor
        try:
            if not self._pooled:
                await psycopg.AsyncCursor(connection).execute(RESET, prepare=False)
        except (Exception, CancelledError):  # the event is committed: its time may end now
            return False
        return True

    @asynccontextmanager
    async def _amarked(self, connection: psycopg.AsyncConnection[Any], delivery: Delivery) -> AsyncGenerator[bool]:
        name, transaction = consumer_of(self._consumer, delivery.headers), connection.transaction()
        async with AsyncExitStack() as stack:
            try:
                entered = await stack.enter_async_context(transaction)
                is_first = await inbox.aonce(connection, name, delivery.uid)
            except psycopg.Error as error:
                _down(error)
            yield is_first
        _check_committed(entered)

    # -- both -------------------------------------------------------------------------------------------------

    def check(self) -> str | None:
        """Return why the inbox cannot be used, or None. Blocks."""
        statement = "select to_regprocedure('outbox.once(text, uuid)'), has_schema_privilege('outbox', 'usage')"
        try:
            with self._connect(clock() + CONNECT_SECONDS) as connection:
                found = connection.execute(statement).fetchone()
                granted = False
                if found is not None and found[0] is not None and found[1]:
                    row = connection.execute("select has_function_privilege(%s::regprocedure, 'execute')", found[:1])
                    granted = bool((row.fetchone() or (False,))[0])
        except DatabaseDown as error:
            return str(error)
        except psycopg.Error as error:
            return _reason(error)
        return None if granted else f"dsn: {NO_INBOX}"

    def _options(self, ends_at: float) -> dict[str, Any]:
        """Return options by which a connection attempt ends before the call, so that the database is the reason."""
        if not self._limits_connect:
            return self._named
        left = int(ends_at - clock()) - 1
        return {**self._named, "connect_timeout": max(LEAST_CONNECT_SECONDS, min(CONNECT_SECONDS, left))}

    def _take(self, kind: type[ConnectionT]) -> ConnectionT | None:
        """Return a kept connection about which the server has said nothing meanwhile, or None. For any thread."""
        while True:
            try:
                connection = self._idle.pop()
            except IndexError:
                return None
            assert isinstance(connection, kind)  # noqa: S101 - a worker has one handler
            poll = select.poll()
            poll.register(connection.fileno(), select.POLLIN)
            if not poll.poll(0):
                return connection
            connection.pgconn.finish()


def _is_idle(connection: psycopg.Connection[Any] | psycopg.AsyncConnection[Any]) -> bool:
    """Return True if the connection is open and in no transaction."""
    return not connection.closed and connection.info.transaction_status == TransactionStatus.IDLE


def _check_open(connection: psycopg.Connection[Any] | psycopg.AsyncConnection[Any]) -> None:
    """Raise ``TransactionEnded`` unless the transaction can be committed as a whole."""
    if connection.closed:
        raise TransactionEnded("delivery.connection was closed or lost before its transaction was committed")
    if connection.info.pipeline_status != PipelineStatus.OFF:
        raise TransactionEnded("the handler returned inside a pipeline of delivery.connection")
    if connection.info.transaction_status == TransactionStatus.INERROR:
        raise TransactionEnded("a statement of the handler failed, and the handler returned: nothing was committed")
    if connection.info.transaction_status != TransactionStatus.INTRANS:
        raise TransactionEnded(CONTROL)


def _check_committed(transaction: psycopg.Transaction | psycopg.AsyncTransaction) -> None:
    """Raise ``TransactionEnded`` after psycopg left a block without an exception and without a commit."""
    if transaction.status != transaction.Status.COMMITTED:
        raise TransactionEnded("the handler rolled its transaction back: nothing was committed")


def _reason(error: psycopg.Error) -> str:
    if isinstance(error, _MISSING):
        return f"dsn: {NO_INBOX}"
    return f"dsn: the handler's database cannot be used: {described(error)}"


def _down(error: psycopg.Error) -> NoReturn:
    raise DatabaseDown(_reason(error)) from None
