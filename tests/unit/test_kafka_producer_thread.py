"""What the Kafka sink makes of delivery reports: order, verdicts and new producers, on a scripted client."""

import asyncio
import threading
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
from confluent_kafka import KafkaError

from outbox_relay.domain.errors import Misconfigured
from outbox_relay.domain.event import Event
from outbox_relay.domain.outcomes import DELIVERED, Refused, Unavailable
from outbox_relay.formats.topics import TopicTemplate
from outbox_relay.sinks.kafka import KafkaSink
from outbox_relay.sinks.kafka.call import DeliverCall
from outbox_relay.sinks.kafka.client import ClientSettings
from outbox_relay.sinks.kafka.errors import ErrorKind, error_kind
from outbox_relay.sinks.kafka.producer_thread import ProducerThread
from outbox_relay.sinks.kafka.records import RecordFormat, TopicResolver
from outbox_relay.sinks.kafka.statistics import NOTHING
from tests.contract.harness import an_event, some_events, soon

STALL_SECONDS = 0.3
SILENCE = object()
"""What a script says of a record that is never reported on."""
PURGED = KafkaError(KafkaError._PURGE_QUEUE)

Script = Callable[[Event, bool], KafkaError | object | None]
"""Says what becomes of a record, and whether it is sent alone: nothing for delivered, an error, or silence."""


class FakeClient:
    """Stands for librdkafka: every producer made, every record in the order of handing over, and their reports."""

    def __init__(self) -> None:
        self.script: Script = lambda _event, _alone: None
        self.lanes: list[ProducerThread] = []
        self.producers: list[FakeWire] = []
        self.taken: list[str] = []
        """The uids that the broker took, in its order."""
        self.held = False
        """While true no reports are made."""
        self.polled = 0
        """Records that an answer was made for."""

    def lane(self, *args: Any, **more: Any) -> ProducerThread:
        self.lanes.append(ProducerThread(*args, **more))
        return self.lanes[-1]

    def wire(
        self, _settings: Any, _log: Any, _form: Any, batch_bytes: int, extra: Mapping[str, Any] | None = None
    ) -> "FakeWire":
        self.producers.append(FakeWire(self, batch_bytes, alone=extra is not None))
        return self.producers[-1]


class FakeWire:
    """One producer. A record that fails for good ends it, unless it sends one at a time."""

    def __init__(self, client: FakeClient, batch_bytes: int, *, alone: bool) -> None:
        self.batch_bytes = batch_bytes
        self.fatal: str | None = None
        self.statistics = NOTHING
        self.opening = None
        self.closed = self.purged = False
        self.alone = alone
        self._client = client
        self._queue: deque[tuple[DeliverCall, int]] = deque()

    def put(self, call: DeliverCall, places: Sequence[int]) -> int:
        assert not self.closed
        if self.fatal:
            return 0
        self._queue.extend((call, place) for place in places)
        call.sent += len(places)
        return len(places)

    def poll(self, _seconds: float) -> None:
        if self._client.held and not self.purged:
            return
        silent: deque[tuple[DeliverCall, int]] = deque()
        while self._queue:
            call, place = self._queue.popleft()
            answer = PURGED if self.purged else self._client.script(call.batch[place], self.alone)
            if self.fatal and not isinstance(answer, KafkaError):
                answer = PURGED
            self._client.polled += 1
            if answer is SILENCE:
                silent.append((call, place))
                continue
            error = answer if isinstance(answer, KafkaError) else None
            if error is None:
                self._client.taken.append(call.batch[place].uid)
            elif not self.alone and error_kind(error) in (ErrorKind.MESSAGE, ErrorKind.FATAL):
                self.fatal = f"{error.name()}: dead"
            call.reports.callbacks[place](error, None)
        self._queue = silent

    hurry = poll

    def purge(self, *, in_flight: bool) -> None:
        self.purged = self.purged or in_flight

    def close(self) -> None:
        self.closed = True


