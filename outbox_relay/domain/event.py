"""The immutable event of the log, as every stage of the relay passes it on."""

from __future__ import annotations

from collections.abc import Callable, Sequence, Sized
from datetime import datetime
from operator import itemgetter
from typing import NamedTuple

SHARDS = 64
"""Shards of every sink. An event's shard is a hash of its key, or of its uid if it has no key."""


class StoredEvent(NamedTuple):
    """One row of ``outbox.event``, in the column order of the reading functions.

    A tuple, because hundreds of thousands of these pass every second: it has no instance dict and cannot be changed.
    """

    id: int
    shard: int
    uid: str
    type: str
    key: str | None
    payload: bytes
    content_type: str
    headers: str | None
    """The text of a JSON object of strings, or None; parsed only by a sink that needs it."""
    deliver_at: datetime | None
    created_at: datetime
    fault: str | None = None
    """Why the event cannot be delivered, or None. Its payload was not fetched, and it becomes a dead letter."""
    tenant: str | None = None
    """Whose event it is, in an application with several tenants, or None."""


ID = itemgetter(StoredEvent._fields.index("id"))
KEY = itemgetter(StoredEvent._fields.index("key"))
PAYLOAD = itemgetter(StoredEvent._fields.index("payload"))
HEADERS = itemgetter(StoredEvent._fields.index("headers"))
FAULT = itemgetter(StoredEvent._fields.index("fault"))
DELIVER_AT = itemgetter(StoredEvent._fields.index("deliver_at"))
"""Getters of one field for use with ``map``, which makes no frame per event."""
UNREAD = "unread"
"""The ``fault`` of an event without its contents, which is to be read again. It never reaches a dispatcher."""
MAX_CHARACTER_BYTES = 4
"""The longest encoding of a character in UTF-8."""


def memory_bytes(events: Sequence[StoredEvent]) -> int:
    """Return the size of payloads, keys and headers together.

    A character of a key or header counts as one byte.
    """
    return _length(events, PAYLOAD) + _length(events, KEY) + _length(events, HEADERS)


def max_wire_bytes(events: Sequence[StoredEvent]) -> int:
    """Return an upper bound of the bytes that the database counted for ``events``."""
    texts = _length(events, KEY) + _length(events, HEADERS)
    return _length(events, PAYLOAD) + MAX_CHARACTER_BYTES * texts


def _length(events: Sequence[StoredEvent], field: Callable[[StoredEvent], Sized | None]) -> int:
    return sum(map(len, filter(None, map(field, events))))


def pop_scan_end(events: list[StoredEvent]) -> int | None:
    """Remove the end row of an incomplete read, and return the last searched id.

    None if the read was complete or was cut only by its bounds. See ``outbox_internal.read_late``.
    """
    return events.pop().id if events and events[-1].shard < 0 else None


def cut_unread(events: list[StoredEvent]) -> bool:
    """Remove the first event that is to be read again, and those behind it. Return True if there was one.

    See ``outbox_internal.read_rest``, which reads the contents of small events only if it is asked to.
    """
    if not any(map(FAULT, events)):
        return False
    first = next((n for n, event in enumerate(events) if event.fault == UNREAD), None)
    if first is not None:
        del events[first:]
    return first is not None


def pop_passed_by(events: list[StoredEvent]) -> list[StoredEvent]:
    """Remove the events that a replay passes by, and return them. Their ``fault`` is the reason.

    See ``outbox_internal.read_replayed``, which returns them without a uid.
    """
    passed_by = [event for event in events if not event.uid]
    if passed_by:
        events[:] = [event for event in events if event.uid]
    return passed_by
