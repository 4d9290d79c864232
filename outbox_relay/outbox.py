"""Emitting events from Python: one row of the log, in the caller's own transaction, over the caller's own connection.

Imports psycopg and the standard library, and nothing of the relay. docs/emitting.md shows every use.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Final, LiteralString
from uuid import UUID

import psycopg
from psycopg import errors
from psycopg.pq import PipelineStatus, TransactionStatus
from psycopg.rows import TupleRow, tuple_row

__all__ = ["Event", "InvalidEvent", "NotInTransaction", "aemit", "aemit_many", "emit", "emit_many"]

REFUSED: Final = "outbox.emit: "
"""How the database begins what it says of an event that it does not take (SQLSTATE 22023)."""

# Every parameter is cast: what type psycopg gives a string depends on the dumpers that the application registered.
ONE: Final[LiteralString] = """
select outbox.emit_raw(%s::text, %b::bytea, %s::text, %s::jsonb, %s::timestamptz, %s::uuid, %s::text)
"""

# unnest returns rows in the order of its arrays, and nothing here could change it. A sort would copy every payload.
MANY: Final[LiteralString] = """
select outbox.emit_raw(e.type, e.payload, e.key, e.headers, e.deliver_at, e.uid, e.content_type)
  from unnest(%s::text[], %b::bytea[], %s::text[], %s::jsonb[], %s::timestamptz[], %s::uuid[], %s::text[])
       e (type, payload, key, headers, deliver_at, uid, content_type)
