"""Calls of the Kafka sink: order, verdicts and replaced producers, on a scripted client."""

import threading
import time
from collections.abc import Generator
from types import SimpleNamespace
from typing import Any

import pytest
from confluent_kafka import KafkaError

from outbox_relay.domain.outcomes import DELIVERED, Refused, Unavailable
from outbox_relay.domain.times import lease_clock
from outbox_relay.sinks.calls import Call
from outbox_relay.sinks.contract.handing import an_event, some_events, soon
from outbox_relay.sinks.kafka import KafkaSink, RecordFormat
from outbox_relay.sinks.kafka.delivery import LATE, Delivery
from outbox_relay.sinks.kafka.producer import NewProducerGuard
from tests.support.kafka import scripted
from tests.support.kafka.delivering import deliver, finish, submit
from tests.support.kafka.scripted import ScriptedClient, SteppedClock, fails, scripted_sink, silent
from tests.support.wait import until

client = scripted.client
clock = scripted.clock


@pytest.fixture
def sink(client: ScriptedClient) -> Generator[KafkaSink]:
    with scripted_sink(client, "orders") as opened:
        yield opened


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
def test_an_error_of_the_destination_makes_the_rest_of_the_key_unavailable(
    client: ScriptedClient, sink: KafkaSink, code: int
) -> None:
    events = [an_event("a"), an_event("a"), an_event("b"), an_event("a"), an_event(None)]
    client.script, client.reports = fails(code, events[1]), False
    calls = [submit(sink, batch) for batch in (events[:3], events[3:])]
    client.reports = True
    first, second = finish(sink, *calls)
    assert first[0] == DELIVERED
    assert isinstance(first[1], Unavailable)
    assert isinstance(second[0], Unavailable)
    assert KafkaError(code).name() in first[1].reason
    assert [producer.closed for producer in client.producers] == [True]
    client.script = fails(code)
    assert deliver(sink, [events[1], events[3]]) == [DELIVERED, DELIVERED]
    assert len(client.producers) == 2


def test_acknowledged_records_after_an_unavailable_one_of_their_key_are_unavailable(
    client: ScriptedClient, sink: KafkaSink
) -> None:
    events = [an_event("a"), an_event("b"), an_event("a"), an_event("b")]
    client.script = fails(KafkaError.TOPIC_AUTHORIZATION_FAILED, events[0])
    assert [verdict is DELIVERED for verdict in deliver(sink, events)] == [False, True, False, True]
    assert client.taken == [event.uid for event in events[1:]]


@pytest.mark.parametrize("code", [KafkaError.INVALID_RECORD, KafkaError.MSG_SIZE_TOO_LARGE])
def test_a_failed_request_is_sent_again_record_by_record_before_anything_later(
    client: ScriptedClient, sink: KafkaSink, code: int
) -> None:
    events = some_events(1_000, keys=3)
    poisoned, innocent = fails(code, events[150]), fails(code, *events[148:155], alone=False)
    client.script = lambda record, alone: poisoned(record, alone) or innocent(record, alone)
    first, second = finish(sink, *[submit(sink, batch) for batch in (events[:500], events[500:])])
    refused = first[150]
    assert isinstance(refused, Refused)
    assert [*first, *second].count(DELIVERED) == 999
    assert client.taken == [event.uid for event in events if event is not events[150]]
    assert [producer.alone for producer in client.producers] == [False, True, False]
    assert f"topic orders: {KafkaError(code).name()}" in refused.reason


def test_no_event_of_a_key_is_sent_after_a_refused_one_that_holds_it(client: ScriptedClient) -> None:
    events = [an_event("a"), an_event("a"), an_event("b"), an_event("a", headers='["not headers"]'), an_event("a")]
    client.script = fails(KafkaError.INVALID_RECORD, events[0])
    with scripted_sink(client, "orders", hold_keys=True) as sink:
        verdicts = deliver(sink, events)
        assert [type(verdict) for verdict in verdicts[:2]] == [Refused, Unavailable]
        assert verdicts[2] is DELIVERED
        assert isinstance(verdicts[4], Unavailable)
        assert verdicts[4].behind
        assert client.taken == [events[2].uid]
        assert deliver(sink, events[4:]) == [DELIVERED], "the caller knows of it by now"


