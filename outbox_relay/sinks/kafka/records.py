"""The conversion of events to Kafka records: value, partition and headers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Literal, NamedTuple, TypeAlias

from outbox_relay.domain.event import StoredEvent
from outbox_relay.formats import cloudevents
from outbox_relay.formats.headers import own_headers

ANY_PARTITION = -1
"""Lets the client choose the partition by the key."""
MAX_PARTITION_DIGITS = 9
CONTENT_TYPE = 2
"""The place of the content type among the headers of a record."""
REPLAY = "outbox-replay"
"""The header with the number of the replay that delivers an event again."""
RESERVED = frozenset(("id", "type", "content-type", REPLAY))
"""The headers that every record has, and that of replays."""
RESERVED_PREFIX = "ce_"
"""The prefix of CloudEvents headers."""

Headers: TypeAlias = list[tuple[str, str | bytes | None]]


def without_reserved(own: Iterable[tuple[str, str]]) -> list[tuple[str, str]]:
    """Return an event's ``own`` headers without those named like one of the relay's, in any case.

    Consumers that keep one header per name would otherwise read the event's value, for example a forged uid. They
    recognise repeated deliveries by the uid.
    """
    return [pair for pair in own if not _is_reserved(pair[0].lower())]


def _is_reserved(name: str) -> bool:
    return name in RESERVED or name.startswith(RESERVED_PREFIX)


class RecordFormat(NamedTuple):
    """The settings by which events become records."""

    partition_header: str | None = None
    """The event header that contains the partition, or None."""
    tombstones: bool = False
    """True if an empty payload becomes a null value."""
    cloudevents: Literal["binary", "structured"] | None = None
    source: str = ""
    """The ``source`` of CloudEvents."""
    type_header: str | None = None
    """The event header whose value replaces the event's type in the header ``type``, or None."""

    replay: int | None = None
    """The number of the replay whose events these are, or None."""

    @property
    def plain(self) -> bool:
        """Return True if the value is the payload, the key chooses the partition, and no header is special."""
        return self == RecordFormat(source=self.source)

    def record(self, event: StoredEvent) -> tuple[bytes | None, int, Headers]:
        """Return value, partition and headers of the record.

        Raise ValueError, with a reason, for an event that cannot become one.
        """
        own = own_headers(event.headers)
        partition = self.partition(own)
        shown_type = _first(own, self.type_header)
        headers: Headers = [
            ("id", event.uid),
            ("type", event.type if shown_type is None else shown_type),
            ("content-type", event.content_type),
        ]
        value: bytes | None = event.payload
        if self.tombstones and not event.payload:
            if event.key is None:
                raise ValueError("an empty payload is a tombstone, and a tombstone needs a key")
            value = None
        if self.cloudevents == "structured" and value is not None:
            value = cloudevents.structured(event, self.source)
            headers[CONTENT_TYPE] = ("content-type", cloudevents.CONTENT_TYPE)
        elif self.cloudevents is not None:
            # A tombstone has no value to wrap: its attributes are headers in both modes.
            headers += [(f"ce_{name}", text) for name, text in cloudevents.attributes(event, self.source).items()]
        if self.replay is not None:
            headers.append((REPLAY, str(self.replay)))
        return value, partition, [*headers, *without_reserved(own)]

    def partition(self, own: Sequence[tuple[str, str]]) -> int:
        """Return the partition in an event's ``own`` headers. Raise ValueError if the header has no number."""
        text = _first(own, self.partition_header)
        if text is None:
            return ANY_PARTITION
        if not (text.isascii() and text.isdigit() and len(text) <= MAX_PARTITION_DIGITS):
            raise ValueError(f"header {self.partition_header} should be the number of a partition, from 0 on")
        return int(text)


def _first(own: Sequence[tuple[str, str]], wanted: str | None) -> str | None:
    """Return the first value of the header ``wanted``, or None."""
    return None if wanted is None else next((text for name, text in own if name == wanted), None)
