"""Destinations of the benchmarks: topics and a webhook receiver, which count arrived events."""

from __future__ import annotations

from collections.abc import Callable

from confluent_kafka import Consumer, KafkaException, TopicPartition

from outbox_relay.workbench.embedded import ports
from tests.bench import consumer, receiver
from tests.bench.counter import Counter
from tests.bench.environment import PARTITIONS, REQUEST_SECONDS, BenchEnvironment

START_SECONDS = 30.0
FETCH_WAIT_MS, EMBEDDED_FETCH_WAIT_MS = 500, 1
"""The embedded broker always waits this long, even if there are records to return."""


class ConsumerProcess:
    """A consumer process that counts records and measures latencies."""

    def __init__(self, bench: BenchEnvironment, topic: str) -> None:
        self._bench = bench
        self._times = bench.new_path(".times")
        path = bench.new_path(".counter")
        self._counter = Counter(path)
        wait = EMBEDDED_FETCH_WAIT_MS if bench.embedded_broker else FETCH_WAIT_MS
        self._process = bench.start_process(
            "consumer", "tests.bench.consumer", "--bootstrap", bench.bootstrap, "--topic", topic,
            "--counter", str(path), "--times", str(self._times), "--fetch-wait-ms", str(wait),
        )  # fmt: skip
        bench.wait_until(lambda: self._counter.read(consumer.ASSIGNED), START_SECONDS, "the consumer reads")

    def count(self) -> int:
        """Return the number of consumed records."""
        return self._counter.read(consumer.ARRIVED)

    def stop(self) -> list[float]:
        """Stop the consumer and return the latency of each event in seconds, in the order of arrival."""
        self._bench.stop(self._process)
        return consumer.read_times(self._times)


class EndOffsets:
    """The end offsets of a topic, queried from the broker."""

    def __init__(self, bootstrap: str, topic: str) -> None:
        self._partitions = [TopicPartition(topic, number) for number in range(PARTITIONS)]
        self._consumer = Consumer({"bootstrap.servers": bootstrap, "group.id": "outbox-bench", "log_level": 0})

    def count(self) -> int:
        """Return the number of records in the topic."""
        try:
            return sum(self._consumer.get_watermark_offsets(p, timeout=REQUEST_SECONDS)[1] for p in self._partitions)
        except KafkaException:
            return 0  # a partition without a leader, or no broker that answers


def record_counter(bench: BenchEnvironment, topic: str) -> Callable[[], int]:
    """Return a function that counts the records of a topic, with a consumer if the end offsets are not reliable."""
    if bench.embedded_broker:
        return ConsumerProcess(bench, topic).count
    return EndOffsets(bench.bootstrap, topic).count


class ReceiverProcess:
    """A webhook receiver process; with `failing` it refuses one key in ten."""

    def __init__(self, bench: BenchEnvironment, *, failing: bool = False, port: int | None = None) -> None:
        self.port = port or ports.free_port()
        self.url = f"http://{ports.LOOPBACK}:{self.port}/hooks"
        path = bench.new_path(".counter")
        self._bench = bench
        self._counter = Counter(path)
        self._process = bench.start_process(
            "receiver", "tests.bench.receiver", "--port", str(self.port), "--counter", str(path),
            *(("--failing",) if failing else ()),
        )  # fmt: skip
        bench.wait_until(lambda: ports.is_listening(self.port), START_SECONDS, "the receiver listens")

    def count(self) -> int:
        """Return the number of accepted requests."""
        return self._counter.read(receiver.ACCEPTED)

    def refused(self) -> int:
        """Return the number of refused requests."""
        return self._counter.read(receiver.REFUSED)

    def close(self) -> None:
        """Stop the receiver."""
        self._bench.stop(self._process)
