"""Emitting and consuming in Django, in the current ``atomic`` block of a database.

docs/emitting.md and docs/consumers.md show every use.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from datetime import datetime
from functools import wraps
from inspect import iscoroutinefunction
from typing import Any, Final, TypeVar, Unpack, cast
from uuid import UUID

import psycopg
from django.db import DEFAULT_DB_ALIAS, connections
from django.db.backends.base.base import BaseDatabaseWrapper
from django.db.transaction import TransactionManagementError

from outbox_relay import inbox
from outbox_relay.callers import STATEMENTS, fetch, insert_many, insert_one, page_of
from outbox_relay.emit_rows import NOT_GIVEN, Declared, Event, InvalidEvent, row_of, rows_of
from outbox_relay.inbox_marks import HasHeaders, InvalidMark, consumer_of, uid_of
from outbox_relay.statements import EventOptions, event_time, event_uid
from outbox_relay.statements import mark as mark_parameters

__all__ = [
    "Event",
    "InvalidEvent",
    "InvalidMark",
    "cancel",
    "consumer_of",
    "emit",
    "emit_many",
    "once",
    "once_per_event",
    "reschedule",
    "uid_of",
]

Message = TypeVar("Message", bound=HasHeaders)
Result = TypeVar("Result")

OUTSIDE: Final = (
    "an event was emitted outside an atomic block of database {!r}, so it would not be atomic with your data; use "
    "`with transaction.atomic(using={!r}):` around both, or pass require_atomic=False"
)
CHANGED_OUTSIDE: Final = (
    "a scheduled event was changed outside an atomic block of database {!r}, so that would not be atomic with your "
    "data; use `with transaction.atomic(using={!r}):` around both, or pass require_atomic=False"
)
MARKED_OUTSIDE: Final = (
    "once was called outside an atomic block of database {!r}, so the event would be marked before your changes are "
    "committed; use `with transaction.atomic(using={!r}):` around both"
)


def emit(
    type: str | Declared,  # noqa: A002 - as for outbox.emit
    payload: Any = NOT_GIVEN,
    *,
    using: str = DEFAULT_DB_ALIAS,
    require_atomic: bool = True,
    **options: Unpack[EventOptions],
) -> UUID:
    """Emit one event in the current atomic block of the database ``using``, in one round trip; return its uid.

    The other arguments are those of ``outbox.emit``. With ``require_atomic=False`` an event may be emitted outside an
    atomic block; it is then committed by itself.

    Raises :class:`InvalidEvent` for an event that the outbox refuses, ``TransactionManagementError`` outside an atomic
    block or in one that must be rolled back, TypeError if the database is not PostgreSQL with psycopg 3, and
    ``django.db.Error`` for all other failures.
    """
    row = row_of(Event(type, payload, **options))
    wrapper, connection = _connection(using, require_atomic=require_atomic)
    with wrapper.wrap_database_errors:
        return insert_one(connection, row)


def emit_many(
    events: Iterable[Event | Declared], *, using: str = DEFAULT_DB_ALIAS, require_atomic: bool = True
) -> list[UUID]:
    """Emit all events in order with one statement, as :func:`emit` does; return their uids.

    If one event is refused none is emitted, and :class:`InvalidEvent` has its index. Without events there is no round
    trip.
    """
    rows = rows_of(events)
    if not rows:
        return []
    wrapper, connection = _connection(using, require_atomic=require_atomic)
    with wrapper.wrap_database_errors:
        return insert_many(connection, rows)


def cancel(uid: UUID, *, using: str = DEFAULT_DB_ALIAS, require_atomic: bool = True) -> bool:
    """Cancel a scheduled event in the current atomic block of the database ``using``; return True if it was in time.

    As ``outbox.cancel``, but raises as :func:`emit`.
    """
    parameters = event_uid(uid)
    wrapper, connection = _connection(using, require_atomic=require_atomic, name="cancel", outside=CHANGED_OUTSIDE)
    with wrapper.wrap_database_errors:
        return bool(fetch(connection, STATEMENTS.cancel, parameters))


def reschedule(uid: UUID, at: datetime, *, using: str = DEFAULT_DB_ALIAS, require_atomic: bool = True) -> bool:
    """Move a scheduled event to ``at``, an aware datetime; return True if that was in time.

    As ``outbox.reschedule``, but raises as :func:`emit`.
    """
    parameters = event_time(uid, at)
    wrapper, connection = _connection(using, require_atomic=require_atomic, name="reschedule", outside=CHANGED_OUTSIDE)
    with wrapper.wrap_database_errors:
        return bool(fetch(connection, STATEMENTS.reschedule, parameters))


def once(consumer: str, uid: UUID | str, *, using: str = DEFAULT_DB_ALIAS) -> bool:
    """Mark an event as handled in the current atomic block of the database ``using``; return True the first time.

    The other arguments are those of ``inbox.once``.

    Raises :class:`InvalidMark` for a name or a uid that the inbox refuses, and as :func:`emit` otherwise.
    """
    parameters = mark_parameters(consumer, uid)
    wrapper, connection = _connection(using, require_atomic=True, name="once", outside=MARKED_OUTSIDE)
    with wrapper.wrap_database_errors:
        return bool(fetch(connection, STATEMENTS.once, parameters))


def once_per_event(
    consumer: str, *, using: str = DEFAULT_DB_ALIAS, separate_replays: bool = True
) -> Callable[[Callable[[Message], Result]], Callable[[Message], Result | None]]:
    """Return a decorator for a handler ``(message)``, which then handles each event once.

    As ``inbox.once_per_event``, but in the current atomic block of the database ``using``.
    """

    def mark(_: None, name: str, uid: UUID) -> bool:
        return once(name, uid, using=using)

    def decorate(handler: Callable[[Message], Result]) -> Callable[[Message], Result | None]:
        if iscoroutinefunction(handler):
            raise TypeError("once_per_event wraps plain functions, because atomic blocks are not asynchronous")

        @inbox.once_per_event(consumer, mark=mark, separate_replays=separate_replays)
        def handle_with(_: None, message: Message) -> Result:
            return handler(message)

        @wraps(handler)
        def handle(message: Message) -> Result | None:
            return handle_with(None, message)

        return handle

    return decorate


def _connection(
    using: str, *, require_atomic: bool, name: str = "emit", outside: str = OUTSIDE
) -> tuple[BaseDatabaseWrapper, psycopg.Connection[Any]]:
    """Return Django's connection, which can be used now, and the connection of psycopg below it."""
    wrapper = connections[using]
    if require_atomic and not wrapper.in_atomic_block:
        raise TransactionManagementError(outside.format(using, using))
    wrapper.validate_no_broken_transaction()
    wrapper.cursor().close()  # connects; refuses a thread or a test that may not use the connection
    below: object = wrapper.connection
    if isinstance(below, psycopg.Connection):
        return wrapper, cast("psycopg.Connection[Any]", below)
    kind = f"{below.__class__.__module__}.{below.__class__.__qualname__}"
    raise TypeError(
        f"{name} needs a database of PostgreSQL with psycopg 3, not {kind}, for {using!r}: see {page_of(name)}"
    )
