"""Schemas of events: remembered, asked for again, and what a missing one or a silent registry does to whom."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest

from outbox_relay.domain.event import StoredEvent
from outbox_relay.domain.outcomes import Refused
from outbox_relay.sinks.contract.handing import an_event
from outbox_relay.sinks.kafka.call import DeliverCall, DeliveryReports, DeliveryRound, Encoder
from outbox_relay.sinks.kafka.client import ClientLog, ClientSettings
from outbox_relay.sinks.kafka.event_schemas import (
    EventSchemas,
    SchemasUnavailable,
    SchemaUnusable,
    Strategy,
    Subject,
    SubjectNaming,
)
from outbox_relay.sinks.kafka.producer import RecordProducer
from outbox_relay.sinks.kafka.records import RecordFormat

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

    def __init__(self, answers: dict[str, Encoder | Exception] | None = None) -> None:
        self.answers = answers
        self.asked: list[str] = []

    def encoder(self, subject: Subject, seconds: float, cancelled: Callable[[], bool]) -> Encoder:
        self.asked.append(subject.name)
        assert seconds <= 1
        assert not cancelled()
        if self.answers is None:
            raise SchemasUnavailable("schema registry: no answer")
        answer = self.answers.get(subject.name, SchemaUnusable(f"subject {subject.name}: missing"))
        if isinstance(answer, Exception):
            raise answer
        return answer

    def probe(self, seconds: float) -> None:
        assert seconds == 1
        if self.answers is None:
            raise SchemasUnavailable("schema registry: no answer")


def a_call(*events: StoredEvent, topics: list[str | None] | None = None) -> DeliverCall:
    reports = DeliveryReports(len(events))
    call = DeliverCall(1, events, math.inf, math.inf, DeliveryRound(), lambda _: None, reports)
    call.set_topics(topics or ["orders"] * len(events))
    return call


def schemas(
    source: Source, cache_seconds: float = HOUR, strategy: Strategy = "topic", only: str | None = None
) -> EventSchemas:
    return EventSchemas(SubjectNaming(strategy, {"order.created": "shop.Order"}), source, cache_seconds, only=only)


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


def test_missing_subject_holds_its_own_events_back_and_is_not_asked_for_at_each_call() -> None:
    source = Source({"orders-value": Upper()})
    both = schemas(source)
    for _ in range(3):
        held = both.assign(a_call(an_event(), an_event(), topics=["orders", "missing"]), 1)
        assert list(held) == [1]
        assert (held[1].part, held[1].reason) == ("subject missing-value", "subject missing-value: missing")
        assert (held[1].retry_after_seconds or 0) > 0
    assert source.asked.count("missing-value") == 1


def test_missing_subject_of_all_events_makes_the_sink_unavailable() -> None:
    with pytest.raises(SchemasUnavailable, match="orders-value: missing"):
        schemas(Source({}), only="orders-value").assign(a_call(an_event()), 1)


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
    nameless = EventSchemas(SubjectNaming("topic", {}), source, HOUR, only="alone-value")
    assert nameless.check(lambda _: "alone", 1) == "subject alone-value: missing"
    assert schemas(Source()).check(lambda _: "orders", 1) == "schema registry: no answer"


SETTINGS = ClientSettings({"bootstrap.servers": "127.0.0.1:1"})


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
