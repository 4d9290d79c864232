"""Topics of one sink: missing ones, their limits, their creation, and record formats."""

import json
from collections.abc import Callable, Generator, Mapping
from typing import Any

import pytest
from cloudevents.core.bindings.kafka import KafkaMessage, from_binary, from_structured
from cloudevents.core.formats.json import JSONFormat

from outbox_relay.domain.event import StoredEvent
from outbox_relay.domain.outcomes import DELIVERED, Delivered, Refused, Unavailable
from outbox_relay.sinks.contract.handing import an_event
from outbox_relay.sinks.kafka import KafkaSink, RecordFormat, TopicCreation
from tests.support.kafka import Administration, KafkaBroker
from tests.support.kafka.delivering import deliver, opening
from tests.support.wait import until

STALL_SECONDS = 5.0


@pytest.fixture
def sink_on() -> Generator[Callable[..., Any]]:
    """Open sinks: `sink_on(broker, template, producer settings, **more)`."""
    with opening(STALL_SECONDS, KafkaSink) as open_sink:

        def sink_on(
            broker: KafkaBroker, template: str, producer: Mapping[str, str | int] | None = None, **more: Any
        ) -> Any:
            return open_sink(template, {"bootstrap.servers": broker.bootstrap, **(producer or {})}, **more)

        yield sink_on


def to(region: str, key: str | None = None, payload: bytes = b"{}") -> StoredEvent:
    """Return an event whose header contains the end of its topic's name."""
    return an_event(key, payload, headers=json.dumps({"to": region}))


# -- topics that events may name -----------------------------------------------------------------------------------


# -- topics that accept no events ----------------------------------------------------------------------------------


def test_a_topic_that_cannot_be_created_affects_only_its_own_events(
    real_kafka: KafkaBroker, topic: str, sink_on: Any
) -> None:
    """One broker cannot create a topic with three replicas."""
    admin = Administration(real_kafka.bootstrap)
    admin.create_topic(f"{topic}.good", 2)
    sink = sink_on(real_kafka, f"{topic}.{{headers.to}}", creation=TopicCreation(1, 3))
    events = [to("good", "a"), to("bad", "a"), to("good", "b"), to("good", "a"), to("bad", "c")]
    verdicts = deliver(sink, events)
    assert [type(verdict) for verdict in verdicts] == [Delivered, Unavailable, Delivered, Unavailable, Unavailable]
    for verdict in (verdicts[1], verdicts[3], verdicts[4]):
        assert verdict.part == f"topic {topic}.bad"
        assert "cannot be created: INVALID_REPLICATION_FACTOR" in verdict.reason
        assert verdict.retry_after_seconds > 0
    admin.create_topic(f"{topic}.bad", 2)

    def delivered() -> bool:
        return deliver(sink, [to("bad")]) == [DELIVERED]

    until(delivered, seconds=20, what="the topic accepts events")
    assert deliver(sink, [events[1], events[3], events[4]]) == [DELIVERED] * 3


def test_a_topic_deleted_meanwhile_affects_only_its_own_events(
    real_kafka: KafkaBroker, topic: str, sink_on: Any
) -> None:
    admin = Administration(real_kafka.bootstrap)
    for name in ("good", "gone"):
        admin.create_topic(f"{topic}.{name}", 2)
    # One broker cannot have three replicas, so the topic is not created again.
    sink = sink_on(real_kafka, f"{topic}.{{headers.to}}", creation=TopicCreation(1, 3))
    assert deliver(sink, [to("good"), to("gone")]) == [DELIVERED] * 2
    admin.delete_topic(f"{topic}.gone")
    deliver(sink, [to("good"), to("gone")])  # its acknowledgement does not come, which may look like an outage
    verdicts = deliver(sink, [to("good"), to("gone"), to("good")])
    assert [type(verdict) for verdict in verdicts] == [Delivered, Unavailable, Delivered]
    assert verdicts[1].part == f"topic {topic}.gone"


def test_the_relay_creates_topics_with_the_given_settings(real_kafka: KafkaBroker, topic: str, sink_on: Any) -> None:
    sink = sink_on(real_kafka, f"{topic}.{{headers.to}}", creation=TopicCreation(partitions=3, replication_factor=1))
    assert deliver(sink, [to("one"), to("two")]) == [DELIVERED] * 2
    for name in ("one", "two"):
        found = Administration(real_kafka.bootstrap).client.list_topics(f"{topic}.{name}", timeout=5)
        assert len(found.topics[f"{topic}.{name}"].partitions) == 3
    assert (sink_on(real_kafka, f"{topic}.never", creation=TopicCreation(1, 1))).check() is None


# -- limits --------------------------------------------------------------------------------------------------------


