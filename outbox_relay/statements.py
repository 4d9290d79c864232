"""The statements of ``outbox`` and ``inbox`` for any driver, and the errors for values that the database refuses.

Every parameter but the payload is sent as text and cast, because the type of a string depends on what the application
has registered with its driver.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from datetime import datetime
from typing import Any, Final, NamedTuple, TypeAlias, TypedDict
from uuid import UUID

from outbox_relay.emit_rows import Dumps, refusal, time_text, uid_text, unencodable
from outbox_relay.emit_spans import Row
from outbox_relay.inbox_marks import mark_of, refused_mark, unencodable_mark

COLUMNS: Final[Mapping[str, str]] = {
    "type": "text",
    "payload": "bytea",
    "key": "text",
    "headers": "jsonb",
    "deliver_at": "timestamptz",
    "uid": "uuid",
    "content_type": "text",
    "tenant": "text",
    "priority": "integer",
    "unique_key": "text",
}
"""The parameters of ``outbox.emit_raw`` in their order, and their types."""
PAYLOAD: Final = "payload"

Parameters: TypeAlias = dict[str, Any]
Parameter: TypeAlias = Callable[[str, int], str]
"""Returns the placeholder of a driver for a parameter, given its name and its place in the statement, from 1."""


class EventOptions(TypedDict, total=False):
    """The keyword arguments of ``outbox.emit``."""

    key: str | None
    headers: Mapping[str, str] | None
    deliver_at: datetime | None
    uid: UUID | None
    content_type: str | None
    dumps: Dumps | None
    tenant: str | None
    priority: int | None
    unique_key: str | None


class Statement(NamedTuple):
    """A statement that returns a row for each event, mark or change, with a uid as text in its first column."""

    sql: str
    refusal: Callable[[str | None], Exception | None] = refusal
    """Returns the error for a message of the database (SQLSTATE 22023); None if it is not about an event or a mark."""
    unencodable: Callable[[UnicodeEncodeError], Exception] = unencodable
    """Returns the error for text that the encoding of the connection lacks."""


class Statements(NamedTuple):
    """The statements of one driver."""

    one: Statement
    many: Statement
    cancel: Statement
    reschedule: Statement
    once: Statement


def statements(parameter: Parameter) -> Statements:
    """Return the statements for a driver whose placeholders ``parameter`` returns."""
    places = {name: parameter(name, place) for place, name in enumerate(COLUMNS, 1)}
    sent = {name: "bytea" if name == PAYLOAD else "text" for name in COLUMNS}
    one = ", ".join(_cast(f"cast({places[name]} as {sent[name]})", kind) for name, kind in COLUMNS.items())
    many = ", ".join(_cast(f"e.{name}", kind) for name, kind in COLUMNS.items())
    arrays = {name: f"cast({place} as {sent[name]}[])" for name, place in places.items()}
    uid = f"cast(cast({parameter('uid', 1)} as text) as uuid)"
    at = f"cast(cast({parameter('at', 2)} as text) as timestamptz)"
    consumer = f"cast({parameter('consumer', 1)} as text)"
    marked = f"cast(cast({parameter('uid', 2)} as text) as uuid)"
    # unnest returns rows in the order of its arrays, and the query keeps it; a sort would copy every payload.
    # The setting event_index, made before and reset after each call, lets an error name the refused event.
    # Unique keys are locked in an order that all transactions share, before the first event is emitted.
    return Statements(
        Statement(f"select cast(outbox.emit_raw({one}) as text)"),
        Statement(f"""
with locked as materialized (select outbox.lock_unique_keys({arrays["type"]}, {arrays["unique_key"]}) as number)
select cast(outbox.emit_raw({many}) as text), outbox.event_index(null)
  from locked
 cross join unnest({", ".join(arrays.values())}) with ordinality e ({", ".join(COLUMNS)}, place)
 where locked.number is not null and outbox.event_index(e.place - 1) is not null
"""),  # noqa: S608 - of the names above
        Statement(f"select '' where outbox.cancel({uid})"),
        Statement(f"select '' where outbox.reschedule({uid}, {at})"),
        Statement(f"select '' where outbox.once({consumer}, {marked})", refused_mark, unencodable_mark),
    )


def one_event(row: Row) -> Parameters:
    """Return the parameters of the statement for one event."""
    return dict(zip(COLUMNS, row, strict=True))


def many_events(rows: Iterable[Row]) -> Parameters:
    """Return the parameters of the statement for several events."""
    return {name: list(column) for name, column in zip(COLUMNS, zip(*rows, strict=True), strict=True)}


def event_uid(uid: object) -> Parameters:
    """Return the parameters that cancel an event. Raises TypeError for anything but a UUID."""
    return {"uid": uid_text(uid)}


def event_time(uid: object, at: object) -> Parameters:
    """Return the parameters that move an event. Raises ``InvalidEvent`` for a time that is not an aware datetime."""
    return {"uid": uid_text(uid), "at": time_text("at", at)}


def mark(consumer: object, uid: object) -> Parameters:
    """Return the parameters of a mark. Raises ``InvalidMark``."""
    name, text = mark_of(consumer, uid)
    return {"consumer": name, "uid": text}


def _cast(value: str, kind: str) -> str:
    return value if kind in ("text", "bytea") else f"cast({value} as {kind})"
