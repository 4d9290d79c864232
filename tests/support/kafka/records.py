"""Read whole topics from the start, without consumer groups."""

import contextlib
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import cast

from confluent_kafka import OFFSET_BEGINNING, Consumer, KafkaError, KafkaException, Message, TopicPartition

from outbox_relay.workbench.embedded.broker import partitions_with_leader
from tests.support.wait import NotInTime, until

BATCH = 1_000
POLL_SECONDS = 0.05
REQUEST_SECONDS = 10


@dataclass(frozen=True)
class Record:
    """One record, as a consumer gets it."""

    topic: str
    partition: int
    offset: int
    key: bytes | None
    value: bytes | None
    header_list: Sequence[tuple[str, bytes | None]]

    @cached_property
    def headers(self) -> Mapping[str, bytes | None]:
        """Return the last value of each header by name."""
        return dict(self.header_list)


def consume(
    bootstrap: str,
    topic: str,
    *,
    count: int | None = None,
    enough: Callable[[Sequence[Record]], bool] | None = None,
    seconds: float = 30,
) -> list[Record]:
    """Read a topic until there are `count` records, or until `enough` is true for all records read so far.

    Per partition the records are in the order of their offsets. More than `count` may be returned. The topic may be
    missing at first. Raises :class:`tests.support.wait.NotInTime` after `seconds`.
    """

    def is_done() -> bool:
        return enough(records) if enough else len(records) >= (count or 0)

    deadline = time.monotonic() + seconds
    records: list[Record] = []
    with _assigned(bootstrap, topic, deadline) as consumer:
        while not is_done():
            if time.monotonic() > deadline:
                raise NotInTime(f"topic {topic}: {len(records)} records within {seconds:g} s, not those waited for")
            records += _batch(consumer)
    return records


def read_all(bootstrap: str, topic: str, *, seconds: float = 30) -> list[Record]:
    """Read a topic up to its present end.

    Needs Apache Kafka: the substitute returns an end before its last records.
    """
    deadline = time.monotonic() + seconds
    with _assigned(bootstrap, topic, deadline) as consumer:
        missing = _ends(consumer)
        records: list[Record] = []
        while missing:
            if time.monotonic() > deadline:
                raise NotInTime(f"topic {topic}: not read to its ends within {seconds:g} s, missing are {missing}")
            for record in _batch(consumer):
                records.append(record)
                if record.offset + 1 >= missing.get(record.partition, 0):
                    missing.pop(record.partition, None)
    return records


@contextlib.contextmanager
def _assigned(bootstrap: str, topic: str, deadline: float) -> Generator[Consumer]:
    """Yield a consumer that has all partitions of a topic, from their start."""
    consumer = Consumer({"bootstrap.servers": bootstrap, "group.id": "tests", "enable.auto.commit": False})
    try:
        partitions = until(
            lambda: partitions_with_leader(consumer, topic),
            seconds=deadline - time.monotonic(),
            what=f"topic {topic} is there",
        )
        consumer.assign([TopicPartition(topic, partition, OFFSET_BEGINNING) for partition in partitions])
        yield consumer
    finally:
        consumer.close()


def _ends(consumer: Consumer) -> dict[int, int]:
    """Return the end offset of each assigned partition with records."""
    ends: dict[int, int] = {}
    for partition in consumer.assignment():
        bounds = until(partial(_bounds, consumer, partition), seconds=REQUEST_SECONDS * 2, what="a leader answers")
        if bounds and bounds[1] > bounds[0]:
            ends[partition.partition] = bounds[1]
    return ends


def _bounds(consumer: Consumer, partition: TopicPartition) -> tuple[int, int] | None:
    """Return first and end offset of a partition, or None while it has no leader."""
    try:
        return consumer.get_watermark_offsets(partition, timeout=REQUEST_SECONDS)
    except KafkaException:
        return None


def _batch(consumer: Consumer) -> list[Record]:
    messages = consumer.consume(BATCH, timeout=POLL_SECONDS)
    for error in (message.error() for message in messages):
        # The consumer retries brokers that are down or restarting.
        if error and error.code() not in (KafkaError._TRANSPORT, KafkaError._ALL_BROKERS_DOWN):
            raise KafkaException(error)
    return [_record(message) for message in messages if not message.error()]


def _record(message: Message) -> Record:
    return Record(
        topic=message.topic() or "",
        partition=message.partition() or 0,
        offset=message.offset() or 0,
        key=message.key(),
        value=message.value(),
        header_list=cast("list[tuple[str, bytes | None]]", message.headers() or []),
    )
