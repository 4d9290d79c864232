"""Events as parameters of ``outbox.emit_raw``, for every function that emits.

Imports the standard library and ``emit_spans``.

The database checks the limits, also for SQL callers. These functions check only values that cannot be sent to it.
"""

from __future__ import annotations

import json
import re
import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Final, cast
from uuid import UUID

from outbox_relay.emit_spans import PlainRow, QueuedRow, Row

REFUSED: Final = re.compile(
    r"outbox\.(?:emit|cancel|reschedule): (?P<said>(?:event (?P<index>[0-9]+): )?.*)", re.DOTALL
)
"""The message of the database for an event that it refuses (SQLSTATE 22023)."""

JSON_ERROR: Final = re.compile(
    r"Object of type \w+ is not JSON serializable|keys must be str, int, float, bool or None, not \w+"
    r"|Circular reference detected|Out of range float values are not JSON compliant|maximum recursion depth exceeded"
)
"""The messages of ``json.dumps`` for values that it refuses. They name types, and nothing of the payload."""

OUTSIDE: Final = (
    "an event was emitted in autocommit mode, outside a transaction, so it is not atomic with your data; "
    "use `{}` around both"
)
"""The warning that there is no transaction; the remedy is put into it."""

PLAIN: Final = 7
"""The number of parameters of an event without tenant, priority and unique key."""
PRIORITY_SENT: Final = 1 << 31
"""The first priority that cannot be sent to the database, which checks the limits."""
PUBLIC: Final = "outbox_relay.outbox"
"""The module under which the errors are known, such as in traces."""
Dumps = Callable[[Any], str | bytes]


class InvalidEvent(ValueError):
    """An event that the outbox refuses; the message names field and limit, never the payload.

    ``index`` is its place, from 0, in the batch given to :func:`emit_many`; None for a single event.
    """

    __module__ = PUBLIC

    def __init__(self, message: str, index: int | None = None) -> None:
        super().__init__(message)
        self.index = index


class NotInTransaction(UserWarning):
    """An event was emitted outside a transaction, so it is not atomic with the caller's data."""

    __module__ = PUBLIC


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
    tenant: str | None = None
    priority: int | None = None
    unique_key: str | None = None


def refusal(said: str | None) -> InvalidEvent | None:
    """Return the error for the database's message (SQLSTATE 22023), or None if it is not about an event."""
    refused = REFUSED.match(said or "")
    if refused is None:
        return None
    return InvalidEvent(refused["said"], int(refused["index"]) if refused["index"] else None)


def unencodable(error: UnicodeEncodeError) -> InvalidEvent:
    """Return the error for text that the encoding of the connection lacks."""
    return InvalidEvent(
        f"type, key, headers, tenant or unique_key have characters that the encoding {error.encoding} lacks"
    )


def warn_outside(remedy: str, stacklevel: int) -> None:
    """Warn with :class:`NotInTransaction` at the caller of the public function, ``stacklevel`` frames up."""
    warnings.warn(OUTSIDE.format(remedy), NotInTransaction, stacklevel=stacklevel + 1)


def columns(rows: list[Row]) -> tuple[list[Any], ...]:
    """Return the parameters of several events, column by column: ten if one of them is a ``QueuedRow``, else seven."""
    if any(len(row) != PLAIN for row in rows):
        rows = [(*row, None, None, None) if len(row) == PLAIN else row for row in rows]
    return tuple(list(column) for column in zip(*rows, strict=True))


def rows_of(events: Iterable[Event]) -> list[Row]:
    """Return the parameters of each event. Raises ``InvalidEvent``, which has the index, or TypeError."""
    rows: list[Row] = []
    for index, event in enumerate(events):
        if not isinstance(cast(object, event), Event):
            raise TypeError(f"event {index} must be an outbox.Event, not {type(event).__name__}")
        try:
            rows.append(row_of(event))
        except InvalidEvent as error:
            raise InvalidEvent(f"event {index}: {error}", index) from error.__cause__
    return rows


def row_of(event: Event) -> Row:
    """Return the parameters of an event. Raises ``InvalidEvent``."""
    body, content_type = _body(event)
    row = (
        _text("type", event.type),
        body,
        None if event.key is None else _text("key", event.key),
        None if event.headers is None else _headers(event.headers),
        None if event.deliver_at is None else time_text("deliver_at", event.deliver_at),
        None if event.uid is None else _own_uid(event.uid),
        _text("content_type", content_type),
    )
    if event.tenant is None and event.priority is None and event.unique_key is None:
        return row
    return _queued(event, row)


def _queued(event: Event, row: PlainRow) -> QueuedRow:
    return (
        *row,
        None if event.tenant is None else _text("tenant", event.tenant),
        None if event.priority is None else _priority(event.priority),
        None if event.unique_key is None else _text("unique_key", event.unique_key),
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


def _priority(priority: object) -> str:
    if not isinstance(priority, int) or isinstance(priority, bool):
        raise InvalidEvent(f"priority must be an int, not {type(priority).__name__}")
    if not -PRIORITY_SENT <= priority < PRIORITY_SENT:
        raise InvalidEvent("priority must be a number from -32768 to 32767")
    return str(int(priority))


def time_text(name: str, value: object) -> str:
    """Return an aware datetime as the text that is sent. Raises ``InvalidEvent`` with the parameter's name."""
    if not isinstance(value, datetime):
        raise InvalidEvent(f"{name} must be a datetime, not {type(value).__name__}")
    if value.utcoffset() is None:
        raise InvalidEvent(f"{name} must have a time zone, such as datetime.now(UTC)")
    return value.isoformat()


def uid_text(uid: object) -> str:
    """Return a uid as the text that is sent. Raises TypeError for anything but a UUID."""
    if not isinstance(uid, UUID):
        raise TypeError(f"uid must be a uuid.UUID, not {type(uid).__name__}")
    return str(uid)


def _own_uid(uid: object) -> str:
    if not isinstance(uid, UUID):
        raise InvalidEvent(f"uid must be a uuid.UUID, not {type(uid).__name__}")
    return str(uid)
