"""The topics that events may name, and topics in trouble among good ones, on a scripted client."""

import json
from collections.abc import Generator, Sequence
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import KafkaError

from outbox_relay.domain.event import StoredEvent
from outbox_relay.domain.outcomes import DELIVERED, Refused, Unavailable
from outbox_relay.settings import KafkaSettings, load
from outbox_relay.sinks.contract.handing import an_event, soon
from outbox_relay.sinks.kafka import KafkaSink, kafka_sink
from outbox_relay.sinks.kafka.topics import TopicTroubles
from tests.support.kafka import scripted
from tests.support.kafka.delivering import deliver, finish, submit
from tests.support.kafka.scripted import ScriptedClient, SteppedClock, fails, scripted_sink

client = scripted.client
clock = scripted.clock


@pytest.fixture
def sink(client: ScriptedClient) -> Generator[KafkaSink]:
    with scripted_sink(client, "{type}") as opened:
        yield opened


def of_type(kind_of_event: str, key: str | None = None) -> StoredEvent:
    return an_event(key)._replace(type=kind_of_event)


def parts(verdicts: Sequence[Any]) -> list[str | None]:
    """Return the `part` of each verdict, None for a delivered event."""
    for verdict in verdicts:
        assert verdict is DELIVERED or (isinstance(verdict, Unavailable) and verdict.part), verdict
    return [None if verdict is DELIVERED else verdict.part for verdict in verdicts]


def test_a_missing_topic_affects_only_its_own_events_and_later_ones_of_their_keys(
    client: ScriptedClient, sink: KafkaSink
) -> None:
    client.missing.add("bad")
    events = [of_type("good", "a"), of_type("bad", "a"), of_type("good", "a"), of_type("good", "b"), of_type("bad")]
    verdicts = deliver(sink, events)
    assert parts(verdicts) == [None, "topic bad", "topic bad", None, "topic bad"]
    assert client.taken == [events[0].uid, events[3].uid]
    assert "UNKNOWN_TOPIC_OR_PART" in str(verdicts[1])
    assert isinstance(verdicts[1], Unavailable)
    assert 0 < (verdicts[1].retry_after_seconds or 0) < 5
    assert len(client.producers) == 1


def test_a_denied_topic_affects_only_its_own_events(client: ScriptedClient, sink: KafkaSink) -> None:
    events = [of_type("good", "a"), of_type("bad", "b"), of_type("good", "b"), of_type("good", "a"), of_type("bad")]
    client.script = fails(KafkaError.TOPIC_AUTHORIZATION_FAILED, events[1], events[4])
    verdicts = deliver(sink, events)
    assert parts(verdicts) == [None, "topic bad", "topic bad", None, "topic bad"]
    assert "TOPIC_AUTHORIZATION_FAILED" in str(verdicts[1])
    client.script = fails(KafkaError.TOPIC_AUTHORIZATION_FAILED)
    assert parts(deliver(sink, [of_type("bad"), of_type("good")])) == ["topic bad", None]


def test_single_probes_at_growing_intervals_find_that_a_topic_is_back(
    clock: SteppedClock, client: ScriptedClient, sink: KafkaSink
) -> None:
    def bad() -> StoredEvent:
        return of_type("bad")

    client.script = lambda record, _alone: (
        KafkaError(KafkaError.TOPIC_AUTHORIZATION_FAILED) if record.type == "bad" else None
    )
    sent: list[int] = []
    for wait in (0.0, 0.5, 0.6, 1.5, 0.6, 3.9, 0.2):
        clock.ahead += wait
        before = client.answered
        assert parts(deliver(sink, [bad(), bad(), of_type("good")])) == [*["topic bad"] * 2, None]
        sent.append(client.answered - before)
    # The first time both are sent, then none, then one after 1, 2 and 4 seconds.
    assert sent == [3, 1, 2, 1, 2, 1, 2]
    client.script = fails(KafkaError.TOPIC_AUTHORIZATION_FAILED)
    clock.ahead += 8.1
    assert parts(deliver(sink, [bad(), bad()], soon() + clock.ahead)) == [None, "topic bad"]
    assert parts(deliver(sink, [bad(), bad()])) == [None, None]


def test_a_key_in_trouble_blocks_concurrent_calls_and_no_later_one(client: ScriptedClient, sink: KafkaSink) -> None:
    client.missing.add("bad")
    client.reports = False
    ahead, bad, good = of_type("good", "z"), of_type("bad", "a"), of_type("good", "a")
    calls = [submit(sink, [ahead, bad]), submit(sink, [good])]
    client.reports = True
    assert [parts(verdicts) for verdicts in finish(sink, *calls)] == [[None, "topic bad"], ["topic bad"]]
    assert client.taken == [ahead.uid]
    assert parts(deliver(sink, [good])) == [None]


# -- probes -----------------------------------------------------------------------------------------------------------


def test_the_probe_interval_doubles_from_a_second_to_a_minute_and_retries_are_spread_over_it(
    clock: SteppedClock,
) -> None:
    troubles, distances = TopicTroubles(), list[int]()
    troubles.add("t", "topic t: gone")
    for _ in range(9):
        verdicts = [troubles.verdict("t") for _ in range(100)]
        distance = 0
        while not troubles.may_request("t"):
            clock.ahead += 0.5
            distance += 1
        waits = [verdict.retry_after_seconds or 0.0 for verdict in verdicts]
        assert min(waits) > distance / 2 - 0.5
        assert max(waits) - min(waits) > 0.4 * distance
        distances.append(distance)
        assert troubles.begin_probe("t")
        assert not troubles.begin_probe("t"), "one at a time"
        troubles.add("t", "still gone")
    assert distances == [2, 4, 8, 16, 32, 64, 120, 120, 120]
    clock.ahead += 60
    troubles.end_probe("t", delivered=True)
    assert "t" not in troubles


# -- topics that events may name ------------------------------------------------------------------------------


def named(topic: str) -> StoredEvent:
    return an_event(None, headers=json.dumps({"to": topic}))


@pytest.mark.parametrize("allowed", [(), ("*",), ("__consumer_offsets",)])
def test_kafkas_internal_topics_are_refused_whatever_is_allowed(client: ScriptedClient, allowed: Sequence[str]) -> None:
    with scripted_sink(client, "{headers.to}", topics=allowed) as sink:
        [verdict] = deliver(sink, [named("__consumer_offsets")])
    assert verdict == Refused("topic __consumer_offsets: names that begin with __ are Kafka's own")


@pytest.mark.usefixtures("client")
def test_a_topic_outside_the_list_of_the_file_is_refused_and_its_neighbours_are_not(tmp_path: Path) -> None:
    """Goes red when the list is left out between the settings and the sink, which would allow every topic."""
    file = tmp_path / "relay.toml"
    file.write_text("""
        [sinks.events]
        type = "kafka"
        topic = "{headers.to}"
        topics = ["shop.*", "audit"]
        producer = { "bootstrap.servers" = "localhost" }
    """)
    settings = load(file, {}).sinks["events"]
    assert isinstance(settings, KafkaSettings)
    sink = kafka_sink("events", settings, 15.0)
    verdicts = deliver(sink, [named(topic) for topic in ("shop.a", "shop", "audit", "audit.b", "shop.", "Shop.a")])
    sink.close()
    assert [verdict is DELIVERED for verdict in verdicts] == [True, False, True, False, True, False]
    assert verdicts[3] == Refused("topic audit.b is not among the topics of this sink: add it to the setting topics")
