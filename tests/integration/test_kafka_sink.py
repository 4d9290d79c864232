"""The Kafka sink on a real broker: faults, limits, topics, and its speed compared with a bare loop."""

import asyncio
import json
import random
import sys
import threading
import time
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from typing import Any

import pytest
from confluent_kafka import KafkaError, Producer

from outbox_relay.domain.errors import ConfigurationError
from outbox_relay.domain.event import StoredEvent
from outbox_relay.domain.lease_clock import lease_clock
from outbox_relay.domain.outcomes import DELIVERED, Delivered, Refused, Unavailable, Verdict
from outbox_relay.formats.topics import TopicTemplate
from outbox_relay.sinks.contract.handing import an_event, hand_over, hand_over_all, some_events, soon
from outbox_relay.sinks.kafka import KafkaSink
from outbox_relay.sinks.kafka.client import DEFAULTS
from tests.support.kafka import Administration, KafkaBroker, Record
from tests.support.kafka.opening import opening
from tests.support.kafka.recording_sink import RecordingKafkaSink
from tests.support.wait import auntil

STALL_SECONDS = 2.0
SMALL_LIMIT = 20_000


@pytest.fixture
async def sink_on() -> AsyncGenerator[Callable[..., Any]]:
    """Open sinks: `await sink_on(broker, template, producer settings)`."""
    async with opening(RecordingKafkaSink, STALL_SECONDS) as open_sink:

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


async def test_a_record_has_our_headers_first_and_then_the_events_own(
    kafka: KafkaBroker, topic: str, sink_on: Any
) -> None:
    kafka.create_topic(topic)
    own = {"traceparent": "00-1-2-03", "empty": "", "имя": "日本"}
    forged = {"id": "theirs", "Type": "theirs", "CONTENT-TYPE": "theirs", "ce_id": "theirs"}
    event = an_event("ключ", b"\x00\xff", json.dumps({**forged, **own}))
    sink = await sink_on(kafka, topic)
    assert list(await sink.deliver([event], soon())) == [DELIVERED]
    (record,) = kafka.read_all(topic)
    ours = [("id", event.uid), ("type", "order.created"), ("content-type", "application/json")]
    assert [(name, (value or b"").decode()) for name, value in record.header_list] == [*ours, *own.items()]
    # As consumers in Python read them: the last header of a name counts.
    assert dict(record.header_list)["id"] == event.uid.encode()
    assert (record.key, record.value) == ("ключ".encode(), b"\x00\xff")


async def test_the_topic_is_rendered_from_type_key_and_headers(kafka: KafkaBroker, sink_on: Any) -> None:
    for place in ("a.eu", "b.us"):
        kafka.create_topic(f"made.order.created.{place}")
    sink = await sink_on(kafka, "made.{type}.{key}.{headers.region}")
    events = [an_event("a", headers='{"region": "eu"}'), an_event("b", headers='{"region": "us"}')]
    assert list(await sink.deliver(events, soon())) == [DELIVERED] * 2
    for event, place in zip(events, ("a.eu", "b.us"), strict=True):
        assert uids(kafka.consume(f"made.order.created.{place}", count=1)) == [event.uid]


async def test_an_event_without_a_topic_or_with_broken_headers_is_refused_alone(
    kafka: KafkaBroker, sink_on: Any
) -> None:
    kafka.create_topic("refusing.a")
    sink = await sink_on(kafka, "refusing.{key}")
    events = [an_event("a"), an_event(None), an_event("a/b"), an_event("a", headers="[1]"), an_event("a")]
    verdicts = await sink.deliver(events, soon())
    assert [type(verdict) for verdict in verdicts] == [Delivered, Refused, Refused, Refused, Delivered]
    assert "a/b" not in str(verdicts)
    assert uids(kafka.read_all("refusing.a")) == [events[0].uid, events[4].uid]


