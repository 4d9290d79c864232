"""The producer thread: order, verdicts and replaced producers, on a scripted client."""

import asyncio
import threading
import time
from collections.abc import AsyncGenerator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from confluent_kafka import KafkaError

from outbox_relay.domain.errors import ConfigurationError
from outbox_relay.domain.event import StoredEvent
from outbox_relay.domain.lease_clock import lease_clock
from outbox_relay.domain.outcomes import DELIVERED, Refused, Unavailable
from outbox_relay.formats.topics import TopicTemplate
from outbox_relay.sinks.contract.handing import an_event, some_events, soon
from outbox_relay.sinks.kafka import ClientSettings, KafkaSink, RecordFormat
from outbox_relay.sinks.kafka.call import DeliverCall
from outbox_relay.sinks.kafka.producer_thread import ProducerThread
from outbox_relay.sinks.kafka.topic_resolver import TopicResolver
from tests.support.kafka import scripted
from tests.support.kafka.scripted import (
    SILENCE,
    STALL_SECONDS,
    ScriptedClient,
    ScriptedProducer,
    SteppedClock,
    fails,
    scripted_sink,
)
from tests.support.wait import until

client = scripted.client
clock = scripted.clock


@pytest.fixture
async def sink(client: ScriptedClient) -> AsyncGenerator[KafkaSink]:
    async with scripted_sink(client, "orders") as opened:
        yield opened


async def overlapping(sink: KafkaSink, *batches: Sequence[StoredEvent]) -> list[Sequence[Any]]:
    return list(await asyncio.gather(*(sink.deliver(batch, soon()) for batch in batches)))


@pytest.mark.parametrize(
    "code",
    [
        KafkaError.TOPIC_AUTHORIZATION_FAILED,
        KafkaError.UNKNOWN_TOPIC_OR_PART,
        KafkaError._MSG_TIMED_OUT,
        KafkaError.OUT_OF_ORDER_SEQUENCE_NUMBER,
        9_999,
    ],
)
async def test_an_error_of_the_destination_makes_the_rest_of_the_key_unavailable(
    client: ScriptedClient, sink: KafkaSink, code: int
) -> None:
    events = [an_event("a"), an_event("a"), an_event("b"), an_event("a"), an_event(None)]
    client.script = fails(code, events[1])
    client.hold_reports()
    calls = [asyncio.ensure_future(sink.deliver(batch, soon())) for batch in (events[:3], events[3:])]
    await client.took(2)
    client.release_reports()
    first, second = await asyncio.gather(*calls)
    assert first[0] == DELIVERED
    assert isinstance(first[1], Unavailable)
    assert isinstance(second[0], Unavailable)
    assert KafkaError(code).name() in first[1].reason
    assert len(client.producers) == 1
    assert client.producers[0].closed
    client.script = fails(code)
    assert await overlapping(sink, [events[1], events[3]]) == [[DELIVERED, DELIVERED]]
    assert len(client.producers) == 2


async def test_acknowledged_records_after_an_unavailable_one_of_their_key_are_unavailable(
    client: ScriptedClient, sink: KafkaSink
) -> None:
    events = [an_event("a"), an_event("b"), an_event("a"), an_event("b")]
    client.script = fails(KafkaError.TOPIC_AUTHORIZATION_FAILED, events[0])
    verdicts = await sink.deliver(events, soon())
    assert [verdict is DELIVERED for verdict in verdicts] == [False, True, False, True]
    assert client.taken == [event.uid for event in events[1:]]


@pytest.mark.parametrize("code", [KafkaError.INVALID_RECORD, KafkaError.INVALID_MSG, KafkaError.MSG_SIZE_TOO_LARGE])
async def test_a_failed_request_is_sent_again_record_by_record_before_anything_later(
    client: ScriptedClient, sink: KafkaSink, code: int
) -> None:
    events = some_events(20, keys=3)
    mates = events[5:9]
    poisoned, innocent = fails(code, events[6]), fails(code, *mates, alone=False)
    client.script = lambda event, alone: poisoned(event, alone) or innocent(event, alone)
    verdicts = [verdict for batch in await overlapping(sink, events[:10], events[10:]) for verdict in batch]
    assert [place for place, verdict in enumerate(verdicts) if isinstance(verdict, Refused)] == [6]
    assert verdicts.count(DELIVERED) == 19
    assert client.taken == [event.uid for event in events if event is not events[6]]
    assert [producer.alone for producer in client.producers] == [False, True, False]
    assert "orders" in verdicts[6].reason
    assert KafkaError(code).name() in verdicts[6].reason


async def test_records_of_a_failed_request_are_sent_before_pending_events(
    client: ScriptedClient, sink: KafkaSink
) -> None:
    events = some_events(1_000, keys=3)
    client.script = fails(KafkaError.INVALID_RECORD, events[150])
    verdicts = [verdict for batch in await overlapping(sink, events[:500], events[500:]) for verdict in batch]
    assert [place for place, verdict in enumerate(verdicts) if verdict is not DELIVERED] == [150]
    assert client.taken == [event.uid for event in events if event is not events[150]]


