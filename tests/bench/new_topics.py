"""What becomes of the first records of topics that were made a moment ago, round after round on a real broker.

usage: python -m tests.bench.new_topics [ROUNDS] [--in-flight N]

A topic is made and at once gets records, in overlapping calls. Its partitions may not be there yet when the first
request arrives: the broker refuses it, and with more than one request in flight takes the next one in its place, which
librdkafka then counts as the delivery of both. `--in-flight 5` takes that setting's guarantee out, to see it happen.

Prints how many acknowledged records are missing, and ends with 1 if any is. Starts the broker by itself.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
import time
from unittest.mock import patch

from outbox_relay.domain.event import Event
from outbox_relay.domain.outcomes import DELIVERED
from outbox_relay.formats.topics import TopicTemplate
from outbox_relay.sinks.kafka import KafkaSink, client
from tests.contract.harness import an_event, soon
from tests.support.kafka import KafkaBroker

PARTITIONS = 6
CALLS, EVENTS, KEYS = 6, 200, 40
SAY_ROUNDS = 25
STALL_SECONDS = 5.0


async def deliver(sink: KafkaSink, topic: str) -> set[str]:
    """Hand over calls that overlap; the uids of what was acknowledged."""
    calls = [[an_event(f"k{n % KEYS}")._replace(type=topic) for n in range(EVENTS)] for _ in range(CALLS)]
    verdicts = await asyncio.gather(*(sink.deliver(call, soon()) for call in calls))
    events: list[Event] = [event for call in calls for event in call]
    flat = [verdict for call in verdicts for verdict in call]
    return {event.uid for event, verdict in zip(events, flat, strict=True) if verdict is DELIVERED}


async def rounds(kafka: KafkaBroker, count: int) -> tuple[int, int]:
    """(records acknowledged, records missing of them)."""
    sink = KafkaSink("new", TopicTemplate.parse("{type}"), {"bootstrap.servers": kafka.bootstrap}, STALL_SECONDS)
    await sink.open()
    acknowledged = missing = 0
    try:
        for number in range(count):
            topic = f"new.{number}"
            kafka.create_topic(topic, PARTITIONS)
            wanted = await deliver(sink, topic)
            found = {
                (record.headers["id"] or b"").decode() for record in await asyncio.to_thread(kafka.read_all, topic)
            }
            acknowledged, missing = acknowledged + len(wanted), missing + len(wanted - found)
            if (number + 1) % SAY_ROUNDS == 0:
                sys.stdout.write(f"{number + 1} topics: {acknowledged:,} acknowledged, {missing} of them missing\n")
                sys.stdout.flush()
    finally:
        await sink.close()
    return acknowledged, missing


def main() -> int:
    """Run; 1 when a record is missing."""
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("rounds", nargs="?", type=int, default=300)
    arguments.add_argument("--in-flight", type=int, default=1)
    options = arguments.parse_args()
    guarantees = {**client.GUARANTEES, "max.in.flight.requests.per.connection": options.in_flight}
    began = time.monotonic()
    with KafkaBroker() as kafka, patch.object(client, "GUARANTEES", guarantees):
        acknowledged, missing = asyncio.run(rounds(kafka, options.rounds))
    sys.stdout.write(
        f"{options.rounds} topics, {options.in_flight} in flight, {time.monotonic() - began:.0f} s:"
        f" {acknowledged:,} acknowledged, {missing} missing; load {os.getloadavg()[0]:.1f}\n"
    )
    return 1 if missing else 0


if __name__ == "__main__":
    sys.exit(main())
