"""Topics in trouble among good ones, on a scripted client."""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from typing import Any

import pytest
from confluent_kafka import KafkaError

from outbox_relay.domain.event import StoredEvent
from outbox_relay.domain.outcomes import DELIVERED, Refused, Unavailable
from outbox_relay.sinks.contract.handing import an_event, soon
from outbox_relay.sinks.kafka import KafkaSink
from tests.support.kafka import scripted
from tests.support.kafka.scripted import SILENCE, ScriptedClient, SteppedClock, fails, scripted_sink

client = scripted.client
clock = scripted.clock


@pytest.fixture
async def sink(client: ScriptedClient) -> AsyncGenerator[KafkaSink]:
    async with scripted_sink(client, "{type}") as opened:
        yield opened


def of_type(kind_of_event: str, key: str | None = None) -> StoredEvent:
    return an_event(key)._replace(type=kind_of_event)


def parts(verdicts: Sequence[Any]) -> list[str | None]:
    """Return the `part` of each verdict, None for a delivered event."""
    for verdict in verdicts:
        assert verdict is DELIVERED or (isinstance(verdict, Unavailable) and verdict.part), verdict
    return [None if verdict is DELIVERED else verdict.part for verdict in verdicts]


async def test_a_missing_topic_affects_only_its_own_events_and_later_ones_of_their_keys(
    client: ScriptedClient, sink: KafkaSink
) -> None:
    client.missing.add("bad")
    events = [of_type("good", "a"), of_type("bad", "a"), of_type("good", "a"), of_type("good", "b"), of_type("bad")]
    verdicts = await sink.deliver(events, soon())
    assert parts(verdicts) == [None, "topic bad", "topic bad", None, "topic bad"]
    assert client.taken == [events[0].uid, events[3].uid]
    assert "UNKNOWN_TOPIC_OR_PART" in str(verdicts[1])
    assert isinstance(verdicts[1], Unavailable)
    assert 0 < (verdicts[1].retry_after_seconds or 0) < 5
    assert len(client.producers) == 1


async def test_a_denied_topic_affects_only_its_own_events(client: ScriptedClient, sink: KafkaSink) -> None:
    events = [of_type("good", "a"), of_type("bad", "b"), of_type("good", "b"), of_type("good", "a"), of_type("bad")]
    client.script = fails(KafkaError.TOPIC_AUTHORIZATION_FAILED, events[1], events[4])
    verdicts = await sink.deliver(events, soon())
    assert parts(verdicts) == [None, "topic bad", "topic bad", None, "topic bad"]
    assert "TOPIC_AUTHORIZATION_FAILED" in str(verdicts[1])
    client.script = fails(KafkaError.TOPIC_AUTHORIZATION_FAILED)
    assert parts(await sink.deliver([of_type("bad"), of_type("good")], soon())) == ["topic bad", None]


async def test_a_denied_topic_and_a_refused_record(client: ScriptedClient, sink: KafkaSink) -> None:
    events = [of_type("bad", "a"), of_type("good", "a"), of_type("good", "b"), of_type("bad", "c"), of_type("good")]
    denied, invalid = fails(KafkaError.TOPIC_AUTHORIZATION_FAILED, events[0], events[3]), events[4]
    invalid_record = fails(KafkaError.INVALID_RECORD, invalid)
    client.script = lambda event, alone: denied(event, alone) or invalid_record(event, alone)
    verdicts = await sink.deliver(events, soon())
    assert isinstance(verdicts[4], Refused)
    assert parts(verdicts[:4]) == ["topic bad", "topic bad", None, "topic bad"]
    assert events[2].uid in client.taken


async def test_single_probes_at_growing_intervals_find_that_a_topic_is_back(
    clock: SteppedClock, client: ScriptedClient, sink: KafkaSink
) -> None:
    def bad() -> StoredEvent:
        return of_type("bad")

    client.script = lambda event, _alone: (
        KafkaError(KafkaError.TOPIC_AUTHORIZATION_FAILED) if event.type == "bad" else None
    )
    sent: list[int] = []
    for wait in (0.0, 0.5, 0.6, 1.5, 0.6, 3.9, 0.2):
        clock.ahead += wait
        before = client.answered
        assert parts(await sink.deliver([bad(), bad(), of_type("good")], soon())) == [*["topic bad"] * 2, None]
        sent.append(client.answered - before)
    # The first time both are sent, then none, then one after 1, 2 and 4 seconds.
    assert sent == [3, 1, 2, 1, 2, 1, 2]
    assert [producer.alone for producer in client.producers].count(True) == 1
    client.script = fails(KafkaError.TOPIC_AUTHORIZATION_FAILED)
    clock.ahead += 8.1
    assert parts(await sink.deliver([bad(), bad()], soon() + clock.ahead)) == [None, "topic bad"]
    assert parts(await sink.deliver([bad(), bad()], soon())) == [None, None]


async def test_a_key_in_trouble_blocks_concurrent_calls_and_no_later_one(
    client: ScriptedClient, sink: KafkaSink
) -> None:
    client.missing.add("bad")
    client.hold_reports()
    ahead, bad, good = of_type("good", "z"), of_type("bad", "a"), of_type("good", "a")
    first = asyncio.ensure_future(sink.deliver([ahead, bad], soon()))
    second = asyncio.ensure_future(sink.deliver([good], soon()))
    await client.took(2)
    client.release_reports()
    assert parts(await first) == [None, "topic bad"]
    assert parts(await second) == ["topic bad"]
    assert client.taken == [ahead.uid]
    assert parts(await sink.deliver([good], soon())) == [None]


async def test_acknowledged_events_after_one_of_a_denied_topic_are_unavailable(
    client: ScriptedClient, sink: KafkaSink
) -> None:
    events = [of_type("bad", "a"), of_type("good", "a")]
    client.script = fails(KafkaError.TOPIC_AUTHORIZATION_FAILED, events[0])
    assert parts(await sink.deliver(events, soon())) == ["topic bad", "topic bad"]


async def test_a_stall_opens_the_breaker_of_a_topic_that_is_gone(
    clock: SteppedClock, client: ScriptedClient, sink: KafkaSink
) -> None:
    events = [of_type("good", "a"), of_type("bad", "b"), of_type("good", "c")]

    def gone(event: StoredEvent, _alone: bool) -> object | None:
        if event.type == "good" or len(client.producers) > 1:
            return None
        client.missing.add("bad")
        return SILENCE

    client.script = gone
    call = asyncio.ensure_future(sink.deliver(events, soon()))
    await client.took(1)
    clock.stall()
    assert parts(await call) == [None, "topic bad", None]
    assert client.producers[0].purged