async def test_records_that_failed_between_suspects_are_sent_between_them(
    client: ScriptedClient, sink: KafkaSink
) -> None:
    events = some_events(30, keys=1)
    client.script = fails(KafkaError.INVALID_RECORD, events[5], events[20])
    verdicts = await sink.deliver(events, soon())
    assert [place for place, verdict in enumerate(verdicts) if verdict is not DELIVERED] == [5, 20]
    assert client.taken == [event.uid for event in events if event not in (events[5], events[20])]


async def test_event_whose_lease_ended_while_it_was_encoded_is_not_refused(
    client: ScriptedClient, sink: KafkaSink, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Goes red if a producer that takes no event always counts as one whose queue is too small for it."""

    def encode_slowly(_producer: object, call: DeliverCall, _indexes: Sequence[int]) -> int:
        until(lambda: lease_clock() >= call.until, seconds=10, what="the lease ends")
        return 0

    monkeypatch.setattr(ScriptedProducer, "put", encode_slowly)
    [verdict] = await sink.deliver([an_event()], lease_clock() + 0.05)
    assert isinstance(verdict, Unavailable)
    assert client.taken == []


async def test_a_record_that_fails_only_in_company_is_delivered(client: ScriptedClient, sink: KafkaSink) -> None:
    events = some_events(20, keys=3)
    client.script = fails(KafkaError.MSG_SIZE_TOO_LARGE, *events[:12], alone=False)
    assert await sink.deliver(events, soon()) == [DELIVERED] * 20
    assert client.taken == [event.uid for event in events]
    assert client.producers[-1].batch_bytes < client.producers[0].batch_bytes


async def test_a_destination_that_fails_while_records_are_sent_alone_ends_the_calls(
    client: ScriptedClient, sink: KafkaSink
) -> None:
    events = some_events(10, keys=2)
    invalid = fails(KafkaError.INVALID_RECORD, *events[2:5], alone=False)
    down = fails(KafkaError.TOPIC_AUTHORIZATION_FAILED, events[4])
    client.script = lambda event, alone: invalid(event, alone) or (down(event, alone) if alone else None)
    verdicts = await sink.deliver(events, soon())
    assert [verdict is DELIVERED for verdict in verdicts] == [True] * 4 + [False] * 6
    assert client.taken == [event.uid for event in events[:4]]
    assert not any(isinstance(verdict, Refused) for verdict in verdicts)


async def test_a_stall_purges_all_records_and_opens_a_new_producer(
    clock: SteppedClock, client: ScriptedClient, sink: KafkaSink
) -> None:
    events = some_events(10, keys=2)
    client.script = lambda event, _alone: SILENCE if event in events[4:] else None
    call = asyncio.ensure_future(sink.deliver(events, soon()))
    await client.took(1)
    clock.stall()
    verdicts = await call
    assert [verdict is DELIVERED for verdict in verdicts] == [True] * 4 + [False] * 6
    assert "no acknowledgement" in str(verdicts[4])
    assert client.producers[0].purged
    assert client.producers[0].closed
    client.script = lambda _event, _alone: None
    assert await sink.deliver(events[4:], soon()) == [DELIVERED] * 6
    assert client.taken == [event.uid for event in events]


def test_waiting_for_a_call_ends_in_time_however_busy_the_machine_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """An endless wait would serve no report and detect no stall: the sink would stop without a word.

    Here the time is over before the wait begins, as it may be on a busy machine.
    """
    monkeypatch.setattr("outbox_relay.sinks.kafka.producer_thread.IDLE_SECONDS", 1e-9)
    settings, topics = ClientSettings({"bootstrap.servers": "unused:1"}), TopicResolver(TopicTemplate.parse("orders"))
    thread = ProducerThread("s", settings, topics, STALL_SECONDS, 1, RecordFormat(), None, hold_keys=False)
    rounds = 20_000
    done: list[int] = []

    def wait() -> None:
        for number in range(rounds):
            thread.put(lambda: None)
            for _ in range(2):
                thread._next_job()  # pyright: ignore[reportPrivateUsage] - the wait itself
            done.append(number)

    waiting = threading.Thread(target=wait, daemon=True)
    waiting.start()
    waiting.join(120)
    assert len(done) == rounds


async def test_a_call_is_answered_after_all_earlier_ones(
    clock: SteppedClock, client: ScriptedClient, sink: KafkaSink
) -> None:
    first, second = some_events(1), some_events(1)
    client.script = lambda event, _alone: SILENCE if event in first else None
    answered: list[int] = []
    calls = [asyncio.ensure_future(sink.deliver(batch, soon())) for batch in (first, second)]
    for number, call in enumerate(calls):
        call.add_done_callback(lambda _, number=number: answered.append(number))
    await client.took(2)
    assert client.taken == [second[0].uid]
    assert answered == []
    clock.stall()
    await asyncio.gather(*calls)
    assert answered == [0, 1]


async def test_no_round_begins_before_all_calls_of_the_last_one_have_returned(
    client: ScriptedClient, sink: KafkaSink
) -> None:
    events = some_events(2, keys=1)
    client.script = lambda event, _alone: SILENCE if event is events[0] else None
    first = asyncio.ensure_future(sink.deliver(events[:1], soon()))
    await client.took(1)
    # Both begin before the event loop can take the answer of the first call.
    _, (late,) = await asyncio.gather(sink.reset(), sink.deliver(events[1:], soon()))
    assert isinstance(late, Unavailable)
    assert client.taken == []
    assert [type(verdict) for verdict in await first] == [Unavailable]
    client.script = lambda _event, _alone: None
    assert await sink.deliver(events, soon()) == [DELIVERED] * 2


async def test_a_machine_that_was_suspended_delivers(sink: KafkaSink, monkeypatch: pytest.MonkeyPatch) -> None:
    """During a suspension the lease clock runs, and the clock of deadlines does not: they are never compared."""

    def ahead(clock: int) -> float:
        return time.clock_gettime(clock) + 3600

    monkeypatch.setattr("outbox_relay.domain.lease_clock.time", SimpleNamespace(clock_gettime=ahead))
    assert await sink.deliver(some_events(3), soon()) == [DELIVERED] * 3


async def test_an_internal_error_is_answered_and_logged(
    client: ScriptedClient, sink: KafkaSink, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("outbox_relay.sinks.kafka.in_flight_messages.PURGE_SECONDS", 0.1)

    def broken(_event: StoredEvent, _alone: bool) -> None:
        raise ZeroDivisionError

    client.script = broken
    (verdict,) = await sink.deliver(some_events(1), soon())
    assert isinstance(verdict, Unavailable)
    assert "ZeroDivisionError" in caplog.text
    client.script = lambda _event, _alone: None
    assert await sink.deliver(some_events(1), soon()) == [DELIVERED]


# -- new settings --------------------------------------------------------------------------------------------------

NEWER = {"bootstrap.servers": "unused:1", "sasl.password": "the-new-one"}


async def test_new_settings_are_used_once_every_record_in_flight_has_a_report(
    client: ScriptedClient, sink: KafkaSink
) -> None:
    """Earlier records are sent by the old producer, later ones by a new one, in that order."""
    client.hold_reports()
    events = some_events(20, keys=2)
    first = asyncio.ensure_future(sink.deliver(events[:10], soon()))
    await client.took(1)
    sink.use_settings(ClientSettings(NEWER))
    second = asyncio.ensure_future(sink.deliver(events[10:], soon()))
    await client.drains()
    assert [producer.closed for producer in client.producers] == [False]
    client.release_reports()
    assert list(await first) + list(await second) == [DELIVERED] * 20
    assert [(producer.closed, producer.purged) for producer in client.producers] == [(True, False), (False, False)]
    assert client.taken == [event.uid for event in events]


async def test_new_settings_reach_the_next_producer_and_old_secrets_stay_redacted(client: ScriptedClient) -> None:
    made: list[tuple[object, str]] = []

    def opened_with(settings: ClientSettings) -> None:
        made.append((settings.producer(1, {}).get("sasl.password"), settings.redact("the-old-one the-new-one")))

    client.opened_with = opened_with
    opened = KafkaSink("s", TopicTemplate.parse("t"), {**NEWER, "sasl.password": "the-old-one"}, STALL_SECONDS)
    await opened.open()
    opened.use_settings(ClientSettings(NEWER))
    assert await opened.deliver(some_events(1), soon()) == [DELIVERED]
    await opened.close()
    assert made == [("the-old-one", "*** the-new-one"), ("the-new-one", "*** ***")]


async def test_a_stall_does_not_lose_new_settings(clock: SteppedClock, client: ScriptedClient, sink: KafkaSink) -> None:
    """Acknowledgements stop while the producer is to be replaced, so it is purged and closed."""
    events = some_events(4, keys=2)
    client.script = lambda event, _alone: SILENCE if event in events[2:] else None
    first = asyncio.ensure_future(sink.deliver(events, soon()))
    await client.took(1)
    sink.use_settings(ClientSettings(NEWER))
    await client.drains()
    clock.stall()
    assert [verdict is DELIVERED for verdict in await first] == [True, True, False, False]
    client.script = lambda _event, _alone: None
    assert await sink.deliver(events[2:], soon()) == [DELIVERED] * 2
    assert client.taken == [event.uid for event in events]
    assert len(client.producers) == 2


async def test_settings_that_open_no_producer_change_nothing() -> None:
    sink = KafkaSink("s", TopicTemplate.parse("t"), NEWER, STALL_SECONDS)
    with pytest.raises(ConfigurationError, match=r"sinks\.s\.producer: .*no.such.setting"):
        await sink.validated_settings({**NEWER, "no.such.setting": "hunter2"}, {})
    with pytest.raises(ConfigurationError, match=r'sinks\.s\.producer_files\."ssl\.key\.pem": .*No such file'):
        await sink.validated_settings(NEWER, {"ssl.key.pem": Path("/nowhere/key")})
