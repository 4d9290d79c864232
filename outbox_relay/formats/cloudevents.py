"""CloudEvents 1.0: the attributes of an event, and the JSON of structured mode.

This module does not depend on the destination. Each binding writes the attributes in its own form: HTTP as headers
``ce-NAME`` with percent-encoding, Kafka as headers ``ce_NAME`` in UTF-8. In binary mode the payload is unchanged, and
its content type is that of the message.

Source: CloudEvents 1.0.2, the specification, its JSON event format (sections 3.1 and 3.1.1) and the extension for
distributed tracing.
"""

from __future__ import annotations

import base64
import json
import re
from datetime import UTC

from outbox_relay.domain.event import StoredEvent
from outbox_relay.formats.headers import own_headers

CONTENT_TYPE = "application/cloudevents+json; charset=utf-8"
"""The content type of a message in structured mode."""
SPEC_VERSION = "1.0"
TRACING = ("traceparent", "tracestate")
"""Event headers that become attributes."""

_PRINTABLE = re.compile(r"[ -~]+")
_JSON_TYPE = re.compile(r"\s*[^\s/;]+/(?:[^\s/;]+\+)?json\s*(?:;.*)?", re.IGNORECASE)


def attributes(event: StoredEvent, source: str) -> dict[str, str]:
    """Return the attributes of ``event`` except ``datacontenttype``.

    ``source`` is a URI reference to the origin of the events. ``time`` is the time of the emit, in RFC 3339 and UTC.
    ``traceparent`` and ``tracestate`` are included if the event has them as headers of printable ASCII.

    Raises ValueError if the event's headers cannot be read.
    """
    found = {
        "specversion": SPEC_VERSION,
        "id": event.uid,
        "source": source,
        "type": event.type,
        "time": event.created_at.astimezone(UTC).isoformat().replace("+00:00", "Z"),
    }
    for name, value in own_headers(event.headers):
        if name.lower() in TRACING and _PRINTABLE.fullmatch(value):
            found.setdefault(name.lower(), value)
    return found


def structured(event: StoredEvent, source: str) -> bytes:
    """Return the event and its payload as JSON in UTF-8, of type ``CONTENT_TYPE``.

    A payload that is declared as JSON and is valid becomes ``data``, byte for byte; any other becomes ``data_base64``.

    Raises ValueError if the event's headers cannot be read.
    """
    head = json.dumps(
        attributes(event, source) | {"datacontenttype": event.content_type}, ensure_ascii=False, separators=(",", ":")
    )
    if _is_json(event):
        member, data = b"data", event.payload
    else:
        member, data = b"data_base64", b'"' + base64.b64encode(event.payload) + b'"'
    return head[:-1].encode() + b',"' + member + b'":' + data + b"}"


def _is_json(event: StoredEvent) -> bool:
    """Return True if the payload is declared as JSON and is valid JSON.

    The declaration alone is not reliable, since emit does not check raw bytes.
    """
    if not _JSON_TYPE.fullmatch(event.content_type):
        return False
    try:
        # Numbers remain text, so that their size does not matter.
        json.loads(event.payload.decode(), parse_int=str, parse_float=str, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return False
    return True


def _refuse(name: str) -> None:
    raise ValueError(f"{name} is not JSON")
