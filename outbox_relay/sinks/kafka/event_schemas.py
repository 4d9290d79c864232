"""The schema of each event: the subject in the registry, and the encoder of its latest version."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Literal, NamedTuple, Protocol, TypeAlias

from outbox_relay.domain.outcomes import Refused, Unavailable
from outbox_relay.sinks.kafka.call import DeliverCall, Encoder

MAX_SUBJECTS = 1_000
"""Maximum number of subjects remembered, with their encoders, which have the ids of their schemas."""
MAX_BYTES = 16 * 1024 * 1024
"""Maximum size of the remembered schemas, as texts."""
STALE_SECONDS = 10.0
"""Time for which no known schema is asked for again after the registry did not answer."""
MISSING_SECONDS = 10.0
"""Time for which a subject without a usable schema is remembered."""
RETRY_SECONDS = 1.0
"""Least delay of an event for whose schema a batch had no time."""

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


class Inquiry(Protocol):
    """A few questions in a row to a registry. Their methods block, and raise ``SchemasUnavailable``."""

    def encoder(self, subject: Subject) -> Encoder:
        """Return the encoder of the newest schema. Raise ``SchemaUnusable`` if there is none."""
        ...

    def probe(self) -> None:
        """Return if the registry answers."""
        ...

    def close(self) -> None:
        """Close the connection."""
        ...


class SchemaSource(Protocol):
    """A registry. Any thread may inquire."""

    def inquire(self, until: float, cancelled: Callable[[], bool]) -> Inquiry:
        """Return an inquiry that waits until ``until`` in ``time.monotonic()``, or until ``cancelled()``."""
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
    answer: Encoder | Refused
    fresh_until: float

    @property
    def size(self) -> int:
        return 0 if isinstance(self.answer, Refused) else self.answer.size


class EventSchemas:
    """Assigns encoders to events. Used by one thread, except for :meth:`check`.

    A schema is asked for again after ``cache_seconds``, and a missing one sooner. While the registry does not answer,
    the known ones remain in use. An event whose subject has no usable schema is refused. ``only`` is the subject of
    all events, if they have one.
    """

    def __init__(
        self, naming: SubjectNaming, source: SchemaSource, cache_seconds: float, *, only: str | None = None
    ) -> None:
        self._naming = naming
        self._source = source
        self._cache_seconds = cache_seconds
        self._only = only
        self._known: dict[tuple[str, str | None], _Known] = {}
        self._bytes = 0
        self._silent_until = 0.0

    def assign(self, call: DeliverCall, seconds: float) -> Mapping[int, Refused | Unavailable]:
        """Set the encoders of the pending events of ``call``, and return the verdicts on those without a schema.

        An event keeps the encoder that it has. Takes little longer than ``seconds``. Raise ``SchemasUnavailable`` if a
        schema is not known and the registry does not answer.
        """
        if not call.encoders:
            call.set_encoders([None] * len(call.batch))
        search = _Search(self._source, time.monotonic() + seconds, lambda: call.round.withdrawn)
        found: dict[tuple[str, str], Encoder | Refused | Unavailable] = {}
        without: dict[int, Refused | Unavailable] = {}
        try:
            for index in call.pending:
                topic, event_type = call.topics[index], call.batch[index].type
                if topic is None or call.encoders[index] is not None:
                    continue
                place = (topic, event_type)
                if place not in found:
                    found[place] = self._find(self._naming.subject(*place), search)
                answer = found[place]
                if isinstance(answer, Refused | Unavailable):
                    without[index] = answer
                else:
                    call.encoders[index] = answer
        finally:
            search.close()
        return without

    def _find(self, subject: Subject, search: _Search) -> Encoder | Refused | Unavailable:
        now, place = time.monotonic(), (subject.name, subject.record)
        known = self._recall(place, now)
        if known is not None and (now < max(known.fresh_until, self._silent_until) or search.is_over(now)):
            return known.answer
        if known is None and search.answered and search.is_over(now):
            return _late(subject)
        try:
            answer: Encoder | Refused = search.encoder(subject)
            seconds = self._cache_seconds
        except SchemaUnusable as reason:
            answer, seconds = Refused(str(reason)), min(MISSING_SECONDS, self._cache_seconds)
        except SchemasUnavailable:
            now = time.monotonic()
            if known is None and search.answered and search.is_over(now):
                return _late(subject)
            self._silent_until = now + STALE_SECONDS
            if known is None:
                raise
            return known.answer
        self._silent_until = 0.0
        self._remember(place, _Known(answer, time.monotonic() + seconds))
        return answer

    def _recall(self, place: tuple[str, str | None], now: float) -> _Known | None:
        """Return what is known of a subject. A refusal is forgotten in time: a silent registry makes no event dead."""
        known = self._known.pop(place, None)
        if known is None:
            return None
        # The order of the table is that of use: what was not used for longest is forgotten first.
        self._known[place] = known
        return None if isinstance(known.answer, Refused) and now >= known.fresh_until else known

    def _remember(self, place: tuple[str, str | None], newer: _Known) -> None:
        self._forget(place)
        while self._known and (len(self._known) >= MAX_SUBJECTS or self._bytes + newer.size > MAX_BYTES):
            self._forget(next(iter(self._known)))
        self._known[place] = newer
        self._bytes += newer.size

    def _forget(self, place: tuple[str, str | None]) -> None:
        if (known := self._known.pop(place, None)) is not None:
            self._bytes -= known.size

    def check(self, topic_of: Callable[[str], str | None], seconds: float) -> str | None:
        """Return why the registry, or a subject of a type in the settings, gives no schema now, or None. Blocks."""
        inquiry = self._source.inquire(time.monotonic() + seconds, lambda: False)
        try:
            inquiry.probe()
            for subject in self._named_subjects(topic_of):
                inquiry.encoder(subject)
        except (SchemasUnavailable, SchemaUnusable) as reason:
            return str(reason)
        finally:
            inquiry.close()
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


class _Search:
    """The questions of one call, whose time and whose bytes of schemas are limited. Connects at the first one."""

    def __init__(self, source: SchemaSource, until: float, cancelled: Callable[[], bool]) -> None:
        self._source = source
        self._until = until
        self._cancelled = cancelled
        self._inquiry: Inquiry | None = None
        self._bytes = 0
        self.answered = False
        """True once the registry has given a schema."""

    def is_over(self, now: float) -> bool:
        """Return True if no more may be asked."""
        return now >= self._until or self._bytes > MAX_BYTES

    def encoder(self, subject: Subject) -> Encoder:
        """Return the encoder of the newest schema. Raise ``SchemasUnavailable`` or ``SchemaUnusable``."""
        if self._inquiry is None:
            self._inquiry = self._source.inquire(self._until, self._cancelled)
        encoder = self._inquiry.encoder(subject)
        self._bytes += encoder.size
        self.answered = True
        return encoder

    def close(self) -> None:
        """Close the connection, if there is one."""
        if self._inquiry is not None:
            self._inquiry.close()


def _late(subject: Subject) -> Unavailable:
    """Return the verdict on an event for whose schema its batch had no time. The batch's other events are delivered."""
    reason = "the batch needs more schemas than can be read at once"
    return Unavailable(reason, retry_after_seconds=RETRY_SECONDS, part=f"subject {subject.name}")
