"""What an event becomes as a request: headers and body, pure, for a given time."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, TypeAlias
from urllib.parse import quote, unquote

from outbox_relay import __version__
from outbox_relay.domain.event import Event
from outbox_relay.formats import cloudevents, signatures
from outbox_relay.formats.headers import own_headers

Mode: TypeAlias = Literal["none", "binary", "structured"]

TRACEPARENT = "traceparent"
"""The one header of an event that is always passed on."""

_FIXED = (("user-agent", f"outbox-relay/{__version__}"), ("accept", "*/*"), ("accept-encoding", "identity"))
_VALUE = re.compile(r"[\t -~]*")
_VALUE_SAFE = "".join(map(chr, range(0x20, 0x7F))) + "\t"
_ATTRIBUTE_SAFE = "".join(map(chr, range(0x21, 0x7F))).translate({ord('"'): None, ord("%"): None})


class Request(NamedTuple):
    """A request but for what the connection adds: where it goes and how long it is."""

    headers: Sequence[tuple[str, str]]
    body: bytes
    signature: str = ""
    """The value of ``webhook-signature``, which stands in ``headers`` too."""
    personal: frozenset[str] = frozenset()
    """What stands of the event's key and of its own headers in ``headers``, as sent and as emitted."""


@dataclass(frozen=True, slots=True)
class Form:
    """How the requests of one sink are made.

    ``forward`` are the names, in lower case, of the event's own headers that are passed on.
    """

    cloudevents: Mode = "none"
    source: str = "/outbox-relay"
    forward: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class Credentials:
    """What may change while the sink runs: the keys that sign, the headers of its settings. Never shown."""

    keys: Sequence[signatures.Key]
    headers: Mapping[str, str] = field(default_factory=dict[str, str], repr=False)
    proxy_authorization: str | None = field(default=None, repr=False)
    """What a proxy is shown; never a part of a request."""


def request(event: Event, form: Form, credentials: Credentials, *, attempt: int, now: float) -> Request:
    """The request for ``event``, signed at ``now``, in unix seconds.

    ``attempt`` is its number, from 1. Raises ValueError when the event's headers cannot be read, or when its content
    type or type cannot stand in a header: what is emitted can, what an owner inserts into the log need not.
    """
    body, content_type = event.payload, event.content_type
    if form.cloudevents == "structured":
        body, content_type = cloudevents.structured(event, form.source), cloudevents.CONTENT_TYPE
    if not (_VALUE.fullmatch(content_type) and _VALUE.fullmatch(event.type)):
        raise ValueError("the event's type or content type is not printable ASCII")
    timestamp = int(now)
    signature = signatures.header(signatures.signing(credentials.keys, now), event.uid, timestamp, body)
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
    passed = [] if event.key is None else [("outbox-key", quote(event.key, safe=""))]
    passed.extend(_of_event(event, form.forward))
    if form.cloudevents == "binary":
        headers.extend(_attributes(event, form.source))
    headers.extend(passed)
    headers.extend(credentials.headers.items())
    personal = frozenset(text for _, value in passed for text in (value, unquote(value)))
    return Request(headers, body, signature, personal)


def _attributes(event: Event, source: str) -> Iterator[tuple[str, str]]:
    """The attributes as the HTTP binding of CloudEvents 1.0.2 writes them, sections 3.1.3.1 and 3.1.3.2."""
    for name, value in cloudevents.attributes(event, source).items():
        yield f"ce-{name}", quote(value, safe=_ATTRIBUTE_SAFE)


def _of_event(event: Event, forward: frozenset[str]) -> Iterator[tuple[str, str]]:
    """Those headers of the event that are passed on, each name once.

    A header holds printable ASCII: what is not is percent-encoded as UTF-8. Blanks at the ends are no part of a value.
    """
    passed: set[str] = set()
    for name, value in own_headers(event.headers):
        lower = name.lower()
        if (lower == TRACEPARENT or lower in forward) and lower not in passed:
            passed.add(lower)
            yield lower, (value if _VALUE.fullmatch(value) else quote(value, safe=_VALUE_SAFE)).strip(" \t")
