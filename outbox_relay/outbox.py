"""Emitting events from Python, in the caller's own transaction and over its connection.

This module imports only psycopg, the standard library and ``emit_spans``. docs/emitting.md shows every use.
"""

from __future__ import annotations

import json
import re
import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Final, LiteralString, cast
from uuid import UUID

import psycopg
from psycopg import errors
from psycopg.pq import TransactionStatus
from psycopg.rows import TupleRow, tuple_row

from outbox_relay import emit_spans
from outbox_relay.emit_spans import Row

__all__ = ["Event", "InvalidEvent", "NotInTransaction", "aemit", "aemit_many", "emit", "emit_many"]

REFUSED: Final = re.compile(r"outbox\.emit: (?P<said>(?:event (?P<index>[0-9]+): )?.*)", re.DOTALL)
"""The message of the database for an event that it refuses (SQLSTATE 22023)."""

JSON_ERROR: Final = re.compile(
    r"Object of type \w+ is not JSON serializable|keys must be str, int, float, bool or None, not \w+"
    r"|Circular reference detected|Out of range float values are not JSON compliant|maximum recursion depth exceeded"
)
"""The messages of ``json.dumps`` for values that it refuses. They name types, and nothing of the payload."""

# Every parameter is cast, because the type of a string depends on the dumpers that the application registered.
ONE: Final[LiteralString] = """
select outbox.emit_raw(%s::text, %b::bytea, %s::text, %s::jsonb, %s::timestamptz, %s::uuid, %s::text)
"""

# unnest returns rows in the order of its arrays, and the query keeps it; a sort would copy every payload.
# The setting, made before and reset after each call, lets an error name the refused event.
MANY: Final[LiteralString] = """
select outbox.emit_raw(e.type, e.payload, e.key, e.headers, e.deliver_at, e.uid, e.content_type),
       set_config('outbox.event_index', '', true)
  from unnest(%s::text[], %b::bytea[], %s::text[], %s::jsonb[], %s::timestamptz[], %s::uuid[], %s::text[])
       with ordinality e (type, payload, key, headers, deliver_at, uid, content_type, place)
 where set_config('outbox.event_index', (e.place - 1)::text, true) is not null
"""

Dumps = Callable[[Any], str | bytes]


class InvalidEvent(ValueError):
    """An event that the outbox refuses; the message names field and limit, never the payload.

    ``index`` is its place, from 0, in the batch given to :func:`emit_many`; None for a single event.
    """

    def __init__(self, message: str, index: int | None = None) -> None:
        super().__init__(message)
        self.index = index


