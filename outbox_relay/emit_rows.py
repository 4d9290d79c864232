"""Events as parameters of ``outbox.emit_raw``, for every function that emits.

Imports the standard library and ``emit_spans``.

The database checks the limits, also for SQL callers. These functions check only values that cannot be sent to it.
"""

from __future__ import annotations

import json
import math
import re
import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, is_dataclass, replace
from datetime import UTC, datetime
from typing import Any, ClassVar, Final, Protocol, TypeAlias, cast
from uuid import UUID

from outbox_relay.emit_spans import Row

REFUSED: Final = re.compile(
    r"outbox\.(?:emit|cancel|reschedule): (?P<said>(?:event (?P<index>[0-9]+): )?.*)", re.DOTALL
)
"""The message of the database for an event that it refuses (SQLSTATE 22023)."""

JSON_ERROR: Final = re.compile(
    r"Object of type \w+ is not JSON serializable|keys must be str, int, float, bool or None, not \w+"
    r"|Circular reference detected|Out of range float values are not JSON compliant|maximum recursion depth exceeded"
)
"""The messages of ``json.dumps`` for values that it refuses. They name types, and nothing of the payload."""

NAME: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,39}")
"""Names of fields that an error shows."""
DEEPEST: Final = 50
"""Levels of a payload in which an error's place is looked for."""

OUTSIDE: Final = (
    "an event was emitted in autocommit mode, outside a transaction, so it is not atomic with your data; "
    "use `{}` around both"
)
"""The warning that there is no transaction; the remedy is put into it."""

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


class _Dataclass(Protocol):
    __dataclass_fields__: ClassVar[dict[str, Any]]


class _Model(Protocol):
    __pydantic_fields__: ClassVar[dict[str, Any]]


class _Struct(Protocol):
    __struct_fields__: ClassVar[tuple[str, ...]]


Declared: TypeAlias = _Dataclass | _Model | _Struct
"""An instance of a class with ``@event`` of ``outbox_relay.catalogue``: a dataclass, a pydantic model or a Struct."""
DECLARATION: Final = "__outbox_event__"
"""The attribute in which ``@event`` keeps the declaration of a class."""


class Declaration(Protocol):
    """The declaration that ``@event`` has made of a class."""

    @property
    def type(self) -> str:
        """The event's type."""
        ...

    def key_of(self, instance: object) -> str | None:
        """Return the key of an instance; None without one. Raises ``InvalidEvent``."""
        ...

    def payload_of(self, instance: object) -> Any:
        """Return an instance as ``json.dumps`` takes it. Raises ``InvalidEvent``."""
        ...


class NotGiven:
    """The payload that was left out."""

    def __repr__(self) -> str:
        return "(not given)"


NOT_GIVEN: Final = NotGiven()


@dataclass(frozen=True, slots=True)
class Event:
    """One event to emit; the fields are the arguments of :func:`emit`."""

    type: str | Declared
    payload: Any = field(default=NOT_GIVEN, repr=False)
    key: str | None = None
    headers: Mapping[str, str] | None = field(default=None, repr=False)
    deliver_at: datetime | None = None
    uid: UUID | None = None
    content_type: str | None = None
    dumps: Dumps | None = field(default=None, repr=False)
    tenant: str | None = None
    priority: int | None = None
    unique_key: str | None = None

    def __repr__(self) -> str:
        """Return type, key and the like, and nothing of the payload, which ``type`` may be."""
        names = ("key", "deliver_at", "uid", "content_type", "tenant", "priority", "unique_key")
        shown = self.type if isinstance(self.type, str) else type(self.type).__name__
        return f"Event(type={shown!r}, {', '.join(f'{name}={getattr(self, name)!r}' for name in names)})"


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


def encoding_error(error: BaseException | None) -> UnicodeEncodeError | None:
    """Return the error about text that the encoding of the connection lacks, if it has caused another one."""
    while error is not None and not isinstance(error, UnicodeEncodeError):
        error = error.__cause__
    return error


def warn_outside(remedy: str, stacklevel: int) -> None:
    """Warn with :class:`NotInTransaction` at the caller of the public function, ``stacklevel`` frames up."""
    warnings.warn(OUTSIDE.format(remedy), NotInTransaction, stacklevel=stacklevel + 1)


def rows_of(events: Iterable[Event | Declared]) -> list[Row]:
    """Return the parameters of each event. Raises ``InvalidEvent``, which has the index, or TypeError."""
    rows: list[Row] = []
    for index, event in enumerate(events):
        try:
            rows.append(row_of(event if isinstance(event, Event) else _alone(index, event)))
        except InvalidEvent as error:
            raise InvalidEvent(f"event {index}: {error}", index) from error.__cause__
    return rows


def _alone(index: int, event: object) -> Event:
    """Return the event that an instance is by itself. Raises TypeError."""
    if DECLARATION not in type(event).__dict__:
        raise TypeError(f"event {index} must be an outbox.Event, not {type(event).__name__}")
    return Event(cast(Declared, event))


def row_of(event: Event) -> Row:
    """Return the parameters of an event. Raises ``InvalidEvent``."""
    if not isinstance(event.type, str):
        event = _declared(event, event.type)
    body, content_type = _body(event)
    return (
        _text("type", event.type),
        body,
        None if event.key is None else _text("key", event.key),
        None if event.headers is None else _headers(event.headers),
        None if event.deliver_at is None else time_text("deliver_at", event.deliver_at),
        None if event.uid is None else _own_uid(event.uid),
        _text("content_type", content_type),
        None if event.tenant is None else _text("tenant", event.tenant),
        None if event.priority is None else _priority(event.priority),
        None if event.unique_key is None else _text("unique_key", event.unique_key),
    )


