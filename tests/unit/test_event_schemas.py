"""Schemas of events: remembered, asked for again, and what a missing one or a silent registry does to whom."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import UTC, datetime, timedelta

import pytest

from outbox_relay.domain.event import StoredEvent
from outbox_relay.domain.lease_clock import lease_clock
from outbox_relay.domain.outcomes import Refused, Unavailable
from outbox_relay.sinks.contract.handing import an_event
from outbox_relay.sinks.kafka.call import DeliverCall, DeliveryReports, DeliveryRound, Encoder
from outbox_relay.sinks.kafka.client import ClientLog, ClientSettings
from outbox_relay.sinks.kafka.encoded_records import RUN_SECONDS
from outbox_relay.sinks.kafka.event_schemas import (
    MAX_SUBJECTS,
    EventSchemas,
    SchemasUnavailable,
    SchemaUnusable,
    Strategy,
    Subject,
    SubjectNaming,
)
from outbox_relay.sinks.kafka.producer import RecordProducer
from outbox_relay.sinks.kafka.records import RecordFormat
from tests.support.wait import until

HOUR = 3600.0


class Upper:
    """Encodes text in capitals, and refuses what is not text."""

    content_type = "text/upper"

    def encode(self, topic: str, payload: bytes) -> bytes:
        if not payload.isalpha():
            raise ValueError("is not text")
        return payload.upper() + topic.encode()


class Source:
    """A registry with the subjects of `answers`; without one it is silent."""

    def __init__(self, answers: Mapping[str, Encoder | SchemaUnusable] | None = None, silent_after: int = 99) -> None:
        self.answers = answers
        self.asked: list[str] = []
        self._silent_after = silent_after

    def read(
        self, subjects: Sequence[Subject], seconds: float, cancelled: Callable[[], bool]
    ) -> Iterator[tuple[Subject, Encoder | SchemaUnusable]]:
        assert seconds <= 1
        assert not cancelled()
        if self.answers is None and not subjects:
            raise SchemasUnavailable("schema registry: no answer")
        for number, subject in enumerate(subjects):
            self.asked.append(subject.name)
            if self.answers is None or number >= self._silent_after:
                raise SchemasUnavailable("schema registry: no answer")
            yield subject, self.answers.get(subject.name, SchemaUnusable(f"subject {subject.name}: missing"))


def a_call(*events: StoredEvent, topics: list[str | None] | None = None, until: float = math.inf) -> DeliverCall:
    reports = DeliveryReports(len(events))
    call = DeliverCall(1, events, until, math.inf, DeliveryRound(), lambda _: None, reports)
    call.set_topics(topics or ["orders"] * len(events))
    return call


def schemas(
    source: Source,
    cache_seconds: float = HOUR,
    strategy: Strategy = "topic",
    missing_seconds: float = HOUR,
    only: str | None = None,
) -> EventSchemas:
    naming = SubjectNaming(strategy, {"order.created": "shop.Order"})
    return EventSchemas(naming, source, cache_seconds, missing_seconds, only=only)


def test_schema_is_asked_for_once_and_again_when_it_is_old() -> None:
    source = Source({"orders-value": Upper()})
    remembered = schemas(source)
    for _ in range(3):
        assert remembered.assign(a_call(an_event(), an_event()), 1) == {}
    assert source.asked == ["orders-value"]
    forgetful = schemas(source, cache_seconds=0)
    for _ in range(2):
        forgetful.assign(a_call(an_event()), 1)
    assert len(source.asked) == 3


def test_known_schema_remains_in_use_while_the_registry_is_silent() -> None:
    source = Source({"orders-value": Upper()})
    known = schemas(source, cache_seconds=0)
    known.assign(a_call(an_event()), 1)
    source.answers = None
    call = a_call(an_event())
    for _ in range(3):
        assert known.assign(call, 1) == {}
    assert known.assign(a_call(an_event()), 1) == {}
    assert call.encoders[0] is not None
    # It is not asked at every call then: each question could take its whole time.
    assert len(source.asked) == 2


def test_silent_registry_makes_events_of_unknown_schemas_unavailable() -> None:
    with pytest.raises(SchemasUnavailable, match="no answer"):
        schemas(Source()).assign(a_call(an_event()), 1)


def test_events_of_a_missing_subject_wait_alone_and_it_is_not_asked_for_at_each_call() -> None:
    source = Source({"orders-value": Upper()})
    both = schemas(source)
    for _ in range(3):
        [(index, verdict)] = both.assign(a_call(an_event(), an_event(), topics=["orders", "missing"]), 1).items()
        assert (index, type(verdict), verdict.reason) == (1, Unavailable, "subject missing-value: missing")
        assert verdict.part == "subject missing-value"  # type: ignore[union-attr]
    assert source.asked.count("missing-value") == 1


def test_event_that_waited_for_long_is_refused_and_a_new_one_is_not() -> None:
    """An event that is old when its subject is first missed has not waited: it may come from a replay."""
    waiting = schemas(Source({}), missing_seconds=0.3)
    old = an_event()._replace(created_at=datetime.now(UTC) - timedelta(days=1))

    def verdicts() -> list[type]:
        return [type(each) for each in waiting.assign(a_call(old, an_event()), 1).values()]

    assert verdicts() == [Unavailable, Unavailable]
    until(lambda: verdicts() == [Refused, Unavailable], seconds=10, what="the old event is refused")


def test_missing_subject_of_all_events_is_asked_for_at_each_probe() -> None:
    source = Source({})
    alone = schemas(source, only="orders-value")
    for _ in range(3):
        assert alone.assign(a_call(an_event()), 1) == {0: Unavailable("subject orders-value: missing")}
    assert len(source.asked) == 3


def test_schema_is_asked_for_before_an_event_is_refused() -> None:
    """Goes red if an event is refused by what was known: its schema was registered meanwhile."""
    source, event = Source({}), an_event()
    waiting = schemas(source, missing_seconds=2.5)
    begin = time.monotonic()
    assert waiting.assign(a_call(event), 1)
    until(lambda: time.monotonic() - begin > 2.4 and waiting.assign(a_call(event), 1), seconds=10, what="it is missed")
    source.answers = {"orders-value": Upper()}
    until(lambda: time.monotonic() - begin > 3.5, seconds=10, what="its time is over")
    assert waiting.assign(a_call(event), 1) == {}


def test_registry_that_has_become_silent_makes_no_event_dead() -> None:
    """Goes red if a missing subject is remembered while the registry is silent."""
    source = Source({})
    waiting = schemas(source, missing_seconds=0)
    assert [type(each) for each in waiting.assign(a_call(an_event()), 1).values()] == [Refused]
    source.answers = None
    later: list[object] = []
    until(
        lambda: (later.append(waiting.assign(a_call(an_event()), 1)[0]), len(source.asked) > 1)[1],
        seconds=10,
        what="it is asked again",
    )
    assert isinstance(later[-1], Unavailable)


def names(count: int) -> list[str | None]:
    return [f"t{number:04}" for number in range(count)]


def test_number_of_remembered_subjects_is_limited_and_the_least_used_one_is_forgotten() -> None:
    topics = names(MAX_SUBJECTS + 1)
    source = Source({f"{topic}-value": Upper() for topic in topics})
    limited = schemas(source)
    for topic in [*topics[:-1], topics[0], topics[-1]]:
        limited.assign(a_call(an_event(), topics=[topic]), 1)
    del source.asked[:]
    for topic in (topics[0], topics[1]):
        limited.assign(a_call(an_event(), topics=[topic]), 1)
    assert source.asked == ["t0001-value"]


def test_schemas_that_were_read_in_time_are_remembered_when_the_rest_was_not() -> None:
    """A registry that is slow does not stop a sink whose batches have many types."""
    source = Source({f"{topic}-value": Upper() for topic in names(30)}, silent_after=20)
    slow = schemas(source)
    with pytest.raises(SchemasUnavailable):
        slow.assign(a_call(*[an_event() for _ in range(30)], topics=names(30)), 1)
    assert slow.assign(a_call(*[an_event() for _ in range(30)], topics=names(30)), 1) == {}
    assert len(source.asked) == 21 + 10


def test_event_keeps_the_encoder_that_it_has() -> None:
    """A record that is sent again is the same, and needs no registry."""
    source = Source({"orders-value": Upper()})
    known, call = schemas(source, cache_seconds=0), a_call(an_event())
    known.assign(call, 1)
    first, source.answers = call.encoders[0], {"orders-value": Upper()}
    known.assign(call, 1)
    assert call.encoders == [first]
    assert len(source.asked) == 1


@pytest.mark.parametrize(
    ("strategy", "event_type", "name", "record"),
    [
        ("topic", "order.created", "orders-value", "shop.Order"),
        ("topic", "other", "orders-value", None),
        ("record", "order.created", "shop.Order", "shop.Order"),
        ("record", "other", "other", "other"),
        ("topic-record", "order.created", "orders-shop.Order", "shop.Order"),
        ("topic-record", "other", "orders-other", "other"),
    ],
)
def test_subject_follows_the_strategy(strategy: Strategy, event_type: str, name: str, record: str | None) -> None:
    naming = SubjectNaming(strategy, {"order.created": "shop.Order"})
    assert naming.subject("orders", event_type) == Subject(name, record, event_type)


def test_check_asks_for_the_subjects_that_the_settings_name() -> None:
    source = Source({"orders-value": Upper()})
    assert schemas(source).check(lambda _: "orders", 1) is None
    assert schemas(source).check(lambda _: None, 1) is None
    assert schemas(source, strategy="record").check(lambda _: None, 1) == "subject shop.Order: missing"
    assert source.asked == ["orders-value", "shop.Order"]
    nameless = EventSchemas(SubjectNaming("topic", {}), source, HOUR, HOUR, only="alone-value")
    assert nameless.check(lambda _: "alone", 1) == "subject alone-value: missing"
    for topic in ("orders", None):
        assert schemas(Source()).check(lambda _, topic=topic: topic, 1) == "schema registry: no answer"


SETTINGS = ClientSettings({"bootstrap.servers": "127.0.0.1:1"})


class Slow(Upper):
    """Encodes slowly, and counts how often."""

    calls = 0

    def encode(self, topic: str, payload: bytes) -> bytes:
        self.calls += 1
        begin = time.monotonic()
        until(lambda: time.monotonic() - begin > RUN_SECONDS, seconds=10, what="time passes")
        return super().encode(topic, payload)


def test_slow_encoding_ends_a_run_and_hands_nothing_over_after_the_lease() -> None:
    """The clock is looked at after each run, and leases may end while one event is encoded."""
    producer = RecordProducer(SETTINGS, ClientLog(SETTINGS), RecordFormat(), 1000)
    try:
        for seconds, dealt in ((HOUR, 1), (0.01, 0)):
            slow = Slow()
            call = a_call(an_event(payload=b"one"), an_event(payload=b"two"), until=lease_clock() + seconds)
            schemas(Source({"orders-value": slow})).assign(call, 1)
            assert producer.put(call, range(2)) == dealt
            assert (call.handed_over, slow.calls, call.decided) == (dealt, 1, {})
    finally:
        producer.purge(in_flight=True)
        producer.close()


@pytest.mark.parametrize("form", [RecordFormat(), RecordFormat(cloudevents="binary", source="s")])
def test_producer_refuses_what_does_not_fit_and_hands_over_its_neighbours(form: RecordFormat) -> None:
    call = a_call(an_event(payload=b"one"), an_event(payload=b"2"), an_event(payload=b"three"))
    schemas(Source({"orders-value": Upper()})).assign(call, 1)
    producer = RecordProducer(SETTINGS, ClientLog(SETTINGS), form, 1000)
    try:
        assert producer.put(call, range(3)) == 3
    finally:
        producer.purge(in_flight=True)
        producer.close()
    assert call.handed_over == 2
    assert call.decided == {1: Refused("cannot be made a Kafka record: is not text")}
