"""A scripted Kafka client for errors that a real broker does not return on demand."""

import contextlib
import threading
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping, Sequence
from typing import Any

import pytest
from confluent_kafka import KafkaError

from outbox_relay.domain.event import StoredEvent
from outbox_relay.formats.topics import TopicTemplate
from outbox_relay.sinks.kafka import KafkaSink
from outbox_relay.sinks.kafka.call import DeliverCall
from outbox_relay.sinks.kafka.client import ClientSettings
from outbox_relay.sinks.kafka.errors import ErrorKind, error_kind
from outbox_relay.sinks.kafka.in_flight_messages import WAIT_SECONDS
from outbox_relay.sinks.kafka.producer_thread import ProducerThread
from tests.support.wait import auntil

ROOM = "outbox_relay.sinks.kafka"
STALL_SECONDS = 60.0
"""Longer than any test takes: a stall comes only when a test moves the clock."""
WAIT_FOR_FACT = 30.0
SILENCE = object()
"""The answer for a record that never gets a report."""
PURGED = KafkaError(KafkaError._PURGE_QUEUE)

Script = Callable[[StoredEvent, bool], KafkaError | object | None]
"""Returns the answer for a record, which may be sent alone: None for delivered, an error, or silence."""


class ScriptedClient:
    """Stands for librdkafka: all producers, the accepted records in their order, and their reports."""

    def __init__(self) -> None:
        self.script: Script = lambda _event, _alone: None
        self.producers: list[ScriptedProducer] = []
        self.opened_with: Callable[[ClientSettings], None] = lambda _: None
        """Called with the settings of each new producer."""
        self.taken: list[str] = []
        """The uids of the accepted records, in the broker's order."""
        self.missing: set[str] = set()
        """Topics that do not exist."""
        self.answered = 0
        """Number of records with an answer."""
        self.draining = False
        """True once the thread has waited for reports with nothing else to do."""
        self._calls_taken = 0
        self._reporting = threading.Event()
        self._reporting.set()

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Take the place of librdkafka and of the cluster's metadata."""
        monkeypatch.setattr(f"{ROOM}.sink.ProducerThread", self._thread)
        monkeypatch.setattr(f"{ROOM}.in_flight_messages.RecordProducer", self._producer)
        monkeypatch.setattr(f"{ROOM}.producer_thread.TopicMetadata", self._metadata)

    def hold_reports(self) -> None:
        """Make no reports until :meth:`release_reports`."""
        self._reporting.clear()

    def release_reports(self) -> None:
        """Make reports again."""
        self._reporting.set()

    def may_report(self, seconds: float) -> bool:
        """Wait up to `seconds` until reports are made, and return True if they are."""
        self.draining = self.draining or seconds >= WAIT_SECONDS
        return self._reporting.wait(seconds)

    async def took(self, calls: int) -> None:
        """Wait until the sink's thread has taken this many calls and served their available reports."""
        await self._fact(lambda: self._calls_taken >= calls, f"{calls} calls are taken")

    async def drains(self) -> None:
        """Wait until the sink's thread does nothing but wait for reports."""
        await self._fact(lambda: self.draining, "the thread waits for reports")

    @staticmethod
    async def _fact(fact: Callable[[], bool], what: str) -> None:
        async def asked() -> bool:
            return fact()

        await auntil(asked, seconds=WAIT_FOR_FACT, what=what)

    def _thread(self, *args: Any, **more: Any) -> ProducerThread:
        client = self

        class CountingThread(ProducerThread):
            """Counts the calls taken."""

            def take(self, call: DeliverCall) -> None:
                super().take(call)
                client._calls_taken += 1

        return CountingThread(*args, **more)

    def _metadata(self, *_: object) -> "ScriptedMetadata":
        return ScriptedMetadata(self.missing)

    def _producer(
        self, settings: Any, _log: Any, _format: Any, batch_bytes: int, extra: Mapping[str, Any] | None = None
    ) -> "ScriptedProducer":
        self.opened_with(settings)
        self.producers.append(ScriptedProducer(self, batch_bytes, alone=extra is not None))
        return self.producers[-1]