async def test_keys_are_placed_as_java_clients_place_them(kafka: KafkaBroker, topic: str, sink_on: Any) -> None:
    kafka.create_topic(topic, partitions=6)
    sink = await sink_on(kafka, topic)
    keys = [f"order-{number}" for number in range(20)]
    await sink.deliver([an_event(key) for key in keys], soon())
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
async def test_a_frozen_broker_loses_and_reorders_nothing(
    real_kafka: KafkaBroker, topic: str, sink_on: Any, report: Callable[[str], None]
) -> None:
    real_kafka.create_topic(topic)
    sink = await sink_on(real_kafka, topic)
    events = some_events(40_000, keys=50)
    relaying = asyncio.ensure_future(hand_over_all(sink, events))
    await sink.has(Delivered, 5_000)
    with real_kafka.frozen():
        began = time.monotonic()
        await sink.has(Unavailable)
        assert time.monotonic() - began < sink.timeout_seconds + 1
    await relaying
    duplicates = assert_all_arrived_in_order(real_kafka.read_all(topic), events)
    report(f"frozen broker: {len(events)} events, 0 lost, 0 out of order, {duplicates} duplicates")


@pytest.mark.slow
async def test_a_broker_that_is_killed_and_comes_back_loses_and_reorders_nothing(
    real_kafka: KafkaBroker, topic: str, sink_on: Any, report: Callable[[str], None]
) -> None:
    real_kafka.create_topic(topic)
    sink = await sink_on(real_kafka, topic)
    events = some_events(40_000, keys=50)
    relaying = asyncio.ensure_future(hand_over_all(sink, events))
    await sink.has(Delivered, 5_000)
    await asyncio.to_thread(real_kafka.kill)
    await sink.has(Unavailable)
    await asyncio.to_thread(real_kafka.start)
    await relaying
    duplicates = assert_all_arrived_in_order(real_kafka.read_all(topic), events)
    report(f"killed broker: {len(events)} events, 0 lost, 0 out of order, {duplicates} duplicates")


async def test_a_full_queue_of_the_client_is_waited_for(kafka: KafkaBroker, topic: str, sink_on: Any) -> None:
    kafka.create_topic(topic)
    sink = await sink_on(kafka, topic, {"queue.buffering.max.messages": 20})
    warm, events = some_events(1), some_events(600)
    await hand_over_all(sink, warm)
    assert await hand_over(sink, events, batch=200) == [DELIVERED] * 600
    assert assert_all_arrived_in_order(kafka.read_all(topic), [*warm, *events]) == 0


@pytest.mark.parametrize("of_user", [False, True], ids=["by default", "as the user says"])
async def test_the_last_records_do_not_linger_unless_the_user_says_so(
    kafka: KafkaBroker, topic: str, sink_on: Any, monkeypatch: pytest.MonkeyPatch, of_user: bool
) -> None:
    """With a linger time of a minute, unsent records are purged when acknowledgements stop."""
    kafka.create_topic(topic)
    minute = 60_000
    if not of_user:
        monkeypatch.setattr("outbox_relay.sinks.kafka.client.DEFAULTS", {**DEFAULTS, "linger.ms": minute})
        monkeypatch.setattr("outbox_relay.sinks.kafka.producer.LINGER_MS", minute)
    sink = await sink_on(kafka, topic, {"linger.ms": minute} if of_user else {})
    [verdict] = await sink.deliver(some_events(1), soon())
    assert isinstance(verdict, Unavailable if of_user else Delivered)


async def test_events_not_handed_over_in_time_are_unavailable_and_never_arrive(
    kafka: KafkaBroker, topic: str, sink_on: Any
) -> None:
    kafka.create_topic(topic)
    sink = await sink_on(kafka, topic, {"queue.buffering.max.messages": 20, "linger.ms": 50})
    [first] = taken = some_events(1)
    await sink.deliver([first], soon())
    delivered: list[Verdict] = []
    seconds = 0.1
    while not delivered:  # a busy machine may need longer for the first of them
        seconds *= 2
        events = [an_event(None, b"%d" % number) for number in range(round(seconds * 20_000))]
        until = lease_clock() + seconds
        verdicts = await sink.deliver(events, until)
        assert lease_clock() < until + STALL_SECONDS
        delivered = [verdict for verdict in verdicts if isinstance(verdict, Delivered)]
        assert len(delivered) < len(verdicts)
        assert list(verdicts[: len(delivered)]) == delivered
        taken += events[: len(delivered)]
    after = some_events(1)
    assert list(await sink.deliver(after, soon())) == [DELIVERED]
    assert set(uids(kafka.read_all(topic))) == {event.uid for event in [*taken, *after]}