"""

Dumps = Callable[[Any], str | bytes]
Row = tuple[str, bytes, str | None, str | None, str | None, str | None, str]


class InvalidEvent(ValueError):
    """An event that the outbox does not take; says which field and which limit, never the payload.

    ``index`` is the event's place in the batch given to :func:`emit_many`, counted from 0. It is None for a single
    event, and for one that the database refused in pipeline mode.
    """

    def __init__(self, message: str, index: int | None = None) -> None:
        super().__init__(message if index is None else f"event {index}: {message}")
        self.index = index


class NotInTransaction(UserWarning):
    """An event was emitted in autocommit mode, outside a transaction: nothing ties it to the data it speaks of."""


@dataclass(frozen=True, slots=True)
class Event:
    """One event to emit; the fields are the arguments of :func:`emit`."""

    type: str
    payload: Any = field(repr=False)
    key: str | None = None
    headers: Mapping[str, str] | None = field(default=None, repr=False)
    deliver_at: datetime | None = None
    uid: UUID | None = None
    content_type: str | None = None
    dumps: Dumps | None = field(default=None, repr=False)


def emit(
    conn: psycopg.Connection[Any] | psycopg.Cursor[Any],
    type: str,  # noqa: A002 - the name that SQL, Kafka headers and CloudEvents use
    payload: Any,
    *,
    key: str | None = None,
    headers: Mapping[str, str] | None = None,
    deliver_at: datetime | None = None,
    uid: UUID | None = None,
    content_type: str | None = None,
    dumps: Dumps | None = None,
) -> UUID:
    """Emit one event in the transaction of ``conn``, in one round trip; return its uid.

    ``payload`` is anything that ``json.dumps`` takes, stored as compact UTF-8, or ``bytes`` together with
    ``content_type``. ``dumps`` replaces ``json.dumps`` for whatever payload is given, and returns str or bytes.
    ``key``: at most 1,024 bytes; events of a key keep their order. ``headers``: names are HTTP tokens. ``deliver_at``:
    aware, not before then. ``uid``: the caller's own, for an idempotent retry: an event whose uid was emitted before
    is not emitted again, and its uid is returned all the same.

    Raises :class:`InvalidEvent` for an event that the outbox does not take, ``psycopg.Error`` for everything else.
    Never commits. Warns with :class:`NotInTransaction` in autocommit mode outside a transaction.
    """
    connection = _connection(conn)
    row = _row(Event(type, payload, key, headers, deliver_at, uid, content_type, dumps))
    _warn_outside(connection)
    try:
        with psycopg.Cursor(connection, row_factory=tuple_row) as cursor:
            return _uid(cursor.execute(ONE, row, prepare=False).fetchone())
    except (errors.InvalidParameterValue, UnicodeEncodeError) as error:
        raise _refusal(error) from None


async def aemit(
    conn: psycopg.AsyncConnection[Any] | psycopg.AsyncCursor[Any],
    type: str,  # noqa: A002 - as for emit
    payload: Any,
    *,
    key: str | None = None,
    headers: Mapping[str, str] | None = None,
    deliver_at: datetime | None = None,
    uid: UUID | None = None,
    content_type: str | None = None,
    dumps: Dumps | None = None,
) -> UUID:
    """Emit one event over an asynchronous connection or cursor; else as :func:`emit`."""
    connection = _async_connection(conn)
    row = _row(Event(type, payload, key, headers, deliver_at, uid, content_type, dumps))
    _warn_outside(connection)
    try:
        async with psycopg.AsyncCursor(connection, row_factory=tuple_row) as cursor:
            await cursor.execute(ONE, row, prepare=False)
            return _uid(await cursor.fetchone())
    except (errors.InvalidParameterValue, UnicodeEncodeError) as error:
        raise _refusal(error) from None


def emit_many(conn: psycopg.Connection[Any] | psycopg.Cursor[Any], events: Iterable[Event]) -> list[UUID]:
    """Emit all events with one statement, in the order given; return their uids in that order.

    Nothing is emitted when one of them is refused: :class:`InvalidEvent` then has its ``index``. No events, no round
    trip. Else as :func:`emit`.
    """
    connection = _connection(conn)
    columns = _columns(events)
    if not columns:
        return []
    _warn_outside(connection)
    done: list[UUID] = []
    piped = _piped(connection)
    try:
        with psycopg.Cursor(connection, row_factory=tuple_row) as cursor:
            if piped:
                return [_uid(row) for row in cursor.execute(MANY, columns, prepare=False).fetchall()]
            # Streamed, the rows before an error arrive before it: their number is the index of the refused event.
            for row in cursor.stream(MANY, columns):
                done.append(_uid(row))  # noqa: PERF401 - what arrived before an error is counted
    except (errors.InvalidParameterValue, UnicodeEncodeError) as error:
        raise _refusal(error, None if piped else len(done)) from None
    return done


async def aemit_many(
    conn: psycopg.AsyncConnection[Any] | psycopg.AsyncCursor[Any], events: Iterable[Event]
) -> list[UUID]:
    """Emit all events over an asynchronous connection or cursor; else as :func:`emit_many`."""
    connection = _async_connection(conn)
    columns = _columns(events)
    if not columns:
        return []
    _warn_outside(connection)
    done: list[UUID] = []
    piped = _piped(connection)
    try:
        async with psycopg.AsyncCursor(connection, row_factory=tuple_row) as cursor:
            if piped:
                await cursor.execute(MANY, columns, prepare=False)
                return [_uid(row) for row in await cursor.fetchall()]
            async for row in cursor.stream(MANY, columns):
                done.append(_uid(row))  # noqa: PERF401 - what arrived before an error is counted
    except (errors.InvalidParameterValue, UnicodeEncodeError) as error:
        raise _refusal(error, None if piped else len(done)) from None
    return done


# -- the connection -----------------------------------------------------------------------------------------------


def _connection(conn: psycopg.Connection[Any] | psycopg.Cursor[Any]) -> psycopg.Connection[Any]:
    found: object = conn.connection if isinstance(conn, psycopg.Cursor) else conn
    if isinstance(found, psycopg.Connection):
        return found  # pyright: ignore[reportUnknownVariableType] - the rows of its own cursors do not matter here
    raise TypeError(_wrong(found, "emit", "a psycopg Connection or Cursor", "aemit for an AsyncConnection"))


def _async_connection(
    conn: psycopg.AsyncConnection[Any] | psycopg.AsyncCursor[Any],
) -> psycopg.AsyncConnection[Any]:
    found: object = conn.connection if isinstance(conn, psycopg.AsyncCursor) else conn
    if isinstance(found, psycopg.AsyncConnection):
        return found  # pyright: ignore[reportUnknownVariableType] - as above
    raise TypeError(_wrong(found, "aemit", "a psycopg AsyncConnection or AsyncCursor", "emit for a Connection"))


def _wrong(found: object, name: str, wanted: str, other: str) -> str:
    kind = f"{type(found).__module__}.{type(found).__qualname__}"
    return f"{name} takes {wanted}, not {kind}; there is {other}, and docs/emitting.md for other libraries"


def _piped(connection: psycopg.Connection[Any] | psycopg.AsyncConnection[Any]) -> bool:
    return connection.pgconn.pipeline_status != PipelineStatus.OFF


def _warn_outside(connection: psycopg.Connection[Any] | psycopg.AsyncConnection[Any]) -> None:
    """Warn where the public function was called, two frames up, if the event would be a transaction of its own."""
    if connection.autocommit and connection.info.transaction_status == TransactionStatus.IDLE:
        message = (
            "an event was emitted in autocommit mode, outside a transaction: it is not atomic with your data; "
            "use `with conn.transaction():` around both"
        )
        warnings.warn(message, NotInTransaction, stacklevel=3)


def _uid(row: TupleRow | None) -> UUID:
    if row is None:
        raise psycopg.InternalError("outbox.emit_raw returned no row")
    return row[0] if isinstance(row[0], UUID) else UUID(str(row[0]))


def _refusal(error: Exception, index: int | None = None) -> Exception:
    """What the caller is told: the database's own words if they are about the event, else the error as it is."""
    if isinstance(error, UnicodeEncodeError):
        return InvalidEvent(f"an event has characters that the connection's encoding {error.encoding} has not")
    said = error.diag.message_primary or "" if isinstance(error, psycopg.Error) else ""
    return InvalidEvent(said.removeprefix(REFUSED), index) if said.startswith(REFUSED) else error


