"""Arrivals, read from the topic and from the receiver's journal after the run."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import psycopg
from confluent_kafka import OFFSET_BEGINNING, Consumer, KafkaException, Message, TopicPartition

from outbox_relay.workbench.embedded.broker import partitions_with_leader
from tests.chaos.handlers import EFFECTS
from tests.chaos.oracle import Arrival
from tests.support.wait import until

TOPIC_SETTINGS = {"message.timestamp.type": "LogAppendTime"}
"""The broker sets the time of a record, so that the relay's clock has no effect."""
BATCH = 5_000
READ_SECONDS = 600.0
LEADERS_SECONDS = 30.0
NO_UID = bytes(16)


@dataclass
class Replayed:
    """The arrivals by replays since the last restore: a restored database gives the numbers of later replays again."""

    since: float = 0.0
    uids: dict[tuple[str, int], set[bytes]] = field(default_factory=dict[tuple[str, int], set[bytes]])
    """Sink and number of a replay → the uids that arrived with it."""
    count: int = 0
    """The number of arrivals, those from before the restore too: it may come after every replay."""

    def add(self, sink: str, number: bytes, uid: str, arrived: float) -> None:
        """Count an arrival, and add it unless it is from before the restore."""
        self.count += 1
        if arrived >= self.since:
            self.uids.setdefault((sink, int(number)), set()).add(bytes.fromhex(uid.replace("-", "")))


def from_topic(bootstrap: str, topic: str, replayed: Replayed) -> Iterator[Arrival]:
    """Yield the records of a topic; those of each key are in the order of the broker.

    Those of replays are added to `replayed` instead.
    """
    to_monotonic = time.monotonic() - time.time()
    for message in _messages(bootstrap, topic):
        headers = dict(cast("list[tuple[str, bytes]]", message.headers() or []))
        arrived = message.timestamp()[1] / 1000 + to_monotonic
        if number := headers.get("outbox-replay"):
            replayed.add("kafka", number, headers["id"].decode(), arrived)
            continue
        yield _arrival(message.value() or b"", headers.get("id", b"").decode(), arrived)


def from_journal(path: Path, replayed: Replayed) -> Iterator[Arrival]:
    """Yield the accepted requests in the order of arrival. Those of replays are added to `replayed` instead."""
    with path.open("rb") as lines:
        for line in lines:
            arrived, uid, _mode, problem, number, body = line.rstrip(b"\n").split(b"\t", 5)
            if number:
                replayed.add("webhook", number, uid.decode(), float(arrived))
            elif not problem:
                yield _arrival(body, uid.decode(), float(arrived))


def from_effects(dsn: str) -> Iterator[Arrival]:
    """Yield the effects of the handler with a transaction, by time."""
    with psycopg.connect(dsn) as connection:
        found = connection.execute(f"select payload, uid::text, ended from public.{EFFECTS} order by ended".encode())
        for payload, uid, ended in found:
            yield _arrival(payload.encode(), uid, ended)


def uids(path: Path) -> set[bytes]:
    """Return the uids in a journal; none if there is no file."""
    if not path.exists():
        return set()
    with path.open("rb") as lines:
        return {bytes.fromhex(line.split(b"\t", 2)[1].decode().replace("-", "")) for line in lines}


def refused(path: Path) -> int:
    """Return the number of requests with an invalid signature."""
    with path.open("rb") as lines:
        return sum(line.split(b"\t", 4)[3] != b"" for line in lines)


def _arrival(payload: bytes, uid: str, arrived: float) -> Arrival:
    """Parse a payload. The result has number 0, which no event has, if it is no event of the run."""
    try:
        said: dict[str, Any] = json.loads(payload)
        return Arrival(said["key"], said["n"], bytes.fromhex(uid.replace("-", "")), said["at"], arrived)
    except (ValueError, KeyError, TypeError):
        return Arrival(-1, 0, NO_UID, 0.0, arrived)


def _messages(bootstrap: str, topic: str) -> Iterator[Message]:
    """Yield the messages of every partition up to its current end."""
    consumer = Consumer({"bootstrap.servers": bootstrap, "group.id": "judge", "enable.auto.commit": False})
    try:
        partitions = until(
            lambda: partitions_with_leader(consumer, topic), seconds=LEADERS_SECONDS, what=f"{topic} has leaders"
        )
        ends = {partition: _end(consumer, topic, partition) for partition in partitions}
        missing = {partition: end for partition, end in ends.items() if end}
        consumer.assign([TopicPartition(topic, partition, OFFSET_BEGINNING) for partition in missing])
        deadline = time.monotonic() + READ_SECONDS
        while missing:
            assert time.monotonic() < deadline, f"{topic} was not read within {READ_SECONDS:g} s: {missing} are left"
            for message in consumer.consume(BATCH, timeout=1.0):
                if error := message.error():
                    raise KafkaException(error)
                partition = cast("int", message.partition())
                if cast("int", message.offset()) + 1 >= missing.get(partition, 0):
                    missing.pop(partition, None)
                yield message
    finally:
        consumer.close()


def _end(consumer: Consumer, topic: str, partition: int) -> int:
    return consumer.get_watermark_offsets(TopicPartition(topic, partition), timeout=LEADERS_SECONDS)[1]