class NotInTransaction(UserWarning):
    """An event was emitted outside a transaction, so it is not atomic with the caller's data."""


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

    ``payload`` is any argument of ``json.dumps``, stored as compact UTF-8, or ``bytes`` together with
    ``content_type``. ``dumps`` replaces ``json.dumps`` for any payload, and returns str or bytes. ``key`` has at most
    1,024 bytes; events of a key keep their order. Names of ``headers`` are HTTP tokens. ``deliver_at`` is an aware
    datetime before which the event is not delivered. ``uid`` makes a retry idempotent: an event whose uid was already
    emitted is not emitted again, and the uid is returned.

    Never commits. Warns with :class:`NotInTransaction` in autocommit mode outside a transaction.

    Raises :class:`InvalidEvent` for an event that the outbox refuses, ``psycopg.Error`` for all other failures.
    """
    connection = _connection(conn)
    row = _row(Event(type, payload, key, headers, deliver_at, uid, content_type, dumps))
    _warn_outside(connection)
    if (spans := emit_spans.begin((row,))) is None:
        return _insert(connection, row)
    with spans:
        return spans.emitted([_insert(connection, *spans.rows)])[0]


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
    """Emit one event over an asynchronous connection or cursor, as :func:`emit` does."""
    connection = _async_connection(conn)
    row = _row(Event(type, payload, key, headers, deliver_at, uid, content_type, dumps))
    _warn_outside(connection)
    if (spans := emit_spans.begin((row,))) is None:
        return await _ainsert(connection, row)
    with spans:
        return spans.emitted([await _ainsert(connection, *spans.rows)])[0]


def emit_many(conn: psycopg.Connection[Any] | psycopg.Cursor[Any], events: Iterable[Event]) -> list[UUID]:
    """Emit all events in order with one statement, as :func:`emit` does; return their uids.

    If one event is refused none is emitted, and :class:`InvalidEvent` has its index. Without events there is no round
    trip.
    """
    connection = _connection(conn)
    rows = _rows(events)
    if not rows:
        return []
    _warn_outside(connection)
    if (spans := emit_spans.begin(rows)) is None:
        return _insert_many(connection, rows)
    with spans:
        return spans.emitted(_insert_many(connection, spans.rows))


async def aemit_many(
    conn: psycopg.AsyncConnection[Any] | psycopg.AsyncCursor[Any], events: Iterable[Event]
) -> list[UUID]:
    """Emit all events over an asynchronous connection or cursor, as :func:`emit_many` does."""
    connection = _async_connection(conn)
    rows = _rows(events)
    if not rows:
        return []
    _warn_outside(connection)
    if (spans := emit_spans.begin(rows)) is None:
        return await _ainsert_many(connection, rows)
    with spans:
        return spans.emitted(await _ainsert_many(connection, spans.rows))


# -- the statements -----------------------------------------------------------------------------------------------


def _insert(connection: psycopg.Connection[Any], row: Row) -> UUID:
    try:
        with psycopg.Cursor(connection, row_factory=tuple_row) as cursor:
            return _uid(cursor.execute(ONE, row, prepare=False).fetchone())
    except (errors.InvalidParameterValue, UnicodeEncodeError) as error:
        raise _refusal(error) from None


async def _ainsert(connection: psycopg.AsyncConnection[Any], row: Row) -> UUID:
    try:
        async with psycopg.AsyncCursor(connection, row_factory=tuple_row) as cursor:
            await cursor.execute(ONE, row, prepare=False)
            return _uid(await cursor.fetchone())
    except (errors.InvalidParameterValue, UnicodeEncodeError) as error:
        raise _refusal(error) from None


def _insert_many(connection: psycopg.Connection[Any], rows: list[Row]) -> list[UUID]:
    try:
        with psycopg.Cursor(connection, row_factory=tuple_row) as cursor:
            return [_uid(row) for row in cursor.execute(MANY, _columns(rows), prepare=False).fetchall()]
    except (errors.InvalidParameterValue, UnicodeEncodeError) as error:
        raise _refusal(error) from None


async def _ainsert_many(connection: psycopg.AsyncConnection[Any], rows: list[Row]) -> list[UUID]:
    try:
        async with psycopg.AsyncCursor(connection, row_factory=tuple_row) as cursor:
            await cursor.execute(MANY, _columns(rows), prepare=False)
            return [_uid(row) for row in await cursor.fetchall()]
    except (errors.InvalidParameterValue, UnicodeEncodeError) as error:
        raise _refusal(error) from None


# -- the connection -----------------------------------------------------------------------------------------------


def _connection(conn: object) -> psycopg.Connection[Any]:
    found = cast(object, conn.connection) if isinstance(conn, psycopg.Cursor) else conn
    if isinstance(found, psycopg.Connection):
        return cast("psycopg.Connection[Any]", found)
    raise TypeError(_wrong(found, "emit", "a psycopg Connection or Cursor", "aemit for an AsyncConnection"))


def _async_connection(conn: object) -> psycopg.AsyncConnection[Any]:
    found = cast(object, conn.connection) if isinstance(conn, psycopg.AsyncCursor) else conn
    if isinstance(found, psycopg.AsyncConnection):
        return cast("psycopg.AsyncConnection[Any]", found)
    raise TypeError(_wrong(found, "aemit", "a psycopg AsyncConnection or AsyncCursor", "emit for a Connection"))


def _wrong(found: object, name: str, wanted: str, other: str) -> str:
    kind = f"{type(found).__module__}.{type(found).__qualname__}"
    return f"{name} takes {wanted}, not {kind}; there is {other}, and docs/emitting.md for other libraries"


def _warn_outside(connection: psycopg.Connection[Any] | psycopg.AsyncConnection[Any]) -> None:
    """Warn at the caller of the public function, two frames up, if no transaction is open."""
    if connection.autocommit and connection.info.transaction_status == TransactionStatus.IDLE:
        message = (
            "an event was emitted in autocommit mode, outside a transaction, so it is not atomic with your data; "
            "use `with conn.transaction():` around both"
        )
        warnings.warn(message, NotInTransaction, stacklevel=3)


def _uid(row: TupleRow | None) -> UUID:
    if row is None:
        raise psycopg.InternalError("outbox.emit_raw returned no row")
    return row[0] if isinstance(row[0], UUID) else UUID(str(row[0]))


def _refusal(error: errors.InvalidParameterValue | UnicodeEncodeError) -> Exception:
    """Return ``InvalidEvent`` with the message about the event, else the error unchanged."""
    if isinstance(error, UnicodeEncodeError):
        return InvalidEvent(f"type, key or headers have characters that the encoding {error.encoding} lacks")
    refused = REFUSED.match(error.diag.message_primary or "")
    if refused is None:
        return error
    return InvalidEvent(refused["said"], int(refused["index"]) if refused["index"] else None)


# -- the event ----------------------------------------------------------------------------------------------------
# The database checks the limits, also for SQL callers. These functions check only values that cannot be sent to it.


def _columns(rows: list[Row]) -> tuple[list[Any], ...]:
    return tuple(list(column) for column in zip(*rows, strict=True))


def _rows(events: Iterable[Event]) -> list[Row]:
    rows: list[Row] = []
    for index, event in enumerate(events):
        if not isinstance(cast(object, event), Event):
            raise TypeError(f"event {index} must be an outbox.Event, not {type(event).__name__}")
        try:
            rows.append(_row(event))
        except InvalidEvent as error:
            raise InvalidEvent(f"event {index}: {error}", index) from error.__cause__
    return rows


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
            raise InvalidEvent("payload is bytes, so content_type is needed, such as 'application/octet-stream'")
        return bytes(cast(bytes, payload)), content_type
    return _serialised(payload, event.dumps), "application/json" if content_type is None else content_type


def _serialised(payload: Any, dumps: Dumps | None) -> bytes:
    try:
        body = cast(object, _json(payload) if dumps is None else dumps(payload))
    except Exception as error:
        raise InvalidEvent(f"payload is not serialisable: {_reason(error, dumps)}") from error
    if isinstance(body, bytes):
        return body
    if not isinstance(body, str):
        raise InvalidEvent(f"payload is not serialisable: dumps must return str or bytes, not {type(body).__name__}")
    try:
        return body.encode()
    except UnicodeEncodeError:
        raise InvalidEvent("payload must be UTF-8, but dumps returned lone surrogates") from None


def _reason(error: Exception, dumps: Dumps | None) -> str:
    """Return why serialisation failed, without anything of the payload."""
    if dumps is not None:
        return f"dumps raised {type(error).__name__}"
    known = JSON_ERROR.match(str(error)) if isinstance(error, TypeError | ValueError | RecursionError) else None
    said = known[0] if known else f"json.dumps raised {type(error).__name__}"
    return f"{said}; dumps= takes another encoder"


def _json(payload: Any) -> bytes:
    try:
        return json.dumps(payload, ensure_ascii=False, separators=(",", ":"), allow_nan=False).encode()
    except UnicodeEncodeError:
        # Lone surrogates are not valid UTF-8, but valid JSON if they are escaped.
        return json.dumps(payload, separators=(",", ":"), allow_nan=False).encode()


def _text(name: str, value: object) -> str:
    """Return the value if it can be sent as a text parameter."""
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
    found = cast("Mapping[object, object]", headers)
    named = {_text("header name", name): value for name, value in found.items()}
    return json.dumps({name: _text(f"the value of header {name[:60]!r}", value) for name, value in named.items()})


def _time(deliver_at: object) -> str:
    if not isinstance(deliver_at, datetime):
        raise InvalidEvent(f"deliver_at must be a datetime, not {type(deliver_at).__name__}")
    if deliver_at.utcoffset() is None:
        raise InvalidEvent("deliver_at must have a time zone, such as datetime.now(UTC)")
    return deliver_at.isoformat()


def _own_uid(uid: object) -> str:
    if not isinstance(uid, UUID):
        raise InvalidEvent(f"uid must be a uuid.UUID, not {type(uid).__name__}")
    return str(uid)