# -- the event ----------------------------------------------------------------------------------------------------
# Limits are checked by the database, which SQL callers meet too. Here stands only what could not reach it.


def _columns(events: Iterable[Event]) -> tuple[list[Any], ...]:
    rows: list[Row] = []
    for index, event in enumerate(events):
        try:
            rows.append(_row(event))
        except InvalidEvent as error:
            raise InvalidEvent(str(error), index) from error.__cause__
    return tuple(list(column) for column in zip(*rows, strict=True))


def _row(event: Event) -> Row:
    body, content_type = _body(event)
    return (
        _text("type", event.type),
        body,
        None if event.key is None else _text("key", event.key),
        None if event.headers is None else _headers(event.headers),
        None if event.deliver_at is None else _time(event.deliver_at),
        None if event.uid is None else _own_uid(event.uid),
        _text("content_type", content_type),
    )


def _body(event: Event) -> tuple[bytes, str]:
    payload, content_type = event.payload, event.content_type
    if event.dumps is None and isinstance(payload, bytes | bytearray | memoryview):
        if content_type is None:
            raise InvalidEvent("payload is bytes, so content_type must say of what: 'application/octet-stream', say")
        return bytes(payload), content_type  # pyright: ignore[reportUnknownArgumentType] - of whatever items
    return _serialised(payload, event.dumps), "application/json" if content_type is None else content_type


def _serialised(payload: Any, dumps: Dumps | None) -> bytes:
    try:
        body = _json(payload) if dumps is None else dumps(payload)
        return body.encode() if isinstance(body, str) else bytes(body)
    except UnicodeEncodeError:
        # Lone surrogates are no UTF-8; escaped they are valid JSON.
        if dumps is None:
            return json.dumps(payload, separators=(",", ":"), allow_nan=False).encode()
        raise InvalidEvent("payload must be UTF-8, but dumps returned lone surrogates") from None
    except Exception as error:
        what = "json.dumps" if dumps is None else "dumps"
        advice = "; dumps= takes another encoder" if dumps is None else ""
        raise InvalidEvent(f"payload is not serialisable: {what} raised {type(error).__name__}{advice}") from error


def _json(payload: Any) -> str:
    return json.dumps(payload, ensure_ascii=False, separators=(",", ":"), allow_nan=False)


def _text(name: str, value: object) -> str:
    """The value, if a text parameter can carry it."""
    if not isinstance(value, str):
        raise InvalidEvent(f"{name} must be a str, not {type(value).__name__}")
    if "\0" in value:
        raise InvalidEvent(f"{name} must not have a NUL character")
    try:
        value.encode()
    except UnicodeEncodeError:
        raise InvalidEvent(f"{name} must be UTF-8; it has a lone surrogate") from None
    return value


def _headers(headers: object) -> str:
    if not isinstance(headers, Mapping):
        raise InvalidEvent(f"headers must be a mapping of str to str, not {type(headers).__name__}")
    found: Mapping[object, object] = headers  # pyright: ignore[reportUnknownVariableType] - checked here
    named = {_text("header name", name): value for name, value in found.items()}
    return json.dumps({name: _text(f"the value of header {name[:60]!r}", value) for name, value in named.items()})


def _time(deliver_at: object) -> str:
    if not isinstance(deliver_at, datetime):
        raise InvalidEvent(f"deliver_at must be a datetime, not {type(deliver_at).__name__}")
    if deliver_at.utcoffset() is None:
        raise InvalidEvent("deliver_at must have a time zone: datetime.now(UTC), say")
    return deliver_at.isoformat()


def _own_uid(uid: object) -> str:
    if not isinstance(uid, UUID):
        raise InvalidEvent(f"uid must be a uuid.UUID, not {type(uid).__name__}")
    return str(uid)
