"""The consumer of the Kafka topic: reads every partition from its start. A process of its own.

Told to stop, it writes a marker to the end of every partition and reads up to it: so it has then seen all that was
written before, which a broker's own word about the ends of its partitions would not prove.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
import threading
import time
from pathlib import Path
from typing import cast

from confluent_kafka import OFFSET_BEGINNING, Consumer, KafkaError, KafkaException, Message, Producer, TopicPartition

from outbox_relay.workbench.demo.journal import UNREADABLE, Arrival, JournalWriter
from outbox_relay.workbench.embedded.broker import partitions_with_leader

SETTINGS = {
    "group.id": "demo",
    "enable.auto.commit": False,
    # The substitute broker waits as long as it may, also when there is something to read.
    "fetch.wait.max.ms": 1,
}
POLL_SECONDS = 0.1
END_SECONDS = 20.0
"""Longest time for reading to the end."""
MARKER = b"end of the demo"
PASSING = (KafkaError._TRANSPORT, KafkaError._ALL_BROKERS_DOWN)  # pyright: ignore[reportPrivateUsage] - librdkafka's own
"""Errors that the client mends by itself."""


class TopicReader:
    """Reads `topic` into `journal`."""

    def __init__(self, bootstrap: str, topic: str, journal: JournalWriter) -> None:
        self._bootstrap = bootstrap
        self._topic = topic
        self._journal = journal
        self._consumer = Consumer({"bootstrap.servers": bootstrap, **SETTINGS})
        self._partitions = partitions_with_leader(self._consumer, topic)
        self._ended: set[int] = set()

    def run(self, stopping: threading.Event) -> None:
        """Read until `stopping` is set and then to the end. Raises KafkaException, RuntimeError without an end."""
        self._consumer.assign([TopicPartition(self._topic, p, OFFSET_BEGINNING) for p in self._partitions])
        while not stopping.is_set():
            self._take_one()
        self._mark_ends()
        deadline = time.monotonic() + END_SECONDS
        while len(self._ended) < len(self._partitions):
            if time.monotonic() > deadline:
                raise RuntimeError(f"the ends of all {len(self._partitions)} partitions were not read in time")
            self._take_one()
        self._consumer.close()

    def _mark_ends(self) -> None:
        producer = Producer({"bootstrap.servers": self._bootstrap})
        for partition in self._partitions:
            producer.produce(self._topic, value=MARKER, partition=partition)
        if producer.flush(END_SECONDS):
            raise RuntimeError("the ends of the topic could not be marked")

    def _take_one(self) -> None:
        message = self._consumer.poll(POLL_SECONDS)
        if message is None:
            return
        error = message.error()
        if error is None:
            self._write(message, time.time())
        elif error.code() not in PASSING:
            raise KafkaException(error)

    def _write(self, message: Message, arrived_at: float) -> None:
        if message.value() == MARKER:
            self._ended.add(cast("int", message.partition()))
            return
        try:
            self._journal.write(_arrival(message, arrived_at))
        except (ValueError, KeyError, TypeError, AttributeError):
            self._journal.write(UNREADABLE)


def _arrival(message: Message, arrived_at: float) -> Arrival:
    """What the record says; raises ValueError, KeyError, TypeError or AttributeError for what is not the shop's."""
    event = json.loads(message.value() or b"")
    headers = dict(cast("list[tuple[str, bytes]]", message.headers()))
    return Arrival(
        key=cast("bytes", message.key()).decode(),
        number=int(event["number"]),
        uid=headers["id"].decode(),
        emitted_at=float(event["emitted_at"]),
        arrived_at=arrived_at,
    )


def main() -> int:
    """The process: reads until SIGTERM, then to the end."""
    parser = argparse.ArgumentParser(prog="outbox-relay demo: consumer")
    parser.add_argument("--bootstrap", required=True)
    parser.add_argument("--topic", required=True)
    parser.add_argument("--journal", type=Path, required=True)
    arguments = parser.parse_args()
    stopping = threading.Event()
    signal.signal(signal.SIGTERM, lambda _number, _frame: stopping.set())
    with JournalWriter(arguments.journal) as journal:
        TopicReader(arguments.bootstrap, arguments.topic, journal).run(stopping)
    return 0


if __name__ == "__main__":
    sys.exit(main())
