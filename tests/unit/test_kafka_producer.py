"""Events that are handed to a producer. One that cannot be a record is refused, and the others are delivered."""

from __future__ import annotations

import math

import pytest

from outbox_relay.domain.event import StoredEvent
from outbox_relay.domain.outcomes import Refused
from outbox_relay.sinks.contract.handing import an_event
from outbox_relay.sinks.kafka.call import DeliverCall, DeliveryReports, DeliveryRound, KeyBlocks
from outbox_relay.sinks.kafka.client import ClientLog, ClientSettings
from outbox_relay.sinks.kafka.producer import RecordProducer
from outbox_relay.sinks.kafka.records import RecordFormat

SECRET = "a-secret-of-the-event"
SETTINGS = ClientSettings({"bootstrap.servers": "127.0.0.1:1"})
NOT_HEADERS = f'["{SECRET}"]'
"""Headers that only the owner of the log can write."""


def a_call(*events: StoredEvent, holds: bool = False) -> DeliverCall:
    """Return a call of which nothing is handed over yet."""
    return DeliverCall(
        1,
        events,
        math.inf,
        math.inf,
        DeliveryRound(),
        lambda _: None,
        DeliveryReports(len(events)),
        topics=["t"] * len(events),
        refusal_blocks=KeyBlocks() if holds else None,
    )


@pytest.mark.parametrize(
    "form", [RecordFormat(), RecordFormat(cloudevents="structured", source="s")], ids=["plain", "CloudEvents"]
)
@pytest.mark.parametrize("holds", [False, True])
def test_event_that_cannot_be_a_record_is_refused_and_its_neighbours_are_handed_over(
    form: RecordFormat, holds: bool
) -> None:
    """With when_dead = "hold" what is behind it waits until the refusal is known."""
    producer = RecordProducer(SETTINGS, ClientLog(SETTINGS), form, 1000)
    call = a_call(an_event(), an_event(headers=NOT_HEADERS), an_event(), holds=holds)
    try:
        assert producer.put(call, range(3)) == (2 if holds else 3)
    finally:
        producer.purge(in_flight=True)
        producer.close()
    assert call.handed_over == (1 if holds else 2)
    [(place, verdict)] = call.decided.items()
    assert isinstance(verdict, Refused)
    assert (place, verdict.reason) == (
        1,
        "cannot be made a Kafka record: the event's headers are not a JSON object of strings",
    )


def test_refusal_quotes_nothing_of_the_event() -> None:
    producer = RecordProducer(SETTINGS, ClientLog(SETTINGS), RecordFormat(), 1000)
    call = a_call(an_event(key=f"{SECRET}\udc80"))
    try:
        assert producer.put(call, [0]) == 1
    finally:
        producer.close()
    [verdict] = call.decided.values()
    assert isinstance(verdict, Refused)
    assert verdict.reason == "cannot be made a Kafka record: UnicodeEncodeError"
