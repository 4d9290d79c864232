"""Program that consumes a topic, counts the records and measures their latency.

Payloads that begin with `{"at": SECONDS` contain the time of emit; the latencies are written to a file at the end.
Records are consumed one by one, because a consumer that waits for several adds this wait to the latency of each.
"""

from __future__ import annotations

import argparse
import signal
import sys
import threading
import time
from array import array
from pathlib import Path

from confluent_kafka import OFFSET_BEGINNING, Consumer, KafkaError, KafkaException, TopicPartition

from outbox_relay.workbench.embedded.broker import Positions, partitions_with_leader
from tests.bench.counter import Counter

ASSIGNED, ARRIVED = 0, 1
"""Slots of the counter: 1 once the consumer reads, and the number of records."""
POLL_SECONDS = 0.1
LEADERS_SECONDS = 30.0
TIME_PREFIX = b'{"at": '
TRANSIENT = (KafkaError._TRANSPORT, KafkaError._ALL_BROKERS_DOWN)  # pyright: ignore[reportPrivateUsage] - librdkafka's own
"""Errors from which the client recovers by itself."""


class CountingConsumer:
    """Consumes `topic` from its beginning until `stopping` is set."""

    def __init__(self, bootstrap: str, topic: str, counter: Counter, *, fetch_wait_ms: int) -> None:
        self._topic = topic
        self._counter = counter
        self._consumer = Consumer(
            {
                "bootstrap.servers": bootstrap,
                "group.id": "outbox-bench",
                "enable.auto.commit": False,
                "fetch.wait.max.ms": fetch_wait_ms,
                "log_level": 0,
            }
        )
        self._positions = Positions(self._consumer)
        self.stopping = threading.Event()
        self.latencies = array("d")

    def run(self) -> None:
        """Consume the topic. Raise KafkaException, or RuntimeError if it has no partition in time."""
        partitions = self._partitions()
        self._consumer.assign([TopicPartition(self._topic, p, OFFSET_BEGINNING) for p in partitions])
        self._counter.add(ASSIGNED)
        while not self.stopping.is_set():
            self._take_one()
        self._consumer.close()

    def _partitions(self) -> list[int]:
        deadline = time.monotonic() + LEADERS_SECONDS
        while not (found := partitions_with_leader(self._consumer, self._topic)):
            if time.monotonic() > deadline:
                raise RuntimeError(f"no partition of {self._topic} has a leader")
            time.sleep(POLL_SECONDS)
        return found

    def _take_one(self) -> None:
        message = self._consumer.poll(POLL_SECONDS)
        if message is None:
            return
        now = time.time()
        error = message.error()
        if error is None:
            if self._positions.follows(message):
                self._count(message.value() or b"", now)
        elif error.code() not in TRANSIENT:
            raise KafkaException(error)

    def _count(self, value: bytes, now: float) -> None:
        if value.startswith(TIME_PREFIX):
            self.latencies.append(now - float(value[len(TIME_PREFIX) : value.index(b",")]))
        self._counter.add(ARRIVED)


def read_times(path: Path) -> list[float]:
    """Return the latency of each event in seconds, in the order of arrival."""
    found = array("d")
    found.frombytes(path.read_bytes())
    return list(found)


def main() -> int:
    """Consume until SIGTERM."""
    parser = argparse.ArgumentParser(prog="bench: consumer")
    parser.add_argument("--bootstrap", required=True)
    parser.add_argument("--topic", required=True)
    parser.add_argument("--counter", type=Path, required=True)
    parser.add_argument("--times", type=Path, required=True)
    parser.add_argument("--fetch-wait-ms", type=int, required=True)
    arguments = parser.parse_args()
    counter = Counter(arguments.counter)
    consumer = CountingConsumer(arguments.bootstrap, arguments.topic, counter, fetch_wait_ms=arguments.fetch_wait_ms)
    signal.signal(signal.SIGTERM, lambda _number, _frame: consumer.stopping.set())
    consumer.run()
    arguments.times.write_bytes(consumer.latencies.tobytes())
    return 0


if __name__ == "__main__":
    sys.exit(main())
