"""The cost of the Kafka sink beside a bare produce loop, in turns, each with the same small events and a new client.

usage: python -m tests.bench.kafka_sink [EVENTS] [ROUNDS]
"""

import sys
import time
from collections.abc import Sequence
from statistics import median

from confluent_kafka import Producer

from outbox_relay.domain.event import StoredEvent
from outbox_relay.formats.topics import TopicTemplate
from outbox_relay.sinks.calls import Call
from outbox_relay.sinks.contract.handing import some_events, soon
from outbox_relay.sinks.kafka import KafkaSink
from outbox_relay.sinks.kafka.records import Headers
from outbox_relay.sinks.kafka.settings import DEFAULTS, GUARANTEES
from tests.support.kafka import KafkaBroker

BATCH = 4_000
UNREPORTED = 8_000


def through_the_sink(bootstrap: str, topic: str, events: Sequence[StoredEvent]) -> tuple[float, float]:
    """Return events per second, and the microseconds of the thread's processor time per event."""
    sink = KafkaSink("bench", TopicTemplate.parse(topic), {"bootstrap.servers": bootstrap}, 5.0)
    sink.open()
    began, worked, open_calls = time.monotonic(), time.thread_time(), 0
    for at in range(0, len(events), BATCH):
        while open_calls >= sink.max_in_flight:
            open_calls -= _ended(sink)
        sink.submit(Call(events[at : at + BATCH], soon()))
        open_calls += 1
    while open_calls:
        open_calls -= _ended(sink)
    figures = _figures(len(events), began, worked)
    sink.close()
    return figures


def _figures(count: int, began: float, worked: float) -> tuple[float, float]:
    return count / (time.monotonic() - began), (time.thread_time() - worked) / count * 1e6


def _ended(sink: KafkaSink) -> int:
    ended = sink.completed(1.0)
    assert all(call.verdicts is None for call in ended)
    return len(ended)


def bare(bootstrap: str, topic: str, events: Sequence[StoredEvent]) -> tuple[float, float]:
    """Return the same of a loop that produces and counts reports."""
    producer = Producer({**DEFAULTS, **GUARANTEES, "bootstrap.servers": bootstrap, "batch.size": 990_000})
    left = 0

    def report(error: object, _message: object) -> None:
        nonlocal left
        assert error is None
        left -= 1

    produce, poll = producer.produce, producer.poll
    began, worked = time.monotonic(), time.thread_time()
    for at in range(0, len(events), 100):
        while left > UNREPORTED - 100:
            poll(0.001)
        for event in events[at : at + 100]:
            headers: Headers = [("id", event.uid), ("type", event.type), ("content-type", event.content_type)]
            produce(topic, event.payload, event.key, -1, report, None, 0, headers)
            left += 1
        poll(0)
    while left:
        producer.flush(0.01)
    return _figures(len(events), began, worked)


def main(count: int = 300_000, rounds: int = 6) -> None:
    """Print the figures of each round, and the medians of their ratios."""
    ratios: list[tuple[float, float]] = []
    events = some_events(count, keys=1_000)
    with KafkaBroker() as broker:
        broker.create_topic("bench", 4)
        for number in range(rounds):
            (through, work), (plain, plain_work) = (
                each(broker.bootstrap, "bench", events) for each in (through_the_sink, bare)
            )
            ratios.append((through / plain, plain_work / work))
            print(f"round {number}: sink {through:,.0f}/s, {work:.1f} us; bare {plain:,.0f}/s, {plain_work:.1f} us")
    rate, work = (median(each) for each in zip(*ratios[1:], strict=True))
    print(
        f"medians without the first round: {rate:.2f} of the bare rate, {work:.2f} of its events per processor second"
    )


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
