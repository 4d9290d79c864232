"""What an event becomes in Kafka: its topic, its partition, its value and its headers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Literal, NamedTuple, Protocol, TypeAlias

from outbox_relay.domain.event import Event
from outbox_relay.domain.routing import matches
from outbox_relay.formats import cloudevents
from outbox_relay.formats.headers import own_headers
from outbox_relay.formats.topics import INTERNAL_PREFIX, TOPICS_MAX

ANY_PARTITION = -1
"""Tells the client to choose the partition by the key."""
PARTITION_DIGITS = 9
RESERVED = frozenset(("id", "type", "content-type"))
"""Names of the headers that every record has."""
RESERVED_PREFIX = "ce_"
"""The beginning of the names by which a record says that it is a CloudEvent."""
REMEMBERED_TOPICS = 4096
"""Allowed topics that are remembered, at most."""

Headers: TypeAlias = list[tuple[str, str | bytes | None]]


def passed_on(own: Iterable[tuple[str, str]]) -> list[tuple[str, str]]:
    """Return those of an event's ``own`` headers that do not have the name of one of the relay's, in any case.

    Consumers that keep one header per name would otherwise believe the event: its uid is the key by which they
    recognise a repeated delivery.
    """
    return [pair for pair in own if not _is_reserved(pair[0].lower())]


def _is_reserved(name: str) -> bool:
    return name in RESERVED or name.startswith(RESERVED_PREFIX)


class RecordFormat(NamedTuple):
    """How events become records, where that is not the plain way."""

    partition_header: str | None = None
    """The event's own header that names the partition."""
    tombstones: bool = False
    """Whether an empty payload becomes a null value."""
    cloudevents: Literal["binary", "structured"] | None = None
    source: str = ""
    """The ``source`` of CloudEvents."""
    type_header: str | None = None
    """The event's own header whose value stands in the header ``type`` instead of the event's type."""

    @property
    def plain(self) -> bool:
        """Whether the payload is the value, the key chooses the partition, and the headers are the plain ones."""
        return self == RecordFormat(source=self.source)

    def record(self, event: Event) -> tuple[bytes | None, int, Headers]:
        """Value, partition and headers of the record. Raises ValueError, with a reason, for an event that has none."""
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
            headers[2] = ("content-type", cloudevents.CONTENT_TYPE)
        elif self.cloudevents is not None:
            # A tombstone has no value that could be wrapped: it is told of in headers in both modes.
            headers += [(f"ce_{name}", text) for name, text in cloudevents.attributes(event, self.source).items()]
        return value, partition, [*headers, *passed_on(own)]

    def partition(self, own: Sequence[tuple[str, str]]) -> int:
        """The partition that the event's ``own`` headers name. Raises ValueError when what they name is none."""
        text = _first(own, self.partition_header)
        if text is None:
            return ANY_PARTITION
        if not (text.isascii() and text.isdigit() and len(text) <= PARTITION_DIGITS):
            raise ValueError(f"header {self.partition_header} should be the number of a partition, from 0 on")
        return int(text)


def _first(own: Sequence[tuple[str, str]], wanted: str | None) -> str | None:
    """Return the value of the header ``wanted``; None when the event has no such header, or none is wanted."""
    return None if wanted is None else next((text for name, text in own if name == wanted), None)


class Template(Protocol):
    """What the sink asks of a topic template."""

    @property
    def fields(self) -> tuple[str, ...]:
        """The fields it is made of: ``type``, ``key``, ``headers.NAME``; none when every event has the same topic."""
        ...

    def render(self, event_type: str, key: str | None, headers: Mapping[str, str]) -> str:
        """The topic of an event. Raises ValueError when it has none, with a reason that holds no value."""
        ...


class TopicResolver:
    """Names the topic of each event of a batch.

    ``allowed`` are the patterns of the topics that events may make; without any every topic is allowed. Kafka's
    internal topics, whose names begin with ``__``, are never allowed. ``most`` bounds how many the sink makes.
    """

    def __init__(self, template: Template, allowed: Sequence[str] = (), most: int = TOPICS_MAX) -> None:
        self.most = most
        """How many different topics the sink may make."""
        self._template = template
        self._allowed = tuple(allowed)
        self._known: set[str] = set()
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
            topic = self._template.render(event.type, event.key, headers)
            if topic not in self._known:
                self._check(topic)
        except ValueError as reason:
            refuse(place, str(reason))
            return None
        except Exception as reason:
            refuse(place, f"the event cannot be made into a record ({type(reason).__name__})")
            return None
        return topic

    @property
    def named(self) -> frozenset[str]:
        """The topics that the settings allow by their whole names."""
        return frozenset(pattern for pattern in self._allowed if "*" not in pattern)

    def _check(self, topic: str) -> None:
        """Raise ValueError, with the setting to change, unless events may make ``topic``."""
        if topic.startswith(INTERNAL_PREFIX):
            raise ValueError(f"topic {topic}: names that begin with {INTERNAL_PREFIX} are Kafka's own")
        if self._allowed and not any(matches(pattern, topic) for pattern in self._allowed):
            raise ValueError(f"topic {topic} is not among the topics of this sink: add it to the setting topics")
        if len(self._known) >= REMEMBERED_TOPICS:
            self._known.clear()
        self._known.add(topic)