def _declared(event: Event, instance: object) -> Event:
    """Return the event whose type, key and payload come from an instance of a class with ``@event``."""
    found: Declaration | None = type(instance).__dict__.get(DECLARATION)
    name = type(instance).__name__
    if found is None:
        raise InvalidEvent(_undeclared(instance))
    if event.payload is not NOT_GIVEN:
        raise InvalidEvent(f"payload is given twice: the {name} is the payload, so leave out payload=")
    if event.dumps is not None:
        raise InvalidEvent(f"dumps must be left out: the class {name} says how it is serialised")
    try:
        key = found.key_of(instance) if event.key is None else event.key
    except AttributeError:  # made without its fields, as by pydantic's model_construct
        raise InvalidEvent(f"key cannot be taken from the {name}, which lacks the field") from None
    return replace(event, type=found.type, payload=found.payload_of(instance), key=key)


def _undeclared(instance: object) -> str:
    name = type(instance).__name__
    if isinstance(instance, type):
        return f"type must be a str or an instance of a class with @event, not the class {instance.__name__}"
    if isinstance(instance, Event):
        return "type is an Event: pass a list of them to emit_many, or the fields of one to emit"
    if any(DECLARATION in base.__dict__ for base in type(instance).__mro__):
        return f"type is a {name}, which has no @event of its own: decorate it too, as its base class is"
    if is_dataclass(instance) or hasattr(instance, "__pydantic_fields__") or hasattr(instance, "__struct_fields__"):
        return f'type is a {name}, which is not declared: decorate the class with @event("…") of outbox_relay.catalogue'
    return f"type must be a str, not {name}"


def _body(event: Event) -> tuple[bytes, str]:
    payload, content_type = event.payload, event.content_type
    if payload is NOT_GIVEN:
        raise InvalidEvent("payload is missing: pass it after the type")
    if event.dumps is None and isinstance(payload, bytes | bytearray | memoryview):
        if content_type is None:
            raise InvalidEvent("payload is bytes, so content_type is needed, such as 'application/octet-stream'")
        return bytes(cast(bytes, payload)), content_type
    return _serialised(payload, event.dumps), "application/json" if content_type is None else content_type


def _serialised(payload: Any, dumps: Dumps | None) -> bytes:
    try:
        body = cast(object, _json(payload) if dumps is None else dumps(payload))
    except Exception as error:
        raise InvalidEvent(f"payload is not serialisable: {_reason(error, payload, dumps)}") from error
    if isinstance(body, bytes):
        return body
    if not isinstance(body, str):
        raise InvalidEvent(f"payload is not serialisable: dumps must return str or bytes, not {type(body).__name__}")
    try:
        return body.encode()
    except UnicodeEncodeError:
        raise InvalidEvent("payload must be UTF-8, but dumps returned lone surrogates") from None


def _reason(error: Exception, payload: object, dumps: Dumps | None) -> str:
    """Return why serialisation failed, without anything of the payload."""
    if dumps is not None:
        return f"dumps raised {type(error).__name__}"
    known = JSON_ERROR.match(str(error)) if isinstance(error, TypeError | ValueError | RecursionError) else None
    said = known[0] if known else f"json.dumps raised {type(error).__name__}"
    place = _place_of_fault(payload) if known else ""
    return f"{said}{f' at {place}' if place else ''}; dumps= takes another encoder"


def _place_of_fault(payload: object) -> str:
    """Return the JSON path of the first value that ``json.dumps`` refuses, such as ``$.total``; empty if unknown.

    A name that may be data, since it is no short identifier, is shown as ``*``.
    """
    try:
        return _fault(payload, "$", DEEPEST) or ""
    except Exception:  # of a mapping of the application
        return ""


def _fault(value: object, path: str, depth: int) -> str | None:
    if value is None or isinstance(value, str | int):
        return None
    if isinstance(value, float):
        return None if math.isfinite(value) else path
    if isinstance(value, dict):
        inside = [(name, f"{path}.{_shown(name)}", each) for name, each in cast("dict[object, object]", value).items()]
    elif isinstance(value, list | tuple):
        listed = cast("list[object]", value)
        inside = [(place, f"{path}[{place}]", each) for place, each in enumerate(listed)]
    else:
        return path
    if depth == 0:
        return ""  # ends the search, which may be in a circle
    for name, where, each in inside:
        if not (name is None or isinstance(name, str | int | float)):
            return path
        if (found := _fault(each, where, depth - 1)) is not None:
            return found
    return None


def _shown(name: object) -> str:
    return name if isinstance(name, str) and NAME.fullmatch(name) else "*"


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
    try:
        return value.astimezone(UTC).isoformat()  # PostgreSQL takes offsets up to 16 hours, in whole seconds
    except OverflowError:
        raise InvalidEvent(f"{name} lies outside the years 1 to 9999 in UTC") from None


def uid_text(uid: object) -> str:
    """Return a uid as the text that is sent. Raises TypeError for anything but a UUID."""
    if not isinstance(uid, UUID):
        raise TypeError(f"uid must be a uuid.UUID, not {type(uid).__name__}")
    return str(uid)


def _own_uid(uid: object) -> str:
    if not isinstance(uid, UUID):
        raise InvalidEvent(f"uid must be a uuid.UUID, not {type(uid).__name__}")
    return str(uid)