class FakeLimits:
    """Knows every topic but the missing ones, and no limit of any."""

    missing: ClassVar[set[str]] = set()
    asked: ClassVar[list[str]] = []
    """Topics asked about, each time."""

    def __init__(self, *_: Any) -> None:
        self.most = 1_000_000
        self._doubted: set[str] = set()

    def unknown(self, topics: Iterable[str]) -> list[str]:
        return [topic for topic in topics if topic in self.missing or topic in self._doubted]

    def learn(self, topics: Sequence[str], _seconds: float, *, patient: bool) -> Mapping[str, str]:
        assert patient in (True, False)
        self.asked.extend(topics)
        self._doubted.difference_update(topics)
        return {topic: f"topic {topic}: UNKNOWN_TOPIC_OR_PART" for topic in topics if topic in self.missing}

    def existing(self, _seconds: float) -> set[str]:
        return set()

    def size(self, _topic: str) -> int:
        return self.most

    def in_use(self, _size: int) -> bool:
        return True

    def of(self, _topic: str) -> None:
        return None

    def doubt(self, topic: str) -> None:
        self._doubted.add(topic)

    def too_large(self, _topic: str) -> None:
        self.most //= 2

    def forget(self) -> None:
        pass


@pytest.fixture
def client(monkeypatch: pytest.MonkeyPatch) -> FakeClient:
    found = FakeClient()
    monkeypatch.setattr("outbox_relay.sinks.kafka.sink.ProducerThread", found.lane)
    monkeypatch.setattr("outbox_relay.sinks.kafka.in_flight_messages.RecordProducer", found.wire)
    monkeypatch.setattr("outbox_relay.sinks.kafka.producer_thread.TopicMetadata", FakeLimits)
    monkeypatch.setattr(FakeLimits, "missing", set[str]())
    monkeypatch.setattr(FakeLimits, "asked", list[str]())
    return found


@pytest.fixture
async def sink(client: FakeClient) -> AsyncGenerator[KafkaSink]:
    opened = KafkaSink("s", TopicTemplate.parse("orders"), {"bootstrap.servers": "unused:1"}, STALL_SECONDS)
    await opened.open()
    assert len(client.producers) == 1
    yield opened
    await opened.close()


def fails(code: int, *events: Event, alone: bool = True) -> Script:
    """A script by which `events` fail with `code`; with `alone` false only in company."""
    uids = {event.uid for event in events}
    return lambda event, is_alone: KafkaError(code) if event.uid in uids and (alone or not is_alone) else None


async def all_taken(client: FakeClient) -> None:
    """Wait until the sink's thread has taken every call made before."""
    await asyncio.sleep(0)
    taken = threading.Event()
    client.lanes[-1].put(taken.set)
    assert await asyncio.to_thread(taken.wait, 10)


async def overlapping(sink: KafkaSink, *batches: Sequence[Event]) -> list[Sequence[Any]]:
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
async def test_what_is_not_about_the_record_is_unavailable_with_all_that_follows_in_its_key(
    client: FakeClient, sink: KafkaSink, code: int
) -> None:
    events = [an_event("a"), an_event("a"), an_event("b"), an_event("a"), an_event(None)]
    client.script = fails(code, events[1])
    client.held = True
    calls = [asyncio.ensure_future(sink.deliver(batch, soon())) for batch in (events[:3], events[3:])]
    await all_taken(client)
    client.held = False
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


async def test_acknowledged_records_behind_an_unavailable_one_of_their_key_are_unavailable(
    client: FakeClient, sink: KafkaSink
) -> None:
    events = [an_event("a"), an_event("b"), an_event("a"), an_event("b")]
    client.script = fails(KafkaError.TOPIC_AUTHORIZATION_FAILED, events[0])
    verdicts = await sink.deliver(events, soon())
    assert [verdict is DELIVERED for verdict in verdicts] == [False, True, False, True]
    assert client.taken == [event.uid for event in events[1:]]


