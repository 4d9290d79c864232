"""The Kafka sink on three brokers: failing leaders, missing replicas, lost answers."""

import sys
from collections.abc import Callable, Generator, Sequence
from typing import Any

import pytest

from outbox_relay.domain.event import StoredEvent
from outbox_relay.domain.outcomes import Delivered, Unavailable
from outbox_relay.sinks.contract.handing import some_events
from tests.contract.kafka import proxied_broker
from tests.support.kafka import Administration, KafkaBroker, KafkaCluster, Record
from tests.support.kafka.delivering import opening, relaying
from tests.support.kafka.recording_sink import RecordingKafkaSink

pytestmark = pytest.mark.thorough

STALL_SECONDS = 2.0
EVENTS = 8_000
KEYS = 50


@pytest.fixture(scope="module")
def cluster(kafka: KafkaBroker) -> Generator[KafkaCluster]:
    """Start three brokers. A test that breaks one must restart it."""
    if not kafka.real:
        pytest.skip("needs Apache Kafka, and this is the substitute")
    with KafkaCluster() as started:
        yield started


@pytest.fixture
def sink_to() -> Generator[Callable[..., Any]]:
    """Open sinks: `sink_to(bootstrap, topic)`."""
    with opening(STALL_SECONDS, RecordingKafkaSink) as open_sink:

        def sink_to(bootstrap: str, topic: str) -> Any:
            return open_sink(topic, {"bootstrap.servers": bootstrap})

        yield sink_to


@pytest.fixture
def report(capsys: pytest.CaptureFixture[str]) -> Callable[[str, int], None]:
    """Show the number of repeated records."""

    def show(what: str, duplicates: int) -> None:
        with capsys.disabled():
            sys.stdout.write(f"\n{what}: {EVENTS} events, 0 lost, 0 out of order, {duplicates} duplicates\n")

    return show


def duplicates(records: Sequence[Record], events: Sequence[StoredEvent]) -> int:
    """Assert that nothing is lost or out of order; return the number of repeated records."""
    expected: dict[bytes, list[str]] = {}
    for event in events:
        expected.setdefault((event.key or "").encode(), []).append(event.uid)
    found: dict[bytes, dict[str, None]] = {}
    for record in records:
        found.setdefault(record.key or b"", {})[(record.headers["id"] or b"").decode()] = None
    assert {key: list(uids) for key, uids in found.items()} == expected
    return len(records) - len(events)


def test_another_leader_replaces_a_killed_one(
    cluster: KafkaCluster, topic: str, sink_to: Any, report: Callable[[str, int], None]
) -> None:
    cluster.create_topic(topic)
    sink = sink_to(cluster.bootstrap, topic)
    events = some_events(EVENTS, keys=KEYS)
    leader = cluster.leader(topic)
    try:
        with relaying(sink, events):
            sink.has(Delivered, 2_000)
            leader.kill()
    finally:
        leader.start()
    report("killed leader", duplicates(cluster.read_all(topic), events))


def test_requests_with_lost_answers_are_repeated_in_order(
    real_kafka: KafkaBroker, topic: str, sink_to: Any, report: Callable[[str, int], None]
) -> None:
    """Requests reach the broker and its answers are dropped, so every record in flight is repeated."""
    assert real_kafka.real
    with proxied_broker() as (broker, proxy):
        Administration(broker.bootstrap).create_topic(topic, 2)
        sink = sink_to(proxy.address, topic)
        events = some_events(EVENTS, keys=KEYS)
        with relaying(sink, events):
            sink.has(Delivered, 2_000)
            proxy.mute = True
            sink.has(Unavailable)
            proxy.mute = False
            proxy.cut()
            proxy.restore()
        found = duplicates(broker.read_all(topic), events)
    assert found > 0
    report("lost answers", found)
