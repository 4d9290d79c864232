"""Emitting and consuming over a connection of asyncpg, in its transaction.

docs/emitting.md and docs/consumers.md show every use.
"""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime
from typing import TYPE_CHECKING, Any, Final, TypeAlias, Unpack
from uuid import UUID

import asyncpg
from asyncpg.pool import PoolConnectionProxy

from outbox_relay.emit_rows import (
    NOT_GIVEN,
    Declared,
    Event,
    InvalidEvent,
    NotInTransaction,
    encoding_error,
    row_of,
    rows_of,
    warn_outside,
)
from outbox_relay.emit_spans import CreateSpans
from outbox_relay.inbox_marks import InvalidMark, NoTransaction, consumer_of, outside, uid_of
from outbox_relay.statements import (
    EventOptions,
    Parameters,
    Statement,
    event_time,
    event_uid,
    many_events,
    mark,
    one_event,
    statements,
)

if TYPE_CHECKING:
    Connection: TypeAlias = asyncpg.Connection[Any] | PoolConnectionProxy[Any]

__all__ = [
    "Event",
    "InvalidEvent",
    "InvalidMark",
    "NoTransaction",
    "NotInTransaction",
    "cancel",
    "consumer_of",
    "emit",
    "emit_many",
    "once",
    "reschedule",
    "uid_of",
]

STATEMENTS: Final = statements(lambda _, place: f"${place}")
REMEDY: Final = "async with conn.transaction():"
"""The remedy for a call outside a transaction."""


async def emit(
    conn: Connection,
    type: str | Declared,  # noqa: A002 - as for outbox.emit
    payload: Any = NOT_GIVEN,
    **options: Unpack[EventOptions],
) -> UUID:
    """Emit one event in the transaction of ``conn``, in one round trip; return its uid.

    The arguments are those of ``outbox.emit``. Never commits. Warns with :class:`NotInTransaction` outside a
    transaction.

    Raises :class:`InvalidEvent` for an event that the outbox refuses, ``asyncpg.PostgresError`` for all other failures.
    """
    connection = _connection(conn)
    row = row_of(Event(type, payload, **options))
    _warn_outside(connection)
    with CreateSpans([row]) as spans:
        return spans.emitted(_uids(await _fetch(connection, STATEMENTS.one, one_event(*spans.rows))))[0]


async def emit_many(conn: Connection, events: Iterable[Event | Declared]) -> list[UUID]:
    """Emit all events in order with one statement, as :func:`emit` does; return their uids.

    If one event is refused none is emitted, and :class:`InvalidEvent` has its index. Without events there is no round
    trip.
    """
    connection = _connection(conn)
    rows = rows_of(events)
    if not rows:
        return []
    _warn_outside(connection)
    with CreateSpans(rows) as spans:
        return spans.emitted(_uids(await _fetch(connection, STATEMENTS.many, many_events(spans.rows))))


async def cancel(conn: Connection, uid: UUID) -> bool:
    """Cancel a scheduled event in the transaction of ``conn``; return True if that was in time.

    As ``outbox.cancel``, but raises ``asyncpg.PostgresError``.
    """
    return bool(await _fetch(_connection(conn, "cancel"), STATEMENTS.cancel, event_uid(uid)))


async def reschedule(conn: Connection, uid: UUID, at: datetime) -> bool:
    """Move a scheduled event to ``at``, an aware datetime; return True if that was in time.

    As ``outbox.reschedule``, but raises ``asyncpg.PostgresError``.
    """
    return bool(await _fetch(_connection(conn, "reschedule"), STATEMENTS.reschedule, event_time(uid, at)))


async def once(conn: Connection, consumer: str, uid: UUID | str) -> bool:
    """Mark an event as handled in the transaction of ``conn``, in one round trip; return True the first time.

    The arguments are those of ``inbox.once``. Never commits.

    Raises :class:`NoTransaction` outside a transaction, :class:`InvalidMark` for a name or a uid that the inbox
    refuses, ``asyncpg.PostgresError`` for all other failures.
    """
    connection = _connection(conn, "once")
    parameters = mark(consumer, uid)
    if not connection.is_in_transaction():
        raise outside(REMEDY)
    return bool(await _fetch(connection, STATEMENTS.once, parameters))


async def _fetch(connection: Connection, statement: Statement, parameters: Parameters) -> list[asyncpg.Record]:
    """Run a statement and return its rows. Raises ``InvalidEvent``, ``InvalidMark`` or ``asyncpg.PostgresError``."""
    try:
        return await connection.fetch(statement.sql, *parameters.values())
    except asyncpg.DataError as error:
        if (lacking := encoding_error(error)) is not None:  # asyncpg's own error, whose message shows the text
            raise statement.unencodable(lacking) from None
        is_refusal = isinstance(error, asyncpg.InvalidParameterValueError)
        if is_refusal and (refused := statement.refusal(error.message)) is not None:
            raise refused from None
        raise


def _uids(rows: list[asyncpg.Record]) -> list[UUID]:
    return [UUID(row[0]) for row in rows]


def _connection(conn: object, name: str = "emit") -> Connection:
    if isinstance(conn, asyncpg.Connection | PoolConnectionProxy):
        return conn  # pyright: ignore[reportUnknownVariableType] - the class of its records
    kind = f"{conn.__class__.__module__}.{conn.__class__.__qualname__}"
    page = "docs/consumers.md" if name == "once" else "docs/emitting.md"
    raise TypeError(f"{name} takes a connection of asyncpg, not {kind}; {page} has the functions for others")


def _warn_outside(connection: Connection) -> None:
    """Warn at the caller of the public function, two frames up, if no transaction is open."""
    if not connection.is_in_transaction():
        warn_outside(REMEDY, 3)
