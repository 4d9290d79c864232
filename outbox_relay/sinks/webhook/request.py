"""Make the request for an event: headers and body, signed. Pure: the caller passes the time."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, TypeAlias
from urllib.parse import quote, unquote

from outbox_relay import __version__
from outbox_relay.domain.event import StoredEvent
from outbox_relay.formats import cloudevents, signatures
from outbox_relay.formats.headers import own_headers

Mode: TypeAlias = Literal["none", "binary", "structured"]

REPLAY = "outbox-replay"
"""The header with the number of the replay that delivers an event again."""
TRACEPARENT = "traceparent"
"""The one header of an event that is always forwarded."""

_FIXED = (("user-agent", f"outbox-relay/{__version__}"), ("accept", "*/*"), ("accept-encoding", "identity"))
_VALUE = re.compile(r"[\t -~]*")
_VALUE_SAFE = "".join(map(chr, range(0x20, 0x7F))) + "\t"
_ATTRIBUTE_SAFE = "".join(map(chr, range(0x21, 0x7F))).translate({ord('"'): None, ord("%"): None})


class Request(NamedTuple):
    """The headers and the body of a request, without the target, host and length that the client adds."""

    headers: Sequence[tuple[str, str]]
    body: bytes
    signature: str = ""
    """The value of ``webhook-signature``, which is in ``headers`` too."""
    personal: frozenset[str] = frozenset()
    """Values of ``headers`` that come from the event's key and its own headers, as sent and as emitted."""


@dataclass(frozen=True, slots=True)
class RequestFormat:
    """The form of a sink's requests.

    ``forward`` names, in lower case, the event's own headers that are forwarded. ``replay`` is the number of the replay
    whose events these are, or None.
    """

    cloudevents: Mode = "none"
    source: str = "/outbox-relay"
    forward: frozenset[str] = frozenset()
    replay: int | None = None


@dataclass(frozen=True, slots=True)
class Credentials:
    """The keys that sign and the headers of the settings. Never shown."""

    keys: Sequence[signatures.SigningKey]
    headers: Mapping[str, str] = field(default_factory=dict[str, str], repr=False)


def make_request(
    event: StoredEvent, request_format: RequestFormat, credentials: Credentials, *, attempt: int, now: float
) -> Request:
    """Return the request for ``event``, signed at ``now``, in unix seconds.

    ``attempt`` is its number, from 1. Raises ValueError when the event's headers cannot be read, or when its type or
    content type cannot be sent in a header. Emitted events can always be sent; the schema's owner may insert others.
    """
    body, content_type = event.payload, event.content_type
    if request_format.cloudevents == "structured":
        body, content_type = cloudevents.structured(event, request_format.source), cloudevents.CONTENT_TYPE
    if not (_VALUE.fullmatch(content_type) and _VALUE.fullmatch(event.type)):
        raise ValueError("the event's type or content type is not printable ASCII")
    timestamp = int(now)
    signature = signatures.signature_header(signatures.active_keys(credentials.keys, now), event.uid, timestamp, body)
    headers = [
        ("webhook-id", event.uid),
        ("webhook-timestamp", str(timestamp)),
        ("webhook-signature", signature),
        ("idempotency-key", event.uid),
        ("content-type", content_type.strip()),
        *_FIXED,
        ("outbox-type", event.type),
        ("outbox-attempt", str(attempt)),
    ]
    if request_format.replay is not None:
        headers.append((REPLAY, str(request_format.replay)))
    of_event = [] if event.key is None else [("outbox-key", quote(event.key, safe=""))]
    of_event.extend(_forwarded(event, request_format.forward))
    if request_format.cloudevents == "binary":
        headers.extend(_cloudevents_headers(event, request_format.source))
    headers.extend(of_event)
    headers.extend(credentials.headers.items())
    personal = frozenset(text for _, value in of_event for text in (value, unquote(value)))
    return Request(headers, body, signature, personal)


def _cloudevents_headers(event: StoredEvent, source: str) -> Iterator[tuple[str, str]]:
    """Yield the attributes as headers (HTTP binding of CloudEvents 1.0.2, sections 3.1.3.1 and 3.1.3.2)."""
    for name, value in cloudevents.attributes(event, source).items():
        yield f"ce-{name}", quote(value, safe=_ATTRIBUTE_SAFE)


def _forwarded(event: StoredEvent, forward: frozenset[str]) -> Iterator[tuple[str, str]]:
    """Yield the headers of the event that are forwarded, each name once.

    Values that are not printable ASCII are percent-encoded as UTF-8. Blanks at the ends are removed.
    """
    passed: set[str] = set()
    for name, value in own_headers(event.headers):
        lower = name.lower()
        if (lower == TRACEPARENT or (lower in forward and lower != REPLAY)) and lower not in passed:
            passed.add(lower)
            yield lower, (value if _VALUE.fullmatch(value) else quote(value, safe=_VALUE_SAFE)).strip(" \t")