async def test_the_event_loop_runs_while_a_batch_is_handed_over(kafka: KafkaBroker, topic: str, sink_on: Any) -> None:
    kafka.create_topic(topic)
    sink = await sink_on(kafka, topic)
    under_way = asyncio.ensure_future(hand_over(sink, some_events(40_000), batch=4_000))
    turns = 0
    while not under_way.done():
        await asyncio.sleep(0)
        turns += 1
    assert turns > 20


# -- limits ------------------------------------------------------------------------------------------------------


async def test_oversized_records_are_refused_and_their_neighbours_arrive_in_order(
    real_kafka: KafkaBroker, topic: str, sink_on: Any
) -> None:
    real_kafka.create_topic(topic, config={"max.message.bytes": str(SMALL_LIMIT)})
    sink = await sink_on(real_kafka, topic)
    events = some_events(3_000)
    large = range(100, 3_000, 300)
    for place in large:
        events[place] = events[place]._replace(payload=b"x" * (SMALL_LIMIT + 1))
    verdicts = await hand_over(sink, events, batch=1_000)
    assert [place for place, verdict in enumerate(verdicts) if isinstance(verdict, Refused)] == list(large)
    assert verdicts.count(DELIVERED) == 3_000 - len(large)
    assert all(topic in reason and "MSG_SIZE_TOO_LARGE" in reason for reason in sink.reasons)
    others = [event for place, event in enumerate(events) if place not in large]
    assert assert_all_arrived_in_order(real_kafka.read_all(topic), others) == 0


async def test_a_record_that_only_the_broker_finds_too_large_is_refused_alone(
    real_kafka: KafkaBroker, topic: str, sink_on: Any
) -> None:
    real_kafka.create_topic(topic, config={"max.message.bytes": str(SMALL_LIMIT)})
    sink = await sink_on(real_kafka, topic, {"compression.type": "lz4"})
    events = some_events(3_000)
    events[700] = events[700]._replace(payload=random.Random(1).randbytes(2 * SMALL_LIMIT))
    verdicts = await hand_over(sink, events, batch=1_000)
    assert [place for place, verdict in enumerate(verdicts) if verdict is not DELIVERED] == [700]
    assert isinstance(verdicts[700], Refused)
    others = [event for event in events if event is not events[700]]
    assert_all_arrived_in_order(real_kafka.read_all(topic), others)


async def test_a_record_above_the_clients_own_limit_is_refused_at_once(
    kafka: KafkaBroker, topic: str, sink_on: Any
) -> None:
    kafka.create_topic(topic)
    sink = await sink_on(kafka, topic, {"message.max.bytes": 5_000})
    events = some_events(30)
    events[10] = events[10]._replace(payload=b"x" * 6_000)
    verdicts = await hand_over(sink, events)
    assert [type(verdict) for verdict in verdicts] == [Delivered] * 10 + [Refused] + [Delivered] * 19
    assert_all_arrived_in_order(kafka.read_all(topic), [event for event in events if event is not events[10]])


async def test_a_record_that_never_fits_into_the_clients_queue_is_refused(
    kafka: KafkaBroker, topic: str, sink_on: Any
) -> None:
    kafka.create_topic(topic)
    sink = await sink_on(kafka, topic, {"queue.buffering.max.kbytes": 2})
    events = some_events(3)
    events[1] = events[1]._replace(payload=b"x" * 5_000)
    assert [type(verdict) for verdict in await hand_over(sink, events)] == [Delivered, Refused, Delivered]


