"""Where events arrive, and how many have: a topic counted at the broker or by a consumer, a receiver of webhooks."""

from __future__ import annotations

from collections.abc import Callable

from confluent_kafka import Consumer, KafkaException, TopicPartition

from outbox_relay.workbench.bench import consumer, receiver
from outbox_relay.workbench.bench.counter import Counter
from outbox_relay.workbench.bench.environment import PARTITIONS, REQUEST_SECONDS, BenchEnvironment
from outbox_relay.workbench.embedded import ports

START_SECONDS = 30.0
FETCH_WAIT_MS, SUBSTITUTE_FETCH_WAIT_MS = 500, 1
"""The substitute waits as long as it may, also when there is something to read."""


class ConsumerProcess:
    """A consumer in a process of its own, which counts what it has read and notes how long it took."""

    def __init__(self, bench: BenchEnvironment, topic: str) -> None:
        self._bench = bench
        self._times = bench.new_path(".times")
        path = bench.new_path(".counter")
        self._counter = Counter(path)
        wait = SUBSTITUTE_FETCH_WAIT_MS if bench.embedded_broker else FETCH_WAIT_MS
        self._part = bench.start_process(
            "consumer", "outbox_relay.workbench.bench.consumer", "--bootstrap", bench.bootstrap, "--topic", topic,
            "--counter", str(path), "--times", str(self._times), "--fetch-wait-ms", str(wait),
        )  # fmt: skip
        bench.wait_until(lambda: self._counter.read(consumer.ASSIGNED), START_SECONDS, "the consumer reads")

    def count(self) -> int:
        """How many records it has read."""
        return self._counter.read(consumer.ARRIVED)

    def times(self) -> list[float]:
        """Stop it; how long each event took, in seconds, in the order of arrival."""
        self._bench.stop(self._part)
        return consumer.read_times(self._times)


class _EndOffsets:
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


def record_counter(bench: BenchEnvironment, topic: str) -> Callable[[], int]:
    """What tells how many records a topic has: the broker, or a consumer where the broker cannot say."""
    if bench.embedded_broker:
        return ConsumerProcess(bench, topic).count
    return _EndOffsets(bench.bootstrap, topic).count


class ReceiverProcess:
    """A receiver of webhooks in a process of its own; with `failing` it refuses one key in ten."""

    def __init__(self, bench: BenchEnvironment, *, failing: bool = False, port: int | None = None) -> None:
        self.port = port or ports.free_port()
        self.url = f"http://{ports.LOOPBACK}:{self.port}/hooks"
        path = bench.new_path(".counter")
        self._bench = bench
        self._counter = Counter(path)
        self._part = bench.start_process(
            "receiver", "outbox_relay.workbench.bench.receiver", "--port", str(self.port), "--counter", str(path),
            *(("--failing",) if failing else ()),
        )  # fmt: skip
        bench.wait_until(lambda: ports.is_listening(self.port), START_SECONDS, "the receiver listens")

    def count(self) -> int:
        """How many requests it has taken."""
        return self._counter.read(receiver.TAKEN)

    def refused(self) -> int:
        """How many it has refused."""
        return self._counter.read(receiver.REFUSED)

    def close(self) -> None:
        """Stop it."""
        self._bench.stop(self._part)
