"""Handlers inside a transaction of a connection of the application's own, with the mark of the event."""

from __future__ import annotations

import select
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Any, TypeAlias

import psycopg
from psycopg import errors
from psycopg.conninfo import conninfo_to_dict
from psycopg.pq import PipelineStatus, TransactionStatus
from psycopg.rows import tuple_row

from outbox_relay import inbox
from outbox_relay.delivery import Delivery
from outbox_relay.inbox_marks import consumer_of
from outbox_relay.sinks.python.handler import HandlerMistake, described

CONNECT_SECONDS = 10
NO_INBOX = "its database has no inbox for this role: run outbox-relay migrate --inbox --grant-consume ROLE there"
_MISSING = (errors.UndefinedFunction, errors.InvalidSchemaName, errors.InsufficientPrivilege, errors.UndefinedTable)

AnyConnection: TypeAlias = psycopg.Connection[Any] | psycopg.AsyncConnection[Any]


class Transactions:
    """The connections of one sink, each used by one delivery at a time and kept between them, as they are left."""

    def __init__(self, dsn: str, consumer: str, timeout_seconds: float) -> None:
        # Below the time limit of a call, so that the database is the reason. libpq knows no limit below 2 s.
        seconds = max(2, min(CONNECT_SECONDS, int(timeout_seconds) - 1))
        self._options: dict[str, Any] = {
            "connect_timeout": seconds,
            # A database that vanished ends a call, too, before all calls hang.
            "tcp_user_timeout": max(1000, int(timeout_seconds * 1000)),
            "keepalives_idle": 5,
            "keepalives_interval": 2,
            "keepalives_count": 3,
            "fallback_application_name": f"outbox-relay handler {consumer}",
            **conninfo_to_dict(dsn),
        }
        self._consumer = consumer
        self._idle: deque[AnyConnection] = deque()

    def run(self, delivery: Delivery, handle: Callable[[], object]) -> None:
        """Call ``handle`` in a transaction that marks the event, unless it is marked."""
        connection: Any = self._take() or psycopg.connect(autocommit=True, **self._options)
        try:
            with connection.transaction() as transaction:
                if inbox.once(connection, consumer_of(self._consumer, delivery.headers), delivery.uid):
                    delivery.connection = connection
                    handle()
                    _check_open(connection)
            _check_committed(transaction)
        except psycopg.Error:  # the server may be another one by now, behind a proxy that keeps the connection
            connection.pgconn.finish()
            raise
        finally:
            self._give_back(connection)

    async def arun(self, delivery: Delivery, handle: Callable[[], Awaitable[object]]) -> None:
        """Call an asynchronous ``handle`` as :meth:`run` does."""
        connection: Any = self._take() or await psycopg.AsyncConnection.connect(autocommit=True, **self._options)
        try:
            async with connection.transaction() as transaction:
                if await inbox.aonce(connection, consumer_of(self._consumer, delivery.headers), delivery.uid):
                    delivery.connection = connection
                    await handle()
                    _check_open(connection)
            _check_committed(transaction)
        except psycopg.Error:  # the server may be another one by now, behind a proxy that keeps the connection
            connection.pgconn.finish()
            raise
        finally:
            self._give_back(connection)

    def check(self) -> str | None:
        """Return why the inbox cannot be used, or None."""
        statement = "select has_function_privilege('outbox.once(text, uuid)', 'execute')"
        try:
            with psycopg.connect(**self._options) as connection:
                [granted] = connection.execute(statement).fetchone() or [False]
        except psycopg.Error as error:
            return reason_of(error)
        return None if granted else f"dsn: {NO_INBOX}"

    def close(self) -> None:
        """Close the connections that are not in use."""
        while self._idle:
            connection = self._idle.pop()
            connection.pgconn.finish()

    def _take(self) -> AnyConnection | None:
        """Return a kept connection about which the server has said nothing meanwhile, or None. For any thread."""
        while True:
            try:
                connection = self._idle.pop()
            except IndexError:
                return None
            poll = select.poll()
            poll.register(connection.fileno(), select.POLLIN)
            if not poll.poll(0):
                return connection
            connection.pgconn.finish()

    def _give_back(self, connection: AnyConnection) -> None:
        if connection.closed or connection.info.transaction_status != TransactionStatus.IDLE:
            connection.pgconn.finish()
        else:
            connection.row_factory = tuple_row  # pyright: ignore[reportAttributeAccessIssue]
            self._idle.append(connection)


def _check_open(connection: AnyConnection) -> None:
    """Raise ``HandlerMistake`` unless the transaction can be committed as a whole."""
    if connection.closed:
        raise HandlerMistake("delivery.connection was closed or lost before its transaction was committed")
    if connection.info.pipeline_status != PipelineStatus.OFF:
        raise HandlerMistake("the handler returned inside a pipeline of delivery.connection")
    if connection.info.transaction_status == TransactionStatus.INERROR:
        raise HandlerMistake("a statement of the handler failed, and the handler returned: nothing was committed")
    if connection.info.transaction_status != TransactionStatus.INTRANS:
        raise HandlerMistake("the handler ended the transaction of delivery.connection: the relay commits it")


def _check_committed(transaction: psycopg.Transaction | psycopg.AsyncTransaction) -> None:
    """Raise ``HandlerMistake`` after psycopg left a block without an exception and without a commit."""
    if transaction.status != transaction.Status.COMMITTED:
        raise HandlerMistake("the handler rolled its transaction back: nothing was committed")


def reason_of(error: psycopg.Error) -> str:
    """Return why the handler's database cannot be used."""
    if isinstance(error, _MISSING):
        return f"dsn: {NO_INBOX}"
    return f"dsn: the handler's database cannot be used: {described(error)}"
