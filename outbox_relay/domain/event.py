"""The event as it stands in the log: what every later stage passes on and none changes."""

from __future__ import annotations

from collections.abc import Callable, Sequence, Sized
from datetime import datetime
from operator import itemgetter
from typing import NamedTuple

SHARDS = 64
"""Shards of every sink: an event's shard is a hash of its key, or of its uid when it has no key."""


class Event(NamedTuple):
    """One row of ``outbox.event``, in the column order of the reading functions of the schema.

    A tuple, because hundreds of thousands of these pass every second: no instance dict, no attribute
    set after it is read.
    """

    id: int
    shard: int
    uid: str
    type: str
    key: str | None
    payload: bytes
    content_type: str
    headers: str | None
    """A JSON object of strings as text, or nothing; parsed only by the sink that needs it."""
    deliver_at: datetime | None
    created_at: datetime
    fault: str | None = None
    """Why the event cannot be delivered, or None. Its payload was not fetched: the event becomes a dead letter."""


KEY = itemgetter(Event._fields.index("key"))
PAYLOAD = itemgetter(Event._fields.index("payload"))
HEADERS = itemgetter(Event._fields.index("headers"))
FAULT = itemgetter(Event._fields.index("fault"))
DELIVER_AT = itemgetter(Event._fields.index("deliver_at"))
"""For what looks at one field of every event: with ``map`` no frame is made for each."""
BYTES_OF_CHARACTER = 4
"""The longest encoding of a character in UTF-8."""


def memory_bytes(events: Sequence[Event]) -> int:
    """Return the size of payloads, keys and headers together; a character of a key or header counts as one byte."""
    return _length(events, PAYLOAD) + _length(events, KEY) + _length(events, HEADERS)


def most_wire_bytes(events: Sequence[Event]) -> int:
    """Return an upper bound of the bytes that the database counted for ``events``."""
    texts = _length(events, KEY) + _length(events, HEADERS)
    return _length(events, PAYLOAD) + BYTES_OF_CHARACTER * texts


def _length(events: Sequence[Event], field: Callable[[Event], Sized | None]) -> int:
    return sum(map(len, filter(None, map(field, events))))


def looked_through(events: list[Event]) -> int | None:
    """Remove the row that ends an incomplete read, and return the id up to which the log was searched.

    None when the read was complete or cut only by its bounds. See ``outbox.read_late``.
    """
    return events.pop().id if events and events[-1].shard < 0 else None
