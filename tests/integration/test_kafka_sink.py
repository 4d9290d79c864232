"""The Kafka sink on a real broker: faults, limits, topics."""

import json
import random
import sys
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Any

import pytest

from outbox_relay.domain.errors import ConfigurationError
from outbox_relay.domain.event import StoredEvent
from outbox_relay.domain.outcomes import DELIVERED, Delivered, Refused, Unavailable
from outbox_relay.formats.topics import TopicTemplate
from outbox_relay.sinks.contract.handing import an_event, hand_over, hand_over_all, some_events
from outbox_relay.sinks.kafka import KafkaSink
from outbox_relay.sinks.kafka.settings import DEFAULTS
from tests.support.kafka import KafkaBroker, Record
from tests.support.kafka.delivering import deliver, opening, relaying
from tests.support.kafka.recording_sink import RecordingKafkaSink

STALL_SECONDS = 2.0
SMALL_LIMIT = 20_000


@pytest.fixture
def sink_on() -> Generator[Callable[..., Any]]:
    """Open sinks: `sink_on(broker, template, producer settings)`."""
    with opening(STALL_SECONDS, RecordingKafkaSink) as open_sink:

        def sink_on(broker: KafkaBroker, template: str, producer: Mapping[str, str | int] | None = None) -> Any:
            return open_sink(template, {"bootstrap.servers": broker.bootstrap, **(producer or {})})

        yield sink_on


@pytest.fixture
def report(capsys: pytest.CaptureFixture[str]) -> Callable[[str], None]:
    """Show a measured figure among pytest's lines."""

    def show(line: str) -> None:
        with capsys.disabled():
            sys.stdout.write(f"\n{line}\n")

    return show


def uids(records: Sequence[Record]) -> list[str]:
    return [(record.headers["id"] or b"").decode() for record in records]


def first_deliveries(records: Sequence[Record]) -> dict[bytes | None, list[str]]:
    """Return the first occurrences of uids per key, in the order of the log."""
    found: dict[bytes | None, dict[str, None]] = {}
    for record, uid in zip(records, uids(records), strict=True):
        found.setdefault(record.key, {})[uid] = None
    return {key: list(of_key) for key, of_key in found.items()}


def assert_all_arrived_in_order(records: Sequence[Record], events: Sequence[StoredEvent]) -> int:
    """Assert that no event is lost and first deliveries are in order per key; return the number of duplicates."""
    expected: dict[bytes | None, list[str]] = {}
    for event in events:
        expected.setdefault(None if event.key is None else event.key.encode(), []).append(event.uid)
    assert first_deliveries(records) == expected
    return len(records) - len(events)


# -- records -----------------------------------------------------------------------------------------------------


def test_a_record_has_our_headers_first_and_then_the_events_own(kafka: KafkaBroker, topic: str, sink_on: Any) -> None:
    kafka.create_topic(topic)
    own = {"traceparent": "00-1-2-03", "empty": "", "имя": "日本"}
    forged = {"id": "theirs", "Type": "theirs", "CONTENT-TYPE": "theirs", "ce_id": "theirs"}
    event = an_event("ключ", b"\x00\xff", json.dumps({**forged, **own}))
    sink = sink_on(kafka, topic)
    assert deliver(sink, [event]) == [DELIVERED]
    (record,) = kafka.read_all(topic)
    ours = [("id", event.uid), ("type", "order.created"), ("content-type", "application/json")]
    assert [(name, (value or b"").decode()) for name, value in record.header_list] == [*ours, *own.items()]
    # As consumers in Python read them: the last header of a name counts.
    assert dict(record.header_list)["id"] == event.uid.encode()
    assert (record.key, record.value) == ("ключ".encode(), b"\x00\xff")


def test_the_topic_is_rendered_from_type_key_and_headers(kafka: KafkaBroker, sink_on: Any) -> None:
    for place in ("a.eu", "b.us"):
        kafka.create_topic(f"made.order.created.{place}")
    sink = sink_on(kafka, "made.{type}.{key}.{headers.region}")
    events = [an_event("a", headers='{"region": "eu"}'), an_event("b", headers='{"region": "us"}')]
    assert deliver(sink, events) == [DELIVERED] * 2
    for event, place in zip(events, ("a.eu", "b.us"), strict=True):
        assert uids(kafka.consume(f"made.order.created.{place}", count=1)) == [event.uid]


def test_keys_are_placed_as_java_clients_place_them(kafka: KafkaBroker, topic: str, sink_on: Any) -> None:
    kafka.create_topic(topic, partitions=6)
    sink = sink_on(kafka, topic)
    keys = [f"order-{number}" for number in range(20)]
    deliver(sink, [an_event(key) for key in keys])
    found = {record.key: record.partition for record in kafka.read_all(topic)}
    assert found == {key.encode(): (_murmur2(key.encode()) & 0x7FFFFFFF) % 6 for key in keys}