def test_a_record_size_above_the_topics_limit_fails_the_check(
    real_kafka: KafkaBroker, topic: str, sink_on: Any
) -> None:
    Administration(real_kafka.bootstrap).create_topic(topic, 1, config={"max.message.bytes": "3000000"})
    assert (sink_on(real_kafka, topic, {"message.max.bytes": 3_000_000})).check() is None
    reason = (sink_on(real_kafka, topic, {"message.max.bytes": 3_000_001})).check()
    assert f"topic {topic} takes at most 3000000 bytes" in (reason or "")
    reason = (sink_on(real_kafka, f"{topic}.{{key}}", {"message.max.bytes": 90_000_000})).check()
    assert "the brokers take at most" in (reason or "")


# -- record formats ------------------------------------------------------------------------------------------------


def test_a_header_chooses_the_partition(real_kafka: KafkaBroker, topic: str, sink_on: Any) -> None:
    real_kafka.create_topic(topic, partitions=4)
    sink = sink_on(real_kafka, topic, record_format=RecordFormat(partition_header="partition"))
    values = ["3", "0", "4", "-1", None, "2"]
    events = [
        an_event("k", b"%d" % number, headers=None if value is None else json.dumps({"partition": value}))
        for number, value in enumerate(values)
    ]
    verdicts = deliver(sink, events)
    refused = {place: verdict.reason for place, verdict in enumerate(verdicts) if isinstance(verdict, Refused)}
    assert refused.keys() == {2, 3}
    assert "has no partition 4, it has 4" in refused[2]
    assert "header partition should be the number of a partition" in refused[3]
    found = {record.value: record.partition for record in real_kafka.read_all(topic)}
    assert (found[b"0"], found[b"1"], found[b"5"]) == (3, 0, 2)
    assert b"4" in found


def test_an_empty_payload_becomes_a_tombstone(kafka: KafkaBroker, topic: str, sink_on: Any) -> None:
    kafka.create_topic(topic, partitions=1)
    sink = sink_on(kafka, topic, record_format=RecordFormat(tombstones=True))
    events = [an_event("k", b"1"), an_event("k", b""), an_event(None, b"")]
    verdicts = deliver(sink, events)
    assert [type(verdict) for verdict in verdicts] == [Delivered, Delivered, Refused]
    assert "a tombstone needs a key" in verdicts[2].reason
    found = kafka.consume(topic, count=2)
    assert [(record.key, record.value) for record in found] == [(b"k", b"1"), (b"k", None)]
    assert found[1].headers["id"] == events[1].uid.encode()


@pytest.mark.parametrize("mode", ["binary", "structured"])
def test_cloudevents_are_read_by_their_own_library(kafka: KafkaBroker, topic: str, sink_on: Any, mode: Any) -> None:
    kafka.create_topic(topic, partitions=1)
    sink = sink_on(kafka, topic, record_format=RecordFormat(cloudevents=mode, source="/shop/orders"))
    event = an_event("k", '{"total": "12.34", "имя": "日本"}'.encode(), headers='{"traceparent": "00-1-2-03"}')
    assert deliver(sink, [event]) == [DELIVERED]
    (record,) = kafka.consume(topic, count=1)
    message = KafkaMessage(
        headers={name: value or b"" for name, value in record.header_list}, key=record.key, value=record.value or b""
    )
    read = from_binary if mode == "binary" else from_structured
    found = read(message, JSONFormat())
    assert (found.get_id(), found.get_type(), found.get_source()) == (event.uid, event.type, "/shop/orders")
    assert found.get_time() == event.created_at
    assert found.get_data() == json.loads(event.payload)


# -- details of deliveries ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("delivery_details", "attempt"),
    [(True, 0), (False, 1), (False, 2)],
    ids=["all", "after a retry by hand", "after a failure"],
)
def test_a_recorded_delivery_tells_topic_partition_and_offset(
    kafka: KafkaBroker, topic: str, sink_on: Any, delivery_details: bool, attempt: int
) -> None:
    for region in ("a", "b"):
        kafka.create_topic(f"{topic}.{region}", 3)
    sink = sink_on(kafka, f"{topic}.{{headers.to}}", delivery_details=delivery_details)
    events = [to(region, f"k{number}") for number in range(20) for region in ("a", "b")]
    verdicts = deliver(sink, events, attempt=attempt)
    assert list(verdicts) == [DELIVERED] * 40
    records = [record for region in ("a", "b") for record in kafka.read_all(f"{topic}.{region}")]
    places = {(record.headers["id"] or b"").decode(): record for record in records}
    for event, verdict in zip(events, verdicts, strict=True):
        record = places[event.uid]
        assert verdict.detail == {"topic": record.topic, "partition": record.partition, "offset": record.offset}
        assert 0 <= verdict.seconds < 60
