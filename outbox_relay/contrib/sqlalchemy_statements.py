"""The statements of ``contrib.sqlalchemy``, and the errors that they raise."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, cast
from uuid import UUID

from sqlalchemy import ARRAY, Connection, LargeBinary, String, TextClause, bindparam, text
from sqlalchemy.exc import DBAPIError

from outbox_relay.emit_rows import InvalidEvent, columns, encoding_error, refusal, unencodable
from outbox_relay.emit_spans import Row
from outbox_relay.inbox_marks import Mark, outside, refused_mark, unencodable_mark

REFUSED: Final = "22023"
"""The SQLSTATE of an event or a mark that the database refuses."""
NAMES: Final = (
    "type",
    "payload",
    "key",
    "headers",
    "deliver_at",
    "uid",
    "content_type",
    "tenant",
    "priority",
    "unique_key",
)
_ONE: Final = text("""
select cast(outbox.emit_raw(cast(:type as text), :payload, cast(:key as text),
                            cast(cast(:headers as text) as jsonb),
                            cast(cast(:deliver_at as text) as timestamptz),
                            cast(cast(:uid as text) as uuid), cast(:content_type as text), cast(:tenant as text),
                            cast(cast(:priority as text) as integer), cast(:unique_key as text)) as text)
""").bindparams(*(bindparam(name, type_=LargeBinary() if name == "payload" else String()) for name in NAMES))
# Unique keys are locked in an order that all transactions share, before the first event is emitted.
_MANY: Final = text("""
with locked as materialized (
    select outbox.lock_unique_keys(cast(:type as text[]), cast(:unique_key as text[])) as number
)
select cast(outbox.emit_raw(e.type, e.payload, e.key, cast(e.headers as jsonb), cast(e.deliver_at as timestamptz),
                            cast(e.uid as uuid), e.content_type, e.tenant, cast(e.priority as integer),
                            e.unique_key) as text),
       outbox.event_index(null)
  from locked
 cross join unnest(cast(:type as text[]), cast(:payload as bytea[]), cast(:key as text[]), cast(:headers as text[]),
                   cast(:deliver_at as text[]), cast(:uid as text[]), cast(:content_type as text[]),
                   cast(:tenant as text[]), cast(:priority as text[]), cast(:unique_key as text[]))
       with ordinality e (type, payload, key, headers, deliver_at, uid, content_type, tenant, priority, unique_key,
                          place)
 where locked.number is not null
   and outbox.event_index(e.place - 1) is not null
""").bindparams(*(bindparam(name, type_=ARRAY(LargeBinary() if name == "payload" else String())) for name in NAMES))
CANCEL: Final = text("""
select 1 where outbox.cancel(cast(cast(:uid as text) as uuid))
""").bindparams(bindparam("uid", type_=String()))
RESCHEDULE: Final = text("""
select 1 where outbox.reschedule(cast(cast(:uid as text) as uuid), cast(cast(:at as text) as timestamptz))
""").bindparams(bindparam("uid", type_=String()), bindparam("at", type_=String()))
_ONCE: Final = text("""
select 1 where outbox.once(cast(:consumer as text), cast(cast(:uid as text) as uuid))
""").bindparams(bindparam("consumer", type_=String()), bindparam("uid", type_=String()))


def is_autocommit(connection: Connection) -> bool:
    """Return True if each statement of the connection is a transaction of its own."""
    return bool(getattr(connection.connection.dbapi_connection, "autocommit", False))


def insert(connection: Connection, row: Row) -> UUID:
    """Insert an event, and return its uid."""
    try:
        return UUID(connection.execute(_ONE, dict(zip(NAMES, row, strict=True))).scalar_one())
    except UnicodeEncodeError as error:
        raise unencodable(error) from None
    except DBAPIError as error:
        if (refused := _refusal(error)) is not None:
            raise refused from None
        error.hide_parameters = True  # they hold the payload
        raise


def insert_many(connection: Connection, rows: list[Row]) -> list[UUID]:
    """Insert events in order with one statement, and return their uids."""
    try:
        found = connection.execute(_MANY, dict(zip(NAMES, columns(rows), strict=True)))
        return [UUID(uid) for uid, _ in found.all()]
    except UnicodeEncodeError as error:
        raise unencodable(error) from None
    except DBAPIError as error:
        if (refused := _refusal(error)) is not None:
            raise refused from None
        error.hide_parameters = True  # they hold the payload
        raise


def change(connection: Connection, statement: TextClause, parameters: Mapping[str, str]) -> bool:
    """Change a scheduled event; return True if that was in time."""
    try:
        return connection.execute(statement, parameters).first() is not None
    except DBAPIError as error:
        if (refused := _refusal(error)) is not None:
            raise refused from None
        raise


def insert_mark(connection: Connection, mark: Mark, remedy: str) -> bool:
    """Mark an event as handled; return True the first time. ``remedy`` is that of a call in autocommit mode."""
    if is_autocommit(connection):
        raise outside(remedy)
    try:
        return connection.execute(_ONCE, dict(zip(("consumer", "uid"), mark, strict=True))).first() is not None
    except UnicodeEncodeError as error:
        raise unencodable_mark(error) from None
    except DBAPIError as error:
        if (lacking := encoding_error(error.orig)) is not None:
            raise unencodable_mark(lacking) from None
        if (refused := refused_mark(_refused_because(error))) is not None:
            raise refused from None
        raise


def _refusal(error: DBAPIError) -> InvalidEvent | None:
    """Return the error with the message about the event, or None if neither driver nor database refused the event."""
    lacking = encoding_error(error.orig)  # asyncpg's own error, whose message shows the text
    return refusal(_refused_because(error)) if lacking is None else unencodable(lacking)


def _refused_because(error: DBAPIError) -> str | None:
    """Return the message of the database for a value that it refuses, or None for another error."""
    found: Any = error.orig
    fields = _fields_of_pg8000(found)
    if REFUSED not in (getattr(found, "sqlstate", None), getattr(found, "pgcode", None), fields.get("C")):
        return None
    diagnosis = getattr(found, "diag", None)  # of psycopg; asyncpg's own error is the cause
    return fields.get("M", str(found.__cause__ or found)) if diagnosis is None else diagnosis.message_primary


def _fields_of_pg8000(error: Any) -> Mapping[str, str]:
    """Return the fields of an error of pg8000, which is made of them; none for another driver."""
    [first, *_] = error.args or (None,)
    return cast("Mapping[str, str]", first) if isinstance(first, dict) else {}
