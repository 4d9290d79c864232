"""Positions of a consumer, which must not skip what the embedded broker writes late."""

from __future__ import annotations

import time
from typing import Protocol, cast

from confluent_kafka import Message, TopicPartition

GAP_SECONDS = 5.0
"""Time in which skipped records must arrive. Later it counts as a gap that stays: transactions leave some."""


class Seeking(Protocol):
    """The part of a Kafka consumer that positions use."""

    def seek(self, partition: TopicPartition, /) -> object:
        """Continue a partition at an offset."""
        ...


class Positions:
    """The next offset of each partition, for a consumer that reads them from their beginning.

    The embedded broker counts a record before it stores it. If two producers write to a partition at the same moment, a
    consumer can therefore get the second record first, and would never get the first.
    """

    def __init__(self, consumer: Seeking) -> None:
        self._consumer = consumer
        self._next: dict[int, int] = {}
        self._gaps: dict[int, float] = {}

    def follows(self, message: Message) -> bool:
        """Return True if a record comes next in its partition. Otherwise the consumer continues at the skipped one.

        After `GAP_SECONDS` a gap is accepted. Raise KafkaException if the consumer cannot go back.
        """
        partition, offset = cast("int", message.partition()), cast("int", message.offset())
        expected = self._next.get(partition, 0)
        if offset > expected:
            now = time.monotonic()
            if now - self._gaps.setdefault(partition, now) < GAP_SECONDS:
                self._consumer.seek(TopicPartition(cast("str", message.topic()), partition, expected))
                return False
        self._gaps.pop(partition, None)
        self._next[partition] = offset + 1
        return True
