"""A consumer of a topic that counts, and notes how long each event took. A process of its own.

Events that begin with `{"at": SECONDS` say when they were emitted; how long they took is written to a file at the end.
Records are taken one by one: a consumer that waits for several adds its own wait to every one of them.
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

from outbox_relay.workbench.bench.counter import Counter
from outbox_relay.workbench.embedded.broker import partitions_with_leader

ASSIGNED, ARRIVED = 0, 1
"""The counts: whether it reads, and how many records it has."""
POLL_SECONDS = 0.1
LEADERS_SECONDS = 30.0
MARK = b'{"at": '
PASSING = (KafkaError._TRANSPORT, KafkaError._ALL_BROKERS_DOWN)  # pyright: ignore[reportPrivateUsage] - librdkafka's own
"""Errors that the client mends by itself."""


class CountingConsumer:
    """Reads `topic` from its beginning until told to stop."""

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
        self.stopping = threading.Event()
        self.took = array("d")

    def run(self) -> None:
        """Read. Raises KafkaException, and RuntimeError for a topic that has no partitions in time."""
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
            value = message.value() or b""
            if value.startswith(MARK):
                self.took.append(now - float(value[len(MARK) : value.index(b",")]))
            self._counter.add(ARRIVED)
        elif error.code() not in PASSING:
            raise KafkaException(error)


def read_times(path: Path) -> list[float]:
    """How long each event took, in seconds, in the order of arrival."""
    found = array("d")
    found.frombytes(path.read_bytes())
    return list(found)


def main() -> int:
    """The process: reads until SIGTERM."""
    parser = argparse.ArgumentParser(prog="outbox-relay bench: consumer")
    parser.add_argument("--bootstrap", required=True)
    parser.add_argument("--topic", required=True)
    parser.add_argument("--counter", type=Path, required=True)
    parser.add_argument("--times", type=Path, required=True)
    parser.add_argument("--fetch-wait-ms", type=int, required=True)
    arguments = parser.parse_args()
    counter = Counter(arguments.counter)
    reading = CountingConsumer(arguments.bootstrap, arguments.topic, counter, fetch_wait_ms=arguments.fetch_wait_ms)
    signal.signal(signal.SIGTERM, lambda _number, _frame: reading.stopping.set())
    reading.run()
    arguments.times.write_bytes(reading.took.tobytes())
    return 0


if __name__ == "__main__":
    sys.exit(main())