class ScriptedProducer:
    """One producer. A record that fails for good ends it, unless it sends records alone."""

    def __init__(self, client: ScriptedClient, batch_bytes: int, *, alone: bool) -> None:
        self.batch_bytes = batch_bytes
        self.alone = alone
        self.fatal: str | None = None
        self.guard = None
        self.owing: frozenset[int] = frozenset()
        self.closed = self.purged = False
        self._client = client
        self._queue: deque[tuple[DeliverCall, int]] = deque()

    def put(self, call: DeliverCall, indexes: Sequence[int]) -> int:
        assert not self.closed
        if self.fatal:
            return 0
        self._queue.extend((call, index) for index in indexes)
        call.count_handed_over(len(indexes))
        return len(indexes)

    def poll(self, seconds: float) -> None:
        if not self.purged and not self._client.may_report(seconds):
            return
        silent: deque[tuple[DeliverCall, int]] = deque()
        while self._queue:
            call, index = self._queue.popleft()
            answer = PURGED if self.purged else self._client.script(call.batch[index], self.alone)
            if self.fatal and not isinstance(answer, KafkaError):
                answer = PURGED
            self._client.answered += 1
            if answer is SILENCE:
                silent.append((call, index))
            else:
                self._report(call, index, answer)
        self._queue = silent
        if silent:
            # As the real client does while no report comes.
            time.sleep(seconds)

    flush_for = poll

    def _report(self, call: DeliverCall, index: int, answer: object) -> None:
        error = answer if isinstance(answer, KafkaError) else None
        if error is None:
            self._client.taken.append(call.batch[index].uid)
        elif not self.alone and error_kind(error) in (ErrorKind.MESSAGE, ErrorKind.FATAL):
            self.fatal = f"{error.name()}: dead"
        call.reports.callbacks[index](error, None)

    def purge(self, *, in_flight: bool) -> None:
        self.purged = self.purged or in_flight

    def close(self) -> None:
        self.closed = True


class ScriptedMetadata:
    """Knows every topic except the missing ones, without any limit."""

    def __init__(self, missing: set[str]) -> None:
        self.max_batch_bytes = 1_000_000
        self._missing = missing
        self._invalid: set[str] = set()

    def unknown(self, topics: Iterable[str]) -> list[str]:
        return [topic for topic in topics if topic in self._missing or topic in self._invalid]

    def load(self, topics: Sequence[str], _seconds: float, *, patient: bool, **_more: object) -> Mapping[str, str]:
        assert patient in (True, False)
        self._invalid.difference_update(topics)
        return {topic: f"topic {topic}: UNKNOWN_TOPIC_OR_PART" for topic in topics if topic in self._missing}

    def existing(self, _seconds: float, _cancelled: object) -> set[str]:
        return set()

    def batch_size(self, _topic: str) -> int:
        return self.max_batch_bytes

    def in_use(self, _batch_size: int) -> bool:
        return True

    def max_message_bytes(self, _topic: str) -> None:
        return None

    def invalidate(self, topic: str) -> None:
        self._invalid.add(topic)

    def reduce_batch_size(self, _topic: str) -> None:
        self.max_batch_bytes //= 2

    def clear(self) -> None:
        pass


class SteppedClock:
    """The sink's clock, which moves only when a test moves it."""

    def __init__(self) -> None:
        self._started = time.monotonic()
        self.ahead = 0.0

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Take the place of `time` wherever the sink measures stalls and probes."""
        for module in ("call_preparation", "failure_recovery", "in_flight_messages", "send_filter"):
            monkeypatch.setattr(f"{ROOM}.{module}.time", self)

    def monotonic(self) -> float:
        return self._started + self.ahead

    def stall(self) -> None:
        """Let more time pass than acknowledgements may take."""
        self.ahead += STALL_SECONDS + 1


@pytest.fixture
def client(monkeypatch: pytest.MonkeyPatch) -> ScriptedClient:
    """Return a client that takes librdkafka's place during the test."""
    found = ScriptedClient()
    found.install(monkeypatch)
    return found


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SteppedClock:
    """Return a clock that takes the place of `time` in the sink during the test."""
    found = SteppedClock()
    found.install(monkeypatch)
    return found


@contextlib.asynccontextmanager
async def scripted_sink(client: ScriptedClient, template: str) -> AsyncGenerator[KafkaSink]:
    """Open a sink on `client`."""
    sink = KafkaSink("s", TopicTemplate.parse(template), {"bootstrap.servers": "unused:1"}, STALL_SECONDS)
    await sink.open()
    assert len(client.producers) == 1
    yield sink
    await sink.close()


def fails(code: int, *events: StoredEvent, alone: bool = True) -> Script:
    """Return a script by which `events` fail with `code`; with `alone` false only in company."""
    uids = {event.uid for event in events}
    return lambda event, is_alone: KafkaError(code) if event.uid in uids and (alone or not is_alone) else None
