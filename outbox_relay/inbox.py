"""Handling each event once, in the transaction of a consumer that keeps its data in PostgreSQL.

The relay delivers an event at least once. A consumer marks it in the transaction that has the effect, and skips an
event that it has marked before. This module imports only psycopg, the standard library and modules that do
the same. docs/consumers.md shows every use.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import wraps
from inspect import isasyncgen, isawaitable, iscoroutine, iscoroutinefunction, isgenerator, isgeneratorfunction
from typing import Any, Final, TypeVar
from uuid import UUID

import psycopg
from psycopg import errors

from outbox_relay.callers import (
    STATEMENTS,
    afetch,
    async_connection_of,
    connection_of,
    fetch,
    is_outside_transaction,
)
from outbox_relay.inbox_marks import (
    HasHeaders,
    Headers,
    InvalidMark,
    NoTransaction,
    consumer_of,
    headers_of,
    outside,
    uid_of,
)
from outbox_relay.statements import mark as mark_parameters

__all__ = [
    "Headers",
    "InvalidMark",
    "NoTransaction",
    "aonce",
    "aonce_per_event",
    "consumer_of",
    "once",
    "once_per_event",
    "uid_of",
]

Conn = TypeVar("Conn")
Message = TypeVar("Message", bound=HasHeaders)
Result = TypeVar("Result")

REMEDY: Final = "with conn.transaction():"
NOT_COMMITTED: Final = "a statement of the handler failed, and the handler returned: nothing can be committed"
NOT_PLAIN: Final = "once_per_event wraps plain functions; use aonce_per_event for asynchronous ones"


def once(conn: psycopg.Connection[Any] | psycopg.Cursor[Any], consumer: str, uid: UUID | str) -> bool:
    """Mark an event as handled in the transaction of ``conn``, in one round trip; return True the first time.

    After True, change data in the same transaction: its commit keeps the mark and the changes, and a rollback neither.
    False means that ``consumer`` has handled the event before. While another transaction handles it, the call waits for
    the end of that one. ``consumer`` is a name of 1 to 255 bytes. ``uid`` may be the text that a header has.

    Never commits.

    Raises :class:`NoTransaction` in autocommit mode outside a transaction, :class:`InvalidMark` for a name or a uid
    that the inbox refuses, ``psycopg.Error`` for all other failures.
    """
    connection = connection_of(conn, "once")
    parameters = mark_parameters(consumer, uid)
    if is_outside_transaction(connection):
        raise outside(REMEDY)
    return bool(fetch(connection, STATEMENTS.once, parameters))


async def aonce(conn: psycopg.AsyncConnection[Any] | psycopg.AsyncCursor[Any], consumer: str, uid: UUID | str) -> bool:
    """Mark an event over an asynchronous connection or cursor, as :func:`once` does."""
    connection = async_connection_of(conn, "once")
    parameters = mark_parameters(consumer, uid)
    if is_outside_transaction(connection):
        raise outside(f"async {REMEDY}")
    return bool(await afetch(connection, STATEMENTS.once, parameters))


# -- handlers -----------------------------------------------------------------------------------------------------


def once_per_event(
    consumer: str, *, mark: Callable[[Any, str, UUID], bool] = once, separate_replays: bool = True
) -> Callable[[Callable[[Conn, Message], Result]], Callable[[Conn, Message], Result | None]]:
    """Return a decorator for a handler ``(conn, message)``, which then handles each event once.

    The event is marked with ``mark`` before the handler is called. If it was marked before, the handler is not called,
    and None is returned. ``message`` is a record of a Kafka client or a request of a web framework. An exception of the
    handler must roll the transaction of ``conn`` back, as it does if it leaves the block of the transaction.

    A handler that catches the error of a statement, without a savepoint, or rolls back, has lost mark and effect. If it
    returns, an exception is raised, so that the event does not count as handled: ``mark`` is called again after the
    handler, in the same transaction, and must return False then.

    A replay counts as another consumer (:func:`consumer_of`), unless ``separate_replays`` is false: then its deliveries
    of events that were handled are skipped.
    """

    def decorate(handler: Callable[[Conn, Message], Result]) -> Callable[[Conn, Message], Result | None]:
        if iscoroutinefunction(handler) or iscoroutinefunction(mark) or isgeneratorfunction(handler):
            raise TypeError(NOT_PLAIN)

        @wraps(handler)
        def handle(conn: Conn, message: Message) -> Result | None:
            name, uid = _named(consumer, message, separate_replays=separate_replays)
            is_first = mark(conn, name, uid)
            if not isinstance(is_first, bool):  # pyright: ignore[reportUnnecessaryIsInstance] - nothing checks callers
                raise TypeError("mark is asynchronous, and would mark no event: use aonce_per_event")
            if not is_first:
                return None
            result = _handled(handler(conn, message))
            if mark(conn, name, uid):
                raise errors.InFailedSqlTransaction(NOT_COMMITTED)
            return result

        return handle

    return decorate


def aonce_per_event(
    consumer: str, *, mark: Callable[[Any, str, UUID], Awaitable[bool]] = aonce, separate_replays: bool = True
) -> Callable[[Callable[[Conn, Message], Awaitable[Result]]], Callable[[Conn, Message], Awaitable[Result | None]]]:
    """Return a decorator for an asynchronous handler, as :func:`once_per_event` does."""

    def decorate(
        handler: Callable[[Conn, Message], Awaitable[Result]],
    ) -> Callable[[Conn, Message], Awaitable[Result | None]]:
        @wraps(handler)
        async def handle(conn: Conn, message: Message) -> Result | None:
            name, uid = _named(consumer, message, separate_replays=separate_replays)
            if not await mark(conn, name, uid):
                return None
            result = _handled(await handler(conn, message))
            if await mark(conn, name, uid):
                raise errors.InFailedSqlTransaction(NOT_COMMITTED)
            return result

        return handle

    return decorate


def _handled(result: Result) -> Result:
    """Return the result of a handler. Raises TypeError if that has not run: the mark must be rolled back then."""
    if not (isawaitable(result) or isgenerator(result) or isasyncgen(result)):
        return result
    if iscoroutine(result):
        result.close()
    raise TypeError(f"the handler returned a {type(result).__name__} and has not run: {NOT_PLAIN}")


def _named(consumer: str, message: HasHeaders, *, separate_replays: bool) -> tuple[str, UUID]:
    """Return the consumer's name and the uid of the event that a message delivers."""
    headers = headers_of(message)
    return consumer_of(consumer, headers) if separate_replays else consumer, uid_of(headers)