@pytest.mark.parametrize("form", [RecordFormat(), RecordFormat(cloudevents="structured", source="s")])
def test_event_that_cannot_be_a_record_is_refused_without_a_part_of_it(
    client: ScriptedClient, form: RecordFormat
) -> None:
    events = [an_event(), an_event(headers='["a-secret"]'), an_event()]
    with scripted_sink(client, "orders", record_format=form) as sink:
        verdicts = deliver(sink, events)
    reason = "cannot be made a Kafka record: the event's headers are not a JSON object of strings"
    assert verdicts == [DELIVERED, Refused(reason), DELIVERED]


# -- stalls, leases and the end of a session ------------------------------------------------------------------------


def test_a_stall_purges_all_records_and_opens_a_new_producer(
    clock: SteppedClock, client: ScriptedClient, sink: KafkaSink
) -> None:
    events = some_events(10, keys=2)
    client.script = silent(*events[4:])
    calls = [submit(sink, batch) for batch in (events[:5], events[5:])]
    assert sink.completed(0) == []
    clock.stall()
    first, second = finish(sink, *calls)
    assert [verdict is DELIVERED for verdict in [*first, *second]] == [True] * 4 + [False] * 6
    assert "no acknowledgement" in str(first[4])
    assert client.producers[0].purged
    client.script = silent()
    assert deliver(sink, events[4:]) == [DELIVERED] * 6
    assert client.taken == [event.uid for event in events]


def test_a_loop_that_was_blocked_elsewhere_serves_reports_before_it_judges(
    clock: SteppedClock, client: ScriptedClient, sink: KafkaSink
) -> None:
    """Goes red if the pause of the loop's thread counts as a silence of the brokers."""
    client.reports = False
    call = submit(sink, some_events(10))
    client.reports = True
    clock.stall()
    assert finish(sink, call) == [[DELIVERED] * 10]


def test_a_purge_from_another_thread_makes_what_was_not_sent_unavailable_in_order(
    client: ScriptedClient, sink: KafkaSink
) -> None:
    """The lease has ended while the thread of the loop was blocked."""
    client.reports = False
    events = some_events(10)
    calls = [submit(sink, batch) for batch in (events[:5], events[5:])]
    purging = threading.Thread(target=sink.purge)
    purging.start()
    purging.join()
    assert finish(sink, *calls) == [[LATE] * 5] * 2, "it says nothing about the destination"
    assert client.taken == []
    client.reports = True
    assert deliver(sink, events) == [DELIVERED] * 10


def test_nothing_is_handed_over_after_a_purge_between_two_records(client: ScriptedClient, sink: KafkaSink) -> None:
    """Goes red when a later record of a key overtakes the purged ones."""
    [producer] = client.producers
    produced: list[Any] = []
    produce = producer.produce

    def purged_after(*record: Any) -> None:
        produce(*record)
        produced.append(record)
        sink.purge()

    producer.produce = purged_after
    assert deliver(sink, events := some_events(5)) == [LATE] * 5
    assert len(produced) == 1
    assert deliver(sink, events) == [DELIVERED] * 5


def test_nothing_is_handed_over_until_every_call_of_an_ended_round_is_taken(
    client: ScriptedClient, sink: KafkaSink
) -> None:
    events = some_events(3, keys=1)
    client.reports = False
    first, late, behind = submit(sink, events[:1]), submit(sink, events[1:2], lease_clock()), submit(sink, events[2:])
    client.reports = True
    assert [verdict is DELIVERED for [verdict] in finish(sink, first, late, behind)] == [True, False, False]
    assert client.taken == [events[0].uid]
    assert deliver(sink, events[1:]) == [DELIVERED] * 2


def test_withdrawn_calls_are_not_returned_and_their_records_not_sent(client: ScriptedClient, sink: KafkaSink) -> None:
    client.reports = False
    submit(sink, some_events(5))
    sink.withdraw()
    client.reports = True
    assert sink.completed(0) == []
    assert client.taken == []
    assert client.producers[0].purged
    after = some_events(2)
    assert deliver(sink, after) == [DELIVERED] * 2
    assert client.taken == [event.uid for event in after]


