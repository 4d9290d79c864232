"""Schemas of events: remembered, asked for again, and what a missing one or a silent registry does to whom."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime, timedelta

import pytest

from outbox_relay.domain.event import StoredEvent
from outbox_relay.domain.outcomes import DELIVERED, Refused, Unavailable
from outbox_relay.domain.times import lease_clock
from outbox_relay.sinks.calls import Call
from outbox_relay.sinks.contract.handing import an_event
from outbox_relay.sinks.kafka.delivery import Delivery, Encoder
from outbox_relay.sinks.kafka.records import RecordFormat
from outbox_relay.sinks.kafka.schemas import (
    MAX_SUBJECTS,
    EventSchemas,
    SchemasUnavailable,
    SchemaUnusable,
    Strategy,
    Subject,
    SubjectNaming,
)
from tests.support.kafka import scripted
from tests.support.kafka.delivering import deliver
from tests.support.kafka.scripted import ScriptedClient, scripted_sink
from tests.support.wait import until

HOUR = 3600.0
STALL_SECONDS = scripted.STALL_SECONDS


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

    def read(self, subjects: Sequence[Subject], seconds: float) -> Iterator[tuple[Subject, Encoder | SchemaUnusable]]:
        assert seconds <= STALL_SECONDS
        if self.answers is None and not subjects:
            raise SchemasUnavailable("schema registry: no answer")
        for number, subject in enumerate(subjects):
            self.asked.append(subject.name)
            if self.answers is None or number >= self._silent_after:
                raise SchemasUnavailable("schema registry: no answer")
            yield subject, self.answers.get(subject.name, SchemaUnusable(f"subject {subject.name}: missing"))


def a_call(*events: StoredEvent, topics: list[str] | None = None) -> Delivery:
    delivery = Delivery(0)
    delivery.begin(Call(events, math.inf), 1, math.inf, details=False)
    delivery.topics = topics or ["orders"] * len(events)
    return delivery


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


@pytest.mark.fence("events are dead because a schema registry is down, moved, or no registry")
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


def names(count: int) -> list[str]:
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


# -- sinks with schemas -------------------------------------------------------------------------------------------

client = scripted.client


class Slow(Upper):
    """Encodes until the lease is over, and counts how often."""

    calls = 0
    until = lease_clock() + HOUR

    def encode(self, topic: str, payload: bytes) -> bytes:
        self.calls += 1
        while lease_clock() < self.until:
            time.sleep(0.01)
        return super().encode(topic, payload)


def test_nothing_is_handed_over_whose_lease_ended_while_it_was_encoded(client: ScriptedClient) -> None:
    slow = Slow()
    events = [an_event(payload=b"one"), an_event(payload=b"two")]
    with scripted_sink(client, "orders", schemas=schemas(Source({"orders-value": slow}))) as sink:
        slow.until = lease_clock() + 2
        verdicts = deliver(sink, events, slow.until)
        assert all(isinstance(verdict, Unavailable) for verdict in verdicts)
        assert (client.taken, slow.calls) == ([], 1)


@pytest.mark.parametrize("form", [RecordFormat(), RecordFormat(cloudevents="binary", source="s")])
def test_what_does_not_fit_is_refused_and_its_neighbours_are_handed_over(
    client: ScriptedClient, form: RecordFormat
) -> None:
    events = [an_event(payload=payload) for payload in (b"one", b"2", b"three")]
    found = schemas(Source({"orders-value": Upper()}))
    with scripted_sink(client, "orders", schemas=found, record_format=form) as sink:
        assert deliver(sink, events) == [DELIVERED, Refused("cannot be made a Kafka record: is not text"), DELIVERED]


def test_a_silent_registry_stops_the_sink_and_a_missing_subject_only_its_events(client: ScriptedClient) -> None:
    source = Source()
    with scripted_sink(client, "{type}", schemas=schemas(source)) as sink:
        [verdict] = deliver(sink, [an_event()])
        assert verdict == Unavailable("schema registry: no answer")
        source.answers = {"a-value": Upper()}
        [missing, found] = deliver(sink, [an_event(), an_event("other", b"x")._replace(type="a")])
        assert isinstance(missing, Unavailable)
        assert missing.part == "subject order.created-value"
        assert found is DELIVERED
