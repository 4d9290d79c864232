"""The schema of each event: the subject in the registry, and the encoder of its latest version."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Literal, NamedTuple, Protocol, TypeAlias

from outbox_relay.domain.outcomes import Unavailable
from outbox_relay.sinks.kafka.call import DeliverCall, Encoder
from outbox_relay.sinks.kafka.topic_breakers import TopicBreakers

MAX_SUBJECTS = 1_000
"""Maximum number of schemas remembered."""
STALE_SECONDS = 10.0
"""Time for which a known schema is used further after the registry did not answer for a newer one."""

Strategy: TypeAlias = Literal["topic", "record", "topic-record"]


class SchemasUnavailable(Exception):
    """The registry gives no schemas now. The message says why, without secrets."""


class SchemaUnusable(Exception):
    """The registry has no schema for a subject, or none that the sink can use. The message says why."""


class Subject(NamedTuple):
    """A subject in the registry, and the name of the record or message that its events are."""

    name: str
    record: str | None
    event_type: str
    """The type of the event that asked first."""


class SchemaSource(Protocol):
    """Finds schemas. Both methods block for at most ``seconds``."""

    def encoder(self, subject: Subject, seconds: float, cancelled: Callable[[], bool]) -> Encoder:
        """Return the encoder of the newest schema. Raise ``SchemasUnavailable`` or ``SchemaUnusable``."""
        ...

    def probe(self, seconds: float) -> None:
        """Raise ``SchemasUnavailable`` if the registry does not answer."""
        ...


class SubjectNaming(NamedTuple):
    """The rule by which a subject is named. ``records`` has the names of records by event type."""

    strategy: Strategy
    records: Mapping[str, str]

    def subject(self, topic: str, event_type: str) -> Subject:
        """Return the subject of events of ``event_type`` in ``topic``."""
        record = self.records.get(event_type)
        match self.strategy:
            case "topic":
                return Subject(f"{topic}-value", record, event_type)
            case "record":
                return Subject(record or event_type, record or event_type, event_type)
            case "topic-record":
                return Subject(f"{topic}-{record or event_type}", record or event_type, event_type)


class _Known(NamedTuple):
    encoder: Encoder
    fresh_until: float


class EventSchemas:
    """Assigns encoders to events. Used by one thread, except for :meth:`check`.

    A schema is asked for again after ``cache_seconds``. While the registry does not answer, the known one remains in
    use. A subject without a usable schema makes only its own events unavailable, unless all events have the one
    subject ``only``.
    """

    def __init__(
        self, naming: SubjectNaming, source: SchemaSource, cache_seconds: float, *, only: str | None = None
    ) -> None:
        self._naming = naming
        self._source = source
        self._cache_seconds = cache_seconds
        self._only = only
        self._known: dict[tuple[str, str | None], _Known] = {}
        self._breakers = TopicBreakers("subject")

    def assign(self, call: DeliverCall, seconds: float) -> Mapping[int, Unavailable]:
        """Set the encoders of the pending events of ``call``, and return the verdicts on those without a schema.

        An event keeps the encoder that it has. Takes little longer than ``seconds``. Raise ``SchemasUnavailable`` if a
        schema is not known and the registry does not answer.
        """
        if not call.encoders:
            call.set_encoders([None] * len(call.batch))
        deadline = time.monotonic() + seconds
        found: dict[tuple[str, str], Encoder | Unavailable] = {}
        held: dict[int, Unavailable] = {}
        for index in call.pending:
            topic, event_type = call.topics[index], call.batch[index].type
            if topic is None or call.encoders[index] is not None:
                continue
            place = (topic, event_type)
            if place not in found:
                found[place] = self._find(self._naming.subject(*place), deadline, lambda: call.round.withdrawn)
            answer = found[place]
            if isinstance(answer, Unavailable):
                held[index] = answer
            else:
                call.encoders[index] = answer
        return held

    def _find(self, subject: Subject, deadline: float, cancelled: Callable[[], bool]) -> Encoder | Unavailable:
        now = time.monotonic()
        place = (subject.name, subject.record)
        known = self._known.get(place)
        if known is not None and now < known.fresh_until:
            return known.encoder
        if not self._breakers.may_request(subject.name, now):
            return self._breakers.verdict(subject.name, now)
        try:
            encoder = self._source.encoder(subject, max(deadline - now, 0.0), cancelled)
        except SchemasUnavailable:
            if known is None:
                raise
            self._known[place] = known._replace(fresh_until=time.monotonic() + STALE_SECONDS)
            return known.encoder
        except SchemaUnusable as reason:
            if subject.name == self._only:
                raise SchemasUnavailable(str(reason)) from None
            now = time.monotonic()
            self._breakers.open(subject.name, str(reason), now)
            return self._breakers.verdict(subject.name, now)
        self._breakers.close(subject.name)
        if len(self._known) >= MAX_SUBJECTS:
            self._known.clear()
        self._known[place] = _Known(encoder, time.monotonic() + self._cache_seconds)
        return encoder

    def check(self, topic_of: Callable[[str], str | None], seconds: float) -> str | None:
        """Return why the registry, or a subject of a type in the settings, gives no schema now, or None. Blocks."""
        deadline = time.monotonic() + seconds
        try:
            self._source.probe(seconds)
            for subject in self._named_subjects(topic_of):
                self._source.encoder(subject, max(deadline - time.monotonic(), 0.0), lambda: False)
        except (SchemasUnavailable, SchemaUnusable) as reason:
            return str(reason)
        return None

    def _named_subjects(self, topic_of: Callable[[str], str | None]) -> Sequence[Subject]:
        """Return the subjects that follow from the settings."""
        topics = {event_type: topic_of(event_type) for event_type in self._naming.records}
        if self._naming.strategy == "record":
            topics = {event_type: topic or "" for event_type, topic in topics.items()}
        subjects = [self._naming.subject(topic, each) for each, topic in topics.items() if topic is not None]
        if not subjects and self._only is not None:
            return [Subject(self._only, None, "")]
        return subjects
