"""What an event becomes in Kafka: its topic, its partition, its value and its headers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Literal, NamedTuple, Protocol, TypeAlias

from outbox_relay import cloudevents
from outbox_relay.event import Event
from outbox_relay.headers import own_headers

ANY_PARTITION = -1
"""Tells the client to choose the partition by the key."""
PARTITION_DIGITS = 9

Headers: TypeAlias = list[tuple[str, str | bytes | None]]


class Form(NamedTuple):
    """How events become records, where that is not the plain way."""

    partition_header: str | None = None
    """The event's own header that names the partition."""
    tombstones: bool = False
    """Whether an empty payload becomes a null value."""
    cloudevents: Literal["binary", "structured"] | None = None
    source: str = ""
    """The ``source`` of CloudEvents."""

    @property
    def plain(self) -> bool:
        """Whether the payload is the value, the key chooses the partition, and the headers are the plain ones."""
        return self.partition_header is None and not self.tombstones and self.cloudevents is None

    def record(self, event: Event) -> tuple[bytes | None, int, Headers]:
        """Value, partition and headers of the record. Raises ValueError, with a reason, for an event that has none."""
        own = own_headers(event.headers)
        partition = self.partition(own)
        headers: Headers = [("id", event.uid), ("type", event.type), ("content-type", event.content_type)]
        value: bytes | None = event.payload
        if self.tombstones and not event.payload:
            if event.key is None:
                raise ValueError("an empty payload is a tombstone, and a tombstone needs a key")
            value = None
        if self.cloudevents == "structured" and value is not None:
            value = cloudevents.structured(event, self.source)
            headers[2] = ("content-type", cloudevents.CONTENT_TYPE)
        elif self.cloudevents is not None:
            # A tombstone has no value that could be wrapped: it is told of in headers in both modes.
            attributes = [(f"ce_{name}", text) for name, text in cloudevents.attributes(event, self.source).items()]
            headers += attributes
            names = {name for name, _ in attributes}
            own = [(name, text) for name, text in own if name not in names]
        return value, partition, [*headers, *own]

    def partition(self, own: Sequence[tuple[str, str]]) -> int:
        """The partition that the event's ``own`` headers name. Raises ValueError when what they name is none."""
        text = next((text for name, text in own if name == self.partition_header), None)
        if text is None:
            return ANY_PARTITION
        if not (text.isascii() and text.isdigit() and len(text) <= PARTITION_DIGITS):
            raise ValueError(f"header {self.partition_header} should be the number of a partition, from 0 on")
        return int(text)


class Template(Protocol):
    """What the sink asks of a topic template."""

    @property
    def fields(self) -> tuple[str, ...]:
        """The fields it is made of: ``type``, ``key``, ``headers.NAME``; none when every event has the same topic."""
        ...

    def render(self, event_type: str, key: str | None, headers: Mapping[str, str]) -> str:
        """The topic of an event. Raises ValueError when it has none, with a reason that holds no value."""
        ...


class Topics:
    """Names the topic of each event of a batch."""

    def __init__(self, template: Template) -> None:
        self._template = template
        self._of_headers = any(name.startswith("headers.") for name in template.fields)
        self.constant = None if template.fields else template.render("", None, {})
        """The one topic of all events, if the template has no field."""

    def of(self, batch: Sequence[Event], refuse: Callable[[int, str], None]) -> Sequence[str | None]:
        """The topic of each place; none where the event can have no topic, and ``refuse`` is told the place and why."""
        if self.constant is not None:
            return [self.constant] * len(batch)
        return [self._topic(place, event, refuse) for place, event in enumerate(batch)]

    def _topic(self, place: int, event: Event, refuse: Callable[[int, str], None]) -> str | None:
        try:
            headers = dict(own_headers(event.headers)) if self._of_headers and event.headers else {}
            return self._template.render(event.type, event.key, headers)
        except ValueError as reason:
            refuse(place, str(reason))
            return None
        except Exception as reason:
            refuse(place, f"the event cannot be made into a record ({type(reason).__name__})")
            return None
