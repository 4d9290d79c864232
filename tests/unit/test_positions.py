"""Consumers of the embedded broker go back for records that it stored late.

The broker's race is lost a few times in ten thousand records, so the tests make its messages themselves.
"""

from __future__ import annotations

from typing import cast

import pytest
from confluent_kafka import Message, TopicPartition

from outbox_relay.workbench.embedded import broker as positions
from outbox_relay.workbench.embedded.broker import Positions


class Sought:
    """A consumer that records where it was sent."""

    def __init__(self) -> None:
        self.places: list[tuple[str, int, int]] = []

    def seek(self, partition: TopicPartition, /) -> None:
        """Record the place."""
        self.places.append((partition.topic, partition.partition, partition.offset))


class At:
    """The place of a message."""

    def __init__(self, partition: int, offset: int) -> None:
        self._place = partition, offset

    def topic(self) -> str:
        """Return the topic."""
        return "orders"

    def partition(self) -> int:
        """Return the partition."""
        return self._place[0]

    def offset(self) -> int:
        """Return the offset."""
        return self._place[1]


def at(partition: int, offset: int) -> Message:
    """Return a message at a place."""
    return cast("Message", At(partition, offset))


def test_records_that_follow_each_other_are_taken() -> None:
    consumer = Sought()
    found = Positions(consumer)
    assert [found.follows(at(p, o)) for p, o in ((0, 0), (1, 0), (0, 1), (1, 1), (0, 2))] == [True] * 5
    assert consumer.places == []


def test_consumer_goes_back_to_a_skipped_record_and_takes_all_once() -> None:
    consumer = Sought()
    found = Positions(consumer)
    assert [found.follows(at(3, o)) for o in (0, 2, 2, 1, 2)] == [True, False, False, True, True]
    assert consumer.places == [("orders", 3, 1)] * 2


def test_gap_that_stays_is_accepted(monkeypatch: pytest.MonkeyPatch) -> None:
    consumer = Sought()
    found = Positions(consumer)
    assert [found.follows(at(0, o)) for o in (0, 2)] == [True, False]
    monkeypatch.setattr(positions, "GAP_SECONDS", 0.0)
    assert [found.follows(at(0, o)) for o in (2, 3)] == [True, True]
