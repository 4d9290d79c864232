"""Events as CloudEvents 1.0: their attributes, and the JSON that wraps attributes and payload.

What is done here does not depend on the destination. A binding writes the attributes as it must: HTTP as headers
``ce-NAME`` with percent-encoding, Kafka as headers ``ce_NAME`` in UTF-8. In binary mode the payload stays as it is, and
its content type is what the message says.

Source: CloudEvents 1.0.2, the specification, its JSON event format (sections 3.1 and 3.1.1) and the extension for
distributed tracing.
"""

from __future__ import annotations

import base64
import json
import re
from datetime import UTC

from outbox_relay.domain.event import Event
from outbox_relay.formats.headers import own_headers

CONTENT_TYPE = "application/cloudevents+json; charset=utf-8"
"""The content type of a message in structured mode."""
SPEC_VERSION = "1.0"
TRACING = ("traceparent", "tracestate")
"""Headers of an event that become attributes."""

_PRINTABLE = re.compile(r"[ -~]+")
_JSON_TYPE = re.compile(r"\s*[^\s/;]+/(?:[^\s/;]+\+)?json\s*(?:;.*)?", re.IGNORECASE)


def attributes(event: Event, source: str) -> dict[str, str]:
    """The attributes of ``event``, required ones first; the content type of the payload is not among them.

    ``source`` says, as a URI reference, where events come from. ``time`` is when the event was emitted, in RFC 3339 and
    UTC. ``traceparent`` and ``tracestate`` are there when the event has them as headers of printable ASCII. Raises
    ValueError when the event's headers cannot be read.
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


def structured(event: Event, source: str) -> bytes:
    """``event`` and its payload as one JSON object in UTF-8, to be sent as ``CONTENT_TYPE``.

    A payload that is JSON by its content type and in truth stands in ``data``, byte for byte; any other in
    ``data_base64``. Raises ValueError when the event's headers cannot be read.
    """
    head = json.dumps(
        attributes(event, source) | {"datacontenttype": event.content_type}, ensure_ascii=False, separators=(",", ":")
    )
    if _is_json(event):
        member, data = b"data", event.payload
    else:
        member, data = b"data_base64", b'"' + base64.b64encode(event.payload) + b'"'
    return head[:-1].encode() + b',"' + member + b'":' + data + b"}"


def _is_json(event: Event) -> bool:
    """Whether the payload can stand in a JSON text: whoever emits raw bytes may call anything JSON."""
    if not _JSON_TYPE.fullmatch(event.content_type):
        return False
    try:
        # Numbers stay text: how large they are is nothing to us.
        json.loads(event.payload.decode(), parse_int=str, parse_float=str, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return False
    return True


def _refuse(name: str) -> None:
    raise ValueError(f"{name} is no JSON")
