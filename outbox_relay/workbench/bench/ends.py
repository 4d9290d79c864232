"""Where events arrive, and how many have: a topic counted at the broker or by a consumer, a receiver of webhooks."""

from __future__ import annotations

from collections.abc import Callable

from confluent_kafka import Consumer, KafkaException, TopicPartition

from outbox_relay.workbench.bench import consumer, receiver
from outbox_relay.workbench.bench.counter import Counter
from outbox_relay.workbench.bench.place import PARTITIONS, REQUEST_SECONDS, Place
from outbox_relay.workbench.embedded import ports

START_SECONDS = 30.0
FETCH_WAIT_MS, SUBSTITUTE_FETCH_WAIT_MS = 500, 1
"""The substitute waits as long as it may, also when there is something to read."""


class TopicConsumer:
    """A consumer in a process of its own, which counts what it has read and notes how long it took."""

    def __init__(self, place: Place, topic: str) -> None:
        self._place = place
        self._times = place.file(".times")
        path = place.file(".counter")
        self._counter = Counter(path)
        wait = SUBSTITUTE_FETCH_WAIT_MS if place.embedded_broker else FETCH_WAIT_MS
        self._part = place.start(
            "consumer", "outbox_relay.workbench.bench.consumer", "--bootstrap", place.bootstrap, "--topic", topic,
            "--counter", str(path), "--times", str(self._times), "--fetch-wait-ms", str(wait),
        )  # fmt: skip
        place.wait(lambda: self._counter.read(consumer.ASSIGNED), START_SECONDS, "the consumer reads")

    def count(self) -> int:
        """How many records it has read."""
        return self._counter.read(consumer.ARRIVED)

    def times(self) -> list[float]:
        """Stop it; how long each event took, in seconds, in the order of arrival."""
        self._place.end(self._part)
        return consumer.read_times(self._times)


class _Watermarks:
    """The ends of a topic's partitions, as the broker says them."""

    def __init__(self, bootstrap: str, topic: str) -> None:
        self._partitions = [TopicPartition(topic, number) for number in range(PARTITIONS)]
        self._consumer = Consumer({"bootstrap.servers": bootstrap, "group.id": "outbox-bench", "log_level": 0})

    def count(self) -> int:
        """How many records the topic has."""
        try:
            return sum(self._consumer.get_watermark_offsets(p, timeout=REQUEST_SECONDS)[1] for p in self._partitions)
        except KafkaException:
            return 0  # a partition without a leader yet


def topic_count(place: Place, topic: str) -> Callable[[], int]:
    """What tells how many records a topic has: the broker, or a consumer where the broker cannot say."""
    if place.embedded_broker:
        return TopicConsumer(place, topic).count
    return _Watermarks(place.bootstrap, topic).count


class Receiver:
    """A receiver of webhooks in a process of its own; with `failing` it refuses one key in ten."""

    def __init__(self, place: Place, *, failing: bool = False, port: int | None = None) -> None:
        self.port = port or ports.free_port()
        self.url = f"http://{ports.LOOPBACK}:{self.port}/hooks"
        path = place.file(".counter")
        self._place = place
        self._counter = Counter(path)
        self._part = place.start(
            "receiver", "outbox_relay.workbench.bench.receiver", "--port", str(self.port), "--counter", str(path),
            *(("--failing",) if failing else ()),
        )  # fmt: skip
        place.wait(lambda: ports.answers(self.port), START_SECONDS, "the receiver listens")

    def count(self) -> int:
        """How many requests it has taken."""
        return self._counter.read(receiver.TAKEN)

    def refused(self) -> int:
        """How many it has refused."""
        return self._counter.read(receiver.REFUSED)

    def close(self) -> None:
        """Stop it."""
        self._place.end(self._part)
