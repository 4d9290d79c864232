"""Program that consumes every partition of the Kafka topic from its beginning.

On SIGTERM it appends a marker to every partition and reads up to it. This proves that it has read all earlier records;
the end offsets that the embedded broker reports would not.
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

from outbox_relay.workbench.embedded.broker import Positions, partitions_with_leader
from outbox_relay.workbench.shop.arrivals import UNREADABLE, Arrival, JournalWriter

SETTINGS = {
    "group.id": "shop",
    "enable.auto.commit": False,
    # The embedded broker always waits this long, even if there are records to return, and returns none if it was busy
    # for longer.
    "fetch.wait.max.ms": 25,
    # A position that the broker does not know ends the consumer. By default it would go on at the end, and the records
    # in between would count as lost.
    "auto.offset.reset": "error",
}
POLL_SECONDS = 0.1
END_SECONDS = 20.0
"""Time limit for reading to the markers."""
MARKER = b"end of the run"
TRANSIENT = (KafkaError._TRANSPORT, KafkaError._ALL_BROKERS_DOWN)  # pyright: ignore[reportPrivateUsage] - librdkafka's own
"""Errors from which the client recovers by itself."""


class TopicReader:
    """A consumer that writes the records of `topic` to `journal`."""

    def __init__(self, bootstrap: str, topic: str, journal: JournalWriter) -> None:
        self._bootstrap = bootstrap
        self._topic = topic
        self._journal = journal
        self._consumer = Consumer({"bootstrap.servers": bootstrap, **SETTINGS})
        self._partitions = partitions_with_leader(self._consumer, topic)
        self._positions = Positions(self._consumer)
        self._ended: set[int] = set()

    def run(self, stopping: threading.Event) -> None:
        """Read until `stopping` is set, then to the markers.

        Raise KafkaException for a client error, RuntimeError if the markers are not written or read in time.
        """
        self._consumer.assign([TopicPartition(self._topic, p, OFFSET_BEGINNING) for p in self._partitions])
        while not stopping.is_set():
            self._take_one()
        self._mark_ends()
        deadline = time.monotonic() + END_SECONDS
        while len(self._ended) < len(self._partitions):
            if time.monotonic() > deadline:
                raise RuntimeError(
                    f"the ends of {len(self._partitions)} partitions were not read within {END_SECONDS:g} s"
                )
            self._take_one()
        self._consumer.close()

    def _mark_ends(self) -> None:
        producer = Producer({"bootstrap.servers": self._bootstrap})
        for partition in self._partitions:
            producer.produce(self._topic, value=MARKER, partition=partition)
        if producer.flush(END_SECONDS):
            raise RuntimeError("the end markers could not be written to the topic")

    def _take_one(self) -> None:
        message = self._consumer.poll(POLL_SECONDS)
        if message is None:
            return
        error = message.error()
        if error is None:
            if self._positions.follows(message):
                self._write(message, time.time())
        elif error.code() not in TRANSIENT:
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
    """Parse a record. Raise ValueError, KeyError, TypeError or AttributeError if the shop did not emit it."""
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
    """Read until SIGTERM, then to the markers."""
    parser = argparse.ArgumentParser(prog="outbox-relay shop: consumer")
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
