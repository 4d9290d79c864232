"""Kafka and `when_dead = "hold"`: no event of a key is sent after a refused one."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest

from outbox_relay.domain.event import StoredEvent
from outbox_relay.domain.outcomes import DELIVERED, Refused, Unavailable, Verdict
from outbox_relay.formats.topics import TopicTemplate
from outbox_relay.sinks.contract.handing import some_events
from outbox_relay.sinks.kafka import KafkaSink
from tests.support.kafka import KafkaBroker
from tests.support.kafka.delivering import finish, submit

LIMIT = 20_000
STALL_SECONDS = 5.0
COUNT, KEYS = 400, 5
BAD = (70, 103, 311, 312)
"""Events of the keys 0, 3, 1 and 2, in the middle of different calls."""


def large(event: StoredEvent) -> StoredEvent:
    """Return `event` with a payload that is too large for the topic even when compressed."""
    return event._replace(payload=random.Random(event.id).randbytes(2 * LIMIT))


def nameless(event: StoredEvent) -> StoredEvent:
    """Return `event` with a type that gives no legal topic name."""
    return event._replace(type="no topic/")


@dataclass(frozen=True)
class Case:
    """A way in which an event is refused."""

    template: str = "{topic}"
    producer: dict[str, str | int] = field(default_factory=dict[str, str | int])
    spoil: Any = large


CASES = {
    "the sink knows the topic's limit": Case(),
    "only the broker knows": Case(producer={"compression.type": "lz4"}),
    "the client's own limit": Case(producer={"message.max.bytes": 5_000}),
    "no topic": Case(template="{topic}{{type}}", spoil=nameless),
}


def expected(events: Sequence[StoredEvent], bad: Sequence[int]) -> list[type]:
    """Return the type of each verdict: no event of a key is delivered from its first refused one on."""
    found: list[type] = []
    ended: set[str | None] = set()
    for place, event in enumerate(events):
        found.append(Unavailable if event.key in ended else Refused if place in bad else type(DELIVERED))
        if place in bad:
            ended.add(event.key)
    return found


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_no_event_of_a_key_is_sent_after_a_refused_one_in_concurrent_calls(
    real_kafka: KafkaBroker, topic: str, case: Case
) -> None:
    name = f"{topic}order.created" if case.spoil is nameless else topic
    real_kafka.create_topic(name, partitions=2, config={"max.message.bytes": str(LIMIT)})
    producer = {"bootstrap.servers": real_kafka.bootstrap, **case.producer}
    template = TopicTemplate.parse(case.template.format(topic=topic))
    sink = KafkaSink("events", template, producer, STALL_SECONDS, hold_keys=True)
    sink.open()
    try:
        events = some_events(COUNT, KEYS)
        for place in BAD:
            events[place] = case.spoil(events[place])
        verdicts: list[Verdict] = []
        # Two calls at once, as the relay makes them, and the next two when both have returned.
        for at in range(0, COUNT, 200):
            left = [event for event in events[at : at + 200] if event.key not in _keys(events, verdicts)]
            found = dict(zip((e.id for e in left), hand_over_all_of(sink, left), strict=True))
            verdicts += [found.get(event.id, Unavailable("the relay knows")) for event in events[at : at + 200]]
    finally:
        sink.close()
    assert [type(verdict) for verdict in verdicts] == expected(events, BAD)
    arrived = {str(record.headers["id"], "ascii") for record in real_kafka.read_all(name) if record.headers["id"]}
    assert arrived == {event.uid for event, v in zip(events, verdicts, strict=True) if v is DELIVERED}


def _keys(events: Sequence[StoredEvent], verdicts: Sequence[Verdict]) -> set[str | None]:
    """Return the keys that a relay would hold by now."""
    return {event.key for event, verdict in zip(events, verdicts, strict=False) if verdict is not DELIVERED}


def hand_over_all_of(sink: KafkaSink, events: Sequence[StoredEvent]) -> list[Verdict]:
    """Return the verdicts on `events`, delivered in two concurrent calls."""
    half = len(events) // 2
    first, second = finish(sink, submit(sink, events[:half]), submit(sink, events[half:]))
    assert all(verdict.behind for verdict in (*first, *second) if isinstance(verdict, Unavailable))
    return [*first, *second]