def _murmur2(data: bytes) -> int:
    """Return Kafka's hash of keys: org.apache.kafka.common.utils.Utils.murmur2, in 32-bit arithmetic."""
    mask, multiplier = 0xFFFFFFFF, 0x5BD1E995
    found = (0x9747B28C ^ len(data)) & mask
    whole = len(data) // 4 * 4
    for at in range(0, whole, 4):
        word = int.from_bytes(data[at : at + 4], "little") * multiplier & mask
        word = (word ^ word >> 24) * multiplier & mask
        found = (found * multiplier & mask) ^ word
    if rest := data[whole:]:
        found = (found ^ int.from_bytes(rest, "little")) * multiplier & mask
    found = (found ^ found >> 13) * multiplier & mask
    return found ^ found >> 15


# -- faults ------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_frozen_broker_loses_and_reorders_nothing(
    real_kafka: KafkaBroker, topic: str, sink_on: Any, report: Callable[[str], None]
) -> None:
    real_kafka.create_topic(topic)
    sink = sink_on(real_kafka, topic)
    events = some_events(40_000, keys=50)
    with relaying(sink, events):
        sink.has(Delivered, 5_000)
        with real_kafka.frozen():
            began = time.monotonic()
            sink.has(Unavailable)
            assert time.monotonic() - began < sink.timeout_seconds + 1
    duplicates = assert_all_arrived_in_order(real_kafka.read_all(topic), events)
    report(f"frozen broker: {len(events)} events, 0 lost, 0 out of order, {duplicates} duplicates")


@pytest.mark.slow
def test_a_broker_that_is_killed_and_comes_back_loses_and_reorders_nothing(
    real_kafka: KafkaBroker, topic: str, sink_on: Any, report: Callable[[str], None]
) -> None:
    real_kafka.create_topic(topic)
    sink = sink_on(real_kafka, topic)
    events = some_events(40_000, keys=50)
    with relaying(sink, events):
        sink.has(Delivered, 5_000)
        real_kafka.kill()
        sink.has(Unavailable)
        real_kafka.start()
    duplicates = assert_all_arrived_in_order(real_kafka.read_all(topic), events)
    report(f"killed broker: {len(events)} events, 0 lost, 0 out of order, {duplicates} duplicates")


def test_a_full_queue_of_the_client_is_waited_for(kafka: KafkaBroker, topic: str, sink_on: Any) -> None:
    kafka.create_topic(topic)
    sink = sink_on(kafka, topic, {"queue.buffering.max.messages": 20})
    warm, events = some_events(1), some_events(600)
    hand_over_all(sink, warm)
    assert hand_over(sink, events, batch=200) == [DELIVERED] * 600
    assert assert_all_arrived_in_order(kafka.read_all(topic), [*warm, *events]) == 0


@pytest.mark.parametrize("of_user", [False, True], ids=["by default", "as the user says"])
def test_the_last_records_do_not_linger_unless_the_user_says_so(
    kafka: KafkaBroker, topic: str, sink_on: Any, monkeypatch: pytest.MonkeyPatch, of_user: bool
) -> None:
    """With a linger time of a minute, unsent records are purged when acknowledgements stop."""
    kafka.create_topic(topic)
    minute = 60_000
    if not of_user:
        monkeypatch.setattr("outbox_relay.sinks.kafka.settings.DEFAULTS", {**DEFAULTS, "linger.ms": minute})
        monkeypatch.setattr("outbox_relay.sinks.kafka.producer.LINGER_MS", minute)
    sink = sink_on(kafka, topic, {"linger.ms": minute} if of_user else {})
    [verdict] = deliver(sink, some_events(1))
    assert isinstance(verdict, Unavailable if of_user else Delivered)


# -- limits ------------------------------------------------------------------------------------------------------


def test_oversized_records_are_refused_and_their_neighbours_arrive_in_order(
    real_kafka: KafkaBroker, topic: str, sink_on: Any
) -> None:
    real_kafka.create_topic(topic, config={"max.message.bytes": str(SMALL_LIMIT)})
    sink = sink_on(real_kafka, topic)
    events = some_events(3_000)
    large = range(100, 3_000, 300)
    for place in large:
        events[place] = events[place]._replace(payload=b"x" * (SMALL_LIMIT + 1))
    verdicts = hand_over(sink, events, batch=1_000)
    assert [place for place, verdict in enumerate(verdicts) if isinstance(verdict, Refused)] == list(large)
    assert verdicts.count(DELIVERED) == 3_000 - len(large)
    assert all(topic in reason and "MSG_SIZE_TOO_LARGE" in reason for reason in sink.reasons)
    others = [event for place, event in enumerate(events) if place not in large]
    assert assert_all_arrived_in_order(real_kafka.read_all(topic), others) == 0


