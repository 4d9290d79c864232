"""A scripted Kafka client for errors that a real broker does not return on demand."""

import contextlib
import math
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import pytest
from confluent_kafka import KafkaError

from outbox_relay.domain.event import StoredEvent
from outbox_relay.formats.topics import TopicTemplate
from outbox_relay.sinks.kafka import KafkaSink
from outbox_relay.sinks.kafka.errors import ErrorKind, error_kind

ROOM = "outbox_relay.sinks.kafka"
STALL_SECONDS = 60.0
"""Longer than any test takes: a stall comes only when a test moves the clock."""
SILENCE = object()
"""The answer for a record that never gets a report."""
PURGED = KafkaError(KafkaError._PURGE_QUEUE)


class Sent(NamedTuple):
    """A record that was handed to the client."""

    uid: str
    type: str
    report: Callable[[KafkaError | None, object], None]


Script = Callable[[Sent, bool], KafkaError | object | None]
"""Returns the answer for a record, which may be sent alone: None for delivered, an error, or silence."""


class ScriptedClient:
    """Stands for librdkafka: all producers, the accepted records in their order, and their reports."""

    def __init__(self) -> None:
        self.script: Script = lambda _record, _alone: None
        self.producers: list[ScriptedProducer] = []
        self.taken: list[str] = []
        """The uids of the accepted records, in the broker's order."""
        self.missing: set[str] = set()
        """Topics that do not exist."""
        self.answered = 0
        """Number of records with an answer."""
        self.reports = True
        """False to make no reports."""

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Take the place of librdkafka and of the cluster's metadata."""
        monkeypatch.setattr(f"{ROOM}.delivery.RecordProducer", self._producer)
        monkeypatch.setattr(f"{ROOM}.delivery.TopicMetadata", self._metadata)

    def _metadata(self, *_: Any) -> "ScriptedMetadata":
        return ScriptedMetadata(self.missing)

    def _producer(self, _settings: Any, _log: Any, batch_bytes: int, *, alone: bool = False) -> "ScriptedProducer":
        self.producers.append(ScriptedProducer(self, batch_bytes, alone=alone))
        return self.producers[-1]


class ScriptedProducer:
    """One producer. A record that fails for good ends it, unless it sends records alone."""

    def __init__(self, client: ScriptedClient, batch_bytes: int, *, alone: bool) -> None:
        self.batch_bytes = batch_bytes
        self.alone = alone
        self.fatal: str | None = None
        self.guard = None
        self.owing: frozenset[int] = frozenset()
        self.closed = self.purged = self.queue_purged = False
        self._client = client
        self._queue: deque[Sent] = deque()

    def produce(self, *args: Any) -> None:
        assert not self.closed
        if self.fatal:
            raise BufferError
        headers = dict(args[-1])
        self._queue.append(Sent(headers["id"], headers["type"], args[4]))

    def records_wait(self) -> None:
        pass

    def serve(self, seconds: float) -> None:
        purged = self.purged or self.queue_purged
        if not purged and not self._client.reports:
            time.sleep(seconds)
            return
        silent: deque[Sent] = deque()
        while self._queue:
            record = self._queue.popleft()
            answer = PURGED if purged else self._client.script(record, self.alone)
            if self.fatal and not isinstance(answer, KafkaError):
                answer = PURGED
            self._client.answered += 1
            if answer is SILENCE:
                silent.append(record)
            else:
                self._report(record, answer if isinstance(answer, KafkaError) else None)
        self._queue = silent
        if silent:
            # As the real client does while no report comes.
            time.sleep(seconds)

    def _report(self, record: Sent, error: KafkaError | None) -> None:
        if error is None:
            self._client.taken.append(record.uid)
        elif not self.alone and error_kind(error) in (ErrorKind.MESSAGE, ErrorKind.FATAL):
            self.fatal = f"{error.name()}: dead"
        record.report(error, None)

    def purge(self, *, in_flight: bool) -> None:
        self.queue_purged, self.purged = True, self.purged or in_flight

    def close(self) -> None:
        self.closed = True


class ScriptedMetadata:
    """Knows every topic except the missing ones, without any limit."""

    def __init__(self, missing: set[str]) -> None:
        self.batch_bytes = 1_000_000
        self._missing = missing
        self._invalid: set[str] = set()

    def unknown(self, topics: Iterable[str]) -> list[str]:
        return [topic for topic in topics if topic in self._missing or topic in self._invalid]

    def load(self, topics: Sequence[str], _seconds: float, *, patient: bool) -> Mapping[str, str]:
        assert patient in (True, False)
        self._invalid.difference_update(topics)
        return {topic: f"topic {topic}: UNKNOWN_TOPIC_OR_PART" for topic in topics if topic in self._missing}

    def partitions(self, _topic: str) -> float:
        return math.inf

    def forget(self, topic: str) -> None:
        self._invalid.add(topic)

    def clear(self) -> None:
        pass


class SteppedClock:
    """The sink's clock, which a test moves forward."""

    def __init__(self) -> None:
        self.ahead = 0.0

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Take the place of `time` wherever the sink measures stalls and probes."""
        for module in ("delivery", "topics"):
            monkeypatch.setattr(f"{ROOM}.{module}.time", self)

    def monotonic(self) -> float:
        return time.monotonic() + self.ahead

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


@contextlib.contextmanager
def scripted_sink(client: ScriptedClient, template: str, **more: Any) -> Generator[KafkaSink]:
    """Open a sink on `client`."""
    sink = KafkaSink("s", TopicTemplate.parse(template), {"bootstrap.servers": "unused:1"}, STALL_SECONDS, **more)
    sink.open()
    assert len(client.producers) == 1
    yield sink
    sink.close()


def fails(code: int, *events: StoredEvent, alone: bool = True) -> Script:
    """Return a script by which `events` fail with `code`; with `alone` false only in company."""
    uids = {event.uid for event in events}
    return lambda record, is_alone: KafkaError(code) if record.uid in uids and (alone or not is_alone) else None


def silent(*events: StoredEvent) -> Script:
    """Return a script by which `events` get no report."""
    uids = {event.uid for event in events}
    return lambda record, _alone: SILENCE if record.uid in uids else None
