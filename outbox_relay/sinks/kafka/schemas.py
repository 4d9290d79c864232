"""The schema of each event: the subject in the registry, and the encoder of its latest version."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Literal, NamedTuple, Protocol, TypeAlias

from outbox_relay.domain.event import StoredEvent
from outbox_relay.domain.outcomes import Refused, Unavailable
from outbox_relay.sinks.kafka.cluster import ClusterUnavailable
from outbox_relay.sinks.kafka.delivery import Delivery, Encoder

MAX_SUBJECTS = 1_000
"""Maximum number of subjects remembered, with their encoders, which have the ids of their schemas."""
STALE_SECONDS = 10.0
"""Time for which no known subject is asked for again after the registry did not answer."""
MISSING_SECONDS = 1.0
"""Time for which a subject without a usable schema is not asked for again, doubled each time."""
MAX_MISSING_SECONDS = 60.0

Strategy: TypeAlias = Literal["topic", "record", "topic-record"]
Place: TypeAlias = tuple[str, str | None]
"""The name and the record of a subject."""


class SchemasUnavailable(ClusterUnavailable):
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
    """A registry."""

    def read(self, subjects: Sequence[Subject], seconds: float) -> Iterable[tuple[Subject, Encoder | SchemaUnusable]]:
        """Yield the encoder of the newest schema of each subject, or why there is none. Blocks.

        Without subjects find out if the registry answers. Raise ``SchemasUnavailable`` if it does not answer within
        ``seconds``.
        """
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
    """The last answer of the registry on a subject. Times are of ``time.monotonic()``."""

    answer: Encoder | SchemaUnusable
    asked_at: float
    fresh_until: float
    since: float
    """The time at which the subject was first found to have no usable schema."""

    def waited(self, event: StoredEvent) -> float:
        """Return the number of seconds for which ``event`` has waited for a usable schema."""
        age = (datetime.now(UTC) - event.created_at).total_seconds()
        return min(age, time.monotonic() - self.since)


class EventSchemas:
    """Assigns encoders to events. Used by one thread, except for :meth:`check`.

    A schema is asked for again after ``cache_seconds``. While the registry does not answer, the known ones remain in
    use. An event whose subject has no usable schema waits, and is refused after ``missing_seconds``. ``only`` is the
    subject of all events, if they have one. Without its schema the destination is down.
    """

    def __init__(
        self,
        naming: SubjectNaming,
        source: SchemaSource,
        cache_seconds: float,
        missing_seconds: float,
        *,
        only: str | None = None,
    ) -> None:
        self._naming = naming
        self._source = source
        self._cache_seconds = cache_seconds
        self._missing_seconds = missing_seconds
        self._only = only
        self._known: dict[Place, _Known] = {}
        self._silent_until = 0.0

    def assign(self, delivery: Delivery, seconds: float) -> Mapping[int, Refused | Unavailable]:
        """Set the encoders of the pending events of ``delivery``, and return the verdicts on those without a schema.

        An event keeps the encoder that it has. Takes little longer than ``seconds``. Raise ``SchemasUnavailable`` if a
        schema is not known and the registry does not answer.
        """
        if not delivery.encoders:
            delivery.encoders = [None] * len(delivery.events)
        subjects: dict[tuple[str, str], Subject] = {}
        oldest: dict[Place, tuple[Subject, StoredEvent]] = {}
        wanted: list[tuple[int, Subject]] = []
        for index in delivery.pending:
            topic, event = delivery.topics[index], delivery.events[index]
            if delivery.encoders[index] is not None:
                continue
            if (subject := subjects.get((topic, event.type))) is None:
                subject = subjects[topic, event.type] = self._naming.subject(topic, event.type)
                oldest.setdefault(subject[:2], (subject, event))
            wanted.append((index, subject))
        found = self._find(oldest.values(), seconds)
        without: dict[int, Refused | Unavailable] = {}
        for index, subject in wanted:
            known = found[subject[:2]]
            if isinstance(known.answer, SchemaUnusable):
                without[index] = self._verdict(subject, known, delivery.events[index])
            else:
                delivery.encoders[index] = known.answer
        return without

    def _find(self, oldest: Iterable[tuple[Subject, StoredEvent]], seconds: float) -> Mapping[Place, _Known]:
        """Return what is known of subjects, each given with its oldest event, after asking the registry if need be."""
        found: dict[Place, _Known] = {}
        due: list[Subject] = []
        for subject, event in oldest:
            if (known := self._known.pop(subject[:2], None)) is not None:
                # The order of the table is that of use: what was not used for longest is forgotten first.
                self._known[subject[:2]] = found[subject[:2]] = known
            if known is None or self._is_due(known, event):
                due.append(subject)
        try:
            for subject, answer in self._source.read(due, seconds) if due else ():
                found[subject[:2]] = self._remember(subject[:2], answer)
                self._silent_until = 0.0
        except SchemasUnavailable:
            self._silent_until = time.monotonic() + STALE_SECONDS
            if any(subject[:2] not in found for subject in due):
                raise
        return found

    def _is_due(self, known: _Known, event: StoredEvent) -> bool:
        now = time.monotonic()
        if now < self._silent_until:
            return False
        if now >= known.fresh_until or not isinstance(known.answer, SchemaUnusable):
            return now >= known.fresh_until
        # No event is refused by an old answer. The probes of a destination that is down come seldom enough.
        is_late = known.waited(event) >= self._missing_seconds and now >= known.asked_at + MISSING_SECONDS
        return is_late or self._only is not None

    def _remember(self, place: Place, answer: Encoder | SchemaUnusable) -> _Known:
        now, before = time.monotonic(), self._known.pop(place, None)
        seconds, since = self._cache_seconds, now
        if isinstance(answer, SchemaUnusable):
            seconds = MISSING_SECONDS
            if before is not None and isinstance(before.answer, SchemaUnusable):
                seconds = min(2 * (before.fresh_until - before.asked_at), MAX_MISSING_SECONDS)
                since = before.since
        if len(self._known) >= MAX_SUBJECTS:
            del self._known[next(iter(self._known))]
        self._known[place] = known = _Known(answer, now, now + seconds, since)
        return known

    def _verdict(self, subject: Subject, known: _Known, event: StoredEvent) -> Refused | Unavailable:
        """Return the verdict on an event without a usable schema. A silent registry makes no event dead."""
        now = time.monotonic()
        if known.waited(event) >= self._missing_seconds and now >= self._silent_until:
            return Refused(f"{known.answer}, for {self._missing_seconds:g} s")
        if self._only is not None:
            return Unavailable(str(known.answer))
        delay = known.fresh_until - known.asked_at
        seconds = max(known.fresh_until - now, 0.0) + delay * (0.1 + random.random())  # noqa: S311 - spreads retries
        return Unavailable(str(known.answer), retry_after_seconds=round(seconds, 3), part=f"subject {subject.name}")

    def check(self, topic_of: Callable[[str], str | None], seconds: float) -> str | None:
        """Return why the registry, or a subject of a type in the settings, gives no schema now, or None. Blocks."""
        try:
            for _, answer in self._source.read(self._named_subjects(topic_of), seconds):
                if isinstance(answer, SchemaUnusable):
                    return str(answer)
        except SchemasUnavailable as reason:
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
