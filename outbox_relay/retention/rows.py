"""Archived events as canonical lines of JSON, which are also what is hashed. Pure."""

from __future__ import annotations

import base64
import json
from typing import Any

from outbox_relay.postgres.retention import DayEvent

COLUMNS = (
    "id",
    "xid",
    "shard",
    "uid",
    "type",
    "key",
    "content_type",
    "headers",
    "deliver_at",
    "created_at",
    "emitter",
    "tenant",
    "priority",
)
"""Columns that are archived as they are, in addition to the payload."""


def encode(event: DayEvent) -> bytes:
    """Return an event as one line of JSON with its end of line.

    A payload that is not UTF-8 is ``payload_base64``. Equal events have equal lines.
    """
    row: dict[str, Any] = {name: getattr(event, name) for name in COLUMNS}
    try:
        row["payload"] = None if event.payload is None else event.payload.decode()
    except UnicodeDecodeError:
        row["payload_base64"] = base64.b64encode(event.payload or b"").decode()
    return json.dumps(row, ensure_ascii=False, separators=(",", ":")).encode() + b"\n"


def decode(line: bytes) -> DayEvent:
    """Return the event of a line. Raises ``ValueError`` or ``KeyError`` for any other line."""
    row = json.loads(line)
    if "payload_base64" in row:
        payload = base64.b64decode(row["payload_base64"], validate=True)
    else:
        payload = None if row["payload"] is None else row["payload"].encode()
    return DayEvent(*(row[name] for name in COLUMNS), payload=payload, key_hash=None)