@pytest.mark.parametrize("code", [KafkaError.INVALID_RECORD, KafkaError.INVALID_MSG, KafkaError.MSG_SIZE_TOO_LARGE])
async def test_a_failed_request_is_sent_again_record_by_record_before_anything_later(
    client: FakeClient, sink: KafkaSink, code: int
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


async def test_what_was_taken_back_with_a_failed_request_comes_before_what_was_not_handed_over_yet(
    client: FakeClient, sink: KafkaSink
) -> None:
    events = some_events(1_000, keys=3)
    client.script = fails(KafkaError.INVALID_RECORD, events[150])
    verdicts = [verdict for batch in await overlapping(sink, events[:500], events[500:]) for verdict in batch]
    assert [place for place, verdict in enumerate(verdicts) if verdict is not DELIVERED] == [150]
    assert client.taken == [event.uid for event in events if event is not events[150]]


async def test_what_failed_between_suspects_is_sent_between_them(client: FakeClient, sink: KafkaSink) -> None:
    events = some_events(30, keys=1)
    client.script = fails(KafkaError.INVALID_RECORD, events[5], events[20])
    verdicts = await sink.deliver(events, soon())
    assert [place for place, verdict in enumerate(verdicts) if verdict is not DELIVERED] == [5, 20]
    assert client.taken == [event.uid for event in events if event not in (events[5], events[20])]


async def test_what_fails_in_company_only_is_delivered(client: FakeClient, sink: KafkaSink) -> None:
    events = some_events(20, keys=3)
    client.script = fails(KafkaError.MSG_SIZE_TOO_LARGE, *events[:12], alone=False)
    assert await sink.deliver(events, soon()) == [DELIVERED] * 20
    assert client.taken == [event.uid for event in events]
    assert client.producers[-1].batch_bytes < client.producers[0].batch_bytes


async def test_a_destination_that_fails_while_records_are_sent_alone_ends_the_calls(
    client: FakeClient, sink: KafkaSink
) -> None:
    events = some_events(10, keys=2)
    invalid = fails(KafkaError.INVALID_RECORD, *events[2:5], alone=False)
    down = fails(KafkaError.TOPIC_AUTHORIZATION_FAILED, events[4])
    client.script = lambda event, alone: invalid(event, alone) or (down(event, alone) if alone else None)
    verdicts = await sink.deliver(events, soon())
    assert [verdict is DELIVERED for verdict in verdicts] == [True] * 4 + [False] * 6
    assert client.taken == [event.uid for event in events[:4]]
    assert not any(isinstance(verdict, Refused) for verdict in verdicts)


async def test_a_stall_takes_everything_back_and_makes_a_new_producer(client: FakeClient, sink: KafkaSink) -> None:
    events = some_events(10, keys=2)
    client.script = lambda event, _alone: SILENCE if event in events[4:] else None
    verdicts = await sink.deliver(events, soon())
    assert [verdict is DELIVERED for verdict in verdicts] == [True] * 4 + [False] * 6
    assert "no acknowledgement" in str(verdicts[4])
    assert client.producers[0].purged
    assert client.producers[0].closed
    client.script = lambda _event, _alone: None
    assert await sink.deliver(events[4:], soon()) == [DELIVERED] * 6
    assert client.taken == [event.uid for event in events]


def test_waiting_for_a_call_ends_in_time_however_busy_the_machine_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """While it waits for ever no report is served and no stall is noticed: the sink would stand still, and say nothing.

    The time here is up before the wait begins, as it is now and then on a machine that is too busy.
    """
    monkeypatch.setattr("outbox_relay.sinks.kafka.producer_thread.IDLE_SECONDS", 1e-9)
    settings, topics = ClientSettings({"bootstrap.servers": "unused:1"}), TopicResolver(TopicTemplate.parse("orders"))
    lane = ProducerThread("s", settings, topics, STALL_SECONDS, 1, RecordFormat(), None, hold_keys=False)
    rounds = 20_000
    done: list[int] = []

    def wait() -> None:
        for number in range(rounds):
            lane.put(lambda: None)
            for _ in range(2):
                lane._next()  # pyright: ignore[reportPrivateUsage] - the wait itself
            done.append(number)

    waiting = threading.Thread(target=wait, daemon=True)
    waiting.start()
    waiting.join(30)
    assert len(done) == rounds


async def test_a_call_is_answered_after_all_earlier_ones(client: FakeClient, sink: KafkaSink) -> None:
    first, second = some_events(1), some_events(1)
    client.script = lambda event, _alone: SILENCE if event in first else None
    answered: list[int] = []
    calls = [asyncio.ensure_future(sink.deliver(batch, soon())) for batch in (first, second)]
    for number, call in enumerate(calls):
        call.add_done_callback(lambda _, number=number: answered.append(number))
    await asyncio.gather(*calls)
    assert answered == [0, 1]


async def test_no_new_call_is_begun_before_all_of_an_ended_course_have_returned(
    client: FakeClient, sink: KafkaSink
) -> None:
    events = some_events(2, keys=1)
    client.script = lambda event, _alone: SILENCE if event is events[0] else None
    first = asyncio.ensure_future(sink.deliver(events[:1], soon()))
    await all_taken(client)
    resetting = asyncio.ensure_future(sink.reset())
    await asyncio.sleep(0)
    (late,) = await sink.deliver(events[1:], soon())
    assert isinstance(late, Unavailable)
    await resetting
    assert client.taken == []
    assert [type(verdict) for verdict in await first] == [Unavailable]
    client.script = lambda _event, _alone: None
    assert await sink.deliver(events, soon()) == [DELIVERED] * 2


async def test_a_machine_that_was_suspended_goes_on_delivering(
    sink: KafkaSink, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The clock of leases goes on meanwhile, the one of a call's deadline does not: they are never compared."""

    def ahead(clock: int) -> float:
        return time.clock_gettime(clock) + 3600

    monkeypatch.setattr("outbox_relay.domain.lease_clock.time", SimpleNamespace(clock_gettime=ahead))
    assert await sink.deliver(some_events(3), soon()) == [DELIVERED] * 3


# -- topics in trouble -------------------------------------------------------------------------------------------


@pytest.fixture
async def sink_by_type(client: FakeClient) -> AsyncGenerator[KafkaSink]:
    opened = KafkaSink("s", TopicTemplate.parse("{type}"), {"bootstrap.servers": "unused:1"}, STALL_SECONDS)
    await opened.open()
    assert len(client.producers) == 1
    yield opened
    await opened.close()


class Clock:
    """The sink's time, which stands still until a test moves it on."""

    def __init__(self) -> None:
        self.began = time.monotonic()
        self.ahead = 0.0

    def monotonic(self) -> float:
        return self.began + self.ahead


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    found = Clock()
    for module in ("producer_thread", "sink", "in_flight_messages"):
        monkeypatch.setattr(f"outbox_relay.sinks.kafka.{module}.time", found)
    return found


def of_type(kind_of_event: str, key: str | None = None) -> Event:
    return an_event(key)._replace(type=kind_of_event)


def parts(verdicts: Sequence[Any]) -> list[str | None]:
    """Of each verdict the topic it blames; nothing for what was delivered."""
    for verdict in verdicts:
        assert verdict is DELIVERED or (isinstance(verdict, Unavailable) and verdict.part), verdict
    return [None if verdict is DELIVERED else verdict.part for verdict in verdicts]


async def test_a_missing_topic_keeps_only_its_own_events_and_what_follows_them_in_their_keys(
    client: FakeClient, sink_by_type: KafkaSink
) -> None:
    FakeLimits.missing.add("bad")
    events = [of_type("good", "a"), of_type("bad", "a"), of_type("good", "a"), of_type("good", "b"), of_type("bad")]
    verdicts = await sink_by_type.deliver(events, soon())
    assert parts(verdicts) == [None, "topic bad", "topic bad", None, "topic bad"]
    assert client.taken == [events[0].uid, events[3].uid]
    assert "UNKNOWN_TOPIC_OR_PART" in str(verdicts[1])
    assert isinstance(verdicts[1], Unavailable)
    assert 0 < (verdicts[1].retry_after_seconds or 0) < 5
    assert len(client.producers) == 1


async def test_a_denied_topic_keeps_only_its_own_events(client: FakeClient, sink_by_type: KafkaSink) -> None:
    events = [of_type("good", "a"), of_type("bad", "b"), of_type("good", "b"), of_type("good", "a"), of_type("bad")]
    client.script = fails(KafkaError.TOPIC_AUTHORIZATION_FAILED, events[1], events[4])
    verdicts = await sink_by_type.deliver(events, soon())
    assert parts(verdicts) == [None, "topic bad", "topic bad", None, "topic bad"]
    assert "TOPIC_AUTHORIZATION_FAILED" in str(verdicts[1])
    client.script = fails(KafkaError.TOPIC_AUTHORIZATION_FAILED)
    assert parts(await sink_by_type.deliver([of_type("bad"), of_type("good")], soon())) == ["topic bad", None]


async def test_a_denied_topic_beside_a_record_that_is_refused(client: FakeClient, sink_by_type: KafkaSink) -> None:
    events = [of_type("bad", "a"), of_type("good", "a"), of_type("good", "b"), of_type("bad", "c"), of_type("good")]
    denied, invalid = fails(KafkaError.TOPIC_AUTHORIZATION_FAILED, events[0], events[3]), events[4]
    invalid_record = fails(KafkaError.INVALID_RECORD, invalid)
    client.script = lambda event, alone: denied(event, alone) or invalid_record(event, alone)
    verdicts = await sink_by_type.deliver(events, soon())
    assert isinstance(verdicts[4], Refused)
    assert parts(verdicts[:4]) == ["topic bad", "topic bad", None, "topic bad"]
    assert events[2].uid in client.taken


async def test_one_probe_at_growing_distances_finds_out_that_a_topic_is_back(
    clock: Clock, client: FakeClient, sink_by_type: KafkaSink
) -> None:
    def bad() -> Event:
        return of_type("bad")

    client.script = lambda event, _alone: (
        KafkaError(KafkaError.TOPIC_AUTHORIZATION_FAILED) if event.type == "bad" else None
    )
    sent: list[int] = []
    for wait in (0.0, 0.5, 0.6, 1.5, 0.6, 3.9, 0.2):
        clock.ahead += wait
        before = client.polled
        assert parts(await sink_by_type.deliver([bad(), bad(), of_type("good")], soon())) == [*["topic bad"] * 2, None]
        sent.append(client.polled - before)
    # The first time both are sent, then none, then one after 1, 2 and 4 seconds.
    assert sent == [3, 1, 2, 1, 2, 1, 2]
    assert [producer.alone for producer in client.producers].count(True) == 1
    client.script = fails(KafkaError.TOPIC_AUTHORIZATION_FAILED)
    clock.ahead += 8.1
    assert parts(await sink_by_type.deliver([bad(), bad()], soon() + clock.ahead)) == [None, "topic bad"]
    assert parts(await sink_by_type.deliver([bad(), bad()], soon())) == [None, None]


async def test_a_key_that_waits_for_a_topic_holds_back_what_is_under_way_and_nothing_later(
    client: FakeClient, sink_by_type: KafkaSink
) -> None:
    FakeLimits.missing.add("bad")
    client.held = True
    ahead, bad, good = of_type("good", "z"), of_type("bad", "a"), of_type("good", "a")
    first = asyncio.ensure_future(sink_by_type.deliver([ahead, bad], soon()))
    second = asyncio.ensure_future(sink_by_type.deliver([good], soon()))
    await all_taken(client)
    client.held = False
    assert parts(await first) == [None, "topic bad"]
    assert parts(await second) == ["topic bad"]
    assert client.taken == [ahead.uid]
    assert parts(await sink_by_type.deliver([good], soon())) == [None]


async def test_acknowledged_events_behind_one_of_a_denied_topic_are_unavailable(
    client: FakeClient, sink_by_type: KafkaSink
) -> None:
    events = [of_type("bad", "a"), of_type("good", "a")]
    client.script = fails(KafkaError.TOPIC_AUTHORIZATION_FAILED, events[0])
    assert parts(await sink_by_type.deliver(events, soon())) == ["topic bad", "topic bad"]


async def test_a_stall_is_blamed_on_a_topic_that_is_gone(client: FakeClient, sink_by_type: KafkaSink) -> None:
    events = [of_type("good", "a"), of_type("bad", "b"), of_type("good", "c")]

    def gone(event: Event, _alone: bool) -> object | None:
        if event.type == "good" or len(client.producers) > 1:
            return None
        FakeLimits.missing.add("bad")
        return SILENCE

    client.script = gone
    assert parts(await sink_by_type.deliver(events, soon())) == [None, "topic bad", None]
    assert client.producers[0].purged


async def test_a_failure_of_the_sink_itself_is_answered_and_told(
    client: FakeClient, sink: KafkaSink, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("outbox_relay.sinks.kafka.in_flight_messages.PURGE_SECONDS", 0.1)

    def broken(_event: Event, _alone: bool) -> None:
        raise ZeroDivisionError

    client.script = broken
    (verdict,) = await sink.deliver(some_events(1), soon())
    assert isinstance(verdict, Unavailable)
    assert "ZeroDivisionError" in caplog.text
    client.script = lambda _event, _alone: None
    assert await sink.deliver(some_events(1), soon()) == [DELIVERED]


# -- other settings ------------------------------------------------------------------------------------------------

NEWER = {"bootstrap.servers": "unused:1", "sasl.password": "the-new-one"}


async def test_new_settings_are_taken_once_all_that_is_under_way_is_reported_on(
    client: FakeClient, sink: KafkaSink
) -> None:
    """What was handed over before goes out by the old producer, and what comes after it by a new one, in that order."""
    client.held = True
    events = some_events(20, keys=2)
    first = asyncio.ensure_future(sink.deliver(events[:10], soon()))
    await all_taken(client)
    sink.use_settings(ClientSettings(NEWER))
    second = asyncio.ensure_future(sink.deliver(events[10:], soon()))
    await asyncio.sleep(0)
    assert [producer.closed for producer in client.producers] == [False]
    client.held = False
    assert list(await first) + list(await second) == [DELIVERED] * 20
    assert [(producer.closed, producer.purged) for producer in client.producers] == [(True, False), (False, False)]
    assert client.taken == [event.uid for event in events]


async def test_new_settings_reach_the_next_producer_and_old_secrets_stay_redacted(
    client: FakeClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[tuple[object, str]] = []

    def wire(settings: ClientSettings, *more: Any) -> "FakeWire":
        made.append((settings.producer(1, {}).get("sasl.password"), settings.redact("the-old-one the-new-one")))
        return client.wire(settings, *more)

    monkeypatch.setattr("outbox_relay.sinks.kafka.in_flight_messages.RecordProducer", wire)
    opened = KafkaSink("s", TopicTemplate.parse("t"), {**NEWER, "sasl.password": "the-old-one"}, STALL_SECONDS)
    await opened.open()
    opened.use_settings(ClientSettings(NEWER))
    assert await opened.deliver(some_events(1), soon()) == [DELIVERED]
    await opened.close()
    assert made == [("the-old-one", "*** the-new-one"), ("the-new-one", "*** ***")]


async def test_new_settings_come_through_a_stall(client: FakeClient, sink: KafkaSink) -> None:
    """Acknowledgements stop while the producer is to be replaced: all is taken back, and that is its end."""
    events = some_events(4, keys=2)
    client.script = lambda event, _alone: SILENCE if event in events[2:] else None
    first = asyncio.ensure_future(sink.deliver(events, soon()))
    await all_taken(client)
    sink.use_settings(ClientSettings(NEWER))
    assert [verdict is DELIVERED for verdict in await first] == [True, True, False, False]
    client.script = lambda _event, _alone: None
    assert await sink.deliver(events[2:], soon()) == [DELIVERED] * 2
    assert client.taken == [event.uid for event in events]
    assert len(client.producers) == 2


async def test_settings_that_make_no_producer_are_refused_before_anything_changes() -> None:
    sink = KafkaSink("s", TopicTemplate.parse("t"), NEWER, STALL_SECONDS)
    with pytest.raises(Misconfigured, match=r"sinks\.s\.producer: .*no.such.setting"):
        sink.validated_settings({**NEWER, "no.such.setting": "hunter2"}, {})
    with pytest.raises(Misconfigured, match=r'sinks\.s\.producer_files\."ssl\.key\.pem": .*No such file'):
        sink.validated_settings(NEWER, {"ssl.key.pem": Path("/nowhere/key")})
