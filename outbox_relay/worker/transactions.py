"""Handlers inside a transaction of the application's own connection, with the mark of the event."""

from __future__ import annotations

import re
import select
from collections.abc import Callable
from typing import Any, NoReturn, TypeVar

import psycopg
from psycopg import errors, sql
from psycopg.conninfo import conninfo_to_dict
from psycopg.pq import TransactionStatus

from outbox_relay import inbox
from outbox_relay.delivery import Delivery
from outbox_relay.inbox_marks import consumer_of
from outbox_relay.worker.handler import Unusable, described

CONNECT_SECONDS = 10
NO_INBOX = "its database has no inbox for this role: run outbox-relay migrate --inbox --grant-consume ROLE there"
CONTROL = "a handler must not end or begin the transaction of delivery.connection: the worker commits when it returns"
_CONTROL = re.compile(
    r"(?:\s|;|--[^\n]*(?:\n|\Z)|/\*.*?\*/)*"
    r"(?:commit|end|abort|begin|rollback(?!\s+(?:work\s+|transaction\s+)?to\b)|(?:start|prepare)\s+transaction)\b",
    re.IGNORECASE | re.DOTALL,
)
_MISSING = (errors.UndefinedFunction, errors.InvalidSchemaName, errors.InsufficientPrivilege, errors.UndefinedTable)

ConnectionT = TypeVar("ConnectionT", psycopg.Connection[Any], psycopg.AsyncConnection[Any])


class DatabaseDown(Exception):
    """The handler's database cannot be used: the handler was not called."""


class TransactionEnded(psycopg.ProgrammingError):
    """A handler ended its transaction, or left it failed."""


def check_statement(query: object, connection: Any) -> None:
    """Raise ``TransactionEnded`` for a statement that ends or begins a transaction."""
    if isinstance(query, sql.Composable):
        query = query.as_string(connection)
    text = query.decode(errors="replace") if isinstance(query, bytes) else str(query)
    if _CONTROL.match(text):
        raise TransactionEnded(CONTROL)


class GuardedCursor(psycopg.Cursor[Any]):
    """A cursor that refuses to end the transaction."""

    def execute(self, query: Any, *args: Any, **kwargs: Any) -> Any:
        """Execute a statement that does not end the transaction."""
        check_statement(query, self.connection)
        return super().execute(query, *args, **kwargs)


class AsyncGuardedCursor(psycopg.AsyncCursor[Any]):
    """An asynchronous cursor that refuses to end the transaction."""

    async def execute(self, query: Any, *args: Any, **kwargs: Any) -> Any:
        """Execute a statement that does not end the transaction."""
        check_statement(query, self.connection)
        return await super().execute(query, *args, **kwargs)


class Transactions:
    """The connections of one worker, each used by one delivery at a time and kept between them."""

    def __init__(self, dsn: str, consumer: str) -> None:
        try:
            given = conninfo_to_dict(dsn)
        except psycopg.Error:
            raise Unusable("dsn is not a connection string of PostgreSQL") from None
        self._dsn = dsn
        self._options: dict[str, Any] = {"fallback_application_name": f"outbox-relay handler {consumer}"}
        if "connect_timeout" not in given:
            self._options["connect_timeout"] = CONNECT_SECONDS
        self._consumer = consumer
        self._idle: list[Any] = []

    # -- plain handlers ---------------------------------------------------------------------------------------

    def run(self, delivery: Delivery, handler: Callable[[Delivery], Any]) -> None:
        """Call ``handler`` in a transaction that marks the event, unless it is marked. Raises as the handler."""
        connection = self._take(psycopg.Connection)
        try:
            connection = connection or self._connect()
            with connection.transaction():
                if self._mark(connection, delivery):
                    delivery.connection = connection
                    _refuse_awaitable(handler(delivery))
                    _check_open(connection)
        finally:
            delivery.connection = None
            if connection is not None and not self._keep(connection):
                connection.close()

    def _connect(self) -> psycopg.Connection[Any]:
        try:
            return psycopg.Connection.connect(self._dsn, autocommit=True, cursor_factory=GuardedCursor, **self._options)
        except psycopg.Error as error:
            _down(error)

    def _mark(self, connection: psycopg.Connection[Any], delivery: Delivery) -> bool:
        try:
            return inbox.once(connection, self._name(delivery), delivery.uid)
        except psycopg.Error as error:
            _down(error)

    # -- asynchronous handlers --------------------------------------------------------------------------------

    async def arun(self, delivery: Delivery, handler: Callable[[Delivery], Any]) -> None:
        """Call an asynchronous ``handler`` as :meth:`run` does."""
        connection = self._take(psycopg.AsyncConnection)
        try:
            connection = connection or await self._aconnect()
            async with connection.transaction():
                if await self._amark(connection, delivery):
                    delivery.connection = connection
                    await handler(delivery)
                    _check_open(connection)
        finally:
            delivery.connection = None
            if connection is not None and not self._keep(connection):
                await connection.close()

    async def _aconnect(self) -> psycopg.AsyncConnection[Any]:
        try:
            return await psycopg.AsyncConnection.connect(
                self._dsn, autocommit=True, cursor_factory=AsyncGuardedCursor, **self._options
            )
        except psycopg.Error as error:
            _down(error)

    async def _amark(self, connection: psycopg.AsyncConnection[Any], delivery: Delivery) -> bool:
        try:
            return await inbox.aonce(connection, self._name(delivery), delivery.uid)
        except psycopg.Error as error:
            _down(error)

    # -- both -------------------------------------------------------------------------------------------------

    def check(self) -> str | None:
        """Return why the inbox cannot be used, or None. Blocks."""
        statement = "select to_regprocedure('outbox.once(text, uuid)'), has_schema_privilege('outbox', 'usage')"
        try:
            with self._connect() as connection:
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

    def _name(self, delivery: Delivery) -> str:
        return consumer_of(self._consumer, delivery.headers)

    def _take(self, kind: type[ConnectionT]) -> ConnectionT | None:
        """Return a kept connection about which the server has said nothing meanwhile, or None."""
        while self._idle:
            connection = self._idle.pop()
            assert isinstance(connection, kind)  # noqa: S101 - a worker has one handler
            poll = select.poll()
            poll.register(connection.fileno(), select.POLLIN)
            if not poll.poll(0):
                return connection
            connection.pgconn.finish()
        return None

    def _keep(self, connection: Any) -> bool:
        """Keep a connection for another delivery. Return False if it cannot serve one."""
        idle = not connection.closed and connection.info.transaction_status == TransactionStatus.IDLE
        if idle:
            self._idle.append(connection)
        return idle


def _check_open(connection: psycopg.Connection[Any] | psycopg.AsyncConnection[Any]) -> None:
    """Raise ``TransactionEnded`` unless the transaction can be committed as a whole."""
    if connection.closed:
        raise TransactionEnded("the handler closed delivery.connection")
    if connection.info.transaction_status == TransactionStatus.INERROR:
        raise TransactionEnded("a statement of the handler failed, and the handler returned: nothing was committed")
    if connection.info.transaction_status != TransactionStatus.INTRANS:
        raise TransactionEnded(CONTROL)


def _refuse_awaitable(result: object) -> None:
    if hasattr(result, "__await__"):
        raise TypeError("the handler returned an awaitable: make it an async function")


def _reason(error: psycopg.Error) -> str:
    if isinstance(error, _MISSING):
        return f"dsn: {NO_INBOX}"
    return f"dsn: the handler's database cannot be used: {described(error)}"


def _down(error: psycopg.Error) -> NoReturn:
    raise DatabaseDown(_reason(error)) from None