async def test_a_lowered_limit_refuses_no_record_that_still_fits(
    real_kafka: KafkaBroker, topic: str, sink_on: Any
) -> None:
    real_kafka.create_topic(topic, partitions=1)
    sink = await sink_on(real_kafka, topic)
    events = [event._replace(payload=b"%0200d" % event.id) for event in some_events(350)]
    assert await hand_over(sink, events[:50], batch=50) == [DELIVERED] * 50
    Administration(real_kafka.bootstrap).set_topic(topic, {"max.message.bytes": "5000"})
    assert await hand_over(sink, events[50:], batch=150) == [DELIVERED] * 300
    assert_all_arrived_in_order(real_kafka.read_all(topic), events)


async def test_a_raised_limit_takes_effect(
    real_kafka: KafkaBroker, topic: str, sink_on: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("outbox_relay.sinks.kafka.topic_metadata.MAX_AGE_SECONDS", 0.0)
    real_kafka.create_topic(topic, config={"max.message.bytes": str(SMALL_LIMIT)})
    sink = await sink_on(real_kafka, topic)
    large = an_event(payload=b"x" * (2 * SMALL_LIMIT))
    assert isinstance((await sink.deliver([large], soon()))[0], Refused)
    Administration(real_kafka.bootstrap).set_topic(topic, {"max.message.bytes": str(3 * SMALL_LIMIT)})

    async def is_delivered() -> bool:
        return list(await sink.deliver([large], soon())) == [DELIVERED]

    await auntil(is_delivered, seconds=30, what="the broker applies the limit, and the sink sees it")


async def test_a_record_that_fails_its_request_is_refused_alone_and_its_mates_keep_their_order(
    real_kafka: KafkaBroker, topic: str, sink_on: Any, report: Callable[[str], None]
) -> None:
    # A compacted topic refuses a record without a key with INVALID_RECORD for the whole request.
    real_kafka.create_topic(topic, partitions=1, config={"cleanup.policy": "compact"})
    sink = await sink_on(real_kafka, topic, {"batch.num.messages": 100})
    events = some_events(10_000)
    poisoned = (0, 2_345, 2_346, 8_000)
    for place in poisoned:
        events[place] = events[place]._replace(key=None)
    verdicts = await hand_over(sink, events, batch=1_000)
    assert [place for place, verdict in enumerate(verdicts) if verdict is not DELIVERED] == list(poisoned)
    assert all(isinstance(verdicts[place], Refused) for place in poisoned)
    assert all("INVALID_RECORD" in reason and topic in reason for reason in sink.reasons)
    others = [event for event in events if event.key is not None]
    duplicates = assert_all_arrived_in_order(real_kafka.read_all(topic), others)
    report(f"{len(poisoned)} records refused by the broker among {len(events)}: {duplicates} duplicates")


# -- topics ------------------------------------------------------------------------------------------------------


async def test_a_topic_that_the_broker_creates_is_waited_for(kafka: KafkaBroker, topic: str, sink_on: Any) -> None:
    sink = await sink_on(kafka, topic)
    events = some_events(100)
    await hand_over_all(sink, events)
    assert_all_arrived_in_order(kafka.read_all(topic), events)


@pytest.mark.slow
async def test_an_unknown_topic_is_named_and_nothing_is_lost(topic: str, sink_on: Any) -> None:
    with KafkaBroker({"auto.create.topics.enable": "false"}) as broker:
        _only_real(broker)
        sink = await sink_on(broker, topic)
        events = some_events(300)
        verdicts = await hand_over(sink, events, batch=100)
        assert {type(verdict) for verdict in verdicts} == {Unavailable}
        assert all(topic in reason and "UNKNOWN_TOPIC_OR_PART" in reason for reason in sink.reasons)
        assert topic in (await sink.check() or "")
        broker.create_topic(topic)
        assert await sink.check() is None
        await hand_over_all(sink, events)
        assert_all_arrived_in_order(broker.read_all(topic), events)

        Administration(broker.bootstrap).delete_topic(topic)
        await auntil(sink.check, seconds=10, what="the topic is gone")
        sink.reasons.clear()
        more = some_events(50)
        verdicts = await hand_over(sink, more)
        assert {type(verdict) for verdict in verdicts} == {Unavailable}
        assert all(topic in reason for reason in sink.reasons), sink.reasons
        sink.reasons.clear()
        assert {type(verdict) for verdict in await hand_over(sink, more)} == {Unavailable}
        assert all(topic in reason and "UNKNOWN_TOPIC_OR_PART" in reason for reason in sink.reasons)
        broker.create_topic(topic)
        await hand_over_all(sink, more)
        assert_all_arrived_in_order(broker.read_all(topic), more)


# -- reasons shown ----------------------------------------------------------------------------------------------


async def test_a_cluster_that_does_not_answer_fails_the_check_without_a_secret(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("outbox_relay.sinks.kafka.sink.CHECK_SECONDS", 1.0)
    producer = {
        "bootstrap.servers": "127.0.0.1:1",
        "security.protocol": "SASL_PLAINTEXT",
        "sasl.mechanism": "PLAIN",
        "sasl.username": "relay",
        "sasl.password": "hunter2-and-more",
    }
    sink = RecordingKafkaSink("events", TopicTemplate.parse("t"), producer, STALL_SECONDS)
    await sink.open()
    reason = await sink.check()
    verdicts = await sink.deliver(some_events(1), soon())
    await sink.close()
    shown = f"{reason} {verdicts}"
    assert "Connection refused" in (reason or "")
    assert "Connection refused" in str(verdicts)
    assert "hunter2" not in shown


async def test_settings_that_librdkafka_does_not_accept_are_named() -> None:
    producer = {"bootstrap.servers": "127.0.0.1:1", "lingre.ms": 3}
    sink = KafkaSink("events", TopicTemplate.parse("t"), producer, STALL_SECONDS)
    with pytest.raises(ConfigurationError, match=r"sinks.events.producer.*lingre.ms"):
        await sink.open()


# -- speed -------------------------------------------------------------------------------------------------------


@pytest.mark.slow
async def test_throughput_compared_with_a_bare_loop(
    kafka: KafkaBroker, topic: str, sink_on: Any, report: Callable[[str], None]
) -> None:
    rounds, size = 25, 4_000
    batch = [event._replace(payload=b"x" * 250) for event in some_events(size, keys=5_000)]
    kafka.create_topic(topic)
    bare = await asyncio.to_thread(_bare_loop, kafka, topic, batch, rounds)
    sink = await sink_on(kafka, topic)
    assert await hand_over(sink, batch[:1]) == [DELIVERED]
    began = time.perf_counter()
    verdicts = await hand_over(sink, batch * rounds, batch=size)
    through = rounds * size / (time.perf_counter() - began)
    assert verdicts.count(DELIVERED) == rounds * size
    report(f"through the sink {through:,.0f} events/s, bare loop {bare:,.0f} events/s, ratio {through / bare:.2f}")


def _bare_loop(broker: KafkaBroker, topic: str, batch: Sequence[StoredEvent], rounds: int) -> float:
    """Return the events per second of a loop around `produce` with a thread for the delivery reports."""
    producer = Producer(
        {
            "bootstrap.servers": broker.bootstrap,
            "enable.idempotence": True,
            "linger.ms": 5,
            "partitioner": "murmur2_random",
            "queue.buffering.max.messages": 1_000_000,
        }
    )
    producer.produce(topic, b"warm")
    producer.flush()
    failures: list[KafkaError] = []
    ended = threading.Event()

    def serve() -> None:
        while not ended.is_set():
            producer.poll(0.05)

    def reported(error: KafkaError | None, _: object) -> None:
        if error is not None:
            failures.append(error)

    serving = threading.Thread(target=serve)
    serving.start()
    began = time.perf_counter()
    for _ in range(rounds):
        for event in batch:
            headers: list[tuple[str, str | bytes | None]]
            headers = [("id", event.uid), ("type", event.type), ("content-type", event.content_type)]
            producer.produce(topic, event.payload, event.key, on_delivery=reported, headers=headers)
    producer.flush()
    took = time.perf_counter() - began
    ended.set()
    serving.join()
    assert not failures
    return len(batch) * rounds / took


def _only_real(broker: KafkaBroker) -> None:
    if not broker.real:
        pytest.skip("needs Apache Kafka, and this is the substitute")