def test_a_call_with_rows_lasts_longer_than_usual_and_tells_until_when(
    client: ScriptedClient, sink: KafkaSink, monkeypatch: pytest.MonkeyPatch
) -> None:
    client.reports = False
    [event] = some_events(1)
    submit(sink, [event], attempt=1)
    assert sink.deadlines() == {}
    ahead = sink.timeout_seconds - 1
    monkeypatch.setattr("outbox_relay.sinks.kafka.delivery.lease_clock", lambda: lease_clock() + ahead)
    sink.completed(0)
    assert sink.deadlines()[event.id] > lease_clock() + ahead + sink.timeout_seconds


def test_a_machine_that_was_suspended_delivers(sink: KafkaSink, monkeypatch: pytest.MonkeyPatch) -> None:
    """During a suspension the lease clock runs, and the clock of deadlines does not: they are never compared."""

    def ahead(clock: int) -> float:
        return time.clock_gettime(clock) + 3600

    monkeypatch.setattr("outbox_relay.domain.times.time", SimpleNamespace(clock_gettime=ahead))
    assert deliver(sink, some_events(3)) == [DELIVERED] * 3


@pytest.mark.parametrize("is_open", [False, True], ids=["idle", "with an open call"])
def test_waking_ends_the_wait_at_once(client: ScriptedClient, sink: KafkaSink, is_open: bool) -> None:
    client.reports = False
    if is_open:
        sink.submit(Call(some_events(1), soon()))
    waking = threading.Timer(0.05, sink.wake)
    waking.start()
    began = time.monotonic()
    assert sink.completed(30) == []
    assert time.monotonic() - began < 5
    sink.wake()
    assert sink.completed(30) == []


# -- the guard of a new producer ------------------------------------------------------------------------------------


def test_a_second_record_of_a_key_waits_for_the_first_and_others_do_not() -> None:
    keys = ["a", None, "b", None, "a", "c", "b", "a"]
    events, topics, guard = [an_event(key) for key in keys], ["t"] * len(keys), NewProducerGuard()

    def given(indexes: range) -> list[int]:
        sendable = list(guard.sendable(topics, events, indexes))
        guard.sent(("t", keys[index]) for index in sendable)
        return sendable

    assert given(range(8)) == [0, 1, 2, 3]
    assert given(range(4, 8)) == []
    guard.record_acknowledged(lambda _: 9)
    assert given(range(4, 8)) == [4, 5, 6, 7], "acknowledged keys do not wait"
    assert not guard.is_open(["t"])


def test_a_topic_is_open_once_each_of_its_partitions_has_an_acknowledged_record() -> None:
    guard = NewProducerGuard()
    guard.sent([("t", "a"), ("t", "b"), ("u", "a")])
    guard.partitions.update([("t", 0), ("t", 1), ("u", 0)])
    guard.record_acknowledged({"t": 2, "u": 2}.__getitem__)
    assert guard.is_open(["t"])
    assert not guard.is_open(["t", "u"])


@pytest.mark.fence("a record is sent after the lease of its event, which ended while it was encoded")
def test_event_whose_lease_ended_while_it_was_encoded_is_neither_sent_nor_refused(
    client: ScriptedClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The clock is looked at after encoding. The queue of a client that takes nothing is then not too small."""

    def encode_slowly(self: KafkaSink, delivery: Delivery, index: int) -> Any:
        until(lambda: lease_clock() >= delivery.until, seconds=10, what="the lease ends")
        return record(self, delivery, index)

    record = KafkaSink._record  # pyright: ignore[reportPrivateUsage]
    monkeypatch.setattr(KafkaSink, "_record", encode_slowly)
    with scripted_sink(client, "orders", record_format=RecordFormat(tombstones=True)) as sink:
        [verdict] = deliver(sink, [an_event()], lease_clock() + 0.05)
    assert isinstance(verdict, Unavailable)
    assert client.taken == []
