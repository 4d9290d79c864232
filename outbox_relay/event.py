"""The event as it stands in the log: what every later stage passes on and none changes."""

from __future__ import annotations

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


PAYLOAD = itemgetter(Event._fields.index("payload"))
DELIVER_AT = itemgetter(Event._fields.index("deliver_at"))
"""For what looks at one field of every event: with ``map`` no frame is made for each."""