def test_a_record_that_only_the_broker_finds_too_large_is_refused_alone(
    real_kafka: KafkaBroker, topic: str, sink_on: Any
) -> None:
    real_kafka.create_topic(topic, config={"max.message.bytes": str(SMALL_LIMIT)})
    sink = sink_on(real_kafka, topic, {"compression.type": "lz4"})
    events = some_events(3_000)
    events[700] = events[700]._replace(payload=random.Random(1).randbytes(2 * SMALL_LIMIT))
    verdicts = hand_over(sink, events, batch=1_000)
    assert [place for place, verdict in enumerate(verdicts) if verdict is not DELIVERED] == [700]
    assert isinstance(verdicts[700], Refused)
    others = [event for event in events if event is not events[700]]
    assert_all_arrived_in_order(real_kafka.read_all(topic), others)


def test_a_record_that_never_fits_into_the_clients_queue_is_refused(
    kafka: KafkaBroker, topic: str, sink_on: Any
) -> None:
    kafka.create_topic(topic)
    sink = sink_on(kafka, topic, {"queue.buffering.max.kbytes": 2})
    events = some_events(3)
    events[1] = events[1]._replace(payload=b"x" * 5_000)
    assert [type(verdict) for verdict in hand_over(sink, events)] == [Delivered, Refused, Delivered]


def test_a_record_that_fails_its_request_is_refused_alone_and_its_mates_keep_their_order(
    real_kafka: KafkaBroker, topic: str, sink_on: Any, report: Callable[[str], None]
) -> None:
    # A compacted topic refuses a record without a key with INVALID_RECORD for the whole request.
    real_kafka.create_topic(topic, partitions=1, config={"cleanup.policy": "compact"})
    sink = sink_on(real_kafka, topic, {"batch.num.messages": 100})
    events = some_events(10_000)
    poisoned = (0, 2_345, 2_346, 8_000)
    for place in poisoned:
        events[place] = events[place]._replace(key=None)
    verdicts = hand_over(sink, events, batch=1_000)
    assert all("INVALID_RECORD" in reason and topic in reason for reason in sink.reasons), sink.reasons
    assert [place for place, verdict in enumerate(verdicts) if verdict is not DELIVERED] == list(poisoned)
    assert all(isinstance(verdicts[place], Refused) for place in poisoned)
    assert all("INVALID_RECORD" in reason and topic in reason for reason in sink.reasons)
    others = [event for event in events if event.key is not None]
    duplicates = assert_all_arrived_in_order(real_kafka.read_all(topic), others)
    report(f"{len(poisoned)} records refused by the broker among {len(events)}: {duplicates} duplicates")


# -- topics ------------------------------------------------------------------------------------------------------


def test_a_topic_that_the_broker_creates_is_waited_for(kafka: KafkaBroker, topic: str, sink_on: Any) -> None:
    sink = sink_on(kafka, topic)
    events = some_events(100)
    hand_over_all(sink, events)
    assert_all_arrived_in_order(kafka.read_all(topic), events)


# -- reasons shown ----------------------------------------------------------------------------------------------


def test_a_cluster_that_does_not_answer_fails_the_check_without_a_secret(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("outbox_relay.sinks.kafka.delivery.CHECK_SECONDS", 1.0)
    producer = {
        "bootstrap.servers": "127.0.0.1:1",
        "security.protocol": "SASL_PLAINTEXT",
        "sasl.mechanism": "PLAIN",
        "sasl.username": "relay",
        "sasl.password": "hunter2-and-more",
    }
    sink = RecordingKafkaSink("events", TopicTemplate.parse("t"), producer, STALL_SECONDS)
    sink.open()
    reason = sink.check()
    verdicts = deliver(sink, some_events(1))
    sink.close()
    shown = f"{reason} {verdicts}"
    assert "Connection refused" in (reason or "")
    assert "Connection refused" in str(verdicts)
    assert "hunter2" not in shown


def test_settings_that_librdkafka_does_not_accept_are_named() -> None:
    producer = {"bootstrap.servers": "127.0.0.1:1", "lingre.ms": 3}
    sink = KafkaSink("events", TopicTemplate.parse("t"), producer, STALL_SECONDS)
    with pytest.raises(ConfigurationError, match=r"sinks.events.producer.*lingre.ms"):
        sink.open()
